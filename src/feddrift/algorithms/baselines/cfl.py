"""CFL, clustered federated learning of Sattler, Müller and Samek, IEEE TNNLS 32(8), 2021, over time.

A cluster that has converged while its clients have not,

    || mean over c of Delta_c || < eps_1   and   max over c of || Delta_c || > eps_2,

is bipartitioned by the cosine similarity of its clients' updates Delta_c, and split if sqrt((1 - alpha) / 2) > gamma,
where alpha is the highest similarity across the parts. As in the FedDrift authors' code eps_1 is a tenth of the largest
mean update so far, and eps_2 is six times eps_1. Clusters are never united.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from feddrift import clustering
from feddrift.algorithms.options import option
from feddrift.averaging import average_updates, measure_updates
from feddrift.errors import ConfigError
from feddrift.memory import ALL, Memory
from feddrift.models import join, replace_model, take
from feddrift.types import Clusters, Event, Federation, Ints, Models, State


@dataclass(frozen=True, repr=False)
class CflState(State):
    """State of CFL after a time step."""

    largest: float = 0.0  # length of the largest mean update of any cluster and round so far
    next_id: int = field(default=1, metadata={"former_name": "born"})


@dataclass(frozen=True)
class CFL:
    """CFL: clusters that split if the updates of their clients point in different directions."""

    gamma: float = option(0.1, "how far the updates of two parts must differ in direction for a split; 1: never split")
    max_models: int | None = option(None, "maximum number of clusters; none: no limit")
    memory: Memory = ALL

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise ConfigError(f"CFL.gamma must be in [0, 1], got {self.gamma}")
        if self.max_models is not None and self.max_models < 1:
            raise ConfigError(f"CFL.max_models must be at least 1 or none, got {self.max_models}")

    def init(self, fed: Federation) -> CflState:
        votes = np.ones((fed.n_clients, 1))
        return CflState(fed.fresh(), clustering.create_empty_clusters(fed.n_clients), votes)

    def step(self, state: State, fed: Federation) -> CflState:
        assert isinstance(state, CflState)
        models = state.models
        largest = state.largest
        next_id = state.next_id
        assigned = state.votes.argmax(axis=1)  # [c], position of the client's cluster
        events: list[Event] = []
        for round_number in range(fed.local.rounds):
            w = self._assign_history(assigned, len(models), fed)
            updates = fed.local_updates(models, w)
            splits: list[tuple[int, Ints]] = []  # clusters, and the clients that leave them
            geometry = measure_updates(models, updates)
            for m in range(len(models)):
                lanes = np.flatnonzero(updates.model == m)  # positions of the cluster's updates
                if not len(lanes):
                    continue
                mean = geometry.measure_mean(m)
                if mean > largest:
                    largest = mean
                elif mean < largest / 10 and geometry.measure_lengths(m).max() > 6 * largest / 10 and len(lanes) > 1:
                    part = clustering.split_cluster(geometry.measure_cosines(m), self.gamma)
                    if part is not None and not self._is_full(len(models) + len(splits)):
                        splits.append((m, updates.client[lanes[part]]))
            if not splits:
                models = average_updates(models, updates, fed.local.average)
                continue
            for m, leavers in splits:  # both parts start again; no cluster is averaged in this round
                cause = {"from": models.ids[m], "clients": leavers.tolist(), "round": round_number}
                events.append(Event("created", next_id, cause))
                assigned[leavers] = len(models)
                models = _restart_models(models, m, next_id, fed)
                next_id += 1
        w = self._assign_history(assigned, len(models), fed)
        return CflState(models, w, votes=w[-1], events=tuple(events), largest=largest, next_id=next_id)

    def _assign_history(self, assigned: Ints, n_models: int, fed: Federation) -> Clusters:
        """Let all remembered data of a client train the cluster that it is assigned to now."""
        return Clusters(np.tile(assigned, (fed.tau + 1, 1)), n_models, self.memory(fed.tau))

    def _is_full(self, n: int) -> bool:
        return self.max_models is not None and n >= self.max_models


def _restart_models(models: Models, m: int, new_id: int, fed: Federation) -> Models:
    """Replace model m by the initial model, and append another copy of that."""
    return join(replace_model(models, m, fed.fresh()), take(fed.fresh(), [0], [new_id]))
