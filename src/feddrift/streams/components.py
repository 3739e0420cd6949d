"""Pictures on their principal components: those of all pictures of a base, whatever a stream makes of them."""

from __future__ import annotations

import hashlib
import io
from contextlib import suppress
from typing import Any

import numpy as np

from feddrift._internal.system import atomic_write
from feddrift.errors import DataError
from feddrift.streams.bases import Base, Values
from feddrift.streams.files import cache

_EXACT = 256  # so many products of two bytes have a sum that float32 holds exactly
_GRID = 2.0**-16  # pictures and axes are rounded to multiples of it
_ROWS = 4096  # pictures that are projected at a time


def _round_to_grid(values: Any) -> Any:
    """Round to multiples of the grid, in float64.

    Products of such numbers, and sums of thousands of them, are exact in float64. So they have the same bits in
    whatever order a processor adds them.
    """
    return np.rint(np.asarray(values, dtype=np.float64) / _GRID) * _GRID + 0.0  # no negative zeros


def project(x: Values, mean: Values, axes: Values) -> Values:
    """Project pictures from 0 to 1 onto these axes, [n, components]."""
    found = np.empty((len(x), axes.shape[1]), dtype=np.float32)
    exact = _round_to_grid(axes)
    for start in range(0, len(x), _ROWS):
        block = x[start : start + _ROWS]
        found[start : start + _ROWS] = _round_to_grid(block.reshape(len(block), -1) - mean) @ exact
    return found


def components(base: Base, n: int) -> tuple[Values, Values]:
    """Mean [d] and axes [d, n] of the first n principal components, the largest of variance 1; kept in the cache."""
    pixels = np.ascontiguousarray(base.x.reshape(len(base.x), -1))
    path = cache() / "components" / f"{hashlib.blake2b(pixels.data, digest_size=8).hexdigest()}-{n}-grid.npy"
    with suppress(OSError, ValueError, EOFError):  # not there, or broken: it is computed
        kept = np.load(path)
        if kept.shape == (n + 1, pixels.shape[1]) and kept.dtype == np.float32:
            return kept[0], np.ascontiguousarray(kept[1:].T)
    mean, axes = _computed(pixels, n)
    file = io.BytesIO()
    np.save(file, np.vstack([mean, axes.T]))
    with suppress(DataError):  # a cache that cannot be written to
        atomic_write(path, file.getvalue())
    return mean, axes


def _computed(pixels: np.ndarray[tuple[int, int], np.dtype[np.uint8]], n: int) -> tuple[Values, Values]:
    """Compute mean and axes from exact sums; rounding to the grid removes the last bits, in which machines differ."""
    products = np.zeros((pixels.shape[1],) * 2)
    for start in range(0, len(pixels), _EXACT):
        block = pixels[start : start + _EXACT].astype(np.float32)
        products += block.T @ block
    mean = pixels.sum(axis=0, dtype=np.int64) / len(pixels)
    variance, axes = np.linalg.eigh(products / len(pixels) - np.outer(mean, mean))
    axes = axes[:, ::-1][:, :n]
    axes = axes * np.sign(axes[np.abs(axes).argmax(axis=0), np.arange(n)])  # an axis has no direction of its own
    scale = 255 / np.sqrt(variance[-1])  # pictures are from 0 to 1 where they are projected
    return (mean / 255).astype(np.float32), np.ascontiguousarray(_round_to_grid(axes * scale), dtype=np.float32)
