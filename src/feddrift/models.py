"""Surgery on the model axis: merge, copy, join and replace models.

Parameters are NumPy arrays here, or look like them: copies and joins of what lies on a device stay there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift import rng
from feddrift._internal.device_arrays import concatenated
from feddrift.errors import ConfigError
from feddrift.trees import classes_of, map_trunk_and_head, tree_map, trunk_of
from feddrift.types import Bools, Floats, Ints, Models, Net, Params, Trains


def params_of(models: Models, m: int) -> Params:
    """The parameters of a single model."""
    return map_trunk_and_head(lambda leaf, at: leaf[at], models, m, models.trunk_index[m])


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
    if models.private.any():
        raise ValueError("private models stay with their clients: they cannot be mixed")
    rows = np.asarray(A, dtype=np.float64)
    if rows.shape != (len(ids), len(models)):
        raise ValueError(f"mix needs a matrix of shape {(len(ids), len(models))}, got {rows.shape}")
    names = tuple(int(i) for i in ids)
    if family is None:
        family = [_family(models, i, np.flatnonzero(row)) for i, row in zip(names, rows, strict=True)]
    frame = Models(None, names, family=tuple(int(i) for i in family), trunk=models.trunk, classes=models.classes)
    on_trunks = np.zeros((len(rows), len(models.families)))
    np.add.at(on_trunks.T, models.trunk_index, rows.T)
    on_trunks[np.abs(on_trunks - 1) < 1e-12] = 1  # shares of one family add up to its trunk
    return replace(frame, params=map_trunk_and_head(_mixed, models, rows, _agreed(frame, on_trunks)))


def mix_rows(models: Models, A: npt.ArrayLike) -> Models:
    """The same models with heads mixed class by class: row k of head `new` is the sum of A[k, new, old] times old's.

    The row of a class is all that leads to its logit: weights and bias, of every array of the head. Trunks stay.

    >>> two = Models({"b": np.array([[2.0, 1.0], [4.0, 3.0]])}, ids=(0, 1), classes={"b": 0})
    >>> mix_rows(two, [[[0.5, 0.5], [0.5, 0.5]], [[1, 0], [0, 1]]]).params["b"].tolist()
    [[3.0, 1.0], [3.0, 3.0]]
    """
    rows = np.asarray(A, dtype=np.float64)
    if models.private.any():
        raise ValueError("private models stay with their clients: they cannot be mixed")

    def mixed(leaf: Any, axis: int, in_trunk: bool) -> Any:
        if in_trunk:
            return leaf
        by_class = np.moveaxis(leaf, 1 + _counts_classes(axis), 0)  # [k, m, ...]
        if rows.shape != (len(by_class), len(models), len(models)):
            expected = len(by_class), len(models), len(models)
            raise ValueError(f"mix_rows needs an array of shape {expected}, got {rows.shape}")
        return np.moveaxis(np.stack([_mixed(*pair) for pair in zip(by_class, rows, strict=True)]), 0, 1 + axis)

    return replace(models, params=map_trunk_and_head(mixed, models, False, True, _classes(models)))


def class_rows(models: Models) -> Floats:
    """[m, k, number]: of each head all numbers that lead to the logit of class k, weights and bias."""
    parts: list[Any] = []

    def gather(leaf: Any, axis: int, in_trunk: bool) -> None:
        if not in_trunk:
            by_class = np.moveaxis(leaf, 1 + _counts_classes(axis), 1)  # [m, k, ...]
            parts.append(by_class.reshape(*by_class.shape[:2], -1).astype(np.float64))

    map_trunk_and_head(gather, models, False, True, _classes(models))
    return np.concatenate(parts, axis=2)


def _classes(models: Models) -> Params:
    return tree_map(lambda _: -1, models.params) if models.classes is None else models.classes


def _counts_classes(axis: int) -> int:
    if axis < 0:
        raise ConfigError("the net must say of each array of its head which axis counts classes: Net(classes=...)")
    return axis


def take(
    models: Models,
    positions: Sequence[int] | Ints,
    ids: Sequence[int],
    family: Sequence[int] | None = None,
    owner: Sequence[int] | None = None,
) -> Models:
    """Copies of the models at these positions under these ids, bit for bit; a position may repeat.

    Unless `family` says otherwise, a model that keeps its id keeps its family, and any other founds its own. With
    `owner`, the copies are private models of these clients (-1: shared); else each is whose the original was.
    """
    at, names = np.asarray(positions, dtype=np.int64), tuple(int(i) for i in ids)
    if family is None:
        family = [_family(models, i, [m]) for i, m in zip(names, at, strict=True)]
    mask = None if models.mask is None else models.mask[at]
    owners = tuple(models.owner[m] for m in at) if owner is None else tuple(int(c) for c in owner)
    held = tuple(models.held[m] for m in at)
    if any(label and models.ids[m] != i for label, m, i in zip(held, at, names, strict=True)):
        raise ValueError("only the owner has the parameters of this model: it cannot be copied under another id")
    frame = Models(None, names, mask, tuple(int(i) for i in family), models.trunk, owners, held, models.classes)
    on_trunk = _agreed(frame, models.trunk_index[at])
    return replace(frame, params=map_trunk_and_head(lambda leaf, rows: leaf[rows], models, at, on_trunk))


def _family(models: Models, new_id: int, sources: Sequence[int] | Ints) -> int:
    families = {models.family[m] for m in sources}
    kept = any(models.ids[m] == new_id for m in sources)
    return families.pop() if kept and len(families) == 1 else new_id


def _agreed(frame: Models, on_trunks: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The trunk of each family, from that of each model; models of a family must agree."""
    _, first = np.unique(frame.trunk_index, return_index=True)
    if not np.array_equal(on_trunks, on_trunks[first][frame.trunk_index]):
        raise ValueError(f"models of different trunks cannot be one family, got {frame.family}")
    return on_trunks[first]


def _mixed(leaf: Any, rows: Floats) -> Any:
    out = np.zeros((len(rows), *leaf.shape[1:]), dtype=leaf.dtype)
    for k, m in np.argwhere(rows):  # zeros are skipped, so a poisoned model stays alone
        out[k] += leaf.dtype.type(rows[k, m]) * leaf[m]
    return out


def join(first: Models, *others: Models) -> Models:
    """Return the models of all these stacks, in their order; families with one name must have the same trunk."""
    stacks = (first, *others)
    ids = list(first.ids)
    known = set(first.families)
    is_new: list[Bools] = []  # of each other stack, which of its families the stacks before it do not have
    for other in others:
        if set(ids) & set(other.ids):
            raise ValueError(
                f"ids are names for life, got {tuple(ids)} and {other.ids}: "
                "take(models, positions, ids) makes copies under new ones"
            )
        if (first.mask is None) != (other.mask is None):
            raise ValueError("models with and without a mask cannot be joined")
        ids += other.ids
        is_new.append(np.array([name not in known for name in other.families], dtype=bool))
        known |= set(other.families)

    def joined(x: Any, *more: Any) -> Any:
        *leaves, in_trunk = more
        if not in_trunk:
            return concatenated([x, *leaves])
        return concatenated([x, *(y[new] for y, new in zip(leaves, is_new, strict=True))])

    def check_trunks(*given: Any) -> None:
        *leaves, in_trunk = given
        seen: dict[int, Any] = {}  # the trunk of each family so far
        for models, leaf in zip(stacks, leaves, strict=True) if in_trunk else ():
            for f, name in enumerate(models.families):
                if name in seen and not np.array_equal(seen[name], leaf[f], equal_nan=True):
                    families = " and ".join(str(models.family) for models in stacks)
                    raise ValueError(f"models of different trunks cannot be one family, got {families}")
                seen.setdefault(name, leaf[f])

    trees = [other.params for other in others]
    if not all(new.all() for new in is_new):
        map_trunk_and_head(check_trunks, first, False, True, *trees)
    params = map_trunk_and_head(joined, first, False, True, *trees)
    mask = None if first.mask is None else np.concatenate([np.asarray(models.mask) for models in stacks])
    family, owner, held = (
        tuple(value for models in stacks for value in getattr(models, name)) for name in ("family", "owner", "held")
    )
    return Models(params, tuple(ids), mask, family, first.trunk, owner, held, first.classes)


def graft(heads: Models, stock: Models, family: int) -> Models:
    """Models with their own heads on the trunk that this family has in another stack."""
    at = [stock.families.index(family)]
    renamed = replace(heads, family=(family,) * len(heads))
    return replace(
        renamed, params=map_trunk_and_head(lambda x, y, trunk: y[at] if trunk else x, heads, False, True, stock.params)
    )


def in_place_of(models: Models, others: Models) -> Models:
    """For each of these models the one of `others` in its place, or the only one there is, under the same ids."""
    if len(others) not in (1, len(models)):
        raise ValueError(f"expected one model, or {len(models)} of them, got {len(others)}")
    at = np.arange(len(models)) % len(others)
    _, first = np.unique(models.trunk_index, return_index=True)
    params = map_trunk_and_head(lambda leaf, rows: leaf[rows], others, at, others.trunk_index[at[first]])
    return replace(models, params=params)


def unused_id(models: Models) -> int:
    """An id that no model and no family has."""
    return max(*models.ids, *models.family) + 1


def private(models: Models, start: Models, n_clients: int) -> Models:
    """A private model for each client, in their order: the first that it owns among these, else a copy of `start`.

    The copies have new ids. So clients that join later have one, too.

    >>> start = Models({"b": np.zeros((1, 2))}, ids=(0,))
    >>> of_two = private(start, start, 2)
    >>> of_two.ids, of_two.owner, private(of_two, start, 3).ids
    ((1, 2), (0, 1), (1, 2, 3))
    """
    place = {c: m for m, c in reversed(list(enumerate(models.owner))) if c >= 0}
    without = [c for c in range(n_clients) if c not in place]
    if without:
        free = unused_id(models)
        ids = range(free, free + len(without))
        place |= {c: len(models) + k for k, c in enumerate(without)}
        models = join(models, take(start, [0] * len(without), ids, owner=without))
    at = [place[c] for c in range(n_clients)]
    return take(models, at, [models.ids[m] for m in at])


def put(models: Models, m: int, newcomer: Models) -> Models:
    """The model at position m, alone in its family or not its founder, replaced by a single other one.

    The other gets the old id and stands on a trunk of its own.
    """
    free = unused_id(models)
    order = [len(models) if k == m else k for k in range(len(models))]
    return take(join(models, take(newcomer, [0], [free])), order, models.ids)


def fresh(net: Net, seed: int, n: int = 1, distinct: bool = False) -> Models:
    """n new models with ids 0..n-1: all the one initialisation of this seed, or each its own."""
    inits = [net.init(rng.derive(seed, "init", i if distinct else 0)) for i in range(n)]
    params = tree_map(lambda *leaves: np.stack(leaves), *inits)
    return Models(params, tuple(range(n)), trunk=trunk_of(net, params), classes=classes_of(net, params))


def only_trained(before: Models, trained: Models, trains: Trains) -> Models:
    """The trained part, the rest as it was: an average of equal arrays may differ in its last bits."""
    if trains == "all":
        return trained
    params = map_trunk_and_head(
        lambda new, old, part: new if part == trains else old, trained, "head", "trunk", before.params
    )
    return replace(trained, params=params)
