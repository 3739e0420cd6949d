"""Clients that tell what is not so: of the rows that they have, and of how models do on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from feddrift import rng
from feddrift.engines.sparse_weights import Entries
from feddrift.engines.worker import Question, Scored, Through, Worker
from feddrift.errors import ConfigError
from feddrift.scores import MAX_LOG_LOSS
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


@dataclass(frozen=True)
class Lies:
    """Who lies, by kind: numbers of clients. They train honestly, with whatever weight the server gives them."""

    claims: tuple[int, ...] = ()  # say that they have `factor` times their rows
    factor: float = 1e6
    alarms: tuple[int, ...] = ()  # get everything wrong on new data, at every second time step
    glue: tuple[int, ...] = ()  # make no mistakes in any cross-evaluation, so that models merge
    losses: tuple[int, ...] = ()  # count mistakes at random

    def __post_init__(self) -> None:
        if not 1 <= self.factor <= 1e9:
            raise ConfigError(f"claims: factor must be in 1..1e9, got {self.factor:g}")

    @property
    def who(self) -> tuple[int, ...]:
        """All of them."""
        names = (field.name for field in fields(self) if field.name != "factor")
        return tuple(sorted({c for name in names for c in getattr(self, name)}))


def lying(worker: Worker, lies: Lies, tau: int, seed: int) -> Worker:
    """The worker, with the answers of liars in place of theirs."""
    return Lying(worker, lies, tau, seed) if lies.who else worker


class Lying(Through):
    """A Worker some of whose clients lie; what they say depends on nothing but the question."""

    def __init__(self, worker: Worker, lies: Lies, tau: int, seed: int) -> None:
        super().__init__(worker)
        self.lies, self.tau, self.seed = lies, tau, seed
        self._claim()

    def load(self, saved: object) -> None:
        super().load(saved)
        self._claim()

    def _claim(self) -> None:
        known = self.worker.known
        self.known = replace(known, counts=self._claimed(known.counts.T, np.arange(len(known.clients))).T)

    def score(
        self, models: Models, cells: Ints, metric: Metric, most: int | None = None, by: Parting | None = None
    ) -> Iterator[Scored]:
        for which, sums, sizes in super().score(models, cells, metric, most, by):
            told, worst = sums.astype(np.float64), MAX_LOG_LOSS if metric == "loss" else 1.0
            for k, (t, c) in enumerate(cells[which].tolist()):
                if c in self.lies.losses:
                    drawn = np.stack([self._share(c, t, i) * sizes[k] for i in models.ids])
                    told[:, k] = np.floor(drawn) if metric == "error" else drawn
                if most is None and self._alarms(c):
                    told[:, k] = worst * sizes[k]
                if most is not None and c in self.lies.glue:
                    told[:, k] = 0
            yield which, told, sizes

    def confusion(self, models: Models, clients: Ints) -> Ints:
        counts = super().confusion(models, clients)
        classes = np.arange(counts.shape[-1])
        for k, c in enumerate(clients.tolist()):
            for m, i in enumerate(models.ids):
                if self._alarms(c) or c in self.lies.losses:
                    rows = counts[k, m].sum(axis=1)
                    right = np.floor(rows * (0.0 if self._alarms(c) else self._share(c, self.tau, i))).astype(np.int64)
                    counts[k, m] = np.diag(right)
                    counts[k, m, classes, np.roll(classes, 1)] += rows - right
        return self._claimed(counts, clients)

    def describe(self, models: Models, clients: Ints, question: Question) -> Moments:
        moments = super().describe(models, clients, question)
        return replace(moments, count=self._claimed(moments.count, clients))

    def reroute(self, models: Models, votes: Floats | Votes, ballot: Ballot, routers: Mapping[int, Router]) -> Ints:
        return self._claimed(super().reroute(models, votes, ballot, routers), np.arange(len(votes)))

    def trial(self, models: Models, older: Entries, parent: Ints, starts: Sequence[Start], local: Local) -> Tournament:
        return self._told(super().trial(models, older, parent, starts, local))

    def contest(self, models: Models, teams: Ints, held_by: Local | None) -> Tournament:
        return self._told(super().contest(models, teams, held_by))

    def _told(self, found: Tournament) -> Tournament:
        wrong, everyone = found.wrong.copy(), np.arange(len(found.rows))
        for c in self.lies.losses:
            share = np.array([self._share(c, self.tau, k) for k in range(wrong.shape[1])])
            both = np.outer(share, share)
            np.fill_diagonal(both, share)
            wrong[c] = np.floor(both * found.rows[c]).astype(np.int64)
        for c in self.lies.alarms:
            wrong[c] = found.rows[c] if self._alarms(c) else wrong[c]
        return Tournament(self._claimed(found.rows, everyone), self._claimed(wrong, everyone))

    def _alarms(self, c: int) -> bool:
        return c in self.lies.alarms and self.tau % 2 == 1

    def _claimed(self, counts: Ints, clients: Ints) -> Ints:
        """Counts [client, ...], with those of who claims more in their place."""
        liars: Bools = np.isin(clients, self.lies.claims)
        by = np.where(liars, self.lies.factor, 1.0).reshape(-1, *[1] * (counts.ndim - 1))
        return np.asarray(counts * by).astype(np.int64)

    def _share(self, c: int, *names: int) -> float:
        """A share of mistakes, drawn for this question."""
        return float(rng.unit(rng.derive(self.seed, "lies", self.tau, c, *names)[0]))
