"""Variants of streams for the docs, named from the root of the repository: `experiments.variants:by_city`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

import feddrift as fd
from feddrift.streams.air import FEATURES


def by_city(data_dir: str | Path | None = None) -> fd.Stream:
    """The city as the concept: Oracle then has one model per city."""
    stream = fd.stream("air-quality", data_dir=data_dir)
    cities = [name.split()[0] for name in stream.clients]
    concepts = np.broadcast_to(np.unique(cities, return_inverse=True)[1], stream.counts.shape)
    return replace(stream, name="by-city", concepts=concepts.astype(np.int64))


def without_date(data_dir: str | Path | None = None) -> fd.Stream:
    """Models are not told the season."""
    stream = fd.stream("air-quality", data_dir=data_dir)
    kept = [k for k, name in enumerate(FEATURES) if not name.startswith("date")]
    return replace(stream, name="without-date", x=np.ascontiguousarray(stream.x[:, kept]))


def by_city_without_date(data_dir: str | Path | None = None) -> fd.Stream:
    """Both."""
    plain, told = without_date(data_dir), by_city(data_dir)
    return replace(plain, name="by-city-without-date", concepts=told.concepts)


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
    """The first so many rows of each cell."""
    stream = fd.stream(name)
    kept = np.concatenate([start + np.arange(rows) for start in stream.starts.reshape(-1)])
    counts = np.full_like(stream.counts, rows)
    return replace(stream, name=f"{name} of {rows}", x=stream.x[kept], y=stream.y[kept], counts=counts)
