"""Algorithms that must be identical at the limits of their settings, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift.algorithms.baselines.single import Single
from feddrift.memory import window
from feddrift.types import Local

LOCAL = Local(rounds=2, steps=5, batch=20, lr=0.01)


def parameters(algorithm: Any, engine: str, stream: fd.Stream) -> list[Any]:
    steps = list(fd.run(stream, algorithm, local=LOCAL, seed=5, engine=engine))
    return [(s.accuracy.tolist(), {k: np.asarray(v) for k, v in s.state.models.params.items()}) for s in steps]


TWINS: dict[str, Any] = {
    "FedDrift": fd.algorithm("FedDrift", delta=1.0),
    "FedDrift-C": fd.algorithm("FedDrift-C", delta=1.0),
    "FedDrift-Eager": fd.algorithm("FedDrift-Eager", delta=1.0),
    "IFCA with one model": fd.algorithm("IFCA", n_models=1),
    "IFCA(T) with one model": fd.algorithm("IFCA(T)", n_models=1),
    "CFL that never splits": fd.algorithm("CFL", gamma=1.0),
    "a window longer than time": Single(memory=window(99)),
    "Oracle without drift": fd.algorithm("Oracle"),
}


@pytest.mark.parametrize("engine", ["simulator", "reference"])
@pytest.mark.parametrize("twin", TWINS)
def test_equals_oblivious(twin: str, engine: str) -> None:
    every = 9 if "without drift" in twin else 2
    stream = fd.stream("sine-2", pattern=f"random:every={every},concepts=2,clients=3,steps=4")
    algorithm = TWINS[twin]
    ours, oblivious = parameters(algorithm, engine, stream), parameters(fd.algorithm("Oblivious"), engine, stream)
    for (accuracy, params), (expected_accuracy, expected) in zip(ours, oblivious, strict=True):
        assert accuracy == expected_accuracy
        for name in expected:
            np.testing.assert_array_equal(params[name], expected[name])


def test_the_windowed_twins_equal_window_at_delta_one() -> None:
    stream = fd.stream("sine-2", pattern="random:every=2,concepts=2,clients=3,steps=4")
    expected = parameters(fd.algorithm("Window"), "simulator", stream)
    for name in ("FedDrift-W", "FedDrift-Eager-W"):
        for (_, ours), (_, theirs) in zip(
            parameters(fd.algorithm(name, delta=1.0), "simulator", stream), expected, strict=True
        ):
            for leaf in theirs:
                np.testing.assert_array_equal(ours[leaf], theirs[leaf])
