"""Algorithms that must be one and the same at the ends of their settings, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift.algorithms.single import Single
from feddrift.types import Local
from feddrift.weights import window

LOCAL = Local(rounds=2, steps=5, batch=20, lr=0.01)


def parameters(algorithm: Any, engine: str, stream: fd.Stream) -> list[Any]:
    steps = list(fd.run(stream, algorithm, local=LOCAL, seed=5, engine=engine))
    return [(s.accuracy.tolist(), {k: np.asarray(v) for k, v in s.state.models.params.items()}) for s in steps]


@pytest.mark.parametrize("engine", ["simulator", "reference"])
@pytest.mark.parametrize("twin", ["FedDrift", "FedDrift-C", "FedDrift-Eager", "long window", "Oracle without drift"])
def test_equals_oblivious(twin: str, engine: str) -> None:
    stream = fd.stream("sine-2", pattern="random:every=2,concepts=2,clients=3,steps=4")
    still = fd.stream("sine-2", pattern="random:every=9,concepts=2,clients=3,steps=4")
    if twin == "Oracle without drift":
        stream, algorithm = still, fd.algorithm("Oracle")
    elif twin == "long window":
        algorithm = Single(memory=window(99))
    else:
        algorithm = fd.algorithm(twin, delta=1.0)
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
