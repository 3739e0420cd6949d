"""Cross-evaluation: the mean score L[i, j] of model i on the data that w assigns to model j (Algorithm 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

import numpy as np

from feddrift.engines.sparse_weights import Entries
from feddrift.engines.worker import CellScores, FederationInfo
from feddrift.errors import ConfigError
from feddrift.types import Floats, Ints, Parting


def get_part_axes(by: str | None, known: FederationInfo) -> tuple[int, ...]:
    """Return the shape of the axis that scores have in addition if rows are divided by class or group; (): none.

    Raises:
        ConfigError: If the division is unknown, or rows have no groups.
    """
    if by not in (None, *get_args(Parting)):
        raise ConfigError(f"by must be class or group, got {by!r}")
    if by == "group" and not known.n_groups:
        raise ConfigError("by=group needs data whose rows belong to groups, and these do not: use by=class")
    return () if by is None else (known.n_classes if by == "class" else known.n_groups,)


def compute_cross_evaluation(
    score: Callable[[Ints], Iterator[CellScores]],
    n_scored: int,
    entries: Entries,
    counts: Ints,
    parts: tuple[int, ...],
    per_client: bool,
) -> Floats:
    """Compute L[i, j], with a client axis if `per_client`, then an axis of parts if rows are divided.

    Args:
        score: Scores the models i on cells [cell, (t, c)].
        n_scored: The number of models i.
        entries: The weights w of all models j.
        counts: [t, c], the number of rows.
        parts: The axis of the divided rows, from `get_part_axes`.
        per_client: Whether the data of each client are scored separately.
    """
    _, n_clients, n_models = entries.shape
    cells, cell_of_entry = np.unique(entries.t * n_clients + entries.c, return_inverse=True)
    weight = entries.value * counts[entries.t, entries.c]
    column_axes = (n_models, n_clients) if per_client else (n_models,)
    column = entries.m * n_clients + entries.c if per_client else entries.m
    n_columns = int(np.prod(column_axes))
    n_parts = parts[0] if parts else 1
    L = np.zeros((n_scored, n_columns, n_parts))
    share = np.zeros((len(cells), n_parts))  # [cell, part], the share of the cell's rows
    by_cell = np.argsort(cell_of_entry, kind="stable")  # the entries, sorted by cell
    for positions, sums, sizes in score(np.stack(np.divmod(cells, n_clients), axis=1)):
        n_rows = sizes.sum(axis=1) if parts else sizes
        share[positions] = sizes.reshape(len(positions), -1) / n_rows[:, None]
        limits = np.searchsorted(cell_of_entry[by_cell], [positions[0], positions[-1] + 1])
        block = by_cell[slice(*limits)]
        if len(positions) <= positions[-1] - positions[0]:  # cells between them are missing
            block = block[np.isin(cell_of_entry[block], positions)]
        block = block[np.argsort(column[block], kind="stable")]  # by model, then by cell, as in all engines
        columns, begins = np.unique(column[block], return_index=True)
        index = np.searchsorted(positions, cell_of_entry[block])
        for g, part_sums in enumerate(np.moveaxis(sums.reshape(n_scored, len(positions), -1), 2, 0)):
            means = (part_sums / n_rows)[:, index]
            L[:, columns, g] += np.add.reduceat(means * weight[block], begins, axis=1)
    scored = (share.sum(axis=1) > 0)[cell_of_entry]
    column = column[scored]
    weight = weight[scored]
    shares = share[cell_of_entry[scored]].T
    rows = np.stack([np.bincount(column, weight * part_share, n_columns) for part_share in shares], axis=1)
    with np.errstate(invalid="ignore"):  # a model without data: 0 / 0
        return np.asarray(L / rows).reshape(n_scored, *column_axes, *parts)
