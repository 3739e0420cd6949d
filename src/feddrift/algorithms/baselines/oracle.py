"""Oracle: Algorithm 1 with the true clustering, the upper bound for every clustering algorithm."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from feddrift.clustering import append_assignment, apply_memory, create_empty_clusters
from feddrift.errors import ConfigError
from feddrift.memory import ALL, Memory
from feddrift.models import graft, join, take
from feddrift.trees import has_trunk
from feddrift.types import Clusters, Event, Federation, State


@dataclass(frozen=True, repr=False)
class OracleState(State):
    """State of Oracle after a time step."""

    w: Clusters
    concept: tuple[int, ...] = ()  # [m], the concept of each model


@dataclass(frozen=True)
class Oracle:
    """Oracle: one model per true concept, created when the concept first appears in the training data."""

    memory: Memory = ALL
    share: bool = False  # True: Oracle-Trunk, whose models share one trunk
    needs_truth = True

    def init(self, fed: Federation) -> OracleState:
        if fed.concepts is None:
            raise ConfigError("Oracle needs a stream whose true concepts are known, this one has none")
        first = int(fed.concepts[0, 0])
        models = fed.fresh()
        if self.share and not has_trunk(models):
            raise ConfigError("Oracle-Trunk needs a net with a trunk and a head, this one names no trunk")
        votes = np.ones((fed.n_clients, 1))
        return OracleState(models, w=create_empty_clusters(fed.n_clients), votes=votes, concept=(first,))

    def step(self, state: State, fed: Federation) -> OracleState:
        assert isinstance(state, OracleState) and fed.concepts is not None
        newest = fed.concepts[-1]
        concepts = list(state.concept)
        models = state.models
        active = (fed.counts[-1] > 0) & fed.reachable
        events = []
        for concept in [int(k) for k in np.unique(newest[active]) if k not in concepts]:
            fresh = take(fed.fresh(), [0], ids=[len(concepts)])
            models = join(models, graft(fresh, models, models.family[0]) if self.share else fresh)
            events.append(Event("created", len(concepts), {"concept": concept}))
            concepts.append(concept)
        position = [concepts.index(k) if k in concepts else 0 for k in newest]
        assigned = np.where(active, position, state.votes.argmax(axis=1))
        w = append_assignment(replace(state.w, n_models=len(concepts)), assigned)
        w = apply_memory(w, self.memory(fed.tau))
        return OracleState(fed.train(models, w), w, votes=w[-1], events=tuple(events), concept=tuple(concepts))
