"""IFCA, the iterative federated clustering algorithm of Ghosh, Chung, Yin and Ramchandran, NeurIPS 2020, over time.

A given number of models have distinct initialisations. In every round each client chooses the one with the lowest error
on its newest data (Algorithm 1 of the publication). IFCA(T) chooses once per time step (Algorithm 2 of the FedDrift
paper). At the first time step all clients start with one model, as in the FedDrift paper for the synthetic streams.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from feddrift import clustering
from feddrift.algorithms.options import option
from feddrift.errors import ConfigError
from feddrift.memory import ALL, Memory
from feddrift.types import Clusters, Event, Federation, Ints, Models, State


@dataclass(frozen=True)
class IFCA:
    """IFCA: clients choose the best of several models, whose number must be known in advance."""

    n_models: int = option(2, "number of models; default: the stream's number of concepts, where known")
    first: Literal["one", "choose"] = option(
        "one", "first time step: all clients use one model, or each chooses its own"
    )
    memory: Memory = ALL
    every_round: bool = True  # False: IFCA(T)

    def __post_init__(self) -> None:
        if self.n_models < 1:
            raise ConfigError(f"IFCA.n_models must be at least 1, got {self.n_models}")

    def init(self, fed: Federation) -> State:
        votes = np.zeros((fed.n_clients, self.n_models))
        votes[:, 0] = 1
        return State(fed.fresh(self.n_models, distinct=True), clustering.create_empty_clusters(*votes.shape), votes)

    def step(self, state: State, fed: Federation) -> State:
        models = state.models
        assigned = state.votes.argmax(axis=1)  # [c], position of the client's model
        created = () if fed.tau else tuple(Event("created", i, {"reason": "an initial model"}) for i in models.ids[1:])
        if fed.tau or self.first == "choose":
            assigned = self._choose_models(models, assigned, fed)
        w = self._assign_newest_data(state, assigned, fed)
        if not self.every_round:
            return replace(state, models=fed.train(models, w), w=w, votes=w[-1], events=created)
        for _ in range(fed.local.rounds):
            models = fed.train(models, w, rounds=1)
            assigned = self._choose_models(models, assigned, fed)
            w = self._assign_newest_data(state, assigned, fed)
        return replace(state, models=models, w=w, votes=w[-1], events=created)

    def _choose_models(self, models: Models, assigned: Ints, fed: Federation) -> Ints:
        """Return [c], the position of each client's best model; without new data, that of its present one."""
        return clustering.find_best_models(fed.evaluate(models), assigned)[0]

    def _assign_newest_data(self, state: State, assigned: Ints, fed: Federation) -> Clusters:
        """Let the newest data of each client train its model, and apply the memory to older data."""
        assert isinstance(state.w, Clusters)
        return clustering.apply_memory(clustering.append_assignment(state.w, assigned), self.memory(fed.tau))
