"""Small runs of unusual but valid configurations, on every engine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddrift import algorithms
from feddrift.engines.conditions.conditions import Conditions
from feddrift.errors import ConfigError
from feddrift.reports import summary
from feddrift.runs import record
from feddrift.runs.config import RunConfig
from feddrift.runs.recorded_run import RecordedRun
from tests.support.fuzzing import call_or_refuse, limit_examples

TRACES = ["1 1 1\n1 1 1\n1 1 1\n", "0 0 0\n0 0 0\n0 0 0\n", "0 0 0\n1 0 1\n", "1 0 0\n0 1 0\n0 0 1\n1 1 1\n1 1 1\n"]
SETTINGS: dict[str, list[Any]] = {
    "delta": [0, 1e-12, 0.05, 1], "merge_delta": [None, 0, 1], "init": ["warm", "fresh", "best", "head"],
    "metric": ["error", "loss"], "max_models": [None, 1, 2, 1_000_000], "ties": ["lowest", "random"],
    "first": ["one", "each", "choose"], "redetect": [True], "n_models": [1, 3], "gamma": [0, 0.1, 1],
    "lr": [1e-30, 0.1, 1e6], "reactive_steps": [2, 1_000_000], "window": [1, 1_000_000], "as_released": [True, False],
    "quarantine": [True], "test": ["threshold", "proportional:ratio=0", "two-sample:confidence=0.5"],
}  # fmt: skip


FALSE_UPDATES = ("reverse:0+stale:1", "collude:0,1+relabel:0", "backdoor:1")  # and false data


@st.composite
def configurations(draw: st.DrawFn, trace: Path) -> dict[str, Any]:
    """Anything that each option allows, extremes included; whether they go together is for feddrift to say."""
    name = draw(st.sampled_from(sorted(algorithms.ALGORITHMS)))
    legal = [key for key in algorithms.get_options(algorithms.find_entry(name).cls) if key in SETTINGS]
    chosen = draw(st.lists(st.sampled_from(legal), unique=True, max_size=3)) if legal else []
    trace.write_text(draw(st.sampled_from(TRACES)))
    options: dict[str, st.SearchStrategy[Any]] = {
        "lr": st.sampled_from([1e-30, 1e-3, 1e6]), "batch": st.sampled_from([1, 7, 100_000]),
        "participation": st.sampled_from([1e-300, 1e-10, 0.4, 1.0]),
        "dropout": st.sampled_from([0.0, 1e-300, 0.5, 0.999]),
        "average": st.sampled_from(["mean", "median", "trimmed", "clipped"]), "trace": st.just(trace),
        "poison": st.sampled_from(["flip:0", "garbage:0,1,2", "claims:0+glue:0", "alarms:0+losses:1", *FALSE_UPDATES]),
        "seed": st.sampled_from([0, 2**32, 2**63 - 1]), "engine": st.sampled_from(["reference", "simulator"]),
        "defend": st.sampled_from([False, True, "robust"]),
    }  # fmt: skip
    given_ = {
        key: draw(options[key]) for key in draw(st.lists(st.sampled_from(sorted(options)), unique=True, max_size=4))
    }
    return {"algorithm": name, "settings": {key: draw(st.sampled_from(SETTINGS[key])) for key in chosen}, **given_}


@limit_examples(6, long=80)
@given(data=st.data())
def test_accepted_configurations_run(tmp_path: Path, caplog: pytest.LogCaptureFixture, data: st.DataObject) -> None:
    caplog.set_level(logging.ERROR)
    small = {"stream": data.draw(st.sampled_from(["sine-2", "sea-4"])), "rounds": 2, "steps": 2, "engine": "reference"}
    small["pattern"] = data.draw(
        st.sampled_from(["random:every=1,concepts=2,clients=3,steps=3", "random:every=9,concepts=1,clients=3,steps=1"])
    )
    values = {**small, **data.draw(configurations(tmp_path / "trace.txt"))}
    run = call_or_refuse(lambda: RecordedRun(RunConfig.from_values(**values), tmp_path / "runs"))
    if run is None or call_or_refuse(lambda: list(run)) is None:
        return
    found = record.read(run.path)
    assert found.status == "complete" and np.isfinite(found.rows.accuracy).all()
    assert all(np.isfinite(leaf).all() for leaf in _parameters(run))
    summary.summarise([found])


def _parameters(run: RecordedRun) -> list[Any]:
    from feddrift import rng
    from feddrift._internal import checkpoint
    from feddrift.trees import tree_leaves

    newest = next(run.checkpoints.newest_first())
    assert isinstance(newest, checkpoint.Checkpoint)
    state, *_ = newest.decode(run.net.init(rng.derive_key(0, "init", 0)))
    return tree_leaves(state.models.params)


@limit_examples(100)
@given(st.floats(), st.lists(st.booleans(), min_size=1, max_size=20))
def test_every_round_has_a_participant(share: float, reachable: list[bool]) -> None:
    try:
        conditions = Conditions(participation=share)
    except ConfigError:
        return
    drawn = conditions.draw_participants(np.array(reachable), (np.uint32(1), np.uint32(2)))
    assert drawn.sum() >= min(1, sum(reachable)) and not (drawn & ~np.array(reachable)).any()
