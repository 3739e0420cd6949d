"""Variants of streams for the docs, named from the root of the repository: `experiments.variants:by_city`."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

import feddrift as fd
from feddrift.data import Cell
from feddrift.streams.air import FEATURES
from feddrift.streams.fmow import load_fashion
from feddrift.streams.mnist import LABELS
from feddrift.streams.patterns import build_pattern


def by_city(data_dir: str | Path | None = None) -> fd.Stream:
    """The city as the concept: Oracle then has one model per city."""
    stream = fd.stream("air-quality", data_dir=data_dir)
    cities = [name.split()[0] for name in stream.clients]
    concepts = np.broadcast_to(np.unique(cities, return_inverse=True)[1], stream.counts.shape)
    return replace(stream, name="by-city", concepts=concepts.astype(np.int64))


def without_date(data_dir: str | Path | None = None) -> fd.Stream:
    """Return the stream without the inputs that contain the season."""
    stream = fd.stream("air-quality", data_dir=data_dir)
    kept = [k for k, name in enumerate(FEATURES) if not name.startswith("date")]
    return replace(stream, name="without-date", x=np.ascontiguousarray(stream.x[:, kept]))


def by_city_without_date(data_dir: str | Path | None = None) -> fd.Stream:
    """Both."""
    plain = without_date(data_dir)
    with_city = by_city(data_dir)
    return replace(plain, name="by-city-without-date", concepts=with_city.concepts)


def sine_100() -> fd.Stream:
    """sine-2 with a fifth of the examples."""
    return _thin("sine-2")


def circle_100() -> fd.Stream:
    """circle-2 with a fifth of the examples."""
    return _thin("circle-2")


def sea_100() -> fd.Stream:
    """sea-4 with a fifth of the examples."""
    return _thin("sea-4")


def _thin(name: str, rows: int = 100) -> fd.Stream:
    """Return the first rows of each cell."""
    stream = fd.stream(name)
    kept = np.concatenate([start + np.arange(rows) for start in stream.starts.reshape(-1)])
    counts = np.full_like(stream.counts, rows)
    group = None if stream.group is None else stream.group[kept]
    return replace(stream, name=f"{name} of {rows}", x=stream.x[kept], y=stream.y[kept], counts=counts, group=group)


def plane(data_seed: int = 0) -> fd.Stream:
    """Two groups of clients, each with a hyperplane in eight dimensions that turns a little at every step; no truth."""
    random = np.random.default_rng([data_seed, 8])
    axes = np.linalg.qr(random.normal(size=(2, 8, 2)))[0]  # the plane in which each group's normal turns
    cells: list[list[Cell | None]] = []
    for t in range(16):
        angle = 0.08 * t
        row: list[Cell | None] = []
        for c in range(10):
            normal = axes[c % 2] @ np.array([np.cos(angle), np.sin(angle)])
            x = random.normal(size=(300, 8)).astype(np.float32)
            row.append((x, (x @ normal > 0) ^ (random.random(300) < 0.1)))
        cells.append(row)
    return fd.Stream.from_arrays(cells, name="plane", n_classes=2)


def fashion_100(data_dir: str | Path | None = None, data_seed: int = 0) -> fd.Stream:
    """Fashion-MNIST on 32 principal components, classes swapped as mnist-4 swaps digits, 100 rows a cell."""
    return _fashion(100, data_dir, data_seed)


def fashion_500(data_dir: str | Path | None = None, data_seed: int = 0) -> fd.Stream:
    """The same with 500 rows a cell."""
    return _fashion(500, data_dir, data_seed)


def _fashion(rows: int, data_dir: str | Path | None, data_seed: int) -> fd.Stream:
    x, classes = _fashion_components(data_dir)
    concepts = build_pattern("F")
    chosen = np.resize(np.random.default_rng([data_seed, 10]).permutation(len(x)), (concepts.size, rows))
    y = LABELS[concepts.reshape(-1, 1), classes[chosen]]
    return fd.Stream(
        name=f"fashion-{rows}",
        x=x[chosen].reshape(-1, x.shape[1]),
        y=y.reshape(-1).astype(np.int32),
        counts=np.full(concepts.shape, rows, dtype=np.int64),
        n_classes=10,
        concepts=concepts,
        local=fd.Local(rounds=20),
    )


@lru_cache(maxsize=1)  # as long as a sweep draws from them
def _fashion_components(
    data_dir: str | Path | None,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    pixels, classes = load_fashion(data_dir)
    return _components(pixels), classes


def _components(pixels: npt.NDArray[np.uint8], n: int = 32) -> npt.NDArray[np.float32]:
    """The first principal components of all images, the largest of variance 1."""
    x = pixels.astype(np.float32) / 255
    x -= x.mean(axis=0)
    variance, axes = np.linalg.eigh(x.T @ x / len(x))
    return np.ascontiguousarray(x @ axes[:, ::-1][:, :n] / np.sqrt(variance[-1]), dtype=np.float32)
