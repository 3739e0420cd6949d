"""Clients described by moments of their data under one model that all have, as FLUX and FEROMA do it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from feddrift.models import take
from feddrift.types import Bools, Federation, Floats, Ints, Layer, Models, Moments, Projection, Router

DESCRIBER = 2**31 - 1  # the id of the model that describes, below those of trials and above all others
FEWEST = 2  # rows of a class, else its numbers are MISSING
MISSING = -1.0
LABEL_FREE = 2  # so many blocks need no labels


def describer(models: Models, m: int = 0) -> Models:
    """A copy of the model at this position, to describe with from now on."""
    return take(models, [m], [DESCRIBER])


def describe(fed: Federation, model: Models, layer: Layer, key: tuple[int, int]) -> tuple[Floats, Ints]:
    """[c, block, d]: `profiles` of the new data of all clients, projected to as many numbers as there are classes; and
    the number of rows [c, k] of each class."""
    moments = fed.moments(model, layer, by="class", project=Projection(key, fed.n_classes))
    return profiles(moments), moments.count[:, 0]


def profiles(moments: Moments) -> Floats:
    """[c, block, d] from moments by class under one model; NaN for a client without new data.

    The blocks are the mean and the deviation of all rows, then the means of all classes, then their deviations.
    """
    count, mean, std = moments.count[:, 0], moments.mean[:, 0], moments.std[:, 0]  # [c, k], [c, k, d]
    total = count.sum(axis=1)
    share = (count / np.maximum(total, 1)[:, None])[..., None]
    of_all = np.nansum(share * mean, axis=1, keepdims=True)
    spread = np.sqrt(np.nansum(share * (std**2 + (mean - of_all) ** 2), axis=1, keepdims=True))
    few = (count < FEWEST)[..., None]
    blocks = [of_all, spread, np.where(few, MISSING, mean), np.where(few, MISSING, std)]
    return np.where((total > 0)[:, None, None], np.concatenate(blocks, axis=1), np.nan)


@dataclass(frozen=True)
class Scale:
    """Each block from 0 to 1."""

    low: Floats  # [block]
    scale: Floats  # [block], 1 over the largest less the smallest; 0 where they are the same

    @classmethod
    def of(cls, described: Floats) -> Scale:
        """By the smallest and the largest number of each block over the clients that are described."""
        there = described[~np.isnan(described[:, 0, 0])]
        low, high = there.min(axis=(0, 2)), there.max(axis=(0, 2))
        return cls(low, np.divide(1.0, high - low, out=np.zeros_like(low), where=high > low))

    def __call__(self, described: Floats) -> Floats:
        """[..., block * d], scaled."""
        scaled = (described - self.low[:, None]) * self.scale[:, None]
        return scaled.reshape(*described.shape[:-2], -1)


def router(scaled: Floats, votes: Floats, scale: Scale, model: Models, layer: Layer, project: Projection) -> Router:
    """At a test, the votes [j, m] of the scaled profile [j, number] to which that of a client's inputs is nearest.

    Only the blocks that need no labels count.
    """
    width = scaled.shape[1] // len(scale.low)
    low, factor = (np.repeat(part[:LABEL_FREE], width) for part in (scale.low, scale.scale))
    given = None if layer == "input" else model
    centre = scaled[:, : LABEL_FREE * width]
    return Router("batch", centre, votes, "moments", project, low, factor, model=given, layer=layer)


def distances(a: Floats, b: Floats) -> Floats:
    """[i, j], how far the rows of a lie from those of b (Euclid)."""
    return np.stack([np.sqrt(((row - b) ** 2).sum(axis=1)) for row in a]) if len(a) else np.zeros((0, len(b)))


def knee(values: Floats) -> float:
    """Where a rising, convex curve turns: of the sorted values the one that lies farthest below the straight line from
    the first to the last (Kneedle, Satopaa et al., 2011); the largest where they lie on it.

    >>> knee(np.array([0.1, 0.3, 0.2, 5.0])), knee(np.array([2.0, 2.0]))
    (0.3, 2.0)
    """
    rising = np.sort(values)
    span = rising[-1] - rising[0]
    if span <= 1e-9 * rising[-1]:  # all are the same
        return float(rising[-1])
    below = np.linspace(0, 1, len(rising)) - (rising - rising[0]) / span
    return float(rising[below.argmax()]) if below.max() > 1e-9 else float(rising[-1])


def components(near: Bools) -> Ints:
    """[i], the first of all that i is linked to, directly or through others: DBSCAN with at least two points, where
    those without a neighbour are clusters of their own.

    >>> components(np.array([[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]], dtype=bool)).tolist()
    [0, 0, 0, 3]
    """
    linked = near | near.T | np.eye(len(near), dtype=bool)
    first = np.arange(len(near))
    while True:
        lower = np.where(linked, first, len(near)).min(axis=1)
        if np.array_equal(lower, first):
            return first
        first = lower
