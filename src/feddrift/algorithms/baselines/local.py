"""Methods whose models stay with their clients: what federated learning has to beat.

A private model is trained by its owner alone and never sent: ``Models.owner`` says whose each is.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from feddrift.algorithms.options import option
from feddrift.errors import ConfigError
from feddrift.memory import ALL, Memory
from feddrift.models import join, take
from feddrift.types import Bools, Clusters, Event, Federation, Models, State, Votes


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
        return State(models, w=_own_data(fed.n_clients, ALL, -1), votes=_own_votes(fed.n_clients))

    def step(self, state: State, fed: Federation) -> State:
        models, n = state.models, fed.n_clients
        late = range(len(models), n)  # clients that have joined since
        if late:
            models = join(models, take(self.init(fed).models, late, late, owner=late))
        w = _own_data(n, self.memory, fed.tau)
        born = models.ids if fed.tau == 0 else tuple(late)
        local = None if self.sees_inputs else replace(fed.local, balance=False)  # frequencies are all it can learn
        return State(fed.train(models, w, local=local), w, _own_votes(n), events=_births(models, born))


@dataclass(frozen=True, repr=False)
class TunedState(State):
    """Also, whose copy has learned from the client's own data."""

    learned: Bools = field(kw_only=True, metadata={"newcomer": False})  # [c]


@dataclass(frozen=True)
class FineTuned:
    """One model for everybody, as Oblivious has it; at each client a copy of it then learns from its own data alone.

    The copies are made anew at every time step. A client out of reach, or with nothing to learn from, keeps its copy.
    """

    memory: Memory = ALL  # of the copies
    own_rounds: int = option(2, "local rounds of a client's copy, of K steps each")

    def __post_init__(self) -> None:
        if self.own_rounds < 1:
            raise ConfigError(f"own_rounds must be at least 1, got {self.own_rounds}")

    def init(self, fed: Federation) -> State:
        n = fed.n_clients
        models = take(fed.fresh(), [0] * (n + 1), range(n + 1), owner=[-1, *range(n)])
        w = _own_data(n, ALL, -1, shared=1)
        return TunedState(models, w, _own_votes(n, shared=1), learned=np.zeros(n, dtype=bool))

    def step(self, state: State, fed: Federation) -> State:
        n, old = fed.n_clients, state.models
        shared = fed.train(take(old, [0], [0]), np.ones((fed.tau + 1, n, 1)))
        private = take(old, range(1, len(old)), old.ids[1:])
        learns: Bools = fed.reachable & ((self.memory(fed.tau)[:, None] * fed.counts).sum(axis=0) > 0)
        assert isinstance(state, TunedState)
        kept: Bools = state.learned & ~learns  # who has not learned yet follows the shared model
        copies = take(
            join(shared, private), np.where(kept, 1 + np.arange(n), 0), range(1, n + 1), range(1, n + 1), range(n)
        )
        tuned = fed.train(copies, _own_data(n, self.memory, fed.tau), self.own_rounds)
        born = tuned.ids if fed.tau == 0 else tuned.ids[len(private) :]
        w = _own_data(n, ALL, fed.tau, shared=1)
        votes = _own_votes(n, shared=1)
        return TunedState(join(shared, tuned), w, votes, events=_births(tuned, born), learned=state.learned | learns)


def _own_data(n_clients: int, memory: Memory, tau: int, shared: int = 0) -> Clusters:
    """w of private models, in the order of their clients behind so many shared ones: each has its owner's data."""
    model = np.tile(shared + np.arange(n_clients), (tau + 1, 1))
    return Clusters(model, shared + n_clients, memory(tau) if tau >= 0 else np.ones(0))


def _own_votes(n_clients: int, shared: int = 0) -> Votes:
    """Each client votes with its private model alone; these follow so many shared models."""
    return Votes.for_one_model(shared + np.arange(n_clients), shared + n_clients)


def _births(models: Models, ids: tuple[int, ...]) -> tuple[Event, ...]:
    owner = dict(zip(models.ids, models.owner, strict=True))
    return tuple(Event("created", i, {"reason": "a private model of the client", "clients": [owner[i]]}) for i in ids)
