"""Every engine of the tests, small streams and models for them, and comparisons of their results."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import feddrift as fd
from feddrift._internal import plugins
from feddrift.algorithms import ALGORITHMS
from feddrift.data import Stream
from feddrift.engines import ENGINES
from feddrift.engines.conditions.conditions import IDEAL, Conditions
from feddrift.engines.server import federation
from feddrift.engines.server.engine import Engine
from feddrift.engines.simulator import lanes, simulator
from feddrift.models import graft, join, take
from feddrift.nets import default_net
from feddrift.types import Floats, Local, Models

LOCAL = Local(rounds=2, steps=2, batch=8, lr=0.01)


class Compiled(simulator.Simulator):
    """The simulator without its native code for small perceptrons, as for other nets and on a GPU."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.native = False


class NarrowDevices(lanes.Devices):
    """Devices with room for three lanes."""

    def count_fitting_lanes(self, params: Any) -> int:
        return 3


class Chunked(Compiled):
    """The compiled program on devices too small for all lanes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.devices = NarrowDevices(self.devices.devices)


ENGINE_CLASSES: dict[str, Any] = {name: cls for name, (cls, *_) in ENGINES.items()} | {
    "compiled": Compiled,
    "chunked": Chunked,
}

ENGINE_CLASSES["threaded"] = plugins.load_object(
    "engine", "own_engine:ThreadedEngine", Path(__file__).parents[2] / "examples"
)

SCORING_MODULES: list[Any] = [federation]  # the modules that know how many rows are scored

IN_PROCESS_ENGINES = [
    name for name in ENGINE_CLASSES if name != "threaded"
]  # the engines that hold the data themselves

if importlib.util.find_spec("flwr"):
    from tests.support.flower import InProcessFlower

    ENGINE_CLASSES["flower"] = InProcessFlower
    from feddrift.engines.flower import messages as flower_messages
    from feddrift.engines.flower.client import evaluation as flower_evaluation

    SCORING_MODULES += [flower_evaluation, flower_messages]

ENGINE_NAMES = list(ENGINE_CLASSES)

SLOW_ENGINES = ("compiled", "chunked", "threaded")  # XLA compiles for long: the laws are theirs in the long checks


def mark_slow(names: Iterable[str], *these: str) -> list[Any]:
    """Return the names as parameters and mark `these` as slow, since XLA needs long to compile."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in these else name for name in names]


EACH_ENGINE = mark_slow(ENGINE_NAMES, *SLOW_ENGINES)


def make_uneven_stream(seed: int = 0, n_clients: int = 4, n_steps: int = 4) -> Stream:
    """Return a stream with cells of 0 to 30 rows, some smaller than a minibatch, some empty.

    All have the same number of rows in total, so that programs are compiled once.
    """
    draw = np.random.default_rng(seed)
    sizes = draw.integers(0, 30, (n_steps + 1, n_clients))
    sizes[0, 0] = 0
    sizes[:, 1] = np.maximum(sizes[:, 1], 3)
    sizes[-1, -1] += 30 * max(sizes.size, 50) - sizes.sum()  # it is tested, never trained on

    def cell(n: int) -> Any:
        x = draw.random((n, 3))
        return (x, (x[:, 0] > x[:, 1]).astype(int)) if n else None

    return Stream.from_arrays([[cell(n) for n in row] for row in sizes], n_classes=2)


def mark_variants_slow(names: Sequence[str]) -> list[Any]:
    """Return the names as parameters and mark all but the first name of each class as slow."""
    first = {ALGORITHMS[name].cls: name for name in reversed(names)}
    return mark_slow(names, "KUE", *(name for name in names if name not in first.values()))  # KUE has ten models


def make_engine(
    name: str, stream: Stream, local: Local = LOCAL, seed: int = 3, conditions: Conditions = IDEAL
) -> Engine:
    engine: Engine = ENGINE_CLASSES[name](stream, default_net(stream), local, seed, conditions)
    return engine


def draw_weights(tau: int, stream: Stream, n_models: int, seed: int = 1) -> Floats:
    draw = np.random.default_rng(seed)
    return draw.random((tau + 1, stream.n_clients, n_models)) * (
        draw.random((tau + 1, stream.n_clients, n_models)) < 0.6
    )


def assert_same(a: Any, b: Any, atol: float = 0.0) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=atol, rtol=0)


def is_different(a: Any, b: Any) -> bool:
    return any(
        not np.array_equal(np.asarray(x), np.asarray(y))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


LINEAR = fd.mlp(1, (), 2)


def make_threshold_models(*limits: float) -> Models:
    """Return models that predict 1 above their limit; the logits differ by ten times the distance to it."""
    W = np.zeros((len(limits), 1, 2))
    b = np.zeros((len(limits), 2))
    W[:, 0, 1] = 10
    b[:, 1] = -10 * np.array(limits)
    params = {"W1": W.astype(np.float32), "b1": b.astype(np.float32)}
    return Models(params, tuple(range(len(limits))), trunk={"W1": False, "b1": False})


class ThresholdModel:
    """A model of another framework whose parameter is a limit."""

    def init(self, seed: int) -> list[Any]:
        return [np.zeros(1, dtype=np.float32)]

    def logits(self, params: list[Any], x: Any) -> Floats:
        return np.concatenate([np.zeros((len(x), 1)), 10 * (x - params[0])], axis=1)

    def fit(self, params: list[Any], batches: Any, lr: float) -> list[Any]:
        return [np.mean([x.mean() for x, _ in batches], keepdims=True).astype(np.float32)]


def make_model_families(fed: Any) -> Models:
    """Return four models: three on the trunk of the first, and one of another family."""
    apart = fed.fresh(4, distinct=True)
    models = take(apart, [0], [0])
    for m in (1, 2):
        models = join(models, graft(take(apart, [m], [m]), models, family=0))
    models = join(models, take(apart, [3], [3]))
    assert models.family == (0, 0, 0, 3) and models.params["W1"].shape[0] == 2 and models.params["W2"].shape[0] == 4
    return models
