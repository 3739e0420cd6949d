"""CFL, clustered federated learning of Sattler, Müller and Samek, IEEE TNNLS 32(8), 2021, over time.

A cluster that has converged while its clients have not,

    || mean over c of Delta_c || < eps_1   and   max over c of || Delta_c || > eps_2,

is bipartitioned by the cosine similarity of its clients' updates Delta_c, and split if sqrt((1 - alpha) / 2) > gamma,
alpha being the highest similarity across the parts. As in the FedDrift authors' code eps_1 is a tenth of the largest
mean update seen so far and eps_2 six times that. Clusters are never united.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from feddrift import clustering
from feddrift.algorithms.options import option
from feddrift.averaging import averaged, moves
from feddrift.errors import ConfigError
from feddrift.memory import ALL, Memory
from feddrift.models import join, put, take
from feddrift.types import Clusters, Event, Federation, Ints, Models, State


@dataclass(frozen=True, repr=False)
class CflState(State):
    """`largest`: the largest mean update of any cluster and round so far."""

    largest: float = 0.0
    born: int = 1


@dataclass(frozen=True)
class CFL:
    """Clusters that split when their clients' updates point apart."""

    gamma: float = option(0.1, "how dissimilar the parts must be for a split; 1: never")
    max_models: int | None = option(None, "at most so many clusters; none: no limit")
    memory: Memory = ALL

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise ConfigError(f"CFL.gamma must be in [0, 1], got {self.gamma}")
        if self.max_models is not None and self.max_models < 1:
            raise ConfigError(f"CFL.max_models must be at least 1 or none, got {self.max_models}")

    def init(self, fed: Federation) -> CflState:
        votes = np.ones((fed.n_clients, 1))
        return CflState(fed.fresh(), clustering.nobody(fed.n_clients), votes)

    def step(self, state: State, fed: Federation) -> CflState:
        assert isinstance(state, CflState)
        models, largest, born = state.models, state.largest, state.born
        home = state.votes.argmax(axis=1)  # the cluster of each client
        events: list[Event] = []
        for i in range(fed.local.rounds):
            w = self._weights(home, len(models), fed)
            updates = fed.local_updates(models, w)
            splits: list[tuple[int, Ints]] = []
            moved = moves(models, updates)
            for m in range(len(models)):
                lanes = np.flatnonzero(updates.model == m)
                if not len(lanes):
                    continue
                mean = moved.mean_length(m)
                if mean > largest:
                    largest = mean
                elif mean < largest / 10 and moved.lengths(m).max() > 6 * largest / 10 and len(lanes) > 1:
                    part = clustering.bipartition(moved.cosines(m), self.gamma)
                    if part is not None and not self._full(len(models) + len(splits)):
                        splits.append((m, updates.client[lanes[part]]))
            if not splits:
                models = averaged(models, updates, fed.local.average)
                continue
            for m, leavers in splits:  # both halves start over; no cluster is averaged in such a round
                cause = {"from": models.ids[m], "clients": leavers.tolist(), "round": i}
                events.append(Event("created", born, cause))
                home[leavers] = len(models)
                models = _restart(models, m, born, fed)
                born += 1
        w = self._weights(home, len(models), fed)
        return CflState(models, w, votes=w[-1], events=tuple(events), largest=largest, born=born)

    def _weights(self, home: Ints, n_models: int, fed: Federation) -> Clusters:
        """A client's whole remembered history belongs to the cluster it is in now."""
        return Clusters(np.tile(home, (fed.tau + 1, 1)), n_models, self.memory(fed.tau))

    def _full(self, n: int) -> bool:
        return self.max_models is not None and n >= self.max_models


def _restart(models: Models, m: int, new_id: int, fed: Federation) -> Models:
    """Model m at the common start again, and one more there."""
    return join(put(models, m, fed.fresh()), take(fed.fresh(), [0], [new_id]))
