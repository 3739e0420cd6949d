"""Methods with private models, which federated learning must beat.

A private model is trained only by its owner (``Models.owner``) and never sent.
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
    """Local: every client trains a private model on its own data, and nothing is sent."""

    memory: Memory = ALL
    sees_inputs: bool = True  # False: Majority, whose models can learn only how frequent each class is

    def init(self, fed: Federation) -> State:
        start = fed.fresh()
        if not self.sees_inputs:
            start = replace(start, mask=np.zeros((1, *fed.features)))
        models = take(start, [0] * fed.n_clients, range(fed.n_clients), owner=range(fed.n_clients))
        return State(models, w=_assign_own_data(fed.n_clients, ALL, -1), votes=_vote_for_own_model(fed.n_clients))

    def step(self, state: State, fed: Federation) -> State:
        models = state.models
        n = fed.n_clients
        newcomers = range(len(models), n)
        if newcomers:
            models = join(models, take(self.init(fed).models, newcomers, newcomers, owner=newcomers))
        w = _assign_own_data(n, self.memory, fed.tau)
        new_ids = models.ids if fed.tau == 0 else tuple(newcomers)
        local = None if self.sees_inputs else replace(fed.local, balance=False)  # Majority learns the frequencies
        trained = fed.train(models, w, local=local)
        return State(trained, w, _vote_for_own_model(n), events=_create_events(models, new_ids))


@dataclass(frozen=True, repr=False)
class TunedState(State):
    """State of FineTuned after a time step."""

    learned: Bools = field(kw_only=True, metadata={"newcomer": False})  # [c], whether the client has trained its copy


@dataclass(frozen=True)
class FineTuned:
    """FineTuned: the model of Oblivious, and for each client a copy of it that is trained on its own data alone.

    The copies are created again at every time step. A client that is unreachable or has no data to train on keeps its
    copy.
    """

    memory: Memory = ALL  # of the copies
    own_rounds: int = option(2, "rounds of training of a client's copy, of K local steps each")

    def __post_init__(self) -> None:
        if self.own_rounds < 1:
            raise ConfigError(f"own_rounds must be at least 1, got {self.own_rounds}")

    def init(self, fed: Federation) -> State:
        n = fed.n_clients
        models = take(fed.fresh(), [0] * (n + 1), range(n + 1), owner=[-1, *range(n)])
        w = _assign_own_data(n, ALL, -1, n_shared=1)
        return TunedState(models, w, _vote_for_own_model(n, n_shared=1), learned=np.zeros(n, dtype=bool))

    def step(self, state: State, fed: Federation) -> State:
        assert isinstance(state, TunedState)
        n = fed.n_clients
        old = state.models
        shared = fed.train(take(old, [0], [0]), np.ones((fed.tau + 1, n, 1)))
        private = take(old, range(1, len(old)), old.ids[1:])
        trains: Bools = fed.reachable & ((self.memory(fed.tau)[:, None] * fed.counts).sum(axis=0) > 0)
        kept: Bools = state.learned & ~trains  # other copies start from the shared model
        positions = np.where(kept, 1 + np.arange(n), 0)
        ids = range(1, n + 1)
        copies = take(join(shared, private), positions, ids, family=ids, owner=range(n))
        tuned = fed.train(copies, _assign_own_data(n, self.memory, fed.tau), self.own_rounds)
        new_ids = tuned.ids if fed.tau == 0 else tuned.ids[len(private) :]
        w = _assign_own_data(n, ALL, fed.tau, n_shared=1)
        votes = _vote_for_own_model(n, n_shared=1)
        return TunedState(
            join(shared, tuned), w, votes, events=_create_events(tuned, new_ids), learned=state.learned | trains
        )


def _assign_own_data(n_clients: int, memory: Memory, tau: int, n_shared: int = 0) -> Clusters:
    """Let the data of each client train its private model; these follow the shared models, in the clients' order."""
    model = np.tile(n_shared + np.arange(n_clients), (tau + 1, 1))
    return Clusters(model, n_shared + n_clients, memory(tau) if tau >= 0 else np.ones(0))


def _vote_for_own_model(n_clients: int, n_shared: int = 0) -> Votes:
    """Let each client vote with its private model; these follow the shared models, in the clients' order."""
    return Votes.for_one_model(n_shared + np.arange(n_clients), n_shared + n_clients)


def _create_events(models: Models, ids: tuple[int, ...]) -> tuple[Event, ...]:
    owner = dict(zip(models.ids, models.owner, strict=True))
    return tuple(Event("created", i, {"reason": "a private model of the client", "clients": [owner[i]]}) for i in ids)
