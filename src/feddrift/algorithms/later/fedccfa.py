"""FedCCFA-Heads: FedCCFA of Chen, Xu, Hou, Wang and Wang, NeurIPS 2024, without its feature anchors.

All clients share one trunk, and each client c has a head phi_c. In every round

1. each client trains a balanced head beta_c from the common start, on the same number of rows of each class. Since all
   balanced heads have the same start, their rows of a class can be compared;
2. each client trains its own head (at first a copy of beta_c), then the trunk; the server averages trunks;
3. for each class k the server compares the rows v_c of class k (weights and bias) in beta_c,

       D(i, j) = mean over z other than i, j of |cos(v_i, v_z) - cos(v_j, v_z)|,

   and in every group of clients that are linked by distances of at most eps, row k of phi_c becomes the group's mean.

So clients share a class if they agree on it, even if they differ in other classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from feddrift import numerics
from feddrift.algorithms.later.data_profiles import find_components
from feddrift.algorithms.later.fedrep import (
    add_heads_of_newcomers,
    assign_own_data,
    create_fresh_heads,
    create_heads,
    split_local_steps,
)
from feddrift.algorithms.options import option
from feddrift.averaging import average_updates
from feddrift.errors import ConfigError
from feddrift.memory import window
from feddrift.models import class_rows, graft, join, mix_rows, take
from feddrift.types import Bools, Federation, Floats, Ints, Models, State

MIN_COMPARED_CLIENTS = 3  # two clients are compared by their cosines to others
HEAD_SHARE = 1 / 6  # of a round's local steps: one epoch for the head, five for the trunk
BALANCED_HEAD_LR = 0.1  # learning rate of balanced heads


@dataclass(frozen=True, repr=False)
class CcfaState(State):
    """State of FedCCFA-Heads after a time step."""

    begun: Bools = field(kw_only=True, metadata={"newcomer": False})  # [c], whether the client's head was ever trained


@dataclass(frozen=True)
class FedCCFAHeads:
    """FedCCFA-Heads: a head for each client on one trunk; clients that agree on a class share its row of the head."""

    eps: float = option(0.1, "clients are linked for a class if the distance of their rows of the head is at most this")
    even: int = option(5, "rows of each class that balanced heads are trained on")
    head_steps: int = option(5, "local steps of training of balanced heads")
    needs_consent = ("sgd",)

    def __post_init__(self) -> None:
        if not 0 <= self.eps <= 2:
            raise ConfigError(f"FedCCFA-Heads.eps must be in [0, 2], got {self.eps}")
        for name in ("even", "head_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"FedCCFA-Heads.{name} must be at least 1, got {getattr(self, name)}")

    def init(self, fed: Federation) -> CcfaState:
        state = create_heads(fed, "FedCCFA-Heads")
        return CcfaState(state.models, state.w, state.votes, begun=np.zeros(fed.n_clients, dtype=bool))

    def step(self, state: State, fed: Federation) -> CcfaState:
        state = add_heads_of_newcomers(state, fed)
        assert isinstance(state, CcfaState)
        models = state.models
        begun = state.begun
        n = len(models)
        w = assign_own_data(fed, window(1))
        balanced = replace(
            fed.local, optimizer="sgd", momentum=0.0, lr=BALANCED_HEAD_LR, trains="head", even=self.even,
            steps=self.head_steps,
        )  # fmt: skip
        for _ in range(fed.local.rounds):
            start = create_fresh_heads(models, range(n, 2 * n), fed)  # new ids, so that no optimiser state is reused
            updates = fed.local_updates(start, w, balanced)
            balanced_heads = average_updates(start, updates)
            clients = np.unique(updates.client)
            models = _replace_heads(models, balanced_heads, np.setdiff1d(clients, np.flatnonzero(begun)))
            begun = begun | np.isin(np.arange(n), clients)
            for part in split_local_steps(fed.local, HEAD_SHARE):
                models = fed.train(models, w, rounds=1, local=part)
            if len(clients) >= MIN_COMPARED_CLIENTS:
                models = mix_rows(models, average_shared_rows(class_rows(balanced_heads), clients, self.eps))
        return replace(state, models=models, w=w, begun=begun)


def average_shared_rows(rows: Floats, clients: Ints, eps: float) -> Floats:
    """Return A[k, i, j] for `mix_rows`, with which row k of each client becomes the mean over its group for class k.

    Args:
        rows: [c, k, number], the rows of all balanced heads.
        clients: The clients that are compared; others keep their rows.
        eps: The largest distance of linked clients.

    >>> rows = np.array([[[1.0, 0.0]], [[1.0, 0.1]], [[0.0, 1.0]], [[0.1, 1.0]]])  # one class, two pairs
    >>> average_shared_rows(rows, np.arange(4), 0.1)[0].tolist()
    [[0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5], [0.0, 0.0, 0.5, 0.5]]
    """
    A = np.tile(np.eye(len(rows)), (rows.shape[1], 1, 1))
    for k in range(rows.shape[1]):
        group = find_components(compute_row_distances(rows[clients, k]) <= eps)
        same_group = group[:, None] == group
        A[k][np.ix_(clients, clients)] = same_group / same_group.sum(axis=1, keepdims=True)
    return A


def compute_row_distances(v: Floats) -> Floats:
    """Return D(i, j), the mean difference of the cosines of v_i and v_j to all other vectors.

    Args:
        v: [i, number], the vectors.
    """
    n = len(v)
    cos = numerics.inner_products(v / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-30))
    total = np.empty((n, n))
    for i in range(n):  # all i at once would need n^3 numbers
        difference = np.abs(cos[i] - cos)  # [j, z]
        difference[:, i] = 0
        np.fill_diagonal(difference, 0)
        total[i] = difference.sum(axis=1)
    return total / (n - 2)


def _replace_heads(models: Models, others: Models, clients: Ints) -> Models:
    """Replace the heads of these clients by those at the same positions of `others`."""
    if not len(clients):
        return models
    n = len(models)
    both = join(models, graft(others, models, models.families[0]))
    positions = np.where(np.isin(np.arange(n), clients), n + np.arange(n), np.arange(n))
    return take(both, positions, models.ids, models.family)
