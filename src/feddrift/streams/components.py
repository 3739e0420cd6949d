"""Principal components of all pictures of a base data set, and projections onto them."""

from __future__ import annotations

import hashlib
import io
from contextlib import suppress
from typing import Any

import numpy as np

from feddrift._internal.system import atomic_write
from feddrift.errors import DataError
from feddrift.streams.bases import Base, Values
from feddrift.streams.files import find_cache_folder

_MAX_EXACT_PRODUCTS = 256  # float32 represents a sum of this many products of two bytes exactly
_GRID_STEP = 2.0**-16  # pictures and axes are rounded to multiples of it
_ROWS_PER_BLOCK = 4096  # pictures in one projection


def _round_to_grid(values: Any) -> Any:
    """Round to multiples of the grid, in float64.

    Products of such numbers, and sums of thousands of them, are exact in float64. The result is therefore the same in
    any order of addition.
    """
    return np.rint(np.asarray(values, dtype=np.float64) / _GRID_STEP) * _GRID_STEP + 0.0  # no negative zeros


def project_pictures(x: Values, mean: Values, axes: Values) -> Values:
    """Project pictures from 0 to 1 onto these axes, [n, components]."""
    projected = np.empty((len(x), axes.shape[1]), dtype=np.float32)
    exact_axes = _round_to_grid(axes)
    for start in range(0, len(x), _ROWS_PER_BLOCK):
        block = x[start : start + _ROWS_PER_BLOCK]
        centred = _round_to_grid(block.reshape(len(block), -1) - mean)
        projected[start : start + _ROWS_PER_BLOCK] = centred @ exact_axes
    return projected


def find_components(base: Base, n: int) -> tuple[Values, Values]:
    """Return mean [d] and axes [d, n] of the first n principal components, scaled to variance 1 of the first.

    The result is stored in the cache folder.
    """
    pixels = np.ascontiguousarray(base.x.reshape(len(base.x), -1))
    path = (
        find_cache_folder() / "components" / f"{hashlib.blake2b(pixels.data, digest_size=8).hexdigest()}-{n}-grid.npy"
    )
    with suppress(OSError, ValueError, EOFError):  # missing or broken: compute it
        stored = np.load(path)
        if stored.shape == (n + 1, pixels.shape[1]) and stored.dtype == np.float32:
            return stored[0], np.ascontiguousarray(stored[1:].T)
    mean, axes = _compute_components(pixels, n)
    file = io.BytesIO()
    np.save(file, np.vstack([mean, axes.T]))
    with suppress(DataError):  # the cache is read-only
        atomic_write(path, file.getvalue())
    return mean, axes


def _compute_components(pixels: np.ndarray[tuple[int, int], np.dtype[np.uint8]], n: int) -> tuple[Values, Values]:
    """Compute mean and axes from exact sums; rounding removes the last bits, which depend on the machine."""
    products = np.zeros((pixels.shape[1],) * 2)
    for start in range(0, len(pixels), _MAX_EXACT_PRODUCTS):
        block = pixels[start : start + _MAX_EXACT_PRODUCTS].astype(np.float32)
        products += block.T @ block
    mean = pixels.sum(axis=0, dtype=np.int64) / len(pixels)
    variance, axes = np.linalg.eigh(products / len(pixels) - np.outer(mean, mean))
    axes = axes[:, ::-1][:, :n]
    axes = axes * np.sign(axes[np.abs(axes).argmax(axis=0), np.arange(n)])  # the sign of an axis is arbitrary
    scale = 255 / np.sqrt(variance[-1])  # projected pictures are scaled to 0 to 1
    return (mean / 255).astype(np.float32), np.ascontiguousarray(_round_to_grid(axes * scale), dtype=np.float32)
