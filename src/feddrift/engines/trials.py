"""Trials at the clients: how should a new model start? Each client finds out on its own new data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from feddrift.engines import sampling
from feddrift.engines.conditions import IDEAL
from feddrift.engines.entries import Entries, begins_of
from feddrift.models import take
from feddrift.types import Bools, Ints, Models, Start, Tournament, Weights

if TYPE_CHECKING:
    from feddrift.engines.base import TimeStep

HELD_OUT_SHARE = 0.3  # of a client's new data: a trial is judged on it
TRIAL_ID_OFFSET = 2**31  # families of trials have ids from here on, so that their random keys are no family's of a run


def tournament(fed: TimeStep, models: Models, w: Weights, parent: Ints, starts: Sequence[Start]) -> Tournament:
    entries = Entries.of(w, (fed.tau, fed.n_clients, len(models)))
    if parent.shape != (fed.n_clients,):
        raise ValueError(f"a tournament needs a parent for each of {fed.n_clients} clients, got {parent.shape}")
    if models.mask is not None:
        raise ValueError("models that see different inputs hold no tournament")
    found = Tournament.nobody(fed.n_clients, len(starts))
    clients = np.flatnonzero((parent >= 0) & (fed.counts[fed.tau] > 1) & fed.reachable)
    if not len(clients):
        return found
    judged = [fed._shuffled(fed.tau, int(c)) for c in clients]
    judged = [rows[int(sampling.trained_rows(np.array(len(rows)), HELD_OUT_SHARE)) :] for rows in judged]
    sizes = np.array([len(rows) for rows in judged])
    found.rows[clients] = sizes
    mistakes: list[Bools] = []  # [start][row]
    for start in starts:
        contender, given, position = _contender(fed, models, entries, parent, clients, start)
        apart = fed._engine.at(fed.tau)  # what happens there is no part of the run, and each client's own
        apart.conditions = IDEAL
        trains: Literal["all", "head"] = "head" if start == "head" else "all"
        local = replace(fed.local, hold_out=HELD_OUT_SHARE, bags=False, trains=trains)
        trained = apart.train(contender, given, local=local)
        mistakes.append(fed._engine.wrong(trained, np.concatenate(judged), sizes, position))
    for a, b in np.ndindex(len(starts), len(starts)):
        found.wrong[clients, a, b] = np.add.reduceat(mistakes[a] & mistakes[b], begins_of(sizes), dtype=np.int64)
    return found


def _contender(
    fed: TimeStep, models: Models, w: Entries, parent: Ints, clients: Ints, start: Start
) -> tuple[Models, Entries, Ints]:
    """What each client trains to try a start, on which data, and where the one that it is about stands."""
    place, family = np.full(fed.n_clients, -1), np.asarray(models.family)
    place[clients] = np.arange(len(clients))
    kin = np.zeros(len(w.t), dtype=bool)  # data for the models on the same trunk, beside which it learns
    if start == "joint":
        kin = (place[w.c] >= 0) & (family[w.m] == family[parent[w.c]]) & (fed.counts[w.t, w.c] > 0)
    old = w.only(kin)
    # A client's block: the new model, a copy of its parent or a fresh one, then those beside it.
    width = len(models) + 1
    old_names, new_names = place[old.c] * width + old.m + 1, np.arange(len(clients)) * width
    names = np.unique(np.concatenate([new_names, old_names]))
    owner, within = names // width, names % width
    source, positions = models, np.where(within == 0, parent[clients[owner]], within - 1)
    if start == "fresh":
        source, positions = fed.fresh(), np.zeros_like(positions)
    taken = take(source, positions, range(len(names)), (TRIAL_ID_OFFSET + clients[owner]).tolist())
    now = np.full(len(clients), fed.tau)  # a client's draws depend on it alone
    first = np.searchsorted(names, new_names)
    given = Entries(
        np.concatenate([old.t, now]),
        np.concatenate([old.c, clients]),
        np.concatenate([np.searchsorted(names, old_names), first]),
        np.concatenate([old.value, np.ones(len(clients))]),
        (fed.tau + 1, fed.n_clients, len(names)),
    )
    return taken, given, first
