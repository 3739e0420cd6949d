"""New shared models for clients whose new data contradict the old ones, and merging of models that do not differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from feddrift import clustering, rng
from feddrift.algorithms.auto import private_models
from feddrift.algorithms.auto.trials import compute_lead_z
from feddrift.algorithms.feddrift.trunk import merge_families
from feddrift.clustering import Clustering
from feddrift.models import join, mix, take, unused_id
from feddrift.trees import has_trunk
from feddrift.types import Bools, Clusters, Federation, Floats, Ints, Models, Tournament

FIRST_HEAD_ID = 2**30  # first id of the heads that are compared with whole models
MAX_COMPARED = 64  # largest number of founders whose candidates are all compared with each other in a time step
DELAY_REASON = (
    f"more than {MAX_COMPARED} clients need new models at once, and none of the first new models fits this client"
)


@dataclass(frozen=True)
class NewClusters:
    """New shared models, the founders of each, and the models that they started from."""

    models: Models
    groups: list[list[int]]
    parents: list[int | None]  # id of the shared model that each new model started from; None: an untrained model


def create_clusters(
    founders: Sequence[int], starts_fresh: Sequence[bool], allowed: Bools, models: Models, best: Ints, next_id: int,
    rounds: int, group_z: float, fed: Federation,
) -> NewClusters:  # fmt: skip
    """Train a candidate at each founder, and create a new model for every group of founders that can share one.

    A candidate is trained on half of its founder's new data; the other half decides which founders share a model. The
    new model of a group is the average of its candidates.

    A founder may be in no group: if no founder of its group is allowed to create a model, or if there are more than
    MAX_COMPARED founders and none of the groups fits. It keeps its model until the next time step.

    Args:
        founders: Clients that need a new model.
        starts_fresh: For each founder, whether its candidate starts from an untrained model, else from its best shared
            model.
        allowed: [c], whether the client may create a model. One such client is enough for a group.
        models: The shared models.
        best: [c], position of the best shared model for each client.
        next_id: The next free id.
        rounds: Rounds of training.
        group_z: Founders share a model unless the own candidate of one is better by more standard errors.
        fed: The federation.

    Raises:
        ConfigError: The new models would get ids of private models.
    """
    private_models.check_shared_ids(next_id, len(founders))
    candidates = _train_candidates(founders, starts_fresh, models, best, next_id, rounds, fed)
    groups = _group_founders(founders, candidates, group_z, fed)
    groups = [group for group in groups if allowed[[founders[k] for k in group]].any()]
    new_models = _average_groups(candidates, groups, next_id)
    parents = [None if starts_fresh[group[0]] else models.ids[best[founders[group[0]]]] for group in groups]
    members = [[founders[k] for k in group] for group in groups]
    if has_trunk(models):
        new_models = _use_parent_trunks(members, new_models, models, best, rounds, fed)
    return NewClusters(new_models, members, parents)


def _train_candidates(
    founders: Sequence[int], starts_fresh: Sequence[bool], models: Models, best: Ints, next_id: int, rounds: int,
    fed: Federation,
) -> Models:  # fmt: skip
    """Train the candidate of each founder on the half of its new data that is not held out; see `create_clusters`."""
    stack = join(models, take(fed.fresh(), [0], [unused_id(models)]))
    start = np.where(np.asarray(starts_fresh, dtype=bool), len(models), best[list(founders)])
    candidates = take(stack, start, range(next_id, next_id + len(founders)))
    # A single client needs no averaging, so all rounds are local steps of one round.
    local = replace(fed.local, hold_out=0.5, steps=rounds * fed.local.steps)
    return fed.train(candidates, select_newest_data(fed, [[c] for c in founders]), 1, local)


def _group_founders(founders: Sequence[int], candidates: Models, group_z: float, fed: Federation) -> list[list[int]]:
    """Group founders that can share a model; groups contain positions in `founders`.

    Up to MAX_COMPARED founders compare all of their candidates. If there are more, MAX_COMPARED of them are drawn and
    grouped. Each other founder compares its candidate with the average candidate of each group, and is appended to the
    best group that fits, or to none. So no client evaluates more than MAX_COMPARED + 1 models.
    """
    n = len(founders)
    if n <= MAX_COMPARED:
        return _link_founders(founders, candidates, group_z, fed)
    drawn = np.sort(rng.permutation(fed.key("founders"), n)[:MAX_COMPARED])
    linked = _link_founders([founders[k] for k in drawn], _select_models(candidates, drawn), group_z, fed)
    groups = [drawn[group].tolist() for group in linked]
    others = np.setdiff1d(np.arange(n), drawn)
    averages = _average_groups(candidates, groups, unused_id(candidates))
    clients = [founders[k] for k in others]
    contestants = np.full((1 + len(groups), fed.n_clients, 1), -1)  # the own candidate, then each average
    contestants[0, clients, 0] = np.arange(len(others))
    contestants[1:, clients, 0] = len(others) + np.arange(len(groups))[:, None]
    result = fed.contest(
        join(_select_models(candidates, others), averages), contestants, replace(fed.local, hold_out=0.5)
    )
    for k, c in zip(others.tolist(), clients, strict=True):
        wrong = result.wrong[c]
        fitting = [g for g in range(len(groups)) if compute_lead_z(wrong, 0, 1 + g) <= group_z]
        if result.rows[c] and fitting:
            groups[min(fitting, key=lambda g: int(wrong[1 + g, 1 + g]))].append(k)
    return groups


def _link_founders(founders: Sequence[int], candidates: Models, group_z: float, fed: Federation) -> list[list[int]]:
    """Group founders by complete linkage; groups contain positions in `founders`.

    The distance of two founders is the larger lead of a founder's own candidate over the other one's, at that founder,
    in standard errors. Within a group it is at most `group_z`.
    """
    n = len(founders)
    contestants = np.full((n, fed.n_clients, 1), -1)
    contestants[:, list(founders), 0] = np.arange(n)[:, None]
    wrong = fed.contest(candidates, contestants, replace(fed.local, hold_out=0.5)).wrong[list(founders)]
    # lead[a, b]: the lead of a's candidate over b's, at founder a
    lead = np.array([[compute_lead_z(wrong[a], a, b) for b in range(n)] for a in range(n)])
    distance = np.maximum(lead, lead.T)
    np.fill_diagonal(distance, np.inf)
    group_of, _ = clustering.link_closest(distance, group_z)
    return [np.flatnonzero(group_of == first).tolist() for first in np.unique(group_of)]


def _average_groups(candidates: Models, groups: Sequence[Sequence[int]], first_id: int) -> Models:
    """Return the average of each group's candidates, all with the same weight, with ids from `first_id` on."""
    weights = np.zeros((len(groups), len(candidates)))
    for g, group in enumerate(groups):
        weights[g, list(group)] = 1 / len(group)
    return mix(candidates, weights, range(first_id, first_id + len(groups)))


def _select_models(models: Models, positions: Ints) -> Models:
    return take(models, positions, [models.ids[m] for m in positions])


def _use_parent_trunks(
    groups: Sequence[list[int]], new_models: Models, models: Models, best: Ints, rounds: int, fed: Federation
) -> Models:
    """Replace each new model by a head on its parent's trunk if that is at least as good on the held-out halves.

    The parent is the best shared model for the first client of the group.
    """
    n = len(groups)
    local = replace(fed.local, hold_out=0.5)
    parents = best[[group[0] for group in groups]]
    parent_families = [models.family[parent] for parent in parents]
    heads = take(models, parents, range(FIRST_HEAD_ID, FIRST_HEAD_ID + n), family=parent_families)
    heads = fed.train(heads, select_newest_data(fed, groups), rounds, replace(local, trains="head"))
    contestants = np.full((2, fed.n_clients, 1), -1)
    for k, group in enumerate(groups):
        contestants[:, group, 0] = np.array([[k], [n + k]])
    both = join(new_models, heads)
    result = fed.contest(both, contestants, local)
    uses_head = [compute_lead_z(result.wrong[group].sum(axis=0), 0, 1) <= 0 for group in groups]
    positions = [n + k if uses_head[k] else k for k in range(n)]
    families = [parent_families[k] if uses_head[k] else new_models.ids[k] for k in range(n)]
    return take(both, positions, new_models.ids, family=families)


def select_newest_data(fed: Federation, groups: Sequence[Sequence[int]]) -> Clusters:
    """Return cells of which only the newest data of each group's clients train the group's model."""
    model = np.full((fed.tau + 1, fed.n_clients), -1)
    for k, group in enumerate(groups):
        model[-1, list(group)] = k
    return Clusters(model, len(groups))


def merge_similar(
    clusters: Clustering, previous: Clustering, mistakes: Tournament, assigned: Ints, merge_z: float, fed: Federation
) -> Clustering:
    """Merge models that differ by at most `merge_z` standard errors, both on their old data and on the new data.

    Args:
        clusters: The clusters of this time step, whose first models are those of `previous`.
        previous: The clusters after the review of this time step, before moves and new models; only their models may
            merge.
        mistakes: Mistakes of the models in `previous` on the new data.
        assigned: [c], position of the model that the client's new data train, or -1 for a new one.
        merge_z: Largest difference of models that merge, in standard errors of the difference of two errors on as many
            rows as the median client has.
        fed: The federation.
    """
    n = len(previous.models)
    if n < 2:
        return clusters
    old_data = previous.assign_new_data(np.full(fed.n_clients, -1)).w  # -1: leave the new data out; `mistakes` has them
    loss = fed.cross_evaluate(previous.models, old_data, "error")
    rows = fed.counts[-1]
    median_rows = float(np.median(rows[rows > 0])) if rows.any() else 1.0
    own_error = np.diag(loss)
    distance = np.full((len(clusters.models),) * 2, np.inf)
    distance[:n, :n] = _compute_distances_z(loss, mistakes, assigned, median_rows)
    if has_trunk(clusters.models):
        mean_error = float(np.nanmean(own_error)) if np.isfinite(own_error).any() else 0.5
        standard_error = math.sqrt(mean_error * (1 - mean_error) / median_rows)
        merged = merge_families(clusters, distance, merge_z, standard_error, "error", fed)
    else:
        models, w, events = clustering.merge_closest(clusters.models, clusters.w, distance, fed.counts, merge_z)
        merged = Clustering(models, w, clusters.events).add_events(events)
    new_events = merged.events[len(clusters.events) :]
    in_z = [replace(event, cause={**event.cause, "unit": "standard errors"}) for event in new_events]
    return replace(merged, events=(*clusters.events, *in_z))


def _compute_distances_z(loss: Floats, mistakes: Tournament, assigned: Ints, rows: float) -> Floats:
    """Return the distance of each pair of models in standard errors: the larger of those on old and on new data.

    Args:
        loss: [i, j], error of model i on the old data that train model j.
        mistakes: Mistakes of the models on the new data.
        assigned: [c], position of the model that the client's new data train, or -1 for a new one.
        rows: Number of rows for which the standard error of an error is computed.
    """
    n = len(loss)
    own_error = np.diag(loss)
    error = np.maximum.outer(own_error, own_error)
    D = clustering.compute_distances(loss)
    with np.errstate(invalid="ignore"):
        standard_error = np.sqrt(2 * error * (1 - error) / rows)  # of a difference of two errors
        D = np.where(np.isfinite(D), D / np.maximum(standard_error, 1e-12), np.inf)
    for i in range(n):
        wrong = mistakes.wrong[assigned == i].sum(axis=0)
        for j in set(range(n)) - {i}:
            D[i, j] = max(D[i, j], compute_lead_z(wrong, i, j))
    return np.maximum(D, D.T)
