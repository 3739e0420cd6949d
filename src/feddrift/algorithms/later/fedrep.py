"""FedRep of Collins, Hassani, Mokhtari and Shakkottai, ICML 2021, over time.

All clients share one trunk, and each has its own head. In every round a client trains its head with the trunk fixed,
then the trunk with its head fixed; the server averages trunks. A head is trained by its client alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from feddrift.algorithms.options import option
from feddrift.errors import ConfigError
from feddrift.memory import ALL, Memory
from feddrift.models import graft, join, take
from feddrift.trees import has_trunk
from feddrift.types import Clusters, Event, Federation, Local, Models, State, Votes

TRUNK_FAMILY = 0  # the family of all heads


@dataclass(frozen=True)
class FedRep:
    """FedRep: one trunk that all clients train, and a head for each client."""

    head_share: float = option(0.5, "the share of a round's local steps, the first ones, in which the head is trained")
    memory: Memory = ALL

    def __post_init__(self) -> None:
        if not 0 < self.head_share < 1:
            raise ConfigError(f"FedRep.head_share must be above 0 and below 1, got {self.head_share}")

    def init(self, fed: Federation) -> State:
        return create_heads(fed, "FedRep")

    def step(self, state: State, fed: Federation) -> State:
        state = add_heads_of_newcomers(state, fed)
        w = assign_own_data(fed, self.memory)
        models = state.models
        for _ in range(fed.local.rounds):
            for part in split_local_steps(fed.local, self.head_share):
                models = fed.train(models, w, rounds=1, local=part)
        return replace(state, models=models, w=w)


def create_heads(fed: Federation, name: str) -> State:
    """Return the state before the first time step: equal heads for all clients on one trunk.

    Args:
        fed: The federation.
        name: The name of the algorithm, for the error message.

    Raises:
        ConfigError: The net has no trunk.
    """
    n = fed.n_clients
    start = fed.fresh()
    if not has_trunk(start):
        raise ConfigError(f"{name} needs a net with a trunk and a head, this one names no trunk")
    models = take(start, [0] * n, range(n), [TRUNK_FAMILY] * n)
    return State(models, Clusters(np.zeros((0, n), dtype=np.int64), n), Votes.for_one_model(np.arange(n), n))


def add_heads_of_newcomers(state: State, fed: Federation) -> State:
    """Return the state with a new head for each client that has joined, and with the events of this time step."""
    models = state.models
    n = fed.n_clients
    newcomers = range(len(models), n)
    if newcomers:
        models = join(models, create_fresh_heads(models, newcomers, fed))
    new_ids = models.ids[1:] if fed.tau == 0 else tuple(newcomers)
    events = tuple(Event("created", i, {"reason": "a head of the client", "clients": [i]}) for i in new_ids)
    return replace(state, models=models, votes=Votes.for_one_model(np.arange(n), n), events=events)


def create_fresh_heads(models: Models, ids: range, fed: Federation) -> Models:
    """Return new heads with these ids, all with the common start, on the trunk of these models."""
    return graft(take(fed.fresh(), [0] * len(ids), ids, [TRUNK_FAMILY] * len(ids)), models, TRUNK_FAMILY)


def assign_own_data(fed: Federation, memory: Memory) -> Clusters:
    """Let the data of each client train its head."""
    return Clusters(np.tile(np.arange(fed.n_clients), (fed.tau + 1, 1)), fed.n_clients, memory(fed.tau))


def split_local_steps(local: Local, head_share: float) -> tuple[Local, Local]:
    """Return the settings of the two parts of a round: first the head is trained, then the trunk.

    Args:
        local: The settings of the whole round.
        head_share: The share of local steps in which the head is trained. Each part has at least one step.
    """
    head_steps = min(max(1, round(head_share * local.steps)), max(1, local.steps - 1))
    trunk_steps = max(1, local.steps - head_steps)
    return replace(local, trains="head", steps=head_steps), replace(local, trains="trunk", steps=trunk_steps)
