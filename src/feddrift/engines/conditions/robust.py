"""What one client can do to the others, bounded: the server's side of the condition `defend`.

- One client weighs at most WEIGHT times what the median client does, whatever rows it claims: in averages, merges and
  all counts that it sends.
- A merge needs the clients behind either model to agree: L is their median, not their mean by rows.
- Of one client's alarms at most one in QUIET time steps is acted on, its first always.
- Scores that cannot be are refused: their client is out of reach for the rest of the time step, and named.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from feddrift.engines.sparse_weights import Entries
from feddrift.engines.worker import Question, Scored, Through, Worker
from feddrift.types import (
    Ballot,
    Bools,
    Floats,
    Ints,
    Local,
    Metric,
    Models,
    Moments,
    Parting,
    Router,
    Start,
    State,
    Tournament,
    Votes,
)

log = logging.getLogger(__name__)

WEIGHT = 5  # times the median row count
QUIET = 3  # time steps
WORST_LOSS = 1e6  # mean cross-entropy of a row
NEVER = -(2**31)  # the time of an alarm that never was


def bounded(counts: Ints, reachable: Bools) -> Ints:
    """counts[t, c], none above WEIGHT times the median of the clients in reach at that time step.

    A client without data at a time step stands there with its usual number, so that no time is one client's alone.

    >>> bounded(np.array([[10, 10, 10**9], [0, 20, 900]]), np.ones(3, dtype=bool)).tolist()
    [[10, 10, 50], [0, 20, 100]]
    """
    heard = reachable & (counts > 0).any(axis=0)
    if not heard.any():
        return counts
    mine = counts[:, heard].astype(np.float64)
    usual = np.array([np.median(rows[rows > 0]) for rows in mine.T])
    limit = WEIGHT * np.median(np.where(mine > 0, mine, usual), axis=1)
    return np.asarray(np.minimum(counts, np.maximum(1, limit).astype(np.int64)[:, None]))


def middle(L: Floats) -> Floats:
    """L[i, j, c] per client as L[i, j]: the median of the clients that have data for model j.

    >>> middle(np.array([[[0.0, 0.4, 0.5, np.nan]]])).tolist()
    [[0.4]]
    """
    ordered = np.sort(L, axis=2)  # NaN last
    n = np.isfinite(ordered).sum(axis=2, keepdims=True)
    low, high = (np.take_along_axis(ordered, np.maximum(at, 0), axis=2) for at in ((n - 1) // 2, n // 2 * (n > 0)))
    return np.asarray(np.where(n > 0, (low + high) / 2, np.nan))[:, :, 0]


def last_acted(state: State, n_clients: int) -> Ints:
    """[c], when an alarm of each client was acted on last; NEVER for who has raised none, and for newcomers."""
    known: Ints = np.zeros(0, dtype=np.int64) if state.acted is None else state.acted
    return np.concatenate([known, np.full(n_clients - len(known), NEVER)])


class Guarded(Through):
    """A Worker that the server does not trust: counts are bounded, scores are looked at."""

    def __init__(self, worker: Worker, tau: int) -> None:
        super().__init__(worker)
        self.tau = tau
        self._bound(bounded(worker.known.counts, worker.known.reachable))

    def save(self) -> Any:
        return {"bounded": self.known.counts, "heard": self.known.reachable, "behind": super().save()}

    def load(self, saved: Any) -> None:
        super().load(saved["behind"])
        self.worker.known.reachable &= saved["heard"]
        self._bound(saved["bounded"])

    def _bound(self, counts: Ints) -> None:
        known = self.worker.known
        self.known = replace(known, counts=counts)  # who is in reach is one array, for both
        claimed = np.maximum(known.counts[self.tau], 1)
        self._share = np.where(known.counts[self.tau] > counts[self.tau], counts[self.tau] / claimed, 1.0)
        for c in np.flatnonzero(self._share < 1):
            what = "time %d: client %s claims %d rows and counts as %d, %d times the median"
            log.info(what, self.tau, known.clients[c], claimed[c], counts[self.tau, c], WEIGHT)

    def score(
        self, models: Models, cells: Ints, metric: Metric, most: int | None = None, by: Parting | None = None
    ) -> Iterator[Scored]:
        worst = WORST_LOSS if metric == "loss" else 1.0
        for which, sums, sizes in super().score(models, cells, metric, most, by):
            bad = (np.isfinite(sums) & ((sums < 0) | (sums > worst * sizes))).reshape(len(models), len(which), -1)
            absurd = bad.any(axis=(0, 2)) & self.known.reachable[cells[which, 1]]
            for k in np.flatnonzero(absurd):
                value = float(sums[:, k].reshape(-1)[bad[:, k].reshape(-1)][0])
                self._refuse(int(cells[which[k], 1]), f"{metric} of {value:g} on {int(np.sum(sizes[k]))} rows")
            heard = self.known.reachable[cells[which, 1]]
            if heard.any():
                yield which[heard], sums[:, heard], sizes[heard]

    def confusion(self, models: Models, clients: Ints) -> Ints:
        return self._weighed(super().confusion(models, clients), clients)

    def describe(self, models: Models, clients: Ints, question: Question) -> Moments:
        moments = super().describe(models, clients, question)
        return replace(moments, count=self._weighed(moments.count, clients))

    def reroute(self, models: Models, votes: Floats | Votes, ballot: Ballot, routers: Mapping[int, Router]) -> Ints:
        return self._weighed(super().reroute(models, votes, ballot, routers), np.arange(len(votes)))

    def trial(self, models: Models, older: Entries, parent: Ints, starts: Sequence[Start], local: Local) -> Tournament:
        return self._looked_at(super().trial(models, older, parent, starts, local))

    def contest(self, models: Models, teams: Ints, held_by: Local | None) -> Tournament:
        return self._looked_at(super().contest(models, teams, held_by))

    def _looked_at(self, found: Tournament) -> Tournament:
        """Reject impossible counts of mistakes, and scale the others to the weight that the client has."""
        n_clients, n_contestants = found.wrong.shape[:2]
        clients = np.flatnonzero(found.rows)  # few of many: the table of all may be large
        rows, wrong = found.rows[clients], found.wrong[clients]
        own = np.diagonal(wrong, axis1=1, axis2=2).copy()
        most = np.minimum(own[:, :, None], own[:, None])
        bad = (wrong < 0) | (wrong > most) | (wrong != np.swapaxes(wrong, 1, 2)) | (wrong > rows[:, None, None])
        too_many = rows > self.worker.known.counts[self.tau, clients]
        for k in np.flatnonzero(bad.any(axis=(1, 2)) | too_many):
            self._refuse(int(clients[k]), f"common mistakes of {int(own[k].max(initial=0))} on {int(rows[k])} rows")
            rows[k], wrong[k] = 0, 0
        checked = Tournament.nobody(n_clients, n_contestants)
        checked.rows[clients] = np.maximum(self._weighed(rows, clients), rows > 0)
        checked.wrong[clients] = self._weighed(wrong, clients)
        return checked

    def _weighed(self, counts: Ints, clients: Ints) -> Ints:
        """Counts [client, ...] by how much of its claim a client weighs."""
        by = self._share[clients].reshape(-1, *[1] * (counts.ndim - 1))
        return np.asarray(np.rint(counts * by)).astype(np.int64)

    def _refuse(self, c: int, what: str) -> None:
        self.known.reachable[c] = False
        said = "time %d: client %s says %s, which cannot be: refused, it sits out the rest of the time step"
        log.warning(said, self.tau, self.known.clients[c], what)
