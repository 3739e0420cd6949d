"""FLUX of Fenoglio et al., NeurIPS 2025: clients are clustered by moments of their data, which needs no loss.

One model is trained for all clients until its accuracy on held-out rows rises slowly. This model, G, is kept. The
profile of each client is computed under G (`data_profiles`), and each block of numbers is scaled to [0, 1] over all
clients. Clients within eps of each other, directly or through others, are one cluster (DBSCAN with at least two
points). A client without a neighbour is a cluster of its own; eps is the knee of the sorted distances to the nearest
neighbour. The model of a cluster starts as a copy of G and is trained by its members.

At a test the inputs of each client, without labels, determine the model: that of the cluster whose centre is nearest to
their means and deviations under G. Here, profiles and clusters are computed again at every time step; the publication
does this in a configured round. A new cluster continues to train the model of the nearest earlier cluster if that is
within eps, else a copy of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from feddrift import clustering
from feddrift.algorithms.later.data_profiles import (
    BlockScale,
    build_router,
    compute_distances,
    copy_as_describer,
    find_components,
    find_knee,
    profile_clients,
)
from feddrift.algorithms.options import option
from feddrift.errors import ConfigError
from feddrift.models import join, take
from feddrift.types import Clusters, Event, Federation, Floats, Ints, Layer, Models, Projection, State

MIN_COMMON_ROUNDS = 3  # rounds with one model for all, at least
MAX_COMMON_ROUNDS_SHARE = 0.8  # of all rounds of a time step
HOLD_OUT_SHARE = 0.2  # of a client's rows


@dataclass(frozen=True, repr=False)
class FluxState(State):
    """State of FLUX after a time step."""

    describer: Models | None = None  # G
    key: tuple[int, int] = (0, 0)  # of the projection
    # [m, block, d], mean profile of the clients of each model when it last had any; not scaled
    centre: Floats = field(default_factory=lambda: np.zeros((0, 0, 0)))


@dataclass(frozen=True)
class FLUX:
    """FLUX: clusters of clients whose data have similar profiles under one model."""

    rise: float = option(0.06, "clustering begins once the first model's accuracy rises by less than this a round")
    linkage: Literal["single", "complete"] = option(
        "single",
        "clients of a cluster are linked through others (single, as published), or pairwise (complete)",
    )
    layer: Layer = option("trunk", "layer of the profiles: the input of the net's head (trunk), input or logits")
    router: bool = option(True, "at a test a client's inputs determine its cluster; false: its cluster stays")
    needs_consent = ("describe",)

    def __post_init__(self) -> None:
        if not 0 <= self.rise <= 1:
            raise ConfigError(f"FLUX.rise must be in [0, 1], got {self.rise}")

    def init(self, fed: Federation) -> FluxState:
        a, b = fed.key("projection")
        return FluxState(
            fed.fresh(),
            clustering.create_empty_clusters(fed.n_clients),
            np.ones((fed.n_clients, 1)),
            key=(int(a), int(b)),
        )

    def step(self, state: State, fed: Federation) -> FluxState:
        assert isinstance(state, FluxState)
        models = state.models
        describer = state.describer
        assigned = state.votes.argmax(axis=1)  # [c], position of the client's model
        rounds = fed.local.rounds
        if not (fed.reachable & (fed.counts[-1] > 0)).any():  # no client has a profile
            return replace(state, w=assign_newest_data(assigned, len(models), fed.tau), events=(), drifted=None)
        if describer is None:
            models, rounds = self._train_first_model(models, fed)
            describer = copy_as_describer(models)
        profiles, _ = profile_clients(fed, describer, self.layer, state.key)  # [c, block, d]
        clients = np.flatnonzero(~np.isnan(profiles[:, 0, 0]))
        if not len(clients):  # no client replied
            w = assign_newest_data(assigned, len(models), fed.tau)
            return replace(state, models=models, describer=describer, w=w, events=(), drifted=None)
        scale = BlockScale.fit_profiles(profiles)
        first_member, eps = self._group_clients(scale(profiles[clients]))
        groups = [clients[first_member == first] for first in np.unique(first_member)]
        centres = np.stack([profiles[group].mean(axis=0) for group in groups])  # [cluster, block, d]
        models, positions, events = _match_clusters(models, state.centre, groups, centres, scale, eps)
        centre = np.zeros((len(models), *centres.shape[1:]))
        if len(state.centre):
            centre[: len(state.centre)] = state.centre
        centre[positions] = centres
        for group, m in zip(groups, positions, strict=True):
            assigned[group] = m
        has_new_model = np.isin(assigned, [models.ids.index(event.model) for event in events])
        drifted = has_new_model & np.isin(np.arange(len(assigned)), clients)
        w = assign_newest_data(assigned, len(models), fed.tau)
        models = fed.train(models, w, rounds=rounds)
        drifted = drifted if fed.tau else np.zeros_like(drifted)
        router = None
        if self.router:
            project = Projection(state.key, fed.n_classes)
            router = build_router(scale(centre), np.eye(len(models)), scale, describer, self.layer, project)
        return FluxState(
            models, w, w[-1], events=events, drifted=drifted, describer=describer, key=state.key, centre=centre,
            router=router,
        )  # fmt: skip

    def _train_first_model(self, models: Models, fed: Federation) -> tuple[Models, int]:
        """Train one model for all until its accuracy rises slowly; also return the number of rounds that are left."""
        total = fed.local.rounds
        local = replace(fed.local, hold_out=HOLD_OUT_SHARE, bags=False)
        w = np.zeros((fed.tau + 1, fed.n_clients, 1))
        w[-1] = 1
        accuracy = list[float]()
        for n_done in range(1, max(1, int(MAX_COMMON_ROUNDS_SHARE * total)) + 1):
            models = fed.train(models, w, rounds=1, local=local)
            result = fed.contest(models, np.zeros((1, fed.n_clients, 1), dtype=np.int64), local)
            scored = result.rows > 0
            share = 1 - result.wrong[scored, 0, 0] / result.rows[scored]
            accuracy.append(float(np.mean(share)) if scored.any() else 0.0)
            if n_done >= MIN_COMMON_ROUNDS and accuracy[-1] - accuracy[-2] < self.rise:
                break
        return models, total - n_done

    def _group_clients(self, scaled: Floats) -> tuple[Ints, float]:
        """Return [client], the first client of each client's cluster, and eps, which is infinite for a single client.

        Args:
            scaled: [client, block * d], the scaled profiles.
        """
        if len(scaled) < 2:
            return np.zeros(len(scaled), dtype=np.int64), np.inf
        D = compute_distances(scaled, scaled)
        np.fill_diagonal(D, np.inf)
        if self.linkage == "complete":
            pairs = clustering.link_closest(D, float(np.finfo(np.float64).max))[1]
            eps = find_knee(np.array([distance for _, _, distance in pairs]))
            return clustering.link_closest(D, eps)[0], eps
        eps = find_knee(D.min(axis=1))
        return find_components(D - eps <= clustering.TOLERANCE), eps


def assign_newest_data(assigned: Ints, n_models: int, tau: int) -> Clusters:
    """Let the newest data of client c train the model at assigned[c], and forget all other data."""
    model = np.full((tau + 1, len(assigned)), -1)
    model[-1] = assigned
    return Clusters(model, n_models)


def _match_clusters(
    models: Models, old: Floats, groups: list[Ints], centres: Floats, scale: BlockScale, eps: float
) -> tuple[Models, Ints, tuple[Event, ...]]:
    """Find the model of each cluster, or create it as a copy of the nearest one.

    The clusters choose in the order of their distance to the nearest model, and each model is chosen once. At the first
    time step there is one model without a centre: the first cluster continues it, and the others train copies.

    Args:
        models: The models.
        old: [m, block, d], the centre of each model; empty at the first time step.
        groups: The clients of each cluster.
        centres: [cluster, block, d], their mean profiles.
        scale: The map that scales profiles.
        eps: The largest distance at which a cluster continues a model.

    Returns:
        All models, the position of each cluster's model, and an event for each new model.
    """
    D = compute_distances(scale(centres), scale(old if len(old) else centres[:1]))
    limit = eps if len(old) else 0.0
    nearest = D.argmin(axis=1)
    distance = D.min(axis=1)
    positions = nearest.copy()
    taken = set[int]()
    events = []
    for k in np.argsort(distance, kind="stable").tolist():
        m = int(nearest[k])
        if distance[k] <= limit + clustering.TOLERANCE and m not in taken:
            taken.add(m)
            continue
        new_id = max(models.ids) + 1
        positions[k] = len(models)
        cause = {"clients": groups[k].tolist(), "from": models.ids[m], "distance": float(distance[k])}
        models = join(models, take(models, [m], [new_id]))
        events.append(Event("created", new_id, cause | ({"eps": eps} if len(old) and np.isfinite(eps) else {})))
    return models, positions, tuple(events)
