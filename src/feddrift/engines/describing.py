"""Moments of what a layer makes of rows: see `Federation.moments`. (Those of the optimiser are in `moments`.)"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift.types import Floats, Ints, Moments


def vectors(blocks: Iterator[npt.NDArray[Any]], matrix: Floats | None = None) -> Floats:
    """[m, row, number] from what a layer makes of rows, in blocks, each row as one vector, perhaps projected."""
    flat = (block.reshape(*block.shape[:2], -1).astype(np.float64) for block in blocks)
    return np.concatenate([block if matrix is None else block @ matrix for block in flat], axis=1)


def put(moments: Moments, of_row: Ints, values: Floats, square: bool) -> None:
    """Write down the moments of these values [m, row, number] of which row r belongs to place of_row[r] of [c, k].

    >>> moments = Moments.nobody(n_clients=2, n_models=1, n_parts=2, width=1)
    >>> put(moments, np.array([0, 3, 0]), np.array([[[1.0], [5.0], [2.0]]]), square=True)
    >>> moments.count[:, 0].tolist(), moments.mean[:, 0, :, 0].tolist(), moments.std[:, 0, :, 0].tolist()
    ([[2, 0], [0, 1]], [[1.5, nan], [nan, 5.0]], [[0.5, nan], [nan, 0.0]])
    """
    order = np.argsort(of_row, kind="stable")
    places, begins, sizes = np.unique(of_row[order], return_index=True, return_counts=True)
    at_client, part = np.divmod(places, moments.count.shape[2])
    values = values[:, order]
    mean = np.add.reduceat(values, begins, axis=1) / sizes[:, None]  # [m, place, number]
    moments.count[at_client, :, part] = sizes[:, None]
    moments.mean[at_client, :, part] = mean.swapaxes(0, 1)
    if square:
        apart = (values - np.repeat(mean, sizes, axis=1)) ** 2
        moments.std[at_client, :, part] = np.sqrt(np.add.reduceat(apart, begins, axis=1) / sizes[:, None]).swapaxes(
            0, 1
        )
