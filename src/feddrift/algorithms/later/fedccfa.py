"""FedCCFA-Heads: what FedCCFA of Chen, Xu, Hou, Wang and Wang, NeurIPS 2024, does with heads, without feature anchors.

One trunk for all clients, at each a head phi_c of its own. In every round

1. each client trains a head from the common start, on as many rows of each class: beta_c. Since all start alike, the
   rows of their classes can be compared;
2. it trains its own head (at first a copy of beta_c), then the trunk; the server averages trunks;
3. for each class k the server compares the rows v_c of class k (weights and bias) in beta_c,

       D(i, j) = mean over z other than i, j of |cos(v_i, v_z) - cos(v_j, v_z)|,

   and in every group of clients that are linked by distances of at most eps, row k of phi_c becomes the group's mean.

So clients share a class where they agree on it, whatever they think of the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from feddrift import numerics
from feddrift.algorithms.later.data_profiles import components
from feddrift.algorithms.later.fedrep import fresh_heads, halves, heads_on_one_trunk, own_data, with_late_heads
from feddrift.algorithms.options import option
from feddrift.averaging import averaged
from feddrift.errors import ConfigError
from feddrift.memory import window
from feddrift.models import class_rows, graft, join, mix_rows, take
from feddrift.types import Bools, Federation, Floats, Ints, Models, State

LEAST = 3  # clients: with fewer there is nobody to compare two with
HEAD_SHARE = 1 / 6  # of a round's local steps: one epoch for the head, five for the trunk
HEAD_LR = 0.1  # of the heads that are compared


@dataclass(frozen=True, repr=False)
class CcfaState(State):
    """Also, whose head has begun to learn."""

    begun: Bools = field(kw_only=True, metadata={"newcomer": False})  # [c]


@dataclass(frozen=True)
class FedCCFAHeads:
    """A head of its own for each client on one trunk; clients that agree on a class share its row of the head."""

    eps: float = option(0.1, "rows of a class no further apart than this are of one group")
    even: int = option(5, "rows of each class on which the heads that are compared are trained")
    head_steps: int = option(5, "local steps in which they are")

    def __post_init__(self) -> None:
        if not 0 <= self.eps <= 2:
            raise ConfigError(f"FedCCFA-Heads.eps must be in [0, 2], got {self.eps}")
        for name in ("even", "head_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"FedCCFA-Heads.{name} must be at least 1, got {getattr(self, name)}")

    def init(self, fed: Federation) -> CcfaState:
        state = heads_on_one_trunk(fed, "FedCCFA-Heads")
        return CcfaState(state.models, state.w, state.votes, begun=np.zeros(fed.n_clients, dtype=bool))

    def step(self, state: State, fed: Federation) -> CcfaState:
        state = with_late_heads(state, fed)
        assert isinstance(state, CcfaState)
        w, models, begun = own_data(fed, window(1)), state.models, state.begun
        n, parts = len(models), halves(fed.local, HEAD_SHARE)
        alike = replace(
            fed.local, optimizer="sgd", momentum=0.0, lr=HEAD_LR, trains="head", even=self.even, steps=self.head_steps
        )
        for _ in range(fed.local.rounds):
            start = fresh_heads(models, range(n, 2 * n), fed)  # under ids of their own: they remember nothing
            updates = fed.local_updates(start, w, alike)
            compared, clients = averaged(start, updates), np.unique(updates.client)
            models = _with_heads_of(models, compared, np.setdiff1d(clients, np.flatnonzero(begun)))
            begun = begun | np.isin(np.arange(n), clients)
            for part in parts:
                models = fed.train(models, w, rounds=1, local=part)
            if len(clients) >= LEAST:
                models = mix_rows(models, shared_rows(class_rows(compared), clients, self.eps))
        return replace(state, models=models, w=w, begun=begun)


def shared_rows(rows: Floats, clients: Ints, eps: float) -> Floats:
    """A[k, new, old] of `mix_rows`: the means over the groups of these clients, by their heads' rows [c, k, number].

    >>> apart = np.array([[[1.0, 0.0]], [[1.0, 0.1]], [[0.0, 1.0]], [[0.1, 1.0]]])  # one class, two opinions
    >>> shared_rows(apart, np.arange(4), 0.1)[0].tolist()
    [[0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5], [0.0, 0.0, 0.5, 0.5]]
    """
    A = np.tile(np.eye(len(rows)), (rows.shape[1], 1, 1))
    for k in range(rows.shape[1]):
        group = components(row_distances(rows[clients, k]) <= eps)
        together = group[:, None] == group
        A[k][np.ix_(clients, clients)] = together / together.sum(axis=1, keepdims=True)
    return A


def row_distances(v: Floats) -> Floats:
    """D(i, j): by how much the cosines of i and j to all others differ, on average."""
    n, unit = len(v), v / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-30)
    cos = numerics.inner_products(unit)
    total = np.empty((n, n))
    for i in range(n):  # one at a time: all at once need n^3 numbers
        apart = np.abs(cos[i] - cos)  # [j, z]
        apart[:, i] = 0
        np.fill_diagonal(apart, 0)
        total[i] = apart.sum(axis=1)
    return total / (n - 2)


def _with_heads_of(models: Models, others: Models, clients: Ints) -> Models:
    """The models, of which those of these clients have the heads of others, which stand in the same order."""
    if not len(clients):
        return models
    n = len(models)
    both = join(models, graft(others, models, models.families[0]))
    at = np.where(np.isin(np.arange(n), clients), n + np.arange(n), np.arange(n))
    return take(both, at, models.ids, models.family)
