"""Profiles of clients, with which FLUX and FEROMA compare them: moments of their data under one model.

A profile is an array [block, d] of blocks of d numbers: the mean and the deviation of all rows, then the means of all
classes, then their deviations. The model under which it is computed is called the describer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from feddrift.models import take
from feddrift.types import Bools, Federation, Floats, Ints, Layer, Models, Moments, Projection, Router

DESCRIBER_ID = 2**31 - 1  # below the ids of models in trials, and above all others
MIN_ROWS_PER_CLASS = 2  # with fewer rows the numbers of a class are MISSING
MISSING = -1.0
N_LABEL_FREE_BLOCKS = 2  # the first blocks, which need no labels


def copy_as_describer(models: Models, m: int = 0) -> Models:
    """Return a copy of the model at position m, to compute profiles with."""
    return take(models, [m], [DESCRIBER_ID])


def profile_clients(fed: Federation, model: Models, layer: Layer, key: tuple[int, int]) -> tuple[Floats, Ints]:
    """Compute profiles of the new data of all clients, projected to d = n_classes numbers.

    Args:
        fed: The federation.
        model: The describer.
        layer: The layer whose output is described.
        key: The random key of the projection.

    Returns:
        The profiles [c, block, d], NaN for clients that did not reply, and the numbers of rows [c, k] of each class k.
    """
    moments = fed.moments(model, layer, by="class", project=Projection(key, fed.n_classes))
    return compute_profiles(moments), moments.count[:, 0]


def compute_profiles(moments: Moments) -> Floats:
    """Compute profiles [c, block, d] from moments by class under one model; NaN for a client without new data."""
    count = moments.count[:, 0]  # [c, k]
    mean = moments.mean[:, 0]  # [c, k, d]
    std = moments.std[:, 0]
    total = count.sum(axis=1)
    share = (count / np.maximum(total, 1)[:, None])[..., None]
    total_mean = np.nansum(share * mean, axis=1, keepdims=True)
    total_std = np.sqrt(np.nansum(share * (std**2 + (mean - total_mean) ** 2), axis=1, keepdims=True))
    is_missing = (count < MIN_ROWS_PER_CLASS)[..., None]
    blocks = [total_mean, total_std, np.where(is_missing, MISSING, mean), np.where(is_missing, MISSING, std)]
    return np.where((total > 0)[:, None, None], np.concatenate(blocks, axis=1), np.nan)


@dataclass(frozen=True)
class BlockScale:
    """Linear map of each block of a profile to the range from 0 to 1."""

    low: Floats  # [block]
    scale: Floats  # [block], 1 / (largest - smallest number); 0 if they are equal

    @classmethod
    def fit_profiles(cls, profiles: Floats) -> BlockScale:
        """Return the map of the smallest number of each block over all clients to 0, and of the largest to 1."""
        known = profiles[~np.isnan(profiles[:, 0, 0])]
        low = known.min(axis=(0, 2))
        high = known.max(axis=(0, 2))
        return cls(low, np.divide(1.0, high - low, out=np.zeros_like(low), where=high > low))

    def __call__(self, profiles: Floats) -> Floats:
        """Return scaled profiles [..., block * d] of profiles [..., block, d]."""
        scaled = (profiles - self.low[:, None]) * self.scale[:, None]
        return scaled.reshape(*profiles.shape[:-2], -1)


def build_router(
    scaled: Floats, votes: Floats, scale: BlockScale, model: Models, layer: Layer, project: Projection
) -> Router:
    """Return a router that chooses votes by the inputs of a test: the votes of the nearest profile.

    Only the blocks that need no labels are compared.

    Args:
        scaled: [j, block * d], the scaled profiles.
        votes: [j, m], the votes for each profile.
        scale: The map that scaled the profiles.
        model: The describer.
        layer: The layer whose output is described.
        project: The projection of its output to d numbers.
    """
    width = scaled.shape[1] // len(scale.low)
    low = np.repeat(scale.low[:N_LABEL_FREE_BLOCKS], width)
    factor = np.repeat(scale.scale[:N_LABEL_FREE_BLOCKS], width)
    describer = None if layer == "input" else model
    centre = scaled[:, : N_LABEL_FREE_BLOCKS * width]
    return Router("batch", centre, votes, "moments", project, low, factor, model=describer, layer=layer)


def compute_distances(a: Floats, b: Floats) -> Floats:
    """Return the Euclidean distances [i, j] of the rows of a from those of b."""
    return np.stack([np.sqrt(((row - b) ** 2).sum(axis=1)) for row in a]) if len(a) else np.zeros((0, len(b)))


def find_knee(values: Floats) -> float:
    """Return the knee of the curve of the sorted values (Kneedle, Satopaa et al., 2011).

    This is the value farthest below the straight line from the first to the last one; the largest value if none is
    below the line.

    >>> find_knee(np.array([0.1, 0.3, 0.2, 5.0])), find_knee(np.array([2.0, 2.0]))
    (0.3, 2.0)
    """
    rising = np.sort(values)
    span = rising[-1] - rising[0]
    if span <= 1e-9 * rising[-1]:  # all values are equal
        return float(rising[-1])
    below = np.linspace(0, 1, len(rising)) - (rising - rising[0]) / span
    return float(rising[below.argmax()]) if below.max() > 1e-9 else float(rising[-1])


def find_components(near: Bools) -> Ints:
    """Return [i], the first point that point i is linked to, directly or through others.

    These groups are the clusters of DBSCAN with at least two points, and a cluster for each point without a neighbour.

    Args:
        near: [i, j], whether two points are neighbours.

    >>> find_components(np.array([[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]], dtype=bool)).tolist()
    [0, 0, 0, 3]
    """
    linked = near | near.T | np.eye(len(near), dtype=bool)
    first = np.arange(len(near))
    while True:
        lower = np.where(linked, first, len(near)).min(axis=1)
        if np.array_equal(lower, first):
            return first
        first = lower
