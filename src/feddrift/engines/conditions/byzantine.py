"""Byzantine clients: false row counts, false evaluation results, and false updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from feddrift import rng
from feddrift.averaging import average_rows, compute_shares, sum_lane_sizes
from feddrift.engines.sparse_weights import Entries
from feddrift.engines.worker import CellScores, StatisticsRequest, Worker, WorkerProxy
from feddrift.errors import ConfigError
from feddrift.scores import MAX_LOG_LOSS
from feddrift.trees import map_trunk_and_head
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
    Updates,
    Votes,
)


@dataclass(frozen=True)
class ByzantineBehaviour:
    """Byzantine clients, by the kind of their false reports and updates.

    Clients with false reports train honestly, with the weight that the server assigns to them. Clients with false
    updates report honestly, and train their private models honestly.
    """

    claims: tuple[int, ...] = ()  # clients that report `factor` times their number of rows
    factor: float = 1e6
    alarms: tuple[int, ...] = ()  # clients that report only mistakes on new data, at every second time step
    glue: tuple[int, ...] = ()  # clients that report no mistakes in cross-evaluations, so that models merge
    losses: tuple[int, ...] = ()  # clients that report random numbers of mistakes
    reverse: tuple[int, ...] = ()  # clients that send `reverse_factor` times the opposite of their update
    reverse_factor: float = 20.0
    collude: tuple[int, ...] = ()  # clients that together replace the mean of each model: see `replace_mean`
    stale: tuple[int, ...] = ()  # clients that return the models that they received

    def __post_init__(self) -> None:
        for kind, factor in (("claims", self.factor), ("reverse", self.reverse_factor)):
            if not 1 <= factor <= 1e9:
                raise ConfigError(f"{kind}: factor must be in 1..1e9, got {factor:g}")

    @property
    def clients(self) -> tuple[int, ...]:
        """All Byzantine clients, in ascending order."""
        names = (field.name for field in fields(self) if not field.name.endswith("factor"))
        return tuple(sorted({c for name in names for c in getattr(self, name)}))

    @property
    def alters_updates(self) -> bool:
        """True if some clients send false updates."""
        return bool(self.reverse or self.collude or self.stale)

    def alter_updates(self, models: Models, updates: Updates) -> Updates:
        """Replace the updates of the clients in `reverse`, `stale` and `collude`, in this order.

        Args:
            models: The models before the round.
            updates: The updates of the round.
        """
        if not self.alters_updates or not len(updates.client):
            return updates
        _, first = np.unique(updates.lane, return_index=True)
        trunk, size = sum_lane_sizes(models, updates.model, updates.lane, updates.size)
        head_rows = UpdateRows(updates.client, updates.model, updates.size)
        trunk_rows = UpdateRows(updates.client[first], trunk, size)
        params = map_trunk_and_head(partial(_alter_rows, self), models, head_rows, trunk_rows, updates.params)
        return replace(updates, params=params)


@dataclass(frozen=True)
class UpdateRows:
    """Clients, models (or trunks) and sizes of the rows of an array of updates."""

    client: Ints  # [row]
    target: Ints  # [row], the row of the models that the update belongs to
    size: Floats  # [row]


def _alter_rows(lies: ByzantineBehaviour, old: Any, new: Any, rows: UpdateRows) -> Any:
    old = np.asarray(old)
    altered = np.array(new)
    reversed_rows = np.isin(rows.client, lies.reverse)
    start = old[rows.target[reversed_rows]]
    altered[reversed_rows] = start - old.dtype.type(lies.reverse_factor) * (altered[reversed_rows] - start)
    stale_rows = np.isin(rows.client, lies.stale)
    altered[stale_rows] = old[rows.target[stale_rows]]
    return replace_mean(old, altered, rows, np.isin(rows.client, lies.collude))


def replace_mean(old: Any, new: Any, rows: UpdateRows, colluding: Bools) -> Any:
    """Return the updates, where those of colluding clients make the weighted mean of each model move backwards.

    The colluding clients of a model know the updates of its other clients. They all send the same parameters. With
    these, the mean differs from the model before the round by the opposite of the mean update of the other clients. A
    model without other clients is trained honestly.

    Args:
        old: [m, ...], the parameters before the round.
        new: [row, ...], the updates.
        rows: The client, model and size of each update.
        colluding: [row], whether the client of the update takes part.
    """
    total = np.bincount(rows.target, rows.size, len(old))
    honest_total = np.bincount(rows.target[~colluding], rows.size[~colluding], len(old))
    replaced = colluding & (honest_total > 0)[rows.target]
    if not replaced.any():
        return new
    honest = np.flatnonzero(~colluding)
    share = np.zeros(len(new))
    share[honest] = compute_shares(rows.target[honest], rows.size[honest])
    update = average_rows(old, new, rows.target, share, honest) - old
    false_total = np.where(total > honest_total, total - honest_total, 1.0)
    factor = (1 + 2 * honest_total / false_total).astype(old.dtype)  # (total * -update - honest_total * update) / ...
    sent = old - factor.reshape(-1, *[1] * (old.ndim - 1)) * update
    altered = np.array(new)
    altered[replaced] = sent[rows.target[replaced]]
    return altered


NO_BYZANTINE_CLIENTS = ByzantineBehaviour()


class ByzantineWorker(WorkerProxy):
    """A Worker with Byzantine clients, whose reports depend only on the request, the time step and the seed."""

    def __init__(self, worker: Worker, lies: ByzantineBehaviour, tau: int, seed: int) -> None:
        super().__init__(worker)
        self.lies = lies
        self.tau = tau
        self.seed = seed
        self._inflate_known_counts()

    def load(self, saved: object) -> None:
        super().load(saved)
        self._inflate_known_counts()

    def _inflate_known_counts(self) -> None:
        known = self.worker.known
        self.known = replace(known, counts=self._inflate_counts(known.counts.T, np.arange(len(known.clients))).T)

    def score(
        self, models: Models, cells: Ints, metric: Metric, max_rows: int | None = None, by: Parting | None = None
    ) -> Iterator[CellScores]:
        for scored, sums, sizes in super().score(models, cells, metric, max_rows, by):
            reported = sums.astype(np.float64)
            worst = MAX_LOG_LOSS if metric == "loss" else 1.0
            for k, (t, c) in enumerate(cells[scored].tolist()):
                if c in self.lies.losses:
                    drawn = np.stack([self._draw_error_share(c, t, i) * sizes[k] for i in models.ids])
                    reported[:, k] = np.floor(drawn) if metric == "error" else drawn
                if max_rows is None and self._raises_alarm(c):
                    reported[:, k] = worst * sizes[k]
                if max_rows is not None and c in self.lies.glue:
                    reported[:, k] = 0
            yield scored, reported, sizes

    def confusion(self, models: Models, clients: Ints) -> Ints:
        counts = super().confusion(models, clients)
        classes = np.arange(counts.shape[-1])
        for k, c in enumerate(clients.tolist()):
            for m, i in enumerate(models.ids):
                if self._raises_alarm(c) or c in self.lies.losses:
                    rows = counts[k, m].sum(axis=1)
                    share = 0.0 if self._raises_alarm(c) else self._draw_error_share(c, self.tau, i)
                    right = np.floor(rows * share).astype(np.int64)
                    counts[k, m] = np.diag(right)
                    counts[k, m, classes, np.roll(classes, 1)] += rows - right
        return self._inflate_counts(counts, clients)

    def describe(self, models: Models, clients: Ints, question: StatisticsRequest) -> Moments:
        moments = super().describe(models, clients, question)
        return replace(moments, count=self._inflate_counts(moments.count, clients))

    def reroute(self, models: Models, votes: Floats | Votes, ballot: Ballot, routers: Mapping[int, Router]) -> Ints:
        return self._inflate_counts(super().reroute(models, votes, ballot, routers), np.arange(len(votes)))

    def trial(self, models: Models, older: Entries, parent: Ints, starts: Sequence[Start], local: Local) -> Tournament:
        return self._falsify_tournament(super().trial(models, older, parent, starts, local))

    def contest(self, models: Models, teams: Ints, held_by: Local | None) -> Tournament:
        return self._falsify_tournament(super().contest(models, teams, held_by))

    def _falsify_tournament(self, tournament: Tournament) -> Tournament:
        wrong = tournament.wrong.copy()
        clients = np.arange(len(tournament.rows))
        for c in self.lies.losses:
            share = np.array([self._draw_error_share(c, self.tau, k) for k in range(wrong.shape[1])])
            both = np.outer(share, share)
            np.fill_diagonal(both, share)
            wrong[c] = np.floor(both * tournament.rows[c]).astype(np.int64)
        for c in self.lies.alarms:
            wrong[c] = tournament.rows[c] if self._raises_alarm(c) else wrong[c]
        return Tournament(self._inflate_counts(tournament.rows, clients), self._inflate_counts(wrong, clients))

    def _raises_alarm(self, c: int) -> bool:
        return c in self.lies.alarms and self.tau % 2 == 1

    def _inflate_counts(self, counts: Ints, clients: Ints) -> Ints:
        """Multiply the counts [client, ...] of clients with false row counts."""
        inflated: Bools = np.isin(clients, self.lies.claims)
        factors = np.where(inflated, self.lies.factor, 1.0).reshape(-1, *[1] * (counts.ndim - 1))
        return np.asarray(counts * factors).astype(np.int64)

    def _draw_error_share(self, c: int, *names: int) -> float:
        """Return the share of mistakes that client c reports for a request with these numbers."""
        return float(rng.to_unit_interval(rng.derive_key(self.seed, "lies", self.tau, c, *names)[0]))
