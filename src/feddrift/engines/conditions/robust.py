"""Limits on the influence of a client on the others: the server's part of the condition `defend`.

Both versions have these limits:

- Models merge only if most clients of both agree: L is the median over clients, not the mean over rows.
- At most one alarm of each client in `MIN_ALARM_INTERVAL_STEPS` time steps is accepted.
- A client with impossible scores is excluded for the rest of the time step, and the log names it.

- The weight of a client in merges and counts is at most `MAX_WEIGHT_RATIO` times that of the median client.

With `defend=True`, of version 0.3, this is also its weight in averages. `defend="robust"` has further limits:

- The weight of a client in merges and counts is also at most that of the largest client that remains if the share
  `LEFT_OUT_SHARE` of the clients, those with the largest counts, is left out.
- A model is averaged by the median of each parameter, which has no weights, after `averaging.limit_lengths`.
- Models that merge are compared with the best model on the same data, see `compare_with_best`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from feddrift.engines.conditions.conditions import Defend
from feddrift.engines.sparse_weights import Entries
from feddrift.engines.worker import CellScores, StatisticsRequest, Worker, WorkerProxy
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
    Tournament,
    Votes,
)

log = logging.getLogger(__name__)

MAX_WEIGHT_RATIO = 5  # row count divided by the median row count
LEFT_OUT_SHARE = 0.3  # share of the clients, at least one, whose counts do not determine the limit of counts
MIN_ALARM_INTERVAL_STEPS = 3  # time steps from an accepted alarm of a client to its next
MAX_MEAN_LOSS = 1e6  # mean cross-entropy of a row
NO_ALARM_TIME = -(2**31)  # in place of the time of the last accepted alarm if there was none


def choose_average(local: Local) -> Local:
    """Return settings of training that average updates by their median instead of their mean; other rules stay."""
    return replace(local, average="median") if local.average == "mean" else local


def cap_counts(counts: Ints, reachable: Bools, defend: Defend = True) -> Ints:
    """Limit counts[t, c] to `MAX_WEIGHT_RATIO` times the median of the reachable clients at each time step.

    With `robust` the median is the lower one: of an even number of counts the smaller one of the two in the middle. The
    limit is also at most the largest count that remains if those of `LEFT_OUT_SHARE` of the clients are left out. The
    claims of as many Byzantine clients are then at most the largest honest count.

    A client without data at a time step is represented by the median of its other time steps. Otherwise a client that
    is the only one with data would not be limited.

    >>> cap_counts(np.array([[10, 10, 10**9], [0, 20, 900]]), np.ones(3, dtype=bool)).tolist()
    [[10, 10, 50], [0, 20, 100]]
    >>> cap_counts(np.array([[10, 30, 20, 10**9]]), np.ones(4, dtype=bool), "robust").tolist()
    [[10, 30, 20, 30]]
    """
    compared = reachable & (counts > 0).any(axis=0)
    if not compared.any():
        return counts
    rows = counts[:, compared].astype(np.float64)
    medians = np.array([np.median(client_rows[client_rows > 0]) for client_rows in rows.T])
    compared_rows = np.where(rows > 0, rows, medians)
    if defend == "robust":
        in_order = np.sort(compared_rows, axis=1)
        last = in_order.shape[1] - 1
        n_left_out = min(last, max(1, int(LEFT_OUT_SHARE * in_order.shape[1])))
        limit = np.minimum(in_order[:, last - n_left_out], MAX_WEIGHT_RATIO * in_order[:, last // 2])
    else:
        limit = MAX_WEIGHT_RATIO * np.median(compared_rows, axis=1)
    return np.asarray(np.minimum(counts, np.maximum(1, limit).astype(np.int64)[:, None]))


def compute_client_median(L: Floats) -> Floats:
    """Return L[i, j] from L[i, j, c]: the median over the clients with data for model j.

    >>> compute_client_median(np.array([[[0.0, 0.4, 0.5, np.nan]]])).tolist()
    [[0.4]]
    """
    ordered = np.sort(L, axis=2)  # NaN last
    n = np.isfinite(ordered).sum(axis=2, keepdims=True)
    low = np.take_along_axis(ordered, np.maximum((n - 1) // 2, 0), axis=2)
    high = np.take_along_axis(ordered, n // 2 * (n > 0), axis=2)
    return np.asarray(np.where(n > 0, (low + high) / 2, np.nan))[:, :, 0]


def compare_with_best(L: Floats) -> Floats:
    """Return L[i, j] where the score of a model on its own data is the lowest score of all models on these data.

    Two models merge if the score of each on the data of the other exceeds that on its own data by at most delta. A bad
    model whose score on its own data is high would pass this test. With the lowest score instead, merged models differ
    by at most 2 delta on the data of either, even if the clients of one of them report false scores.

    >>> compare_with_best(np.array([[0.5, 0.5], [0.1, 0.1]])).tolist()
    [[0.1, 0.5], [0.1, 0.1]]
    """
    compared = L.copy()
    own = np.arange(len(L))
    compared[own, own] = np.where(np.isnan(L[own, own]), np.nan, np.fmin.reduce(L, axis=0))
    return compared


class AlarmFilter:
    """Filter that accepts at most one alarm of each client in `MIN_ALARM_INTERVAL_STEPS` time steps.

    Args:
        last_times: [c], the time step of the last accepted alarm of each client, without clients that have joined
            since; None: no alarm was accepted yet.
        n_clients: The number of clients.
        tau: The time step of the alarms.

    >>> alarms = AlarmFilter(np.array([3, 0]), n_clients=3, tau=4)
    >>> alarms.accept(np.array([True, True, False])).tolist()
    [False, True, False]
    >>> alarms.last_times.tolist() == [3, 4, NO_ALARM_TIME]
    True
    """

    def __init__(self, last_times: Ints | None, n_clients: int, tau: int) -> None:
        earlier_times: Ints = np.zeros(0, dtype=np.int64) if last_times is None else last_times
        self._earlier_times = np.concatenate([earlier_times, np.full(n_clients - len(earlier_times), NO_ALARM_TIME)])
        self._tau = tau
        self._accepted: Bools = np.zeros(n_clients, dtype=bool)

    def accept(self, alarms: Bools) -> Bools:
        """Return [c], true for the alarms that are accepted."""
        accepted: Bools = alarms & (self._tau - self._earlier_times >= MIN_ALARM_INTERVAL_STEPS)
        self._accepted |= accepted
        return accepted

    @property
    def last_times(self) -> Ints:
        """[c], the time step of each client's last accepted alarm, including those of this time step."""
        return np.where(self._accepted, self._tau, self._earlier_times)


class RobustWorker(WorkerProxy):
    """A Worker whose counts are limited, and whose impossible scores are rejected."""

    def __init__(self, worker: Worker, tau: int, defend: Defend = True) -> None:
        super().__init__(worker)
        self.tau = tau
        is_robust = defend == "robust"
        self._limit_text = "as other large clients" if is_robust else f"{MAX_WEIGHT_RATIO} times the median"
        self._apply_caps(cap_counts(worker.known.counts, worker.known.reachable, defend))

    def save(self) -> Any:
        # Names in stored checkpoints, which do not change.
        return {"bounded": self.known.counts, "heard": self.known.reachable, "behind": super().save()}

    def load(self, saved: Any) -> None:
        super().load(saved["behind"])
        self.worker.known.reachable &= saved["heard"]
        self._apply_caps(saved["bounded"])

    def _apply_caps(self, counts: Ints) -> None:
        known = self.worker.known
        self.known = replace(known, counts=counts)  # `reachable` is the same array in both
        claimed = np.maximum(known.counts[self.tau], 1)
        self._share = np.where(known.counts[self.tau] > counts[self.tau], counts[self.tau] / claimed, 1.0)
        for c in np.flatnonzero(self._share < 1):
            text = "time %d: client %s reports %d rows and counts as %d, %s"
            log.info(text, self.tau, known.clients[c], claimed[c], counts[self.tau, c], self._limit_text)

    def score(
        self, models: Models, cells: Ints, metric: Metric, max_rows: int | None = None, by: Parting | None = None
    ) -> Iterator[CellScores]:
        worst = MAX_MEAN_LOSS if metric == "loss" else 1.0
        for scored, sums, sizes in super().score(models, cells, metric, max_rows, by):
            bad = (np.isfinite(sums) & ((sums < 0) | (sums > worst * sizes))).reshape(len(models), len(scored), -1)
            absurd = bad.any(axis=(0, 2)) & self.known.reachable[cells[scored, 1]]
            for k in np.flatnonzero(absurd):
                value = float(sums[:, k].reshape(-1)[bad[:, k].reshape(-1)][0])
                self._exclude_client(int(cells[scored[k], 1]), f"{metric} of {value:g} on {int(np.sum(sizes[k]))} rows")
            accepted = self.known.reachable[cells[scored, 1]]
            if accepted.any():
                yield scored[accepted], sums[:, accepted], sizes[accepted]

    def confusion(self, models: Models, clients: Ints) -> Ints:
        return self._scale_counts(super().confusion(models, clients), clients)

    def describe(self, models: Models, clients: Ints, question: StatisticsRequest) -> Moments:
        moments = super().describe(models, clients, question)
        return replace(moments, count=self._scale_counts(moments.count, clients))

    def reroute(self, models: Models, votes: Floats | Votes, ballot: Ballot, routers: Mapping[int, Router]) -> Ints:
        return self._scale_counts(super().reroute(models, votes, ballot, routers), np.arange(len(votes)))

    def trial(self, models: Models, older: Entries, parent: Ints, starts: Sequence[Start], local: Local) -> Tournament:
        return self._check_tournament(super().trial(models, older, parent, starts, local))

    def contest(self, models: Models, teams: Ints, held_by: Local | None) -> Tournament:
        return self._check_tournament(super().contest(models, teams, held_by))

    def _check_tournament(self, tournament: Tournament) -> Tournament:
        """Reject impossible counts of mistakes, and scale the others to the limited weight of the client."""
        n_clients, n_contestants = tournament.wrong.shape[:2]
        clients = np.flatnonzero(tournament.rows)  # usually few: the table of all clients may be large
        rows = tournament.rows[clients]
        wrong = tournament.wrong[clients]
        mistakes = np.diagonal(wrong, axis1=1, axis2=2).copy()
        max_common = np.minimum(mistakes[:, :, None], mistakes[:, None])
        bad = (wrong < 0) | (wrong > max_common) | (wrong != np.swapaxes(wrong, 1, 2)) | (wrong > rows[:, None, None])
        too_many = rows > self.worker.known.counts[self.tau, clients]
        for k in np.flatnonzero(bad.any(axis=(1, 2)) | too_many):
            self._exclude_client(
                int(clients[k]), f"common mistakes of {int(mistakes[k].max(initial=0))} on {int(rows[k])} rows"
            )
            rows[k] = 0
            wrong[k] = 0
        checked = Tournament.empty(n_clients, n_contestants)
        checked.rows[clients] = np.maximum(self._scale_counts(rows, clients), rows > 0)
        checked.wrong[clients] = self._scale_counts(wrong, clients)
        return checked

    def _scale_counts(self, counts: Ints, clients: Ints) -> Ints:
        """Scale counts [client, ...] by the limited row count of each client divided by the reported one."""
        factors = self._share[clients].reshape(-1, *[1] * (counts.ndim - 1))
        return np.asarray(np.rint(counts * factors)).astype(np.int64)

    def _exclude_client(self, c: int, report: str) -> None:
        self.known.reachable[c] = False
        text = "time %d: client %s reports %s, which is impossible: it is excluded for the rest of the time step"
        log.warning(text, self.tau, self.known.clients[c], report)
