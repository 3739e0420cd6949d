"""Cross-evaluation: the mean score L[i, j] of model i on the data of model j, as w assigns them (Algorithm 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

import numpy as np

from feddrift.engines.sparse_weights import Entries
from feddrift.engines.worker import CellScores, FederationInfo
from feddrift.errors import ConfigError
from feddrift.types import Floats, Ints, Parting


def get_part_axes(by: str | None, known: FederationInfo) -> tuple[int, ...]:
    """Return the shape of the axis that a division of rows by class or group adds to scores."""
    if by not in (None, *get_args(Parting)):
        raise ConfigError(f"by must be class or group, got {by!r}")
    if by == "group" and not known.n_groups:
        raise ConfigError("by=group needs data whose rows belong to groups, and these do not: use by=class")
    return () if by is None else (known.n_classes if by == "class" else known.n_groups,)


def compute_cross_evaluation(
    score: Callable[[Ints], Iterator[CellScores]],
    entries: Entries,
    counts: Ints,
    parts: tuple[int, ...],
    per_client: bool,
) -> Floats:
    """Compute L[i, j], with a client axis if `per_client`, then an axis of parts if rows are divided.

    Args:
        score: Scores all models on cells [k, (t, c)].
        entries: The weights w.
        counts: [t, c], the number of rows.
        parts: The axis of the division of rows, from `get_part_axes`.
        per_client: True to keep the clients apart.
    """
    _, n_clients, n_models = entries.shape
    cells, of_entry = np.unique(entries.t * n_clients + entries.c, return_inverse=True)
    weight = entries.value * counts[entries.t, entries.c]
    column_axes = (n_models, n_clients) if per_client else (n_models,)
    column = entries.m * n_clients + entries.c if per_client else entries.m
    n_columns = int(np.prod(column_axes))
    n_parts = parts[0] if parts else 1
    L = np.zeros((n_models, n_columns, n_parts))
    share = np.zeros((len(cells), n_parts))  # of the rows of a cell, by part
    by_cell = np.argsort(of_entry, kind="stable")
    for which, sums, sizes in score(np.stack(np.divmod(cells, n_clients), axis=1)):
        n_rows = sizes.sum(axis=1) if parts else sizes
        share[which] = sizes.reshape(len(which), -1) / n_rows[:, None]
        block = by_cell[slice(*np.searchsorted(of_entry[by_cell], [which[0], which[-1] + 1]))]
        if len(which) <= which[-1] - which[0]:  # some cells between are missing
            block = block[np.isin(of_entry[block], which)]
        block = block[np.argsort(column[block], kind="stable")]  # by model, then cell: the order of all engines
        columns, begins = np.unique(column[block], return_index=True)
        at = np.searchsorted(which, of_entry[block])
        for g, of_part in enumerate(np.moveaxis(sums.reshape(n_models, len(which), -1), 2, 0)):
            L[:, columns, g] += np.add.reduceat((of_part / n_rows)[:, at] * weight[block], begins, axis=1)
    scored = (share.sum(axis=1) > 0)[of_entry]
    column = column[scored]
    weight = weight[scored]
    shares = share[of_entry[scored]].T
    rows = np.stack([np.bincount(column, weight * of_part, n_columns) for of_part in shares], axis=1)
    with np.errstate(invalid="ignore"):  # a model without data: 0 / 0
        return np.asarray(L / rows).reshape(n_models, *column_axes, *parts)
