"""Oracle: Algorithm 1 with the true clustering, the ceiling for every clustering algorithm."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from feddrift.clustering import assign, fade, nobody
from feddrift.errors import ConfigError
from feddrift.memory import ALL, Memory
from feddrift.models import graft, join, take
from feddrift.trees import has_trunk
from feddrift.types import Clusters, Event, Federation, State


@dataclass(frozen=True, repr=False)
class OracleState(State):
    """`concept[m]` is what model m stands for."""

    w: Clusters
    concept: tuple[int, ...] = ()


@dataclass(frozen=True)
class Oracle:
    """One model per true concept, made when the concept first appears; knows the concept of the training data."""

    memory: Memory = ALL
    share: bool = False  # Oracle-Trunk: all concepts stand on one trunk
    needs_truth = True

    def init(self, fed: Federation) -> OracleState:
        if fed.concepts is None:
            raise ConfigError("Oracle needs a stream whose true concepts are known, this one has none")
        first, models = int(fed.concepts[0, 0]), fed.fresh()
        if self.share and not has_trunk(models):
            raise ConfigError("Oracle-Trunk needs a net with a trunk and a head, this one names no trunk")
        votes = np.ones((fed.n_clients, 1))
        return OracleState(models, w=nobody(fed.n_clients), votes=votes, concept=(first,))

    def step(self, state: State, fed: Federation) -> OracleState:
        assert isinstance(state, OracleState) and fed.concepts is not None
        now, concepts, models = fed.concepts[-1], list(state.concept), state.models
        active = (fed.counts[-1] > 0) & fed.reachable
        events = []
        for concept in [int(k) for k in np.unique(now[active]) if k not in concepts]:
            fresh = take(fed.fresh(), [0], ids=[len(concepts)])
            models = join(models, graft(fresh, models, models.family[0]) if self.share else fresh)
            events.append(Event("created", len(concepts), {"concept": concept}))
            concepts.append(concept)
        cluster = np.where(active, [concepts.index(k) if k in concepts else 0 for k in now], state.votes.argmax(axis=1))
        w = fade(assign(replace(state.w, n_models=len(concepts)), cluster), self.memory(fed.tau))
        return OracleState(fed.train(models, w), w, votes=w[-1], events=tuple(events), concept=tuple(concepts))
