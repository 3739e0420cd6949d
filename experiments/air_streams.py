"""Variants of air-quality for docs/air-quality.md, by path: `--stream experiments.air_streams:by_city`."""

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
