"""Averages of the clients' updates at the server, and the lengths of updates and the angles between them.

Rounds that run in compiled code compute the weighted mean there: `engines.native.kernel_loops` and
`engines.simulator.program`. A change of the mean must change all three.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from feddrift import numerics
from feddrift._internal.device_arrays import UpdateGeometry, find_device
from feddrift._renamed import forward_renamed_names
from feddrift.trees import map_trunk_and_head, tree_leaves
from feddrift.types import Average, Bools, Floats, Ints, Models, Params, Updates

TRIMMED_SHARE = 0.3  # share of the values that a trimmed mean leaves out at each end
MAX_LENGTH_RATIO = 2.0  # length of an update divided by a median length: see limit_lengths
MAX_PARAMETER = 1e15  # largest parameter that is accepted: sums of many of their squares fit into float32

if not TYPE_CHECKING:
    __getattr__ = forward_renamed_names(__name__)


def average_updates(models: Models, updates: Updates, rule: Average = "mean") -> Models:
    """Average the clients' updates (Algorithm 1): those of a head over its pairs, of a trunk over its family's lanes.

    Lanes with parameters that are not finite are left out. Models without updates stay as they are.

    Args:
        models: The models before the round.
        updates: The updates.
        rule: `mean` is weighted by the number of examples. The other rules limit the influence of single clients:
            `median` of each parameter, and `trimmed`, its mean without TRIMMED_SHARE of the values at each end, both
            without weights; `clipped` shortens updates to the median length before the weighted mean.
    """
    if not len(updates.client):
        return models
    device = find_device(updates.params)
    if rule == "mean" and device is not None:
        return device.average_updates(models, updates)
    is_finite = find_finite_lanes(models, updates)
    if not is_finite.any():
        return models
    if not is_finite.all():
        updates = _select_lanes(models, updates, is_finite)
    trunk, size = sum_lane_sizes(models, updates.model, updates.lane, updates.size)
    if rule in ("median", "trimmed"):
        average = partial(_trim_mean, rule=rule)
        return replace(models, params=map_trunk_and_head(average, models, updates.model, trunk, updates.params))
    if rule == "clipped":
        updates = replace(updates, params=_shorten_updates(models, updates, trunk, _compute_median_lengths))
    params = map_trunk_and_head(
        lambda old, new, target_and_share: average_rows(old, new, *target_and_share),
        models,
        (updates.model, compute_shares(updates.model, updates.size)),
        (trunk, compute_shares(trunk, size)),
        updates.params,
    )
    return replace(models, params=params)


def find_finite_lanes(models: Models, updates: Updates) -> Bools:
    """Return [lane], True for lanes whose parameters are all finite and at most MAX_PARAMETER in absolute value."""
    device = find_device(updates.params)
    if device is not None:
        return device.find_finite_lanes(models, updates)
    _, first = np.unique(updates.lane, return_index=True)
    is_finite = np.ones(len(first), dtype=bool)

    def check_leaf(_: Any, new: Any, lane: Ints) -> None:
        rows = new.reshape(len(new), math.prod(new.shape[1:]))
        is_finite[lane[~(np.abs(rows) <= MAX_PARAMETER).all(axis=1)]] = False

    map_trunk_and_head(check_leaf, models, updates.lane, np.arange(len(first)), updates.params)
    return is_finite


def renormalize_shares(share: Floats, order: Ints, target: Ints, is_finite: Bools) -> tuple[Floats, Ints]:
    """Leave updates that are not finite out of an average, and rescale the shares of the others.

    Args:
        share: [i], the share of update i in the average that it belongs to.
        order: Indices i of updates.
        target: [i], the average that update i belongs to.
        is_finite: [k], False if the update order[k] is left out.

    Returns:
        The shares, and the remaining indices.
    """
    order = order[is_finite]
    rescaled = share.copy()
    total = np.bincount(target[order], share[order], int(target.max()) + 1)
    rescaled[order] = share[order] / total[target[order]]
    return rescaled, order


def _select_lanes(models: Models, updates: Updates, is_selected: Bools) -> Updates:
    """Return the updates of the selected lanes."""
    pairs = is_selected[updates.lane]
    return Updates(
        params=map_trunk_and_head(lambda _, new, rows: new[rows], models, pairs, is_selected, updates.params),
        client=updates.client[pairs],
        model=updates.model[pairs],
        size=updates.size[pairs],
        lane=(np.cumsum(is_selected) - 1)[updates.lane[pairs]],
    )


def _trim_mean(old: Any, new: Any, target: Ints, rule: Average) -> Any:
    """Return old, where row target[i] becomes the median or trimmed mean of its rows new[i]."""
    out = old.copy()
    for m in np.unique(target):
        parts = np.sort(new[target == m], axis=0)
        cut = (len(parts) - 1) // 2 if rule == "median" else int(TRIMMED_SHARE * len(parts))
        out[m] = parts[cut : len(parts) - cut].mean(axis=0)
    return out


def limit_lengths(models: Models, updates: Updates) -> Updates:
    """Shorten long updates, so that a few clients cannot move a model further than the others.

    The limit for a head or trunk is MAX_LENGTH_RATIO times the median length of its updates, or of all updates of the
    round if that is larger. Of an even number of lengths the median is the lower one of the two in the middle. Updates
    that `find_finite_lanes` rejects are not changed.

    Args:
        models: The models before the round.
        updates: The updates.
    """
    if not len(updates.client):
        return updates
    trunk, _ = sum_lane_sizes(models, updates.model, updates.lane, updates.size)
    return replace(updates, params=_shorten_updates(models, updates, trunk, _compute_length_limits))


def _compute_length_limits(length: Floats, target: Ints) -> Floats:
    """Return [i], the limit of each update's length; infinite for updates that are too long to be accepted."""
    accepted = length <= MAX_PARAMETER  # False for NaN
    limit = np.full(len(length), np.inf)
    if accepted.any():
        of_round = _compute_lower_median(length[accepted])
        for m in np.unique(target[accepted]):
            rows = accepted & (target == m)
            limit[rows] = MAX_LENGTH_RATIO * max(of_round, _compute_lower_median(length[rows]))
    return limit


def _compute_lower_median(values: Floats) -> float:
    return float(np.sort(values)[(len(values) - 1) // 2])


def _compute_median_lengths(length: Floats, target: Ints) -> Floats:
    return np.array([np.median(length[target == m]) for m in target])


def _shorten_updates(
    models: Models, updates: Updates, trunk: Ints, compute_limits: Callable[[Floats, Ints], Floats]
) -> Params:
    """Shorten updates to a limit.

    Args:
        models: The models before the round.
        updates: The updates.
        trunk: [lane], the position of each lane's trunk.
        compute_limits: Returns the limits, given lengths [i] and the head or trunk [i] that each update belongs to.
    """
    heads = updates.model, np.zeros(len(updates.model))  # the row that each update belongs to, and its squared length
    trunks = trunk, np.zeros(len(trunk))

    def add_squares(old: Any, new: Any, target_and_square: tuple[Ints, Floats]) -> None:
        target, square = target_and_square
        square += ((new - old[target]).reshape(len(new), -1).astype(np.float64) ** 2).sum(axis=1)

    def shorten(old: Any, new: Any, target_and_square: tuple[Ints, Floats]) -> Any:
        target, square = target_and_square
        length = np.sqrt(square)
        limit = compute_limits(length, target)
        scale = np.minimum(1, np.divide(limit, length, out=np.ones_like(length), where=length > 0)).astype(new.dtype)
        return old[target] + scale.reshape(-1, *[1] * (new.ndim - 1)) * (new - old[target])

    map_trunk_and_head(add_squares, models, heads, trunks, updates.params)
    return map_trunk_and_head(shorten, models, heads, trunks, updates.params)


def average_rows(old: Any, new: Any, target: Ints, share: Floats, order: Ints | None = None) -> Any:
    """Return old, where row target[i] becomes the sum of share[i] new[i] over i.

    Args:
        old: [row, ...], the array before.
        new: [i, ...], the array of updates.
        target: [i], the row that update i belongs to.
        share: [i], its share.
        order: The updates to add up, in this order; by default all, in the order of `new`.
    """
    out = old.copy()
    if order is None:
        order = np.arange(len(target))
    out[target[order]] = 0
    for i in order:
        out[target[i]] += out.dtype.type(share[i]) * new[i]
    return out


def sum_lane_sizes(models: Models, model: Ints, lane: Ints, size: Floats) -> tuple[Ints, Floats]:
    """Return [lane], the position of each lane's trunk, and [lane], the sum of the sizes of its pairs.

    Args:
        models: The models before the round.
        model: [pair], the position of the model.
        lane: [pair], the lane.
        size: [pair], the weighted number of examples.
    """
    _, first = np.unique(lane, return_index=True)
    total: Floats = np.zeros(len(first))
    np.add.at(total, lane, size)
    return models.trunk_index[model[first]], total


def compute_shares(target: Ints, size: Floats) -> Floats:
    """Return [i], the share of update i in the average at target[i], in proportion to size[i]."""
    return np.asarray(size / np.bincount(target, size)[target])


def measure_updates(models: Models, updates: Updates) -> UpdateGeometry:
    """Return the geometry of the updates of models without shared trunks, computed where the updates are."""
    device = find_device(updates.params)
    return HostUpdateGeometry(models, updates) if device is None else device.measure_updates(models, updates)


class HostUpdateGeometry:
    """`UpdateGeometry` in NumPy."""

    def __init__(self, models: Models, updates: Updates) -> None:
        self.models = models
        self.updates = updates
        self._cache: dict[int, list[Any]] = {}  # the differences of the model that was measured last

    def measure_mean(self, m: int) -> float:
        means = [part.mean(axis=0, dtype=float, keepdims=True) for part in self._compute_differences(m)]
        return float(_compute_lengths(means)[0])

    def measure_lengths(self, m: int) -> Floats:
        return _compute_lengths(self._compute_differences(m))

    def measure_cosines(self, m: int) -> Floats:
        products = [numerics.inner_products(part.astype(float)) for part in self._compute_differences(m)]
        return compute_cosines(sum(products))

    def _compute_differences(self, m: int) -> list[Any]:
        """Return, for each array, the differences [update, parameter] of the updates from model m."""
        if m not in self._cache:
            of_model = np.flatnonzero(self.updates.model == m)
            leaves = zip(tree_leaves(self.models.params), tree_leaves(self.updates.params), strict=True)
            self._cache = {m: [(new[of_model] - old[m]).reshape(len(of_model), -1) for old, new in leaves]}
        return self._cache[m]


def compute_cosines(products: Any) -> Floats:
    """Return the cosines [i, j] of the angles between vectors, from their inner products [i, j]."""
    lengths = np.maximum(np.sqrt(np.diag(products)), 1e-30)
    return np.asarray(products / lengths / lengths[:, None])


def _compute_lengths(parts: list[Any]) -> Floats:
    """Return [update], the lengths of vectors that consist of these parts [update, parameter]."""
    return np.asarray(np.sqrt(sum((part.astype(float) ** 2).sum(axis=1) for part in parts)))
