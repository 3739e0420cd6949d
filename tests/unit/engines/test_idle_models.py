"""Idle models are scored only by clients for which no other model qualifies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift.engines.conditions.conditions import Conditions
from feddrift.errors import ConfigError
from feddrift.nets import default_net
from feddrift.simulation import Step, run_steps
from feddrift.testing import small_stream
from feddrift.types import Local

LEARN = Local(rounds=10, steps=20, batch=20, lr=0.05)
# All leave concept 0 for four time steps; then client 0 comes back to it.
CONCEPTS = np.array([[0] * 3, [0] * 3, [1] * 3, [1] * 3, [1] * 3, [1] * 3, [0, 1, 1], [0, 1, 1], [0, 1, 1]])
FEDDRIFT = fd.algorithm("FedDrift", delta=0.1)


def run_method(rest: int, engine: str = "simulator", metric: str = "error") -> list[Step]:
    stream = small_stream(CONCEPTS, size=120)
    method = fd.algorithm("FedDrift", delta=0.1 if metric == "error" else 0.3, metric=metric)
    return list(fd.run(stream, method, engine=engine, local=LEARN, conditions=Conditions(rest=rest)))


@pytest.mark.parametrize("engine", ["simulator", pytest.param("reference", marks=pytest.mark.slow)])
@pytest.mark.parametrize("metric", ["error", "loss"])
def test_a_concept_that_comes_back_is_found_for_less(engine: str, metric: str) -> None:
    usual, resting = run_method(0, engine, metric), run_method(2, engine, metric)
    assert [step.model.tolist() for step in resting] == [step.model.tolist() for step in usual]
    assert resting[6].model.tolist() == [0, *usual[5].model[1:]] and usual[5].model[0] != 0
    assert [(e.kind, e.model) for e in resting[6].events] == [("revived", 0)]
    sent, most = (np.array([step.sent_scoring.sum() for step in steps]) for steps in (resting, usual))
    assert (sent[[4, 5]] < most[[4, 5]]).all() and sent[6] < most[6] + 1e-9 and sent.sum() < most.sum()
    np.testing.assert_array_equal(sent[:4], most[:4])  # nothing rests yet
    np.testing.assert_array_equal(sent[7:], most[7:])  # and nothing any more
    for step, other in zip(resting, usual, strict=True):
        np.testing.assert_array_equal(step.sent - step.sent_scoring, other.sent - other.sent_scoring)
        np.testing.assert_array_equal(step.accuracy, other.accuracy)


def test_a_newcomer_chooses_among_all_models() -> None:
    """Client 0 brings its first data when concept 0 has rested for long: it has nothing to compare with."""
    stream = small_stream(CONCEPTS, size=120, missing=[(t, 0) for t in range(6)])
    trained = run_method(0)[5].state.models
    fed = fd.engines.engine("simulator")(stream, default_net(stream), LEARN, 0).at(6)
    fed.idle_models = frozenset({0})
    asked = np.isfinite(fed.evaluate(trained)[:, 0])
    assert asked.tolist() == [True, False, False] and fed.sent_scoring.tolist() == [2, 1, 1]


def test_idle_models_do_not_merge_and_are_not_evaluated() -> None:
    stream = small_stream(CONCEPTS, size=60)
    engine = fd.engines.engine("simulator")(stream, default_net(stream), LEARN, 0)
    fed = engine.at(2)
    models, w = fed.fresh(3, distinct=True), np.zeros((3, 3, 3))
    w[0, :, 0], w[1, :, 1], w[2, :, 2] = 1, 1, 1
    usual = fed.cross_evaluate(models, w)
    fed.idle_models = frozenset({0, 2})
    L = fed.cross_evaluate(models, w)  # model 2 has been chosen again
    assert np.isnan(L[0]).all() and np.isnan(L[:, 0]).all()
    np.testing.assert_array_equal(L[1:, 1:], usual[1:, 1:])
    fed.idle_models = frozenset({0, 1, 2})
    assert np.isfinite(fed.evaluate(models)).all()  # with nothing awake all are asked


@pytest.mark.slow
def test_over_flower_it_equals_the_simulator(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    from tests.support.flower import InProcessFlower

    stream = small_stream(CONCEPTS, size=120)
    engine = InProcessFlower(stream, default_net(stream), LEARN, 0, Conditions(rest=2))
    engine.n_steps = stream.n_steps
    there, here = list(run_steps(engine, FEDDRIFT)), run_method(2)
    for a, b in zip(here, there, strict=True):
        np.testing.assert_array_equal(a.model, b.model)
        np.testing.assert_array_equal(a.sent_scoring, b.sent_scoring)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*fd.algorithms.ALGORITHMS])
def test_every_algorithm_copes(name: str) -> None:
    stream = small_stream(CONCEPTS, size=30)
    brief = Local(rounds=2, steps=4, batch=8, lr=0.05)
    for step in fd.run(stream, fd.algorithm(name, stream), local=brief, conditions=Conditions(rest=1)):
        assert np.isfinite(step.accuracy).all() and np.isfinite(step.state.votes).all()


def test_it_is_recorded_only_where_it_is_set(tmp_path: Path) -> None:
    options: dict[str, Any] = {"out": tmp_path, "rounds": 1}
    assert fd.record("sine-2", "FedDrift", rest=2, **options).header["overrides"] == {"rounds": 1, "rest": 2}
    assert fd.record("sine-2", "FedDrift", **options).header["overrides"] == {"rounds": 1}


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_a_wrong_length_is_reported(value: Any) -> None:
    with pytest.raises(ConfigError, match="rest must be a whole number of time steps, 0 for never"):
        Conditions(rest=value)
