"""Unsupported models, the condition `share_from`: models that fewer clients than this have trained.

The loss of such a model on a row shows whether the row was in its training data. Therefore it is not sent to all
clients, but only to its *receivers*:

- the clients that trained it, and those that already predict with it;
- the clients that trained another unsupported model, because two such models merge only if each was scored on the data
  of the other;
- the badly served clients, whose new data none of the models that they have fits (see `idle_models`).

It is sent to all clients as soon as enough clients have trained it. An untrained model is not limited.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from feddrift.models import take
from feddrift.types import Clusters, Ints, Models, State, Votes


@dataclass(frozen=True)
class UnsupportedModels:
    """Unsupported models at the beginning of a time step, and all shared models, which tell who is badly served."""

    shared: Models
    holders: Mapping[int, Ints]  # by the id of an unsupported model, the clients that trained it or predict with it


def find_unsupported_models(state: State, counts: Ints, share_from: int) -> UnsupportedModels:
    """Find the shared models that at least one but fewer than `share_from` clients have trained.

    A client has trained a model if w gives its rows to the model, also at an earlier time step.

    Args:
        state: The state before the time step.
        counts: [t, c], the number of rows that each client received.
        share_from: The number of clients that a model needs.

    >>> w = Clusters(np.array([[0, 0, 0], [0, 0, 1]]), n_models=2)
    >>> votes = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> state = State(Models(params=(np.zeros((2, 1)),), ids=(0, 7)), w, votes)
    >>> find_unsupported_models(state, np.full((2, 3), 50), 2).holders
    {7: array([2])}
    """
    n_models = len(state.models)
    if isinstance(state.w, Clusters):
        t, c = np.nonzero((state.w.model >= 0) & (state.w.weight[:, None] > 0) & (counts[: len(state.w)] > 0))
        pairs = np.unique(state.w.model[t, c] * counts.shape[1] + c)
        m, c = np.divmod(pairs, counts.shape[1])
    else:
        trained = ((state.w > 0) & (counts[: len(state.w), :, None] > 0)).any(axis=0)
        m, c = np.nonzero(trained.T)
    n_trainers = np.bincount(m, minlength=n_models)
    is_unsupported = (n_trainers > 0) & (n_trainers < share_from) & ~state.models.private
    votes = Votes.of(state.votes)
    voter, slot = np.nonzero(votes.weight > 0)
    voted = votes.model[voter, slot]
    holders = {
        state.models.ids[k]: np.union1d(c[m == k], voter[voted == k]) for k in np.flatnonzero(is_unsupported).tolist()
    }
    shared = np.flatnonzero(~state.models.private)
    return UnsupportedModels(take(state.models, shared, [state.models.ids[k] for k in shared]), holders)
