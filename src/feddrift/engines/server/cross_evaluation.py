"""L from sums over cells: how each model does on the data that w gives to each, perhaps by client, class or group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

import numpy as np

from feddrift.engines.sparse_weights import Entries
from feddrift.engines.worker import Known, Scored
from feddrift.errors import ConfigError
from feddrift.types import Floats, Ints, Parting


def axis_of(by: str | None, known: Known) -> tuple[int, ...]:
    """The axis that telling rows apart adds to scores."""
    if by not in (None, *get_args(Parting)):
        raise ConfigError(f"by must be class or group, got {by!r}")
    if by == "group" and not known.n_groups:
        raise ConfigError("by=group needs data whose rows belong to groups, and these do not: use by=class")
    return () if by is None else (known.n_classes if by == "class" else known.n_groups,)


def crossed(
    score: Callable[[Ints], Iterator[Scored]], entries: Entries, counts: Ints, parts: tuple[int, ...], per_client: bool
) -> Floats:
    """L[i, j], then c if it is per client, then g if rows are in parts; `score` has models scored on cells (t, c)."""
    _, n_clients, n_models = entries.shape
    cells, of_entry = np.unique(entries.t * n_clients + entries.c, return_inverse=True)
    behind = entries.value * counts[entries.t, entries.c]
    columns_of = (n_models, n_clients) if per_client else (n_models,)
    column, n_columns = entries.m * n_clients + entries.c if per_client else entries.m, int(np.prod(columns_of))
    n_parts = parts[0] if parts else 1
    L, share = np.zeros((n_models, n_columns, n_parts)), np.zeros((len(cells), n_parts))  # share: of a cell's rows
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
            L[:, columns, g] += np.add.reduceat((of_part / n_rows)[:, at] * behind[block], begins, axis=1)
    heard = (share.sum(axis=1) > 0)[of_entry]
    column, behind, shares = column[heard], behind[heard], share[of_entry[heard]].T
    rows = np.stack([np.bincount(column, behind * of_part, n_columns) for of_part in shares], axis=1)
    with np.errstate(invalid="ignore"):  # a model without data: 0 / 0
        return np.asarray(L / rows).reshape(n_models, *columns_of, *parts)
