"""New shared models for clients whose new data contradict the old ones, and merging of models that do not differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from feddrift import clustering, rng
from feddrift.algorithms.auto.trials import lead_z
from feddrift.algorithms.feddrift.trunk import merge_families
from feddrift.clustering import Clustering
from feddrift.models import join, mix, take, unused_id
from feddrift.trees import has_trunk
from feddrift.types import Bools, Clusters, Federation, Floats, Ints, Models, Tournament

FIRST_HEAD_ID = 2**30  # ids of the heads that are compared with whole models
MAX_COMPARED = 64  # founders of one time step whose candidates are all compared with each other
WAITS = f"more than {MAX_COMPARED} clients need new models at once, and none of the models made first fits this client"


@dataclass(frozen=True)
class NewClusters:
    """New models, the clients of each, and their origin."""

    models: Models
    groups: list[list[int]]
    parents: list[int | None]  # id of the model that each started from; None: an untrained model


def create_clusters(
    founders: Sequence[int], fresh: Sequence[bool], may: Bools, models: Models, best: Ints, next_id: int, rounds: int,
    share_model_z: float, fed: Federation,
) -> NewClusters:  # fmt: skip
    """Train a candidate at each founder and return a new model for every group of founders that can share one.

    A candidate trains on half of its founder's new data; the other half decides which founders share a model. With more
    than MAX_COMPARED founders some may be in no group: they keep their model until the next time step.

    Args:
        founders: Clients that need a new model.
        fresh: For each founder, whether its candidate starts from an untrained model, else from its best shared model.
        may: [c], clients that may create a model. One such client is enough for a group.
        models: The shared models.
        best: [c], position of the model that serves each client best.
        next_id: The next free id.
        rounds: Rounds of training.
        share_model_z: Standard errors by which a founder's own candidate must be better, or it shares a model.
        fed: The federation.
    """
    candidates = _train_candidates(founders, fresh, models, best, next_id, rounds, fed)
    groups = _group_founders(founders, candidates, share_model_z, fed)
    groups = [group for group in groups if may[[founders[k] for k in group]].any()]
    new_models = _average_groups(candidates, groups, next_id)
    parents = [None if fresh[group[0]] else models.ids[best[founders[group[0]]]] for group in groups]
    members = [[founders[k] for k in group] for group in groups]
    if has_trunk(models):
        new_models = _share_trunk_where_good(members, new_models, models, best, rounds, fed)
    return NewClusters(new_models, members, parents)


def _train_candidates(
    founders: Sequence[int], fresh: Sequence[bool], models: Models, best: Ints, next_id: int, rounds: int,
    fed: Federation,
) -> Models:  # fmt: skip
    """Train the candidate of each founder, in their order, on the half of its new data that is not held out."""
    stack = join(models, take(fed.fresh(), [0], [unused_id(models)]))
    start = np.where(np.asarray(fresh, dtype=bool), len(models), best[list(founders)])
    candidates = take(stack, start, range(next_id, next_id + len(founders)))
    local = replace(fed.local, hold_out=0.5, steps=rounds * fed.local.steps)  # one client needs no rounds of averaging
    return fed.train(candidates, select_newest_data(fed, [[c] for c in founders]), 1, local)


def _group_founders(
    founders: Sequence[int], candidates: Models, share_model_z: float, fed: Federation
) -> list[list[int]]:
    """Group founders, given as positions in `founders`; the first of each group is not one that joined it later.

    Up to MAX_COMPARED founders compare all of their candidates. Of more founders, that many are drawn; each other
    founder compares its candidate with the averages of their groups, so no client evaluates more models.
    """
    n = len(founders)
    if n <= MAX_COMPARED:
        return _link_founders(founders, candidates, share_model_z, fed)
    drawn = np.sort(rng.permutation(fed.key("founders"), n)[:MAX_COMPARED])
    linked = _link_founders([founders[k] for k in drawn], _select(candidates, drawn), share_model_z, fed)
    groups = [drawn[group].tolist() for group in linked]
    rest = np.setdiff1d(np.arange(n), drawn)
    averages = _average_groups(candidates, groups, unused_id(candidates))
    clients = [founders[k] for k in rest]
    teams = np.full((1 + len(groups), fed.n_clients, 1), -1)
    teams[0, clients, 0] = np.arange(len(rest))
    teams[1:, clients, 0] = len(rest) + np.arange(len(groups))[:, None]
    result = fed.contest(join(_select(candidates, rest), averages), teams, replace(fed.local, hold_out=0.5))
    for k, c in zip(rest.tolist(), clients, strict=True):
        wrong = result.wrong[c]
        fits = [g for g in range(len(groups)) if lead_z(wrong, 0, 1 + g) <= share_model_z]
        if result.rows[c] and fits:
            groups[min(fits, key=lambda g: int(wrong[1 + g, 1 + g]))].append(k)
    return groups


def _link_founders(
    founders: Sequence[int], candidates: Models, share_model_z: float, fed: Federation
) -> list[list[int]]:
    """Group founders so that in no pair the own candidate of either is better by more than `share_model_z`."""
    n = len(founders)
    teams = np.full((n, fed.n_clients, 1), -1)
    teams[:, list(founders), 0] = np.arange(n)[:, None]
    wrong = fed.contest(candidates, teams, replace(fed.local, hold_out=0.5)).wrong[list(founders)]
    lead = np.array([[lead_z(wrong[a], a, b) for b in range(n)] for a in range(n)])  # of a's candidate at its founder
    distance = np.maximum(lead, lead.T)
    np.fill_diagonal(distance, np.inf)
    group_of, _ = clustering.link_closest(distance, share_model_z)
    return [np.flatnonzero(group_of == first).tolist() for first in np.unique(group_of)]


def _average_groups(candidates: Models, groups: Sequence[Sequence[int]], first_id: int) -> Models:
    """Average the candidates of each group, in equal parts, under ids from first_id on."""
    share = np.zeros((len(groups), len(candidates)))
    for g, group in enumerate(groups):
        share[g, list(group)] = 1 / len(group)
    return mix(candidates, share, range(first_id, first_id + len(groups)))


def _select(models: Models, positions: Ints) -> Models:
    return take(models, positions, [models.ids[m] for m in positions])


def _share_trunk_where_good(
    groups: Sequence[list[int]], new_models: Models, models: Models, best: Ints, rounds: int, fed: Federation
) -> Models:
    """Replace a new model by a head on its parent's trunk where that does as well on the held-out half."""
    n = len(groups)
    local = replace(fed.local, hold_out=0.5)
    parents = best[[group[0] for group in groups]]
    families = [models.family[parent] for parent in parents]
    heads = take(models, parents, range(FIRST_HEAD_ID, FIRST_HEAD_ID + n), families)
    heads = fed.train(heads, select_newest_data(fed, groups), rounds, replace(local, trains="head"))
    teams = np.full((2, fed.n_clients, 1), -1)
    for k, group in enumerate(groups):
        teams[:, group, 0] = np.array([[k], [n + k]])
    both = join(new_models, heads)
    result = fed.contest(both, teams, local)
    is_good = [lead_z(result.wrong[group].sum(axis=0), 0, 1) <= 0 for group in groups]
    positions = [n + k if good else k for k, good in enumerate(is_good)]
    family = [f if good else i for f, i, good in zip(families, new_models.ids, is_good, strict=True)]
    return take(both, positions, new_models.ids, family)


def select_newest_data(fed: Federation, groups: Sequence[Sequence[int]]) -> Clusters:
    """Return the cells of training where only the newest data of each group's clients train its model."""
    model = np.full((fed.tau + 1, fed.n_clients), -1)
    for k, group in enumerate(groups):
        model[-1, list(group)] = k
    return Clusters(model, len(groups))


def merge_similar(
    clusters: Clustering, previous: Clustering, mistakes: Tournament, targets: Ints, merge_z: float, fed: Federation
) -> Clustering:
    """Merge models that differ by at most `merge_z` standard errors, on all their data and on the new data.

    Args:
        clusters: The clusters of this time step, whose first models are those of `previous`.
        previous: The clusters before it; only their models may merge.
        mistakes: Mistakes of their models on the new data.
        targets: [c], position of the model that client c is to be assigned to, or -1 for a new one.
        merge_z: Largest difference of models that merge, in standard errors of a batch's error.
        fed: The federation.
    """
    n = len(previous.models)
    if n < 2:
        return clusters
    loss = fed.cross_evaluate(previous.models, previous.assign_new_data(np.full(fed.n_clients, -1)).w, "error")
    rows = fed.counts[-1]
    batch = float(np.median(rows[rows > 0])) if rows.any() else 1.0
    own = np.diag(loss)
    distance = np.full((len(clusters.models),) * 2, np.inf)
    distance[:n, :n] = _measure_distances_z(loss, own, mistakes, targets, batch)
    if has_trunk(clusters.models):
        mean = float(np.nanmean(own)) if np.isfinite(own).any() else 0.5
        error = math.sqrt(mean * (1 - mean) / batch)
        merged = merge_families(clusters, distance, merge_z, error, "error", fed)
    else:
        models, w, events = clustering.merge_closest(clusters.models, clusters.w, distance, fed.counts, merge_z)
        merged = Clustering(models, w, clusters.events).add_events(events)
    new_events = merged.events[len(clusters.events) :]
    in_z = [replace(event, cause={**event.cause, "unit": "standard errors"}) for event in new_events]
    return replace(merged, events=(*clusters.events, *in_z))


def _measure_distances_z(loss: Floats, own: Floats, mistakes: Tournament, targets: Ints, batch: float) -> Floats:
    """Return the distance of each pair of models in standard errors: the larger of that on all data and on new data."""
    error = np.maximum.outer(own, own)
    D = clustering.compute_distances(loss)
    with np.errstate(invalid="ignore"):
        D = np.where(np.isfinite(D), D / np.maximum(np.sqrt(2 * error * (1 - error) / batch), 1e-12), np.inf)
    for i in range(len(own)):
        wrong = mistakes.wrong[targets == i].sum(axis=0)
        for j in set(range(len(own))) - {i}:
            D[i, j] = max(D[i, j], lead_z(wrong, i, j))
    return np.maximum(D, D.T)
