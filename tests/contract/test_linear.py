"""Native code for nets without hidden layers, compared with the reference and the compiled program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift.engines.native import kernel, linear_loops
from feddrift.nets.perceptron import apply_linear
from feddrift.types import State
from tests.support.engines import ENGINE_CLASSES, LOCAL, assert_same, draw_weights, make_uneven_stream

pytest.importorskip("numba")
NET = fd.mlp(3, (), 2)


def test_it_is_for_small_nets_without_a_trunk() -> None:
    params = {name: leaf[None] for name, leaf in NET.init((np.uint32(1), np.uint32(2))).items()}
    assert NET.apply is apply_linear and kernel.supports_net(NET, params)
    assert not kernel.supports_net(replace(NET, trunk=("W1", "b1")), params)
    assert not kernel.supports_net(NET, params | {"W1": np.zeros((1, 1025, 2))})


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("masked", [False, True])
def test_all_verbs_agree_between_engines(optimizer: Any, masked: bool) -> None:
    stream = make_uneven_stream(1)
    w = draw_weights(2, stream, 3)
    results = []
    for name in ("simulator", "compiled", "reference"):
        engine = ENGINE_CLASSES[name](stream, NET, replace(LOCAL, optimizer=optimizer, batch=20), 3)
        fed = engine.at(2)
        models = fed.fresh(3, distinct=True)
        if masked:
            models = replace(models, mask=np.array([[1.0, 0, 1], [0, 1, 1], [1, 1, 1]]))
        state = State(models, w, np.eye(3)[[0, 1, 2, 0]])
        results.append(
            [
                fed.evaluate(models), fed.cross_evaluate(models, w), fed.local_updates(models, w).params,
                fed.train(models, w).params, engine.test(state, 3),
            ]
        )  # fmt: skip
    assert_same(results[0], results[1], atol=1e-5)
    assert_same(results[0], results[2], atol=1e-5)


def test_the_simulator_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, calls, train = make_uneven_stream(), [], linear_loops.train_lanes

    def counted(*args: Any) -> None:
        calls.append(1)
        train(*args)

    monkeypatch.setattr(linear_loops, "train_lanes", counted)
    fed = ENGINE_CLASSES["simulator"](stream, NET, LOCAL, 3).at(2)
    fed.train(fed.fresh(2), draw_weights(2, stream, 2))
    assert calls


def test_nan_is_left_out_of_the_average() -> None:
    stream = make_uneven_stream()
    x = stream.x.copy()
    rows = stream.rows(2, 1)
    x[rows] = 3e38
    w = draw_weights(2, stream, 1)
    w[:2, 1], w[2, 1], w[2, 2] = 0, 1, 1
    fed = ENGINE_CLASSES["simulator"](replace(stream, x=x), NET, replace(LOCAL, optimizer="sgd", lr=1e5), 3).at(2)
    for leaf in fed.train(fed.fresh(1), w).params.values():
        assert np.isfinite(leaf).all()
