"""Unsupported models, the condition `share_from`: models that fewer clients than this have trained.

The loss of such a model on a row shows whether the row was in its training data. Therefore it is not sent to all
clients, but only to its *receivers*:

- the clients that trained it, and those that already predict with it;
- the clients that trained another unsupported model, because two such models merge only if each was scored on the data
  of the other;
- the badly served clients, whose new data none of the models that they have fits.

A client is badly served if the error of its best model on the new data is higher than it was when the client was last
served well. No model was trained on the data of either error before it was measured. A client without an earlier error
is badly served. It is scored with the models that it may receive in any case.

A model is sent to all clients as soon as enough clients have trained it. An untrained model is not limited.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from feddrift.engines.conditions.idle_models import has_risen
from feddrift.engines.worker import Worker
from feddrift.models import take
from feddrift.types import Bools, Clusters, Floats, Ints, Models, State, Votes

Holders = Mapping[int, Ints]  # by the id of an unsupported model, the clients that trained it or predict with it


@dataclass(frozen=True, eq=False)
class SharingLimits:
    """Unsupported models of a time step, and the clients that receive all of them."""

    holders: Holders
    candidates: Bools  # [c], true for holders of an unsupported model and for badly served clients
    served: Floats  # [2, c], error when the client was last served well, and its number of rows; NaN: never scored

    def find_receivers(self, model_id: int) -> Bools:
        """Return [c], true for the clients that receive a model."""
        receivers = self.candidates | (model_id not in self.holders)
        receivers[self.holders.get(model_id, [])] = True
        return receivers


def find_holders(state: State, counts: Ints, share_from: int) -> Holders:
    """Find the shared models that at least one but fewer than `share_from` clients have trained, and who has them.

    A client has trained a model if w gives its rows to the model, also at an earlier time step.

    Args:
        state: The state before the time step.
        counts: [t, c], the number of rows that each client received.
        share_from: The number of clients that a model needs.

    >>> w = Clusters(np.array([[0, 0, 0], [0, 0, 1]]), n_models=2)
    >>> votes = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> state = State(Models(params=(np.zeros((2, 1)),), ids=(0, 7)), w, votes)
    >>> find_holders(state, np.full((2, 3), 50), 2)
    {7: array([2])}
    """
    n_clients = counts.shape[1]
    has_rows = counts[: len(state.w)] > 0
    if isinstance(state.w, Clusters):
        used = (state.w.model >= 0) & (state.w.weight[:, None] > 0) & has_rows
        m, c = np.divmod(np.unique((state.w.model * n_clients + np.arange(n_clients))[used]), n_clients)
    else:
        m, c = np.nonzero(((state.w > 0) & has_rows[:, :, None]).any(axis=0).T)
    n_trainers = np.bincount(m, minlength=len(state.models))
    is_unsupported = (n_trainers > 0) & (n_trainers < share_from) & ~state.models.private
    votes = Votes.of(state.votes)
    voter, slot = np.nonzero(votes.weight > 0)
    voted = votes.model[voter, slot]
    return {
        state.models.ids[k]: np.union1d(c[m == k], voter[voted == k]) for k in np.flatnonzero(is_unsupported).tolist()
    }


def limit_sharing(
    worker: Worker, models: Models, holders: Holders, clients: Ints, tau: int, served: Floats | None
) -> SharingLimits:
    """Find the clients that receive all unsupported models.

    Args:
        worker: The clients.
        models: The shared models that are not idle.
        holders: The unsupported models and the clients that have them.
        clients: The reachable clients with new data.
        tau: The time step.
        served: `SharingLimits.served` of the last time step, without clients that have joined since; None: no client
            was scored yet.
    """
    n_clients = len(worker.known.clients)
    old = np.full((2, n_clients), np.nan)
    if served is not None:
        old[:, : served.shape[1]] = served
    new = _measure_best_errors(worker, models, holders, clients, tau)
    rose = has_risen(*new, *old)
    is_first = np.isnan(old[0]) & ~np.isnan(new[0])
    candidates: Bools = rose | is_first
    for who in holders.values():
        candidates[who] = True
    return SharingLimits(holders, candidates, np.where(rose | np.isnan(new[0]), old, new))


def _measure_best_errors(worker: Worker, models: Models, holders: Holders, clients: Ints, tau: int) -> Floats:
    """Return [2, c], the lowest error of the client's models on its new data, and the number of rows; NaN: no reply."""
    best = np.full((2, len(worker.known.clients)), np.nan)
    open_models = [m for m, i in enumerate(models.ids) if i not in holders]
    groups = [(open_models, clients)] if open_models else []
    groups += [([m], np.intersect1d(holders[i], clients)) for m, i in enumerate(models.ids) if i in holders]
    for positions, group in groups:
        if not len(group):
            continue
        cells = np.stack([np.full_like(group, tau), group], axis=1)
        subset = take(models, positions, [models.ids[m] for m in positions])
        for scored, sums, sizes in worker.score(subset, cells, "error"):
            c = group[scored]
            best[:, c] = np.fmin(best[0, c], (sums / sizes).min(axis=0)), sizes
    return best
