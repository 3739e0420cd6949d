"""New shared models for clients whose data contradict what is there, and merging those that turn out alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from feddrift import clustering, rng
from feddrift.algorithms.auto.trials import ahead
from feddrift.algorithms.feddrift.trunk import merge_families
from feddrift.clustering import Clustering
from feddrift.models import join, mix, take, unused_id
from feddrift.trees import has_trunk
from feddrift.types import Bools, Clusters, Event, Federation, Ints, Models, Tournament

HEADS = 2**30  # ids of heads on trial
MAX_COMPARED = 64  # founders of one time step whose candidates are all compared with each other
WAITS = f"more than {MAX_COMPARED} clients need new models at once, and none of the models made first fits this client"


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
    """Train a candidate at each founder and return a new model for every group of founders that can share one.

    A candidate learns from half of its founder's new data; the other half decides who founds together. A founder of
    more than MAX_COMPARED may be in no group: it keeps its model until the next time step.

    Args:
        clients: The founders.
        fresh: For each founder, whether its candidate starts from a fresh model, else from its best shared model.
        may: [c], who may found. A group founds if one of its clients may.
        models: The shared models.
        best: [c], the position of the model that serves each client best.
        born: The next free id.
        rounds: Rounds of training.
        alike: Standard errors by which a founder's own candidate must be better, or it founds with others.
        fed: The federation.
    """
    candidates = _train_candidates(clients, fresh, models, best, born, rounds, fed)
    every = _group_founders(clients, candidates, alike, fed)
    groups = [group for group in every if may[[clients[k] for k in group]].any()]
    whole = _average_groups(candidates, groups, born)
    parents = [None if fresh[group[0]] else models.ids[best[clients[group[0]]]] for group in groups]
    members = [[clients[k] for k in group] for group in groups]
    if has_trunk(models):
        whole = _rooted(members, whole, models, best, rounds, fed)
    return Newborn(whole, members, parents)


def _train_candidates(
    clients: Sequence[int], fresh: Sequence[bool], models: Models, best: Ints, born: int, rounds: int, fed: Federation
) -> Models:
    """Train the candidate of each founder, in their order, on the half of its new data that is not held out."""
    m = len(clients)
    stack = join(models, take(fed.fresh(), [0], [unused_id(models)]))
    start = np.where(np.asarray(fresh, dtype=bool), len(models), best[list(clients)])
    starts = take(stack, start, range(born, born + m))
    local = replace(fed.local, hold_out=0.5)
    alone = replace(local, steps=rounds * local.steps)  # who trains alone needs no rounds
    return fed.train(starts, newest(fed, [[c] for c in clients]), 1, alone)


def _group_founders(clients: Sequence[int], candidates: Models, alike: float, fed: Federation) -> list[list[int]]:
    """Group founders, as positions in `clients`, the first of each group before those that joined it.

    Of at most MAX_COMPARED founders all candidates are compared with each other. Of more, that many are drawn; each
    other founder then compares its candidate with the averages of their groups, so no client scores more models.
    """
    m = len(clients)
    if m <= MAX_COMPARED:
        return _link_founders(clients, candidates, alike, fed)
    drawn = np.sort(rng.permutation(fed.key("founders"), m)[:MAX_COMPARED])
    groups = [
        drawn[group].tolist()
        for group in _link_founders([clients[k] for k in drawn], _select(candidates, drawn), alike, fed)
    ]
    rest = np.setdiff1d(np.arange(m), drawn)
    averages = _average_groups(candidates, groups, unused_id(candidates))
    stack = join(_select(candidates, rest), averages)
    at_rest = [clients[k] for k in rest]
    teams = np.full((1 + len(groups), fed.n_clients, 1), -1)
    teams[0, at_rest, 0] = np.arange(len(rest))
    teams[1:, at_rest, 0] = len(rest) + np.arange(len(groups))[:, None]
    result = fed.contest(stack, teams, replace(fed.local, hold_out=0.5))
    for k, c in zip(rest.tolist(), at_rest, strict=True):
        wrong = result.wrong[c]
        fits = [g for g in range(len(groups)) if ahead(wrong, 0, 1 + g) <= alike]
        if result.rows[c] and fits:
            groups[min(fits, key=lambda g: int(wrong[1 + g, 1 + g]))].append(k)
    return groups


def _link_founders(clients: Sequence[int], candidates: Models, alike: float, fed: Federation) -> list[list[int]]:
    """Group founders so that for no pair of a group the own candidate of either is better by more than `alike`."""
    m = len(clients)
    teams = np.full((m, fed.n_clients, 1), -1)
    teams[:, list(clients), 0] = np.arange(m)[:, None]
    wrong = fed.contest(candidates, teams, replace(fed.local, hold_out=0.5)).wrong[list(clients)]
    better = np.array([[ahead(wrong[a], a, b) for b in range(m)] for a in range(m)])  # a's own, at its client
    D = np.maximum(better, better.T)
    np.fill_diagonal(D, np.inf)
    into, _ = clustering.linked(D, alike)
    return [np.flatnonzero(into == first).tolist() for first in np.unique(into)]


def _average_groups(candidates: Models, groups: Sequence[Sequence[int]], first_id: int) -> Models:
    """Average the candidates of each group, in equal parts, under ids from first_id on."""
    share = np.zeros((len(groups), len(candidates)))
    for g, group in enumerate(groups):
        share[g, list(group)] = 1 / len(group)
    return mix(candidates, share, range(first_id, first_id + len(groups)))


def _select(models: Models, positions: Ints) -> Models:
    return take(models, positions, [models.ids[m] for m in positions])


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
    D = clustering.distances(L)
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
        models, w, events = clustering.merge_closest(now.models, now.w, apart, fed.counts, limit)
        merged = Clustering(models, w, now.events).tell(events)
    in_units = [_in_standard_errors(event) for event in merged.events[len(now.events) :]]
    return replace(merged, events=now.events + tuple(in_units))


def _in_standard_errors(event: Event) -> Event:
    return replace(event, cause={**event.cause, "unit": "standard errors"})
