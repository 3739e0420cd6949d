"""New shared models for clients whose data contradict what is there, and merging those that turn out alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from feddrift import cluster
from feddrift.algorithms.conflict import ahead
from feddrift.algorithms.trunk import merge_families
from feddrift.cluster import Clustering
from feddrift.models import join, mix, put, take
from feddrift.trees import has_trunk
from feddrift.types import Bools, Clusters, Event, Federation, Ints, Models, Tournament

HEADS = 2**30  # ids of heads on trial


@dataclass(frozen=True)
class Newborn:
    """New models, the clients of each, and where they come from."""

    models: Models
    groups: list[list[int]]
    parents: list[int | None]  # ids; None: begun afresh


def found(
    clients: Sequence[int], fresh: Sequence[bool], may: Bools, models: Models, best: Ints, born: int, rounds: int,
    alike: float, fed: Federation,
) -> Newborn:  # fmt: skip
    """Founders train candidates on half of their new data; those of whom neither's own is better by `alike` standard
    errors on the other half found together, if one of them `may` [c]."""
    m = len(clients)
    starts = take(models, best[list(clients)], range(born, born + m))
    for k in np.flatnonzero(fresh):
        starts = put(starts, int(k), fed.fresh())
    local = replace(fed.local, hold_out=0.5)
    alone = replace(local, steps=rounds * local.steps)  # who trains alone needs no rounds
    candidates = fed.train(starts, newest(fed, [[c] for c in clients]), 1, alone)
    teams = np.full((m, fed.n_clients, 1), -1)
    teams[:, list(clients), 0] = np.arange(m)[:, None]
    wrong = fed.contest(candidates, teams, local).wrong[list(clients)]
    better = np.array([[ahead(wrong[a], a, b) for b in range(m)] for a in range(m)])  # a's own, at its client
    D = np.maximum(better, better.T)
    np.fill_diagonal(D, np.inf)
    into, _ = cluster.linked(D, alike)
    left, group = np.unique(into, return_inverse=True)
    every = [[clients[int(k)] for k in np.flatnonzero(group == g)] for g in range(len(left))]
    kept = np.array([g for g, members in enumerate(every) if may[members].any()])
    groups, left = [every[g] for g in kept], left[kept]
    share = (group == kept[:, None]).astype(np.float64)
    whole = mix(candidates, share / share.sum(axis=1, keepdims=True), range(born, born + len(left)))
    parents = [None if fresh[k] else models.ids[best[clients[k]]] for k in map(int, left)]
    if has_trunk(models):
        whole = _rooted(groups, whole, models, best, rounds, fed)
    return Newborn(whole, groups, parents)


def _rooted(
    groups: Sequence[list[int]], whole: Models, models: Models, best: Ints, rounds: int, fed: Federation
) -> Models:
    """Where a head on the parent's trunk does as well as a whole model on the held-out half, that."""
    m, local = len(groups), replace(fed.local, hold_out=0.5)
    parents = best[[group[0] for group in groups]]
    families = [models.family[parent] for parent in parents]
    heads = take(models, parents, range(HEADS, HEADS + m), families)
    heads = fed.train(heads, newest(fed, groups), rounds, replace(local, trains="head"))
    teams = np.full((2, fed.n_clients, 1), -1)
    for k, group in enumerate(groups):
        teams[:, group, 0] = np.array([[k], [m + k]])
    both = join(whole, heads)
    result = fed.contest(both, teams, local)
    enough = [ahead(result.wrong[group].sum(axis=0), 0, 1) <= 0 for group in groups]
    at = [m + k if head else k for k, head in enumerate(enough)]
    family = [f if head else i for f, i, head in zip(families, whole.ids, enough, strict=True)]
    return take(both, at, whole.ids, family)


def newest(fed: Federation, groups: Sequence[Sequence[int]]) -> Clusters:
    """The newest data of each group's clients, and nothing else, train its model."""
    model = np.full((fed.tau + 1, fed.n_clients), -1)
    for k, group in enumerate(groups):
        model[-1, list(group)] = k
    return Clusters(model, len(groups))


def merge_alike(
    now: Clustering, before: Clustering, mistakes: Tournament, members: Ints, limit: float, fed: Federation
) -> Clustering:
    """Merge models of `before` that are alike: no further apart on all their data than so many standard errors of a
    batch's error, and neither better than the other by as many on the new data of its members.

    `mistakes` are those of all of them on the new data, members[c] is the model that is to serve client c, or -1.
    """
    m = len(before.models)
    if m < 2:
        return now
    L = fed.cross_evaluate(before.models, before.assign(np.full(fed.n_clients, -1)).w, "error")
    rows = fed.counts[-1]
    batch = float(np.median(rows[rows > 0])) if rows.any() else 1.0
    own = np.diag(L)
    e = np.maximum.outer(own, own)
    D = cluster.distances(L)
    with np.errstate(invalid="ignore"):
        D = np.where(np.isfinite(D), D / np.maximum(np.sqrt(2 * e * (1 - e) / batch), 1e-12), np.inf)
    for i in range(m):
        wrong = mistakes.wrong[members == i].sum(axis=0)
        for j in set(range(m)) - {i}:
            D[i, j] = max(D[i, j], ahead(wrong, i, j))
    apart = np.full((len(now.models),) * 2, np.inf)
    apart[:m, :m] = np.maximum(D, D.T)
    if has_trunk(now.models):
        mean = float(np.nanmean(own)) if np.isfinite(own).any() else 0.5
        merged = merge_families(now, apart, limit, math.sqrt(mean * (1 - mean) / batch), "error", fed)
    else:
        models, w, events = cluster.merge_closest(now.models, now.w, apart, fed.counts, limit)
        merged = Clustering(models, w, now.events).tell(events)
    in_units = [_in_standard_errors(event) for event in merged.events[len(now.events) :]]
    return replace(merged, events=now.events + tuple(in_units))


def _in_standard_errors(event: Event) -> Event:
    return replace(event, cause={**event.cause, "unit": "standard errors"})
