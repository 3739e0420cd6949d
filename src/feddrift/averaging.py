"""How the server makes one model of its clients' updates, and how far these are from each other."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from feddrift import numerics
from feddrift._internal.device_arrays import Moves, place_of
from feddrift.trees import leaves, map_trunk_and_head
from feddrift.types import Average, Bools, Floats, Ints, Models, Params, Updates

TRIM = 0.3  # of the clients at each end
MAX_PARAMETER = 1e15  # largest parameter that is accepted: even sums of many of their squares fit into float32


def averaged(models: Models, updates: Updates, rule: Average = "mean") -> Models:
    """Algorithm 1's average: each model becomes the mean of its pairs by the data behind them, or stays as it is.

    A trunk becomes the mean of its family's lanes by all the data behind them. A lane that is not `finite` is left out.
    The other rules bound what a few clients can do: the `median` of each parameter; its mean without the TRIM lowest
    and highest share (`trimmed`), both whatever the data behind; or the mean of updates no longer than the median one
    (`clipped`).
    """
    if rule == "mean" and len(updates.client) and (place := place_of(updates.params)) is not None:
        return place.averaged(models, updates)
    if len(updates.client) and not (sound := finite(models, updates)).all():
        updates = _only(models, updates, sound)
    if not len(updates.client):
        return models
    trunk, size = lane_sizes(models, updates.model, updates.lane, updates.size)
    if rule in ("median", "trimmed"):
        middle = partial(_middle, rule=rule)
        return replace(models, params=map_trunk_and_head(middle, models, updates.model, trunk, updates.params))
    if rule == "clipped":
        updates = replace(updates, params=_clipped(models, updates, trunk))
    heads = updates.model, shares(updates.model, updates.size)
    trunks = trunk, shares(trunk, size)
    params = map_trunk_and_head(
        lambda old, new, parts: average(old, new, *parts), models, heads, trunks, updates.params
    )
    return replace(models, params=params)


def finite(models: Models, updates: Updates) -> Bools:
    """[lane], whether all that it trained are numbers that one can compute with: none beyond MAX_PARAMETER."""
    if (place := place_of(updates.params)) is not None:
        return place.finite(models, updates)
    _, first = np.unique(updates.lane, return_index=True)
    sound = np.ones(len(first), dtype=bool)

    def look(_: Any, new: Any, lane: Ints) -> None:
        sound[lane[~(np.abs(new.reshape(len(new), math.prod(new.shape[1:]))) <= MAX_PARAMETER).all(axis=1)]] = False

    map_trunk_and_head(look, models, updates.lane, np.arange(len(first)), updates.params)
    return sound


def renormalised(share: Floats, order: Ints, target: Ints, sound: Bools) -> tuple[Floats, Ints]:
    """Leave updates that are not finite out of an average: the shares of the others, rescaled, and which they are."""
    order = order[sound]
    left = share.copy()
    total = np.bincount(target[order], share[order], int(target.max()) + 1)
    left[order] = share[order] / total[target[order]]
    return left, order


def _only(models: Models, updates: Updates, kept: Bools) -> Updates:
    """The updates of these lanes."""
    pairs = kept[updates.lane]
    return Updates(
        map_trunk_and_head(lambda _, new, which: new[which], models, pairs, kept, updates.params),
        updates.client[pairs],
        updates.model[pairs],
        updates.size[pairs],
        (np.cumsum(kept) - 1)[updates.lane[pairs]],
    )


def _middle(old: Any, new: Any, target: Ints, rule: Average) -> Any:
    out = old.copy()
    for m in np.unique(target):
        parts = np.sort(new[target == m], axis=0)
        cut = (len(parts) - 1) // 2 if rule == "median" else int(TRIM * len(parts))
        out[m] = parts[cut : len(parts) - cut].mean(axis=0)
    return out


def _clipped(models: Models, updates: Updates, trunk: Ints) -> Params:
    """Updates shortened to the median length of those to the same head or trunk."""
    squares = np.zeros(len(updates.model)), np.zeros(len(trunk))

    def measure(old: Any, new: Any, axis: int) -> None:
        target = trunk if axis else updates.model
        squares[axis][:] += ((new - old[target]).reshape(len(new), -1).astype(np.float64) ** 2).sum(axis=1)

    def scaled(old: Any, new: Any, axis: int) -> Any:
        target, length = (trunk if axis else updates.model), np.sqrt(squares[axis])
        bound = np.array([np.median(length[target == m]) for m in target])
        scale = np.minimum(1, np.divide(bound, length, out=np.ones_like(length), where=length > 0)).astype(new.dtype)
        return old[target] + scale.reshape(-1, *[1] * (new.ndim - 1)) * (new - old[target])

    map_trunk_and_head(measure, models, 0, 1, updates.params)
    return map_trunk_and_head(scaled, models, 0, 1, updates.params)


def average(old: Any, new: Any, target: Ints, share: Floats, order: Ints | None = None) -> Any:
    """old, where row target[i] becomes the sum of share[i] new[i] over i, added up in this order."""
    out, every = old.copy(), range(len(target)) if order is None else order
    out[target if order is None else target[order]] = 0
    for i in every:
        out[target[i]] += out.dtype.type(share[i]) * new[i]
    return out


def lane_sizes(models: Models, model: Ints, lane: Ints, size: Floats) -> tuple[Ints, Floats]:
    """The position of each lane's trunk, and the data behind the lane, from those of its pairs."""
    _, first = np.unique(lane, return_index=True)
    total: Floats = np.zeros(len(first))
    np.add.at(total, lane, size)
    return models.trunk_index[model[first]], total


def shares(target: Ints, size: Floats) -> Floats:
    """The share of each part in the average that it goes to, by size."""
    return np.asarray(size / np.bincount(target, size)[target])


def moves(models: Models, updates: Updates) -> Moves:
    """How updates move their models, each of which stands on a trunk of its own."""
    place = place_of(updates.params)
    return HostMoves(models, updates) if place is None else place.moves(models, updates)


class HostMoves:
    """`resident.Moves` in NumPy."""

    def __init__(self, models: Models, updates: Updates) -> None:
        self.models, self.updates = models, updates
        self._last: tuple[int, list[Any]] | None = None  # which were computed last

    def mean_length(self, m: int) -> float:
        return float(_lengths([move.mean(axis=0, dtype=float, keepdims=True) for move in self._of(m)])[0])

    def lengths(self, m: int) -> Floats:
        return _lengths(self._of(m))

    def cosines(self, m: int) -> Floats:
        return cosines_of(sum(numerics.inner_products(move.astype(float)) for move in self._of(m)))

    def _of(self, m: int) -> list[Any]:
        """[update, parameter], of each array."""
        if self._last is None or self._last[0] != m:
            which = np.flatnonzero(self.updates.model == m)
            pairs = zip(leaves(self.models.params), leaves(self.updates.params), strict=True)
            self._last = m, [(new[which] - old[m]).reshape(len(which), -1) for old, new in pairs]
        return self._last[1]


def cosines_of(products: Any) -> Floats:
    """The cosines of the angles between vectors with these inner products."""
    lengths = np.maximum(np.sqrt(np.diag(products)), 1e-30)
    return np.asarray(products / lengths / lengths[:, None])


def _lengths(moves: list[Any]) -> Floats:
    return np.asarray(np.sqrt(sum((move.astype(float) ** 2).sum(axis=1) for move in moves)))
