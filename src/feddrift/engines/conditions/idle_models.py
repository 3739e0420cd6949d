"""Idle models: models that no client has used for some time are scored by badly served clients only."""

from __future__ import annotations

import numpy as np

from feddrift.engines.worker import MAX_SCORED_ROWS, Worker
from feddrift.types import Bools, Clusters, Floats, Ints, Models, State, Votes

BADLY_SERVED_Z = 2.0  # standard errors by which the error of a client's best model must have risen


def find_idle_models(state: State, n_steps: int) -> frozenset[int]:
    """Return the ids of shared models without votes and without training data from the last `n_steps` time steps.

    >>> w = Clusters(np.array([[0, 1], [1, 1], [1, 1]]), n_models=2)
    >>> state = State(Models(params=(np.zeros((2, 1)),), ids=(0, 7)), w, votes=np.array([[0.0, 1.0], [0.0, 1.0]]))
    >>> find_idle_models(state, 2), find_idle_models(state, 3)
    (frozenset({0}), frozenset())
    """
    if not n_steps or len(state.w) < n_steps:
        return frozenset()
    in_use: Bools
    if isinstance(state.w, Clusters):
        in_use = np.isin(np.arange(state.w.n_models), state.w.model[-n_steps:])
    else:
        in_use = np.asarray((state.w[-n_steps:] > 0).any(axis=(0, 1)))
    is_idle = ~in_use & ~Votes.of(state.votes).used & ~state.models.private
    return frozenset(np.asarray(state.models.ids)[is_idle].tolist())


def find_badly_served_clients(worker: Worker, models: Models, clients: Ints, tau: int) -> Ints:
    """Return the badly served clients, which score the idle models, too.

    A client is badly served if its best model has a higher error on the new data than on the last earlier data
    by more than `BADLY_SERVED_Z` standard errors of the difference. Clients without earlier data are badly served. The
    clients have received all these models already, so nothing is sent.

    Args:
        worker: The clients.
        models: The models that are not idle.
        clients: The clients with new data.
        tau: The time step.
    """
    counts = worker.known.counts
    earlier_times = [np.flatnonzero(counts[:tau, c]) for c in clients]
    last_times = np.array([times[-1] if len(times) else -1 for times in earlier_times], dtype=np.int64)
    newcomers = clients[last_times < 0]
    clients = clients[last_times >= 0]
    last_times = last_times[last_times >= 0]
    new, n_new = _measure_errors(worker, models, np.stack([np.full_like(clients, tau), clients], axis=1), None)
    old, n_old = _measure_errors(worker, models, np.stack([last_times, clients], axis=1), MAX_SCORED_ROWS)
    best = np.arange(len(clients)), np.where(np.isnan(new), np.inf, new).argmin(axis=1)
    new = new[best]
    old = old[best]
    return np.sort(np.concatenate([newcomers, clients[has_risen(new, n_new, old, n_old)]]))


def has_risen(new: Floats, n_new: Floats, old: Floats, n_old: Floats) -> Bools:
    """Return whether errors rose by more than `BADLY_SERVED_Z` standard errors; false for NaN, an unknown error.

    Args:
        new: The new errors.
        n_new: The numbers of rows that they were measured on.
        old: The earlier errors.
        n_old: The numbers of rows of these.
    """
    pooled_error = (new * n_new + old * n_old) / (n_new + n_old)
    standard_error = np.sqrt(pooled_error * (1 - pooled_error) * (1 / n_new + 1 / n_old))
    return np.asarray(new - old > BADLY_SERVED_Z * standard_error)


def _measure_errors(worker: Worker, models: Models, cells: Ints, max_rows: int | None) -> tuple[Floats, Floats]:
    """Return the errors [cell, m], NaN without a reply, and the number of scored rows of each cell."""
    errors = np.full((len(cells), len(models)), np.nan)
    sizes = np.ones(len(cells))
    if len(cells):
        for scored, sums, rows in worker.score(models, cells, "error", max_rows):
            errors[scored] = (sums / rows).T
            sizes[scored] = rows
    return errors, sizes
