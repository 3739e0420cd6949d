"""A small federation with every special case of a run, on which the golden list and the fixtures are made."""

from __future__ import annotations

from typing import Any

import numpy as np

from feddrift import numerics
from feddrift.data import Stream
from feddrift.types import Local, Net

CONCEPTS = """0 0 0 0 0
              0 0 0 0 0
              0 1 0 0 0
              0 1 1 0 1
              1 1 1 0 1
              1 0 2 2 1
              1 0 2 2 1
              1 0 2 2 1"""
LATE, EMPTY, FEW = (slice(0, 2), 4), (3, 3), (4, 2)  # a client that joins later, a cell without rows, one with 7


def make() -> Stream:
    """Five clients, seven time steps; concept 1 swaps the labels of 0, concept 2 looks at another feature."""
    concepts = np.array([row.split() for row in CONCEPTS.splitlines()], dtype=np.int64)
    sizes = np.full(concepts.shape, 40)
    sizes[LATE], sizes[EMPTY], sizes[FEW] = 0, 0, 7
    draw = np.random.Generator(np.random.Philox(16))

    def cell(t: int, c: int) -> Any:
        x = draw.integers(0, 1 << 12, (sizes[t, c], 3)) / (1 << 12)  # numbers that every machine has alike
        above = x[:, 0] > x[:, 1] if concepts[t, c] < 2 else x[:, 2] > 0.5
        return (x, above ^ (concepts[t, c] == 1)) if len(x) else None

    cells = [[cell(t, c) for c in range(concepts.shape[1])] for t in range(len(concepts))]
    local = Local(rounds=6, steps=8, batch=20, lr=0.05)
    return Stream.from_arrays(cells, name="world", n_classes=2, concepts=concepts, local=local, clients="abcde")


def shifted() -> Stream:
    """Six clients whose inputs tell the concept, for runs in which inputs choose the model."""
    concepts = np.array([list(map(int, row)) for row in ("000000", "000000", "111100", "111100", "001111", "110011")])
    draw = np.random.Generator(np.random.Philox(17))

    def cell(concept: int) -> Any:
        x = draw.integers(0, 1 << 12, (40, 3)) / (1 << 12)
        return x + [0, 0, 2 * concept], (x[:, 0] > x[:, 1]) ^ (concept == 1)

    cells = [[cell(int(concept)) for concept in row] for row in concepts]
    local = Local(rounds=6, steps=8, batch=20, lr=0.05)
    return Stream.from_arrays(cells, name="shifted", n_classes=2, concepts=concepts, local=local, clients="abcdef")


def deep(stream: Stream) -> Net:
    """A net with two hidden layers, which the native code does not know."""
    import jax.numpy as jnp

    from feddrift import rng

    shapes = {"A": (3, 5), "B": (5, 4), "C": (4, 2)}

    def init(key: rng.Words) -> Any:
        words = {name: rng.threefry2x32(key, (np.uint32(i), np.uint32(1))) for i, name in enumerate(shapes)}
        return {name: rng.uniform(words[name], shape, -0.7, 0.7) for name, shape in shapes.items()}

    def apply(params: Any, x: Any) -> Any:
        return jnp.tanh(jnp.tanh(x @ params["A"]) @ params["B"]) @ params["C"]

    return Net(init, apply, trunk=("A", "B"))


class Linear:
    """A model of another framework, NumPy here: logistic regression by hand."""

    def init(self, seed: int) -> list[Any]:
        return [np.zeros((3, 2), dtype=np.float32), np.zeros(2, dtype=np.float32)]

    def logits(self, params: list[Any], x: Any) -> Any:
        return numerics.matmul(np.asarray(x, dtype=np.float32), params[0]) + params[1]

    def fit(self, params: list[Any], batches: Any, lr: float) -> list[Any]:
        for x, y in batches:
            scores = numerics.exp(self.logits(params, x))
            push = (scores / scores.sum(axis=1, keepdims=True) - np.eye(2, dtype=np.float32)[y]) / len(x)
            params = [params[0] - lr * numerics.matmul(np.asarray(x).T, push), params[1] - lr * push.sum(axis=0)]
        return [np.asarray(array, dtype=np.float32) for array in params]
