"""Trials at the clients: how should a new model start? Each client finds out on its own new data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Protocol, Self

import numpy as np

from feddrift.engines.local import sampling
from feddrift.engines.sparse_weights import Entries, begins_of
from feddrift.engines.worker import Work, Worker, in_turn
from feddrift.models import only_trained, take
from feddrift.types import Bools, Ints, Local, Models, Start, Tournament

HELD_OUT_SHARE = 0.3  # of a client's new data: a trial is judged on it
MANY_CONTESTANTS = 12  # above this number their common mistakes are counted client by client
TRIAL_ID_OFFSET = 2**31  # families of trials have ids from here on, so that their random keys are no family's of a run


class Host(Worker, Protocol):
    """What a trial needs of the worker whose clients hold it."""

    tau: int

    def apart(self) -> Self: ...
    def fresh(self) -> Models: ...
    def shuffled(self, t: int, c: int) -> Ints: ...
    def wrong(self, models: Models, rows: Ints, sizes: Ints, which: Ints) -> Bools: ...


def hold_trials(
    host: Host, models: Models, older: Entries, parent: Ints, starts: Sequence[Start], local: Local
) -> Tournament:
    """Let every client with a parent train each start; how many of the rows that it held out each gets wrong."""
    clients = np.flatnonzero(parent >= 0)
    if not len(clients):
        return Tournament.nobody(len(parent), len(starts))
    judged = [host.shuffled(host.tau, int(c)) for c in clients]
    judged = [rows[sampling.held_rows(len(rows), HELD_OUT_SHARE, "last")] for rows in judged]
    sizes = np.array([len(rows) for rows in judged])
    mistakes: list[Bools] = []  # [start][row]
    for start in starts:
        contender, data, position = _contender(host, models, older, parent, clients, start)
        trains: Literal["all", "head"] = "head" if start == "head" else "all"
        how = replace(local, hold_out=HELD_OUT_SHARE, holds="last", bags=False, trains=trains, patience=0.0)
        trained = _trained(host.apart(), contender, Work.of(contender, data, host.known.counts), how)
        mistakes.append(host.wrong(trained, np.concatenate(judged), sizes, position))
    return counted(len(parent), clients, sizes, mistakes)


def counted(n_clients: int, clients: Ints, sizes: Ints, mistakes: Sequence[Bools] | Bools) -> Tournament:
    """The table of each client from mistakes[contestant][row], whose rows lie one client after the other."""
    tournament = Tournament.nobody(n_clients, len(mistakes))
    tournament.rows[clients] = sizes
    begins = begins_of(sizes)
    if len(mistakes) > MANY_CONTESTANTS:
        table = np.asarray(mistakes, dtype=np.float32)  # whole numbers below 2^24: products are exact in any order
        for c, begin, size in zip(clients.tolist(), begins.tolist(), sizes.tolist(), strict=True):
            of_client = table[:, begin : begin + size]
            tournament.wrong[c] = of_client @ of_client.T
        return tournament
    for a in range(len(mistakes)):
        for b in range(a, len(mistakes)):
            common = np.add.reduceat(mistakes[a] & mistakes[b], begins, dtype=np.int64)
            tournament.wrong[clients, a, b] = common
            tournament.wrong[clients, b, a] = common
    return tournament


def _trained(worker: Worker, models: Models, work: Work, local: Local) -> Models:
    rounds = worker.rounds if local.average == "mean" else lambda *args: in_turn(worker, *args)
    trained, _ = rounds(models, work, 0, local.rounds, local)
    return only_trained(models, trained, local.trains)


def _contender(
    host: Host, models: Models, w: Entries, parent: Ints, clients: Ints, start: Start
) -> tuple[Models, Entries, Ints]:
    """What each client trains to try a start, on which data, and where the one that it is about stands."""
    n_clients, place, family = len(parent), np.full(len(parent), -1), np.asarray(models.family)
    place[clients] = np.arange(len(clients))
    kin = np.zeros(len(w.t), dtype=bool)  # data for the models on the same trunk, beside which it learns
    if start == "joint":
        kin = (place[w.c] >= 0) & (family[w.m] == family[parent[w.c]])
    old = w.select(kin)
    # A client's block: the new model, a copy of its parent or a fresh one, then those beside it.
    width = len(models) + 1
    old_names, new_names = place[old.c] * width + old.m + 1, np.arange(len(clients)) * width
    names = np.unique(np.concatenate([new_names, old_names]))
    owner, within = names // width, names % width
    source, positions = models, np.where(within == 0, parent[clients[owner]], within - 1)
    if start == "fresh":
        source, positions = host.fresh(), np.zeros_like(positions)
    copies = take(source, positions, range(len(names)), (TRIAL_ID_OFFSET + clients[owner]).tolist())
    now = np.full(len(clients), host.tau)  # a client's draws depend on it alone
    first = np.searchsorted(names, new_names)
    data = Entries(
        np.concatenate([old.t, now]),
        np.concatenate([old.c, clients]),
        np.concatenate([np.searchsorted(names, old_names), first]),
        np.concatenate([old.value, np.ones(len(clients))]),
        (host.tau + 1, n_clients, len(names)),
    )
    return copies, data, first
