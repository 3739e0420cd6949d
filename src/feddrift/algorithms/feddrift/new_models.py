"""New models: for whom, how they start, and which old ones make room for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from feddrift import clustering
from feddrift.algorithms.feddrift.detection import Detecting, DriftState, Seen
from feddrift.clustering import Clustering
from feddrift.models import put, take
from feddrift.types import Bools, Event, Federation, Ints, Models, Start

SHARED: tuple[Start, ...] = ("head", "joint")  # a new model that starts so stands on its parent's trunk

Groups = Sequence[Sequence[int]]  # the clients of each new model


@dataclass(frozen=True)
class Newborn:
    """New models, the clients that each is for, and why."""

    models: Models
    groups: Groups
    events: tuple[Event, ...]


def alone(drifted: Bools) -> Groups:
    """Every drifted client by itself (Algorithm 4)."""
    return [[int(c)] for c in np.flatnonzero(drifted)]


def together(drifted: Bools) -> Groups:
    """All drifted clients in one group (Algorithm 3)."""
    return [np.flatnonzero(drifted).tolist()] if drifted.any() else []


def make_room(method: Detecting, now: Clustering, seen: Seen, groups: Groups) -> tuple[Clustering, Seen, Groups]:
    """Retire long unused models until all groups can have a new one; the last groups beyond that go without.

    This comes before merging: a model may go although a merge in the same step would have made room.
    """
    most, n = method.max_models, len(now.models)
    if most is None or n + len(groups) <= most:
        return now, seen, groups
    leaving = clustering.least_used(now.w, np.isin(np.arange(n), seen.best), n + len(groups) - most)
    place = np.cumsum(~np.isin(np.arange(n), leaving)) - 1
    now = now.drop(leaving, "made room, longest unused")
    return now, replace(seen, best=place[seen.best]), groups[: max(0, most - len(now.models))]


def home(seen: Seen, groups: Groups) -> Ints:
    """w[tau] = 1{m = argmin l}: each client's best model, or -1 for those that get a new one."""
    chosen = seen.best.copy()
    for clients in groups:
        chosen[list(clients)] = -1
    return chosen


def create(
    method: Detecting, now: Clustering, seen: Seen, groups: Groups, state: DriftState, fed: Federation
) -> Newborn:
    """One new model per group of clients, each with the event that says why and how it starts.

    A group's parent, and the numbers of its event, are those of its first client.
    """
    models, ids = now.models, list(range(state.born, state.born + len(groups)))
    parents = [int(seen.best[clients[0]]) for clients in groups]
    starts, trials = choose_starts(method, now, parents, groups, fed)
    family = [models.family[m] if s in SHARED else i for i, m, s in zip(ids, parents, starts, strict=True)]
    newborn = take(models, parents, ids, family)
    rule = {"delta": method.delta} if method.test == "threshold" else {"test": method.test}
    events = []
    for k, clients in enumerate(groups):
        fresh, first = starts[k] == "fresh", clients[0]
        if fresh:
            newborn = put(newborn, k, fed.fresh())
        cause: dict[str, Any] = {"clients": list(clients), method.metric: float(seen.lowest[first])}
        cause |= {"reference": float(state.reference[first]), **rule}
        cause |= {"from": None if fresh else models.ids[parents[k]]}
        cause |= {"family": family[k]} if starts[k] in SHARED else {}
        events.append(Event("created", ids[k], cause | trials[k]))
    return Newborn(newborn, groups, tuple(events))


def choose_starts(
    method: Detecting, now: Clustering, parents: Sequence[int], groups: Groups, fed: Federation
) -> tuple[list[Start], list[dict[str, Any]]]:
    """How each group's new model starts, and what the clients' trials found where they held any."""
    if method.init_ != "best":
        return [method.init_ for _ in groups], [{} for _ in groups]
    if not groups:
        return [], []
    parent = np.full(fed.n_clients, -1)
    for m, clients in zip(parents, groups, strict=True):
        parent[list(clients)] = m
    tournament = fed.tournament(
        now.models, clustering.fade(now.w, method.memory(fed.tau)[:-1]), parent, method.candidates
    )
    starts, trials = [], []
    for clients in groups:
        rows, wrong = int(tournament.rows[list(clients)].sum()), tournament.wrong[list(clients)].sum(axis=0)
        starts.append(method.candidates[method.winner(rows, wrong)])
        trials.append({"start": starts[-1], "starts": list(method.candidates), "rows": rows, "wrong": wrong.tolist()})
    return starts, trials
