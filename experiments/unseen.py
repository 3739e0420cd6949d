"""Small streams that no method here was built or tuned on: `experiments.unseen:swing`.

Eight clients, ten time steps and one that tests, 200 rows a cell (`few`: 40); R = 20 rounds of 20 local steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import feddrift as fd

CLIENTS = 8
STEPS = 10
ROWS = 200
LOCAL = fd.Local(rounds=20, steps=20)
Cell = Callable[[np.random.Generator, int, int, int], tuple[npt.NDArray[Any], npt.NDArray[Any]]]


def _stream(name: str, cell: Cell, data_seed: int, rows: int = ROWS) -> fd.Stream:
    random = np.random.default_rng(data_seed)
    cells = [[cell(random, t, c, rows) for c in range(CLIENTS)] for t in range(STEPS + 1)]
    float32 = [[(x.astype(np.float32), y) for x, y in row] for row in cells]
    return fd.Stream.from_arrays(float32, name=name, local=LOCAL)


def moved(data_seed: int = 0) -> fd.Stream:
    """Four classes in five dimensions take each other's labels, in three groups of clients at times 4, 6 and 8."""
    return _stream("moved", _draw_moved_cell, data_seed)


def few(data_seed: int = 0) -> fd.Stream:
    """The same with 40 rows a cell."""
    return _stream("few", _draw_moved_cell, data_seed, rows=40)


def _draw_moved_cell(random: np.random.Generator, t: int, c: int, n: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    y = random.integers(0, 4, n)
    x = 2.5 * np.eye(5)[y] + random.normal(size=(n, 5))
    return x, (y + (t >= 3 + 2 * (c % 3))) % 4


def corners(data_seed: int = 0) -> fd.Stream:
    """Exclusive or, and its opposite for a while, with 5 % noise and four inputs that say nothing."""

    def cell(random: np.random.Generator, t: int, c: int, n: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        x = random.uniform(-1, 1, (n, 6))
        opposite = 3 <= t < 6 if c < 4 else t >= 7
        return x, ((x[:, 0] * x[:, 1] > 0) ^ opposite ^ (random.random(n) < 0.05)).astype(int)

    return _stream("corners", cell, data_seed)


def places(data_seed: int = 0) -> fd.Stream:
    """No drift: every client has a rule of its own, near the others'."""

    def cell(random: np.random.Generator, t: int, c: int, n: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        place = np.random.default_rng([77, c])
        rule = np.array([1, 1, -1, 0.5]) + 0.7 * place.normal(size=4)
        offset = 0.5 * place.normal()
        x = random.normal(size=(n, 4)) + 0.5 * place.normal(size=4)
        return x, (x @ rule + offset + 0.5 * random.normal(size=n) > 0).astype(int)

    return _stream("places", cell, data_seed)


def seasons(data_seed: int = 0) -> fd.Stream:
    """No drift: an input has seasons, which come later to some, under one bent rule with 8 % noise."""

    def cell(random: np.random.Generator, t: int, c: int, n: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        x = random.normal(size=(n, 3))
        x[:, 0] += 1.5 * np.sin(2 * np.pi * (t / 6 + c / 8))
        return x, ((np.sin(1.5 * x[:, 0]) + 0.5 * x[:, 1] > 0) ^ (random.random(n) < 0.08)).astype(int)

    return _stream("seasons", cell, data_seed)


def swing(data_seed: int = 0) -> fd.Stream:
    """Only class shares move, between a tenth and nine tenths within three time steps, at each client in its turn."""

    def cell(random: np.random.Generator, t: int, c: int, n: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        y = (random.random(n) < 0.5 + 0.4 * np.sin(t + c)).astype(int)
        return random.normal(size=(n, 4)) + np.outer(2 * y - 1, [0.8, 0.4, 0, 0]), y

    return _stream("swing", cell, data_seed)


def together(data_seed: int = 0) -> fd.Stream:
    """All clients drift at times 5 and 9."""

    def cell(random: np.random.Generator, t: int, c: int, n: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        x = random.uniform(0, 1, (n, 3))
        rule = ([1, 1, 0], [1, -1, 0], [-1, 0, 1])[(t >= 4) + (t >= 8)]
        return x, ((x - 0.5) @ np.array(rule) > 0).astype(int)

    return _stream("together", cell, data_seed)
