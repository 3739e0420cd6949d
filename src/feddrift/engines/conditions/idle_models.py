"""Models at rest: one that nobody has used for some time is not sent to be scored, until a client is badly served."""

from __future__ import annotations

import numpy as np

from feddrift.engines.worker import SCORE_ROWS, Worker
from feddrift.types import Bools, Clusters, Floats, Ints, Models, State, Votes

BOUND = 2.0  # standard errors by which a client's best model must do worse than on its data before


def idle(state: State, n: int) -> frozenset[int]:
    """The ids of the shared models that trained on nothing of the last n time steps, and that nobody votes with.

    >>> w = Clusters(np.array([[0, 1], [1, 1], [1, 1]]), n_models=2)
    >>> state = State(Models(params=(np.zeros((2, 1)),), ids=(0, 7)), w, votes=np.array([[0.0, 1.0], [0.0, 1.0]]))
    >>> idle(state, 2), idle(state, 3)
    (frozenset({0}), frozenset())
    """
    if not n or len(state.w) < n:
        return frozenset()
    in_use: Bools
    if isinstance(state.w, Clusters):
        in_use = np.isin(np.arange(state.w.n_models), state.w.model[-n:])
    else:
        in_use = np.asarray((state.w[-n:] > 0).any(axis=(0, 1)))
    rests = ~in_use & ~Votes.of(state.votes).used & ~state.models.private
    return frozenset(np.asarray(state.models.ids)[rests].tolist())


def badly_served(worker: Worker, models: Models, clients: Ints, tau: int) -> Ints:
    """Of these clients with new data those for which none of these models does: they are sent those at rest, too.

    The best of them makes more mistakes on the new data than the same model on the client's last data before, by more
    than twice the standard error of the difference. Who has no data before has nothing to compare with. All these
    models are at the clients already, so nothing is sent.
    """
    counts = worker.known.counts
    earlier = [np.flatnonzero(counts[:tau, c]) for c in clients]
    before = np.array([times[-1] if len(times) else -1 for times in earlier], dtype=np.int64)
    newcomers, clients, before = clients[before < 0], clients[before >= 0], before[before >= 0]
    new, n = _errors(worker, models, np.stack([np.full_like(clients, tau), clients], axis=1), None)
    old, n_old = _errors(worker, models, np.stack([before, clients], axis=1), SCORE_ROWS)
    at = np.arange(len(clients)), np.where(np.isnan(new), np.inf, new).argmin(axis=1)
    new, old = new[at], old[at]
    share = (new * n + old * n_old) / (n + n_old)
    error = np.sqrt(share * (1 - share) * (1 / n + 1 / n_old))
    return np.sort(np.concatenate([newcomers, clients[new - old > BOUND * error]]))  # NaN, no answer, is not above


def _errors(worker: Worker, models: Models, cells: Ints, most: int | None) -> tuple[Floats, Floats]:
    """[cell, m] errors, NaN where no answer came, and on how many rows."""
    errors, sizes = np.full((len(cells), len(models)), np.nan), np.ones(len(cells))
    if len(cells):
        for which, sums, rows in worker.score(models, cells, "error", most):
            errors[which], sizes[which] = (sums / rows).T, rows
    return errors, sizes
