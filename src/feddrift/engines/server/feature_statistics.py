"""Moments of what a layer makes of rows: see `Federation.moments`. (Those of the optimiser are in `moments`.)"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from feddrift import numerics
from feddrift.engines.worker import Known
from feddrift.errors import ConfigError
from feddrift.nets import layer_width
from feddrift.types import Floats, Ints, Layer, Moments, Net, Projection


def checked_width(net: Net, known: Known, layer: Layer, by: str, project: Floats | Projection | None) -> int:
    """How many numbers the layer has, where the question makes sense."""
    if layer not in get_args(Layer):
        raise ConfigError(f"layer must be input, trunk or logits, got {layer!r}")
    if by not in ("all", "class"):
        raise ConfigError(f"by must be all or class, got {by!r}")
    width = layer_width(net, layer, known.features, known.n_classes)
    if isinstance(project, np.ndarray) and (project.ndim != 2 or len(project) != width):
        raise ConfigError(f"project must be a matrix [{width}, d] for layer={layer}, got shape {project.shape}")
    return width


def vectors(blocks: Iterator[npt.NDArray[Any]], matrix: Floats | None = None) -> Floats:
    """[m, row, number] from what a layer makes of rows, in blocks, each row as one vector, perhaps projected."""
    flat = (block.reshape(*block.shape[:2], -1).astype(np.float64) for block in blocks)
    return np.concatenate([block if matrix is None else numerics.matmul(block, matrix) for block in flat], axis=1)


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
