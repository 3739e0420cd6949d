"""SINE, CIRCLE and SEA: points in a square or cube, labelled by the concept of their cell.

The data are the same for every seed, as in the paper: its trials differ in models and minibatches only. A data seed
draws others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from feddrift import numerics, rng
from feddrift.data import Stream
from feddrift.types import Ints, Local

SAMPLES = 500  # per cell
NOISE = 0.1  # how often a SEA label is flipped
RELEASED = (8.0, 9.0, 7.0, 9.0)  # SEA's theta in the authors' files, where B and D are one distribution
TEXT = (9.0, 8.0, 7.0, 9.5)  # SEA's theta in the paper's text

_SEA = 1  # its name among the random keys of data
_CENTRES = np.array([[0.2, 0.5], [0.6, 0.5]])
_RADII = np.array([0.15, 0.25])

Points = npt.NDArray[np.float64]


def sine(name: str, concepts: Ints, data_dir: str | Path | None = None, data_seed: int = 0) -> Stream:
    """Label 1 iff x2 <= sin(x1); concept 1 swaps the labels."""
    return _unit_square(name, "sine", concepts, data_seed, lambda x, k: (x[:, 1] <= numerics.sin(x[:, 0])) ^ (k == 1))


def circle(name: str, concepts: Ints, data_dir: str | Path | None = None, data_seed: int = 0) -> Stream:
    """Label 1 iff outside the concept's circle."""
    return _unit_square(
        name, "circle", concepts, data_seed, lambda x, k: ((x - _CENTRES[k]) ** 2).sum(axis=1) > _RADII[k] ** 2
    )


def sea(name: str, concepts: Ints, data_dir: str | Path | None = None, data_seed: int = 0) -> Stream:
    """Label 1 iff x2 + x3 > theta, as in the files the authors released, then one label in ten flipped."""
    return _cube(name, concepts, data_seed, lambda x, k: x[:, 1] + x[:, 2] > RELEASED[k], same={3: 1})


def sea_text(name: str, concepts: Ints, data_dir: str | Path | None = None, data_seed: int = 0) -> Stream:
    """Label 1 iff x1 + x2 <= theta, as the paper's text has it, then one label in ten flipped."""
    return _cube(name, concepts, data_seed, lambda x, k: x[:, 0] + x[:, 1] <= TEXT[k], same={})


def _unit_square(
    name: str, family: str, concepts: Ints, data_seed: int, label: Callable[[Points, int], npt.NDArray[np.bool_]]
) -> Stream:
    random = np.random.RandomState(data_seed)  # the released recipe: with 0 the data match it bit for bit
    x = np.empty((concepts.size, SAMPLES, 2), dtype=np.float32)
    y = np.empty((concepts.size, SAMPLES), dtype=np.int32)
    for cell, concept in enumerate(concepts.reshape(-1)):  # time outer, client inner
        points = random.rand(SAMPLES, 2)
        random.rand(SAMPLES)  # the recipe draws label noise here even where its rate is zero
        x[cell], y[cell] = points, label(points, int(concept))
    return _stream(name, family, concepts, x, y, {})


def _cube(
    name: str,
    concepts: Ints,
    data_seed: int,
    label: Callable[[npt.NDArray[np.float32], int], npt.NDArray[np.bool_]],
    same: Mapping[int, int],
) -> Stream:
    x = np.empty((concepts.size, SAMPLES, 3), dtype=np.float32)
    y = np.empty((concepts.size, SAMPLES), dtype=np.int32)
    for cell, (t, c) in enumerate(np.ndindex(concepts.shape)):
        x[cell] = rng.uniform(rng.derive(data_seed, "data", _SEA, t, c, 0), (SAMPLES, 3), 0.0, 10.0)
        flip = rng.uniform(rng.derive(data_seed, "data", _SEA, t, c, 1), (SAMPLES,)) < NOISE
        y[cell] = label(x[cell], int(concepts[t, c])) ^ flip
    return _stream(name, "sea", concepts, x, y, same)


def _stream(
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
        counts=np.full(concepts.shape, SAMPLES, dtype=np.int64),
        n_classes=2,
        concepts=concepts,
        same=same,
        family=family,
        local=Local(lr=1e-2),
    )
