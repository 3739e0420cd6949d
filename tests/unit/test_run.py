"""The loop over time: what it derives from the states of an algorithm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift.engines import engine as find_engine
from feddrift.engines.conditions import Conditions
from feddrift.errors import ConfigError
from feddrift.nets import default_net
from feddrift.run import lineage, steps_on
from feddrift.runs.config import RunConfig
from feddrift.runs.record import read
from feddrift.runs.recorded import RecordedRun
from feddrift.types import Event, Local, Models, State


def state(ids: tuple[int, ...], used: list[int], events: tuple[Event, ...] = ()) -> State:
    """Client c uses the model with id used[c]."""
    votes = np.array([[float(i == u) for i in ids] for u in used])
    return State(Models({}, ids), votes[None], votes, events=events)


def kinds(before: State, after: State) -> list[tuple[str, int]]:
    return [(e.kind, e.model) for e in lineage(before, after)]


def test_a_model_that_falls_out_of_use_is_retired_and_may_be_revived() -> None:
    both, only = state((0, 1), [0, 1]), state((0, 1), [1, 1])
    assert kinds(both, only) == [("retired", 0)]
    assert kinds(only, both) == [("revived", 0)]
    assert lineage(only, both)[0].cause == {"clients": [0]}
    assert lineage(both, only)[0].cause == {"reason": "no client uses it"}
    assert lineage(both, state((1,), [1, 1]))[0].cause == {"reason": "deleted"}
    assert kinds(both, both) == []


def test_the_target_of_a_merge_is_revived_when_it_was_idle() -> None:
    merged = Event("merged", 1, {"into": 0, "distance": 0.0})
    idle = state((0, 1), [1, 1])
    assert kinds(idle, state((0,), [0, 0], (merged,))) == [("merged", 1), ("revived", 0)]
    assert kinds(state((0, 1, 2), [0, 1]), state((0, 2), [2, 2], (merged,))) == [
        ("merged", 1), ("retired", 0), ("revived", 2),
    ]  # fmt: skip


def test_a_model_is_not_born_twice() -> None:
    created = Event("created", 1, {})
    assert kinds(state((0,), [0, 0]), state((0, 1), [0, 1], (created,))) == [("created", 1)]
    decided = Event("decided", 0, {"clients": [1], "reason": "stays"})
    both = state((0, 1), [0, 1])
    assert kinds(both, state((0, 1), [1, 1], (decided,))) == [("decided", 0), ("retired", 0)]
    private = replace(both, models=Models({}, (0, 1), owner=(-1, 1)))
    assert kinds(private, state((0,), [0, 0])) == []  # private models need no events
    told = Event("retired", 0, {"reason": "its own"})
    assert lineage(state((0, 1), [0, 1]), state((1,), [1, 1], (told,))) == (told,)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (lambda s: None, "Wrong.step at tau=0 must return a State, got NoneType"),
        (lambda s: replace(s, votes=np.ones((10, 3))), r"votes must have shape \(10, 1\) .* got \(10, 3\)"),
        (lambda s: replace(s, w=np.ones((4, 10, 1))), r"w must have shape \(1, 10, 1\) .* got \(4, 10, 1\)"),
    ],
)
def test_a_method_of_ones_own_that_returns_nonsense_is_told_so(state: Any, why: str) -> None:
    class Wrong:
        def init(self, fed: Any) -> State:
            return State(fed.fresh(), w=np.zeros((0, fed.n_clients, 1)), votes=np.ones((fed.n_clients, 1)))

        def step(self, before: State, fed: Any) -> Any:
            return state(replace(before, w=np.ones((fed.tau + 1, fed.n_clients, 1))))

    with pytest.raises(ConfigError, match=why):
        next(fd.run(fd.stream("sine-2"), Wrong(), local=Local(rounds=1, steps=1)))


@pytest.mark.parametrize("engine", ["simulator", "reference"])
def test_a_step_says_what_came_how_it_scored_and_what_that_cost(engine: str) -> None:
    stream, local = fd.stream("sine-2", pattern="random:every=2,concepts=2,clients=4,steps=4"), Local(rounds=2, steps=5)
    one_out = Conditions(trace=np.array([[True] * 4, [True, True, False, True], [True] * 4, [True] * 4]))
    made = find_engine(engine)(stream, default_net(stream), local, 0, one_out)
    method = fd.algorithm("FedDrift")
    before = method.init(made.at(0))
    for step in steps_on(made, method):
        expected = stream.counts[step.tau].copy()
        if step.tau == 1:
            expected[2] = 0
            assert np.isnan(step.loss[2]) and step.sent[2] == 0
        assert step.received.tolist() == expected.tolist()
        here, ids = np.flatnonzero(step.received), before.models.ids
        scored = made.at(step.tau).evaluate(before.models)
        for c in here:
            known = step.model[c] in ids
            assert step.loss[c] == scored[c, ids.index(step.model[c])] if known else np.isnan(step.loss[c])
        assert (step.sent_scoring[here] >= len(ids)).all()
        lanes = (np.asarray(step.state.w)[:, here].sum(axis=0) > 0).sum(axis=1)
        assert ((step.sent - step.sent_scoring)[here] == 2 * local.rounds * lanes).all()
        before = step.state


def test_what_never_scores_has_no_loss() -> None:
    (first, *_) = fd.run(fd.stream("sine-2"), fd.algorithm("Oblivious"), local=Local(rounds=1, steps=1))
    assert np.isnan(first.loss).all() and (first.sent_scoring == 0).all() and (first.sent == 2).all()


def test_the_loss_is_that_before_training() -> None:
    stream, local = fd.stream("sine-2"), Local(rounds=2, steps=20)
    method = fd.algorithm("IFCA")  # chooses after every round
    made = find_engine("simulator")(stream, default_net(stream), local, 0)
    before = method.init(made.at(0))
    for step in steps_on(made, method):
        if step.tau:
            scored = made.at(step.tau).evaluate(before.models)
            assert step.loss.tolist() == [scored[c, before.models.ids.index(m)] for c, m in enumerate(step.model)]
        before = step.state
    first = next(iter(fd.run(stream, fd.algorithm("AUE"), local=local)))  # which scores what it has trained
    assert np.isnan(first.loss).all()


def test_a_record_says_what_a_step_says(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).random((40, 2)), np.tile([0, 1], 20)
    (tmp_path / "data").mkdir()
    for name, first in (("a", 0), ("b", 1)):
        (tmp_path / "data" / f"client_{name}").mkdir()
        for t in range(first, 4):
            np.savez(tmp_path / "data" / f"client_{name}" / f"step_{t + 5}.npz", x=x[: 30 + t], y=y[: 30 + t])
    config = RunConfig.checked(stream=f"folder:{tmp_path / 'data'}", algorithm="FedDrift", rounds=1, steps=1)
    recorded = RecordedRun(config, tmp_path / "runs")
    steps = list(recorded)
    found = read(recorded.path)
    assert found.header["times"] == ["step_5", "step_6", "step_7", "step_8"] and found.header["model_bytes"] == 4 * 22
    for name in ("received", "loss", "sent_scoring"):
        assert np.allclose(
            getattr(found.rows, name), [getattr(step, name) for step in steps], atol=1e-6, equal_nan=True
        )
    assert found.rows.received.tolist() == [[30, 0], [31, 31], [32, 32]]
    assert np.isnan(found.rows.loss[0, 1]) and not np.isnan(found.rows.loss[2]).any()


def test_a_run_that_goes_on_knows_which_models_were_in_use(tmp_path: Path) -> None:
    config = RunConfig.checked(stream="sine-2", algorithm="FedDrift", rounds=2, steps=20)
    whole = list(RecordedRun(config, tmp_path / "whole"))
    begun = iter(RecordedRun(config, tmp_path / "parts"))
    for _ in range(5):
        next(begun)
    begun.close()  # type: ignore[attr-defined]
    again = RecordedRun(config, tmp_path / "parts", resume=True)
    first = next(iter(again))
    assert again.before is not None and again.before.tolist() == whole[first.tau - 1].model.tolist()
