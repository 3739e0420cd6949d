"""IFCA, the iterative federated clustering algorithm of Ghosh, Chung, Yin and Ramchandran, NeurIPS 2020, over time.

A given number of models with distinct initialisations; in every round each client joins the one with the lowest error
on its newest data (Algorithm 1 there). IFCA(T) chooses once per time step: Algorithm 2 of the FedDrift paper. At the
first time step all clients start on one model, as the FedDrift paper has it for the synthetic streams.
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
    """Clients choose the best of a number of models that has to be known beforehand."""

    n_models: int = option(2, "the number of concepts, which IFCA takes as given; default: the stream's, where known")
    first: Literal["one", "choose"] = option("one", "at the first time step all clients start on one model, or choose")
    memory: Memory = ALL
    every_round: bool = True  # False: IFCA(T)

    def __post_init__(self) -> None:
        if self.n_models < 1:
            raise ConfigError(f"IFCA.n_models must be at least 1, got {self.n_models}")

    def init(self, fed: Federation) -> State:
        votes = np.zeros((fed.n_clients, self.n_models))
        votes[:, 0] = 1
        return State(fed.fresh(self.n_models, distinct=True), clustering.nobody(*votes.shape), votes)

    def step(self, state: State, fed: Federation) -> State:
        models, home = state.models, state.votes.argmax(axis=1)
        created = () if fed.tau else tuple(Event("created", i, {"reason": "given"}) for i in models.ids[1:])
        if fed.tau or self.first == "choose":
            home = self._choose(models, home, fed)
        w = self._weights(state, home, fed)
        if not self.every_round:
            return replace(state, models=fed.train(models, w), w=w, votes=w[-1], events=created)
        for _ in range(fed.local.rounds):
            models = fed.train(models, w, rounds=1)
            home = self._choose(models, home, fed)
            w = self._weights(state, home, fed)
        return replace(state, models=models, w=w, votes=w[-1], events=created)

    def _choose(self, models: Models, home: Ints, fed: Federation) -> Ints:
        return clustering.best_models(fed.evaluate(models), home)[0]

    def _weights(self, state: State, home: Ints, fed: Federation) -> Clusters:
        assert isinstance(state.w, Clusters)
        return clustering.fade(clustering.assign(state.w, home), self.memory(fed.tau))
