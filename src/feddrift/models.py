"""Surgery on the model axis: everything is a `mix` of rows. Parameters are NumPy arrays here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift.types import Models, Params, Updates


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
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    if isinstance(tree, list | tuple):
        return [leaf for branch in tree for leaf in leaves(branch)]
    return [tree]


def mix(models: Models, A: npt.ArrayLike, ids: Sequence[int]) -> Models:
    """New stack whose row k is the sum of A[k, m] times model m, and bears the id ids[k].

    Merging is a row with two weights; a row with a single 1 copies that model.

    >>> two = Models({"b": np.array([[2.0], [4.0]])}, ids=(0, 1))
    >>> mix(two, [[0.5, 0.5], [1, 0]], ids=(0, 2)).params["b"].tolist()
    [[3.0], [2.0]]
    """
    if models.mask is not None:
        raise ValueError("models that see different inputs cannot be mixed")
    rows = np.asarray(A, dtype=np.float64)
    if rows.shape != (len(ids), len(models)):
        raise ValueError(f"mix needs a matrix of shape {(len(ids), len(models))}, got {rows.shape}")

    def mixed(leaf: Any) -> Any:
        out = np.zeros((len(ids), *leaf.shape[1:]), dtype=leaf.dtype)
        for k, m in np.argwhere(rows):  # zeros are skipped, so a poisoned model stays alone
            out[k] += leaf.dtype.type(rows[k, m]) * leaf[m]
        return out

    return Models(tree_map(mixed, models.params), tuple(int(i) for i in ids))


def take(models: Models, positions: Sequence[int] | npt.NDArray[np.int64], ids: Sequence[int]) -> Models:
    """Copies of the models at these positions under these ids, bit for bit; a position may repeat."""
    at = np.asarray(positions, dtype=np.int64)
    mask = None if models.mask is None else models.mask[at]
    return Models(tree_map(lambda leaf: leaf[at], models.params), tuple(int(i) for i in ids), mask)


def join(a: Models, b: Models) -> Models:
    """The models of a, then those of b."""

    if (a.mask is None) != (b.mask is None):
        raise ValueError("models with and without a mask cannot be joined")
    mask = None if a.mask is None or b.mask is None else np.concatenate([a.mask, b.mask])
    return Models(tree_map(lambda x, y: np.concatenate([x, y]), a.params, b.params), a.ids + b.ids, mask)


def averaged(models: Models, updates: Updates) -> Models:
    """Algorithm 1's average: each model becomes the mean of its lanes by the data behind them, or stays as it is."""
    both = join(Models(models.params, models.ids), Models(updates.params, tuple(range(len(updates.client)))))
    A = averaging(updates, len(models))
    idle = ~A.any(axis=1)
    return replace(models, params=mix(both, np.concatenate([np.diag(idle), A], axis=1), models.ids).params)


def averaging(updates: Updates, n_models: int) -> npt.NDArray[np.float64]:
    """A[m, lane], Algorithm 1's weights: each model's lanes by the data behind them; a row of zeros: no lane."""
    A = np.zeros((n_models, len(updates.size)))
    A[updates.model, np.arange(len(updates.size))] = updates.size
    total = A.sum(axis=1, keepdims=True)
    shares: npt.NDArray[np.float64] = np.divide(A, total, out=np.zeros_like(A), where=total > 0)
    return shares
