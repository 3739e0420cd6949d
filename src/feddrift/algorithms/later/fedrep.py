"""FedRep of Collins, Hassani, Mokhtari and Shakkottai, ICML 2021, over time.

One trunk for all clients, and at each a head of its own. In every round a client trains its head on the trunk as it is,
then the trunk under its head; the server averages trunks. A head learns from its client alone.
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

TRUNK = 0  # the family of all heads


@dataclass(frozen=True)
class FedRep:
    """One trunk that learns from all, and a head of its own for each client."""

    head_share: float = option(0.5, "the share of a round's local steps in which the head learns, the first ones")
    memory: Memory = ALL

    def __post_init__(self) -> None:
        if not 0 < self.head_share < 1:
            raise ConfigError(f"FedRep.head_share must be above 0 and below 1, got {self.head_share}")

    def init(self, fed: Federation) -> State:
        return heads_on_one_trunk(fed, "FedRep")

    def step(self, state: State, fed: Federation) -> State:
        state = with_late_heads(state, fed)
        w, models = own_data(fed, self.memory), state.models
        for _ in range(fed.local.rounds):
            for part in halves(fed.local, self.head_share):
                models = fed.train(models, w, rounds=1, local=part)
        return replace(state, models=models, w=w)


def heads_on_one_trunk(fed: Federation, name: str) -> State:
    """A head of its own for each client, all alike on one trunk."""
    n, start = fed.n_clients, fed.fresh()
    if not has_trunk(start):
        raise ConfigError(f"{name} needs a net with a trunk and a head, this one names no trunk")
    models = take(start, [0] * n, range(n), [TRUNK] * n)
    return State(models, Clusters(np.zeros((0, n), dtype=np.int64), n), Votes.for_one_model(np.arange(n), n))


def with_late_heads(state: State, fed: Federation) -> State:
    """The state with fresh heads on the trunk for clients that joined since, and the births of this step."""
    models, n = state.models, fed.n_clients
    late = range(len(models), n)
    if late:
        models = join(models, fresh_heads(models, late, fed))
    born = models.ids[1:] if fed.tau == 0 else tuple(late)
    events = tuple(Event("created", i, {"reason": "a head of the client", "clients": [i]}) for i in born)
    return replace(state, models=models, votes=Votes.for_one_model(np.arange(n), n), events=events)


def fresh_heads(models: Models, ids: range, fed: Federation) -> Models:
    """New heads under these ids, all with the common start, on the trunk of these models."""
    return graft(take(fed.fresh(), [0] * len(ids), ids, [TRUNK] * len(ids)), models, TRUNK)


def own_data(fed: Federation, memory: Memory) -> Clusters:
    """w[t, c, c]: each head learns from its client."""
    return Clusters(np.tile(np.arange(fed.n_clients), (fed.tau + 1, 1)), fed.n_clients, memory(fed.tau))


def halves(local: Local, head_share: float) -> tuple[Local, Local]:
    """A round in two: so many of its local steps for the head, the others for the trunk; each has one at least."""
    head = min(max(1, round(head_share * local.steps)), max(1, local.steps - 1))
    trunk = max(1, local.steps - head)
    return replace(local, trains="head", steps=head), replace(local, trains="trunk", steps=trunk)
