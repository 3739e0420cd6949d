"""New models: their clients, their initial parameters, and the old models that are retired to make room for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from feddrift import clustering
from feddrift.algorithms.feddrift.detection import DetectionResult, DriftDetectionOptions, DriftState
from feddrift.clustering import Clustering
from feddrift.models import replace_model, take
from feddrift.types import Bools, Event, Federation, Ints, Models, Start

SHARED_TRUNK_STARTS: tuple[Start, ...] = ("head", "joint")  # starts whose new model shares the trunk of its parent

ClientGroups = Sequence[Sequence[int]]  # the clients of each new model


@dataclass(frozen=True)
class NewModels:
    """New models, the clients of each, and an event for each."""

    models: Models
    groups: ClientGroups
    events: tuple[Event, ...]


def group_each_client(drifted: Bools) -> ClientGroups:
    """Put every drifted client into a group of its own (Algorithm 4)."""
    return [[int(c)] for c in np.flatnonzero(drifted)]


def group_all_clients(drifted: Bools) -> ClientGroups:
    """Put all drifted clients into one group (Algorithm 3)."""
    return [np.flatnonzero(drifted).tolist()] if drifted.any() else []


def retire_unused_models(
    method: DriftDetectionOptions, clusters: Clustering, detected: DetectionResult, groups: ClientGroups
) -> tuple[Clustering, DetectionResult, ClientGroups]:
    """Retire the longest unused models until each group can have a new one within `max_models`.

    Models that are the best of a client stay. If too few others can be retired, the last groups get no new model.
    Models are retired before any are merged, even if a merge in the same time step would have made room.

    Returns:
        The remaining models, the result of detection with the new positions of the best models, and the groups that get
        a new model.
    """
    limit = method.max_models
    n = len(clusters.models)
    if limit is None or n + len(groups) <= limit:
        return clusters, detected, groups
    is_best = np.isin(np.arange(n), detected.best)
    unused = clustering.find_least_used(clusters.w, is_best, n + len(groups) - limit)
    new_positions = np.cumsum(~np.isin(np.arange(n), unused)) - 1
    clusters = clusters.retire_models(unused, "made room, longest unused")
    detected = replace(detected, best=new_positions[detected.best])
    return clusters, detected, groups[: max(0, limit - len(clusters.models))]


def assign_remaining_clients(detected: DetectionResult, groups: ClientGroups) -> Ints:
    """Return [c], the position of each client's best model (w[tau] = 1{m = argmin l}); -1 if it gets a new model."""
    assigned = detected.best.copy()
    for clients in groups:
        assigned[list(clients)] = -1
    return assigned


def create_models(
    method: DriftDetectionOptions,
    clusters: Clustering,
    detected: DetectionResult,
    groups: ClientGroups,
    state: DriftState,
    fed: Federation,
) -> NewModels:
    """Create a model for each group of clients, with an event that has its cause and its start.

    The first client of a group determines the parent, which is its best model, and the losses in the event.

    Args:
        method: The settings.
        clusters: The old models.
        detected: The result of drift detection.
        groups: The clients of each new model.
        state: The state after the last time step.
        fed: The federation.
    """
    models = clusters.models
    ids = list(range(state.next_id, state.next_id + len(groups)))
    parents = [int(detected.best[clients[0]]) for clients in groups]
    starts, trials = choose_starts(method, clusters, parents, groups, fed)
    shares_trunk = [start in SHARED_TRUNK_STARTS for start in starts]
    families = [models.family[parents[k]] if shares_trunk[k] else new_id for k, new_id in enumerate(ids)]
    new_models = take(models, parents, ids, families)
    rule = {"delta": method.delta} if method.test == "threshold" else {"test": method.test}
    events = []
    for k, clients in enumerate(groups):
        is_fresh = starts[k] == "fresh"
        first = clients[0]
        if is_fresh:
            new_models = replace_model(new_models, k, fed.fresh())
        cause: dict[str, Any] = {"clients": list(clients), method.metric: float(detected.lowest[first])}
        cause |= {"reference": float(state.reference[first]), **rule}
        cause |= {"from": None if is_fresh else models.ids[parents[k]]}
        cause |= {"family": families[k]} if shares_trunk[k] else {}
        events.append(Event("created", ids[k], cause | trials[k]))
    return NewModels(new_models, groups, tuple(events))


def choose_starts(
    method: DriftDetectionOptions, clusters: Clustering, parents: Sequence[int], groups: ClientGroups, fed: Federation
) -> tuple[list[Start], list[dict[str, Any]]]:
    """Choose the start of each group's new model: the one of the settings, or the winner of a trial at its clients.

    Args:
        method: The settings.
        clusters: The old models.
        parents: For each group the position of its parent model.
        groups: The clients of each new model.
        fed: The federation.

    Returns:
        The start of each new model, and for each the result of its trial for the event, empty without a trial.
    """
    if method.init_ != "best":
        return [method.init_ for _ in groups], [{} for _ in groups]
    if not groups:
        return [], []
    parent_of = np.full(fed.n_clients, -1)
    for parent, clients in zip(parents, groups, strict=True):
        parent_of[list(clients)] = parent
    old_data = clustering.apply_memory(clusters.w, method.memory(fed.tau)[:-1])
    tournament = fed.tournament(clusters.models, old_data, parent_of, method.candidates)
    starts = []
    trials = []
    for clients in groups:
        rows = int(tournament.rows[list(clients)].sum())
        wrong = tournament.wrong[list(clients)].sum(axis=0)
        start = method.candidates[method.choose_start(rows, wrong)]
        starts.append(start)
        trials.append({"start": start, "starts": list(method.candidates), "rows": rows, "wrong": wrong.tolist()})
    return starts, trials
