"""SINE, CIRCLE and SEA: points in a square or cube, labelled by the concept of their cell.

The data are the same for every seed, as in the paper: its trials differ only in models and minibatches. Another data
seed draws other data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from feddrift import numerics, rng
from feddrift.data import Stream
from feddrift.types import Ints, Local

ROWS_PER_CELL = 500
SEA_NOISE_RATE = 0.1  # share of SEA's labels that are flipped
RELEASED_THETAS = (8.0, 9.0, 7.0, 9.0)  # SEA's theta in the authors' files, where B and D are one distribution
PRINTED_THETAS = (9.0, 8.0, 7.0, 9.5)  # SEA's theta in the paper's text

_SEA = 1  # identifies SEA in the random keys of data
_CENTRES = np.array([[0.2, 0.5], [0.6, 0.5]])
_RADII = np.array([0.15, 0.25])

Points = npt.NDArray[np.float64]


def make_sine(name: str, concepts: Ints, data_dir: str | Path | None = None, data_seed: int = 0) -> Stream:
    """Make SINE: the label is 1 if x2 <= sin(x1); concept 1 swaps the labels."""
    return _make_unit_square(
        name, "sine", concepts, data_seed, lambda x, k: (x[:, 1] <= numerics.sin(x[:, 0])) ^ (k == 1)
    )


def make_circle(name: str, concepts: Ints, data_dir: str | Path | None = None, data_seed: int = 0) -> Stream:
    """Make CIRCLE: the label is 1 outside of the concept's circle."""
    return _make_unit_square(
        name, "circle", concepts, data_seed, lambda x, k: ((x - _CENTRES[k]) ** 2).sum(axis=1) > _RADII[k] ** 2
    )


def make_sea(name: str, concepts: Ints, data_dir: str | Path | None = None, data_seed: int = 0) -> Stream:
    """Make SEA as in the authors' files: the label is 1 if x2 + x3 > theta; one label in ten is flipped."""
    return _make_cube(name, concepts, data_seed, lambda x, k: x[:, 1] + x[:, 2] > RELEASED_THETAS[k], same={3: 1})


def make_sea_text(name: str, concepts: Ints, data_dir: str | Path | None = None, data_seed: int = 0) -> Stream:
    """Make SEA as in the paper's text: the label is 1 if x1 + x2 <= theta; one label in ten is flipped."""
    return _make_cube(name, concepts, data_seed, lambda x, k: x[:, 0] + x[:, 1] <= PRINTED_THETAS[k], same={})


def _make_unit_square(
    name: str, family: str, concepts: Ints, data_seed: int, label: Callable[[Points, int], npt.NDArray[np.bool_]]
) -> Stream:
    random = np.random.RandomState(data_seed)  # as in the authors' code: with 0 the data are the same bit for bit
    x = np.empty((concepts.size, ROWS_PER_CELL, 2), dtype=np.float32)
    y = np.empty((concepts.size, ROWS_PER_CELL), dtype=np.int32)
    for cell, concept in enumerate(concepts.reshape(-1)):  # time outer, client inner
        points = random.rand(ROWS_PER_CELL, 2)
        random.rand(ROWS_PER_CELL)  # the authors' code draws label noise here, although its rate is 0
        x[cell] = points
        y[cell] = label(points, int(concept))
    return _build_stream(name, family, concepts, x, y, {})


def _make_cube(
    name: str,
    concepts: Ints,
    data_seed: int,
    label: Callable[[npt.NDArray[np.float32], int], npt.NDArray[np.bool_]],
    same: Mapping[int, int],
) -> Stream:
    x = np.empty((concepts.size, ROWS_PER_CELL, 3), dtype=np.float32)
    y = np.empty((concepts.size, ROWS_PER_CELL), dtype=np.int32)
    for cell, (t, c) in enumerate(np.ndindex(concepts.shape)):
        x[cell] = rng.uniform(rng.derive_key(data_seed, "data", _SEA, t, c, 0), (ROWS_PER_CELL, 3), 0.0, 10.0)
        flip = rng.uniform(rng.derive_key(data_seed, "data", _SEA, t, c, 1), (ROWS_PER_CELL,)) < SEA_NOISE_RATE
        y[cell] = label(x[cell], int(concepts[t, c])) ^ flip
    return _build_stream(name, "sea", concepts, x, y, same)


def _build_stream(
    name: str,
    family: str,
    concepts: Ints,
    x: npt.NDArray[np.float32],
    y: npt.NDArray[np.int32],
    same: Mapping[int, int],
) -> Stream:
    return Stream(
        name=name,
        x=x.reshape(-1, x.shape[-1]),
        y=y.reshape(-1),
        counts=np.full(concepts.shape, ROWS_PER_CELL, dtype=np.int64),
        n_classes=2,
        concepts=concepts,
        same=same,
        family=family,
        local=Local(lr=1e-2),
    )
