"""Surgery on the model axis: everything is a `mix` of rows. Parameters are NumPy arrays here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift.errors import ConfigError
from feddrift.types import Average, Bools, Floats, Ints, Models, Net, Params, Updates

TRIM = 0.3  # of the clients at each end


def tree_map(f: Callable[..., Any], tree: Params, *others: Params) -> Params:
    """Apply f to every array of nested dicts, lists and tuples."""
    if isinstance(tree, dict):
        return {k: tree_map(f, v, *(o[k] for o in others)) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        branches = [tree_map(f, v, *(o[i] for o in others)) for i, v in enumerate(tree)]
        return type(tree)(*branches) if hasattr(tree, "_fields") else type(tree)(branches)  # a named tuple, or plain
    return f(tree, *others)


def leaves(tree: Params) -> list[Any]:
    """The arrays of a tree, dictionaries in the order of their keys."""
    return [leaf for _, leaf in paths(tree)]


def paths(tree: Params, path: str = "") -> Iterator[tuple[str, Any]]:
    """The arrays of a tree with their paths, such as "params/Dense_0/kernel", in the order of `leaves`."""
    below = path + "/" if path else ""
    if isinstance(tree, dict):
        for key in sorted(tree):
            yield from paths(tree[key], f"{below}{key}")
    elif isinstance(tree, list | tuple):
        for i, branch in enumerate(tree):
            yield from paths(branch, f"{below}{i}")
    else:
        yield path, tree


def trunk_of(net: Net, params: Params) -> Params:
    """A tree like params: True where an array belongs to the net's trunk."""
    names = [path for path, _ in paths(params)]
    if callable(net.trunk):
        found = [bool(net.trunk(path)) for path in names]
    else:
        for name in net.trunk:
            if not any(_within(path, name) for path in names):
                raise ConfigError(f"the net has no parameters '{name}' for its trunk (there are: {', '.join(names)})")
        found = [any(_within(path, name) for name in net.trunk) for path in names]
    return refill(params, iter(found))


def has_trunk(models: Models) -> bool:
    """Whether these models can share something and differ in something."""
    return models.trunk is not None and len(set(leaves(models.trunk))) == 2


def _within(path: str, branch: str) -> bool:
    return path == branch or path.startswith(branch + "/")


def split(params: Params, trunk: Params) -> tuple[list[Any], list[Any]]:
    """The arrays of the trunk, and those of the head."""
    marked = list(zip(leaves(params), leaves(trunk), strict=True))
    return [leaf for leaf, shared in marked if shared], [leaf for leaf, shared in marked if not shared]


def unsplit(trunk_leaves: Sequence[Any], head_leaves: Sequence[Any], trunk: Params) -> Params:
    """The parameters whose `split` these are."""
    of_trunk, of_head = iter(trunk_leaves), iter(head_leaves)
    return refill(trunk, (next(of_trunk if shared else of_head) for shared in leaves(trunk)))


def refill(tree: Params, values: Iterator[Any]) -> Params:
    """A tree of the same shape with these leaves, in the order of `leaves`."""
    if isinstance(tree, dict):
        filled = {key: refill(tree[key], values) for key in sorted(tree)}
        return {key: filled[key] for key in tree}
    if isinstance(tree, list | tuple):
        branches = [refill(branch, values) for branch in tree]
        return type(tree)(*branches) if hasattr(tree, "_fields") else type(tree)(branches)
    return next(values)


def per_axis(f: Callable[..., Any], models: Models, head: Any, trunk: Any, *others: Params) -> Params:
    """f(array, ..., head) for every array with the axis m, f(array, ..., trunk) for those with the axis of families."""
    if models.trunk is None:
        return tree_map(lambda *arrays: f(*arrays, head), models.params, *others)
    return tree_map(
        lambda leaf, shared, *rest: f(leaf, *rest, trunk if shared else head), models.params, models.trunk, *others
    )


def one(models: Models, m: int) -> Params:
    """The parameters of a single model."""
    return per_axis(lambda leaf, at: leaf[at], models, m, models.stands_on[m])


def mix(models: Models, A: npt.ArrayLike, ids: Sequence[int], family: Sequence[int] | None = None) -> Models:
    """New stack whose row k is the sum of A[k, m] times model m, and bears the id ids[k].

    Merging is a row with two weights; a row with a single 1 copies that model. Unless `family` says otherwise, a row
    made of one family under an old id stays in it, and any other founds its own.

    >>> two = Models({"b": np.array([[2.0], [4.0]])}, ids=(0, 1))
    >>> mix(two, [[0.5, 0.5], [1, 0]], ids=(0, 2)).params["b"].tolist()
    [[3.0], [2.0]]
    """
    if models.mask is not None:
        raise ValueError("models that see different inputs cannot be mixed")
    rows = np.asarray(A, dtype=np.float64)
    if rows.shape != (len(ids), len(models)):
        raise ValueError(f"mix needs a matrix of shape {(len(ids), len(models))}, got {rows.shape}")
    names = tuple(int(i) for i in ids)
    if family is None:
        family = [_family(models, i, np.flatnonzero(row)) for i, row in zip(names, rows, strict=True)]
    made = Models(None, names, family=tuple(int(i) for i in family), trunk=models.trunk)
    on_trunks = np.zeros((len(rows), len(models.families)))
    np.add.at(on_trunks.T, models.stands_on, rows.T)
    on_trunks[np.abs(on_trunks - 1) < 1e-12] = 1  # shares of one family add up to its trunk
    return replace(made, params=per_axis(_mixed, models, rows, _agreed(made, on_trunks)))


def take(
    models: Models, positions: Sequence[int] | Ints, ids: Sequence[int], family: Sequence[int] | None = None
) -> Models:
    """Copies of the models at these positions under these ids, bit for bit; a position may repeat.

    Unless `family` says otherwise, a model that keeps its id keeps its family, and any other founds its own.
    """
    at, names = np.asarray(positions, dtype=np.int64), tuple(int(i) for i in ids)
    if family is None:
        family = [_family(models, i, [m]) for i, m in zip(names, at, strict=True)]
    mask = None if models.mask is None else models.mask[at]
    made = Models(None, names, mask, tuple(int(i) for i in family), models.trunk)
    on_trunk = _agreed(made, models.stands_on[at])
    return replace(made, params=per_axis(lambda leaf, rows: leaf[rows], models, at, on_trunk))


def _family(models: Models, new_id: int, sources: Sequence[int] | Ints) -> int:
    families = {models.family[m] for m in sources}
    kept = any(models.ids[m] == new_id for m in sources)
    return families.pop() if kept and len(families) == 1 else new_id


def _agreed(made: Models, on_trunks: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What each family of a new stack stands on, from what each of its models does."""
    first = [made.family.index(name) for name in made.families]
    if not np.array_equal(on_trunks, on_trunks[first][made.stands_on]):
        raise ValueError(f"models of different trunks cannot be one family, got {made.family}")
    return on_trunks[first]


def _mixed(leaf: Any, rows: Floats) -> Any:
    out = np.zeros((len(rows), *leaf.shape[1:]), dtype=leaf.dtype)
    for k, m in np.argwhere(rows):  # zeros are skipped, so a poisoned model stays alone
        out[k] += leaf.dtype.type(rows[k, m]) * leaf[m]
    return out


def join(a: Models, b: Models) -> Models:
    """The models of a, then those of b; a family of both must stand on the same trunk."""
    if set(a.ids) & set(b.ids):
        raise ValueError(f"ids are names for life, got {a.ids} and {b.ids}")
    if (a.mask is None) != (b.mask is None):
        raise ValueError("models with and without a mask cannot be joined")
    mask = None if a.mask is None or b.mask is None else np.concatenate([a.mask, b.mask])
    new = np.array([name not in a.families for name in b.families], dtype=bool)
    old = [a.families.index(name) if name in a.families else -1 for name in b.families]

    def joined(x: Any, y: Any, trunk: bool) -> Any:
        if trunk and any(k >= 0 and not np.array_equal(x[k], y[f], equal_nan=True) for f, k in enumerate(old)):
            raise ValueError(f"models of different trunks cannot be one family, got {a.family} and {b.family}")
        return np.concatenate([x, y[new] if trunk else y])

    return Models(per_axis(joined, a, False, True, b.params), a.ids + b.ids, mask, a.family + b.family, a.trunk)


def graft(heads: Models, stock: Models, family: int) -> Models:
    """Models with their own heads on the trunk that this family has in another stack."""
    at = [stock.families.index(family)]
    made = replace(heads, family=(family,) * len(heads))
    return replace(made, params=per_axis(lambda x, y, trunk: y[at] if trunk else x, heads, False, True, stock.params))


def spare(models: Models) -> int:
    """A name that no model and no family has."""
    return max(*models.ids, *models.family) + 1


def put(models: Models, m: int, other: Models) -> Models:
    """The model at position m, alone in its family or not its founder, replaced by a single other one.

    The other gets the old id and stands on a trunk of its own.
    """
    free = spare(models)
    order = [len(models) if k == m else k for k in range(len(models))]
    return take(join(models, take(other, [0], [free])), order, models.ids)


def averaged(models: Models, updates: Updates, rule: Average = "mean") -> Models:
    """Algorithm 1's average: each model becomes the mean of its pairs by the data behind them, or stays as it is.

    A trunk becomes the mean of its family's lanes by all the data behind them. A lane that is not finite is left out.
    The other rules bound what a few clients can do: the `median` of each parameter; its mean without the TRIM lowest
    and highest share (`trimmed`), both whatever the data behind; or the mean of updates no longer than the median one
    (`clipped`).
    """
    if len(updates.client) and not (sound := finite(models, updates)).all():
        updates = _only(models, updates, sound)
    if not len(updates.client):
        return models
    trunk, size = lane_sizes(models, updates)
    if rule in ("median", "trimmed"):
        middle = partial(_middle, rule=rule)
        return replace(models, params=per_axis(middle, models, updates.model, trunk, updates.params))
    if rule == "clipped":
        updates = replace(updates, params=_clipped(models, updates, trunk))
    heads = updates.model, shares(updates.model, updates.size)
    trunks = trunk, shares(trunk, size)
    params = per_axis(lambda old, new, parts: average(old, new, *parts), models, heads, trunks, updates.params)
    return replace(models, params=params)


def finite(models: Models, updates: Updates) -> Bools:
    """[lane], whether all that it trained are numbers."""
    _, first = np.unique(updates.lane, return_index=True)
    sound = np.ones(len(first), dtype=bool)

    def look(_: Any, new: Any, lane: Ints) -> None:
        sound[lane[~np.isfinite(new.reshape(len(new), math.prod(new.shape[1:]))).all(axis=1)]] = False

    per_axis(look, models, updates.lane, np.arange(len(first)), updates.params)
    return sound


def sound_parts(share: Floats, order: Ints, target: Ints, sound: Bools) -> tuple[Floats, Ints]:
    """The shares in an average, and the parts to add, when of those to add in this order only some are sound."""
    order = order[sound]
    left = share.copy()
    total = np.bincount(target[order], share[order], int(target.max()) + 1)
    left[order] = share[order] / total[target[order]]
    return left, order


def _only(models: Models, updates: Updates, kept: Bools) -> Updates:
    """The updates of these lanes."""
    pairs = kept[updates.lane]
    return Updates(
        per_axis(lambda _, new, which: new[which], models, pairs, kept, updates.params), updates.client[pairs],
        updates.model[pairs], updates.size[pairs], (np.cumsum(kept) - 1)[updates.lane[pairs]],
    )  # fmt: skip


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

    per_axis(measure, models, 0, 1, updates.params)
    return per_axis(scaled, models, 0, 1, updates.params)


def average(old: Any, new: Any, target: Ints, share: Floats, order: Ints | None = None) -> Any:
    """old, where row target[i] becomes the sum of share[i] new[i] over i, added up in this order."""
    out, every = old.copy(), range(len(target)) if order is None else order
    out[target if order is None else target[order]] = 0
    for i in every:
        out[target[i]] += out.dtype.type(share[i]) * new[i]
    return out


def lane_sizes(models: Models, updates: Updates) -> tuple[Ints, Floats]:
    """The position of each lane's trunk, and the data behind the lane."""
    _, first = np.unique(updates.lane, return_index=True)
    size: Floats = np.zeros(len(first))
    np.add.at(size, updates.lane, updates.size)
    return models.stands_on[updates.model[first]], size


def shares(target: Ints, size: Floats) -> Floats:
    """The share of each part in the average that it goes to, by size."""
    return np.asarray(size / np.bincount(target, size)[target])
