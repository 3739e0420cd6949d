"""Methods whose models stay with their clients: what federated learning has to beat.

A private model is trained by its owner alone and never sent: ``Models.owner`` says whose each is.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from feddrift.algorithms.options import option
from feddrift.memory import ALL, Memory
from feddrift.models import join, take
from feddrift.types import Bools, Clusters, Event, Federation, Models, State


@dataclass(frozen=True)
class LocalOnly:
    """Every client trains a model of its own on its own data; nothing is sent."""

    memory: Memory = ALL
    sees_inputs: bool = True  # else the models learn nothing but how frequent each class is

    def init(self, fed: Federation) -> State:
        start = fed.fresh()
        if not self.sees_inputs:
            start = replace(start, mask=np.zeros((1, *fed.features)))
        models = take(start, [0] * fed.n_clients, range(fed.n_clients), owner=range(fed.n_clients))
        return State(models, w=_own_data(fed.n_clients, ALL, -1), votes=np.eye(fed.n_clients))

    def step(self, state: State, fed: Federation) -> State:
        models, n = state.models, fed.n_clients
        late = range(len(models), n)  # clients that have joined since
        if late:
            models = join(models, take(self.init(fed).models, late, late, owner=late))
        w = _own_data(n, self.memory, fed.tau)
        born = models.ids if fed.tau == 0 else tuple(late)
        return State(fed.train(models, w), w, np.eye(n), events=_births(models, born))


@dataclass(frozen=True)
class TunedState(State):
    """The clients' private models, and the shared one that they come from."""

    shared: Models = field(kw_only=True)


@dataclass(frozen=True)
class FineTuned:
    """One model for everybody, as Oblivious has it; at each client a copy of it then learns from the newest data alone.

    The copies are made anew at every time step. A client without new data, or out of reach, keeps the one it has.
    """

    rounds: int = option(2, "local rounds of a client's copy, of K steps each")

    def init(self, fed: Federation) -> State:
        shared = fed.fresh()
        models = _copies(shared, fed.n_clients)
        return TunedState(models, _own_data(fed.n_clients, ALL, -1), np.eye(fed.n_clients), shared=shared)

    def step(self, state: State, fed: Federation) -> State:
        assert isinstance(state, TunedState)
        n, before = fed.n_clients, state.models
        shared = fed.train(state.shared, np.ones((fed.tau + 1, n, 1)))
        born = before.ids if fed.tau == 0 else tuple(range(len(before) + 1, n + 1))
        kept: Bools = np.arange(n) < len(before)
        kept &= fed.counts[fed.tau] == 0
        origin = np.where(kept, 1 + np.arange(n), 0)
        ids = range(1, n + 1)
        models = take(join(shared, before), origin, ids, family=ids, owner=range(n))
        tuned = fed.train(models, _own_data(n, Memory("window", 1), fed.tau), self.rounds)
        w = _own_data(n, ALL, fed.tau)
        return TunedState(tuned, w, np.eye(n), events=_births(models, born), shared=shared)


def _copies(shared: Models, n: int) -> Models:
    """A private copy for each client; the shared model has the id 0."""
    return take(shared, [0] * n, range(1, n + 1), owner=range(n))


def _own_data(n_clients: int, memory: Memory, tau: int) -> Clusters:
    """w of private models in the order of their clients: each learns from its owner's data."""
    owner = np.tile(np.arange(n_clients), (tau + 1, 1))
    return Clusters(owner, n_clients, memory(tau) if tau >= 0 else np.ones(0))


def _births(models: Models, ids: tuple[int, ...]) -> tuple[Event, ...]:
    owner = dict(zip(models.ids, models.owner, strict=True))
    return tuple(Event("created", i, {"reason": "private", "clients": [owner[i]]}) for i in ids)
