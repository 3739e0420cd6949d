"""Feature statistics: means and standard deviations of the output of a layer (`Federation.moments`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from feddrift import numerics
from feddrift.engines.worker import FederationInfo
from feddrift.errors import ConfigError
from feddrift.nets import get_layer_width
from feddrift.types import Floats, Ints, Layer, Moments, Net, Projection


def check_layer_width(
    net: Net, known: FederationInfo, layer: Layer, by: str, project: Floats | Projection | None
) -> int:
    """Return the number of outputs of a layer for one row.

    Raises:
        ConfigError: If the layer or the division of rows is unknown, or the projection has another width.
    """
    if layer not in get_args(Layer):
        raise ConfigError(f"layer must be input, trunk or logits, got {layer!r}")
    if by not in ("all", "class"):
        raise ConfigError(f"by must be all or class, got {by!r}")
    width = get_layer_width(net, layer, known.features, known.n_classes)
    if isinstance(project, np.ndarray) and (project.ndim != 2 or len(project) != width):
        raise ConfigError(f"project must be a matrix [{width}, d] for layer={layer}, got shape {project.shape}")
    return width


def project_rows(blocks: Iterator[npt.NDArray[Any]], matrix: Floats | None = None) -> Floats:
    """Concatenate blocks [m, row, ...] of a layer's output to [m, row, number], and project rows with the matrix."""
    flat = (block.reshape(*block.shape[:2], -1).astype(np.float64) for block in blocks)
    return np.concatenate([block if matrix is None else numerics.matmul(block, matrix) for block in flat], axis=1)


def store_statistics(moments: Moments, part_of_row: Ints, values: Floats, square: bool) -> None:
    """Write means and standard deviations of the values of each part of a client's rows to `moments`.

    Args:
        moments: The statistics, which are changed in place.
        part_of_row: [row], the client and part of each row as one number, `client * n_parts + part`.
        values: [m, row, number].
        square: Whether to compute standard deviations, too.

    >>> moments = Moments.empty(n_clients=2, n_models=1, n_parts=2, width=1)
    >>> store_statistics(moments, np.array([0, 3, 0]), np.array([[[1.0], [5.0], [2.0]]]), square=True)
    >>> moments.count[:, 0].tolist(), moments.mean[:, 0, :, 0].tolist(), moments.std[:, 0, :, 0].tolist()
    ([[2, 0], [0, 1]], [[1.5, nan], [nan, 5.0]], [[0.5, nan], [nan, 0.0]])
    """
    order = np.argsort(part_of_row, kind="stable")
    parts, first_rows, sizes = np.unique(part_of_row[order], return_index=True, return_counts=True)
    client, part = np.divmod(parts, moments.count.shape[2])
    values = values[:, order]
    mean = np.add.reduceat(values, first_rows, axis=1) / sizes[:, None]  # [m, part, number]
    moments.count[client, :, part] = sizes[:, None]
    moments.mean[client, :, part] = mean.swapaxes(0, 1)
    if square:
        squares = (values - np.repeat(mean, sizes, axis=1)) ** 2
        std = np.sqrt(np.add.reduceat(squares, first_rows, axis=1) / sizes[:, None])
        moments.std[client, :, part] = std.swapaxes(0, 1)
