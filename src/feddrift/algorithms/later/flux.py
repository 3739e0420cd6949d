"""FLUX of Fenoglio et al., NeurIPS 2025: clients are clustered by moments of their data, which needs no loss.

One model is trained for all until its accuracy on held-out rows rises slowly; call it G, which is kept. Each client
describes its data under G (`profiles`), each block of numbers scaled to [0, 1] over the clients. Clients within eps of
each other, directly or through others, are one cluster (DBSCAN with at least two points), and one that has no
neighbour is a cluster of its own; eps is the knee of the sorted distances to the nearest neighbour. A cluster's model
starts as a copy of G and is trained by its members.

At a test each client's inputs, without labels, choose: the model of the cluster whose centre their means and deviations
under G are nearest to. Over time, which the publication leaves to a configured round, clients are described and
clustered anew at every time step. A new cluster goes on with the model of the nearest earlier one within eps, or else
with a copy of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from feddrift import clustering
from feddrift.algorithms.later.data_profiles import Scale, components, describe, describer, distances, knee, router
from feddrift.algorithms.options import option
from feddrift.errors import ConfigError
from feddrift.models import join, take
from feddrift.types import Clusters, Event, Federation, Floats, Ints, Layer, Models, Projection, State

FIRST_ROUND = 3  # after which the first model may be good enough
LATEST = 0.8  # of the rounds, when it is
HELD_OUT = 0.2


@dataclass(frozen=True, repr=False)
class FluxState(State):
    """`describer` is G, `centre` where each model's clients were when it last had any."""

    describer: Models | None = None
    key: tuple[int, int] = (0, 0)  # of the projection
    centre: Floats = field(default_factory=lambda: np.zeros((0, 0, 0)))  # [m, block, d], not scaled


@dataclass(frozen=True)
class FLUX:
    """Clusters of clients whose data look alike under one model."""

    rise: float = option(0.06, "clients are described once the first model's accuracy rises by less than this a round")
    linkage: Literal["single", "complete"] = option(
        "single", "clients of a cluster are near through others (single, as published), or each to each (complete)"
    )
    layer: Layer = option("trunk", "what is described: what the net's head sees (trunk), input or logits")
    router: bool = option(True, "at a test a client's inputs choose the cluster; false: it keeps the one it trained")

    def __post_init__(self) -> None:
        if not 0 <= self.rise <= 1:
            raise ConfigError(f"FLUX.rise must be in [0, 1], got {self.rise}")

    def init(self, fed: Federation) -> FluxState:
        a, b = fed.key("projection")
        return FluxState(
            fed.fresh(), clustering.nobody(fed.n_clients), np.ones((fed.n_clients, 1)), key=(int(a), int(b))
        )

    def step(self, state: State, fed: Federation) -> FluxState:
        assert isinstance(state, FluxState)
        models, home, rounds = state.models, state.votes.argmax(axis=1), fed.local.rounds
        if not (fed.reachable & (fed.counts[-1] > 0)).any():  # nobody to describe
            return replace(state, w=newest(home, len(models), fed.tau), events=(), drifted=None)
        model = state.describer
        if model is None:
            models, rounds = self._first(models, fed)
            model = describer(models)
        described, _ = describe(fed, model, self.layer, state.key)  # [c, block, d]
        clients = np.flatnonzero(~np.isnan(described[:, 0, 0]))
        if not len(clients):  # all were lost while they were asked
            w = newest(home, len(models), fed.tau)
            return replace(state, models=models, describer=model, w=w, events=(), drifted=None)
        scale = Scale.of(described)
        groups, eps = self._clusters(scale(described[clients]))
        members = [clients[groups == first] for first in np.unique(groups)]
        centres = np.stack([described[group].mean(axis=0) for group in members])  # [cluster, block, d]
        models, places, events = _matched(models, state.centre, members, centres, scale, eps)
        centre = np.zeros((len(models), *centres.shape[1:]))
        if len(state.centre):
            centre[: len(state.centre)] = state.centre
        for group, m, at in zip(members, places, centres, strict=True):
            home[group], centre[m] = m, at
        drifted = np.isin(home, [models.ids.index(e.model) for e in events]) & np.isin(np.arange(len(home)), clients)
        w = newest(home, len(models), fed.tau)
        models = fed.train(models, w, rounds=rounds)
        drifted = drifted if fed.tau else np.zeros_like(drifted)
        way = None
        if self.router:
            project = Projection(state.key, fed.n_classes)
            way = router(scale(centre), np.eye(len(models)), scale, model, self.layer, project)
        return FluxState(models, w, w[-1], "hard", events, drifted, model, state.key, centre, router=way)

    def _first(self, models: Models, fed: Federation) -> tuple[Models, int]:
        """The model under which clients are described, and how many rounds are left."""
        total = fed.local.rounds
        local, w = replace(fed.local, hold_out=HELD_OUT, bags=False), np.zeros((fed.tau + 1, fed.n_clients, 1))
        w[-1], accuracy = 1, list[float]()
        for done in range(1, max(1, int(LATEST * total)) + 1):
            models = fed.train(models, w, rounds=1, local=local)
            judged = fed.contest(models, np.zeros((1, fed.n_clients, 1), dtype=np.int64), local)
            there = judged.rows > 0
            accuracy.append(float(np.mean(1 - judged.wrong[there, 0, 0] / judged.rows[there])) if there.any() else 0.0)
            if done >= FIRST_ROUND and accuracy[-1] - accuracy[-2] < self.rise:
                break
        return models, total - done

    def _clusters(self, described: Floats) -> tuple[Ints, float]:
        """[client], the first of each one's cluster; and eps, infinite for a client that is alone."""
        if len(described) < 2:
            return np.zeros(len(described), dtype=np.int64), np.inf
        D = distances(described, described)
        np.fill_diagonal(D, np.inf)
        if self.linkage == "complete":
            united = clustering.linked(D, float(np.finfo(np.float64).max))[1]
            eps = knee(np.array([apart for _, _, apart in united]))
            return clustering.linked(D, eps)[0], eps
        eps = knee(D.min(axis=1))
        return components(D - eps <= clustering.TOLERANCE), eps


def newest(home: Ints, n_models: int, tau: int) -> Clusters:
    """w that gives each client's newest data to the model at its place, and forgets all others."""
    model = np.full((tau + 1, len(home)), -1)
    model[-1] = home
    return Clusters(model, n_models)


def _matched(
    models: Models, old: Floats, members: list[Ints], centres: Floats, scale: Scale, eps: float
) -> tuple[Models, Ints, tuple[Event, ...]]:
    """All models, the place of each cluster's among them, and an event for each that is new.

    The nearest clusters choose first, and nobody goes on with a model that another has taken. At first there is one
    model and no earlier cluster: the first cluster goes on with it, the others with copies.
    """
    apart = distances(scale(centres), scale(old)) if len(old) else distances(scale(centres), scale(centres[:1]))
    limit = eps if len(old) else 0.0
    nearest, distance = apart.argmin(axis=1), apart.min(axis=1)
    places, taken, events = nearest.copy(), set[int](), []
    for k in np.argsort(distance, kind="stable").tolist():
        m = int(nearest[k])
        if distance[k] <= limit + clustering.TOLERANCE and m not in taken:
            taken.add(m)
            continue
        new_id, places[k] = max(models.ids) + 1, len(models)
        cause = {"clients": members[k].tolist(), "from": models.ids[m], "distance": float(distance[k])}
        models = join(models, take(models, [m], [new_id]))
        events.append(Event("created", new_id, cause | ({"eps": eps} if len(old) and np.isfinite(eps) else {})))
    return models, places, tuple(events)
