"""What the in-process engines share: which rows a verb touches, what it costs, how counts become L."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from feddrift import rng, sampling
from feddrift.errors import ConfigError
from feddrift.models import leaves, per_axis, split, take, tree_map, trunk_of
from feddrift.types import Bools, Floats, Ints, Local, Metric, Models, Net, Start, State, Stream, Tournament, Updates

# Cross-evaluation looks at a keyed sample of at most so many rows of a stored cell.
SCORE_ROWS = 512

# A tournament judges on this share of a client's new data; its lanes have names that no family of a run has.
JUDGED = 0.3
TRIAL = 2**31


class Engine(ABC):
    """Holds the clients' data and does their work; `at(tau)` is the federation of one time step."""

    def __init__(self, stream: Stream, net: Net, local: Local, seed: int) -> None:
        self.stream, self.net, self.local, self.seed = stream, net, local, seed

    @abstractmethod
    def at(self, tau: int) -> TimeStep: ...

    @abstractmethod
    def logits(self, models: Models, rows: Ints) -> Iterator[npt.NDArray[np.float32]]:
        """The logits [m, row, class] of these rows, in blocks of rows."""

    def per_row(self, models: Models, rows: Ints, value: Metric | Literal["class"]) -> Floats:
        """[m, row]: error is 0 or 1, loss the cross-entropy, brier (1 - p)^2, class the predicted one."""
        found, done = [], 0
        for logits in self.logits(models, rows):
            y = self.stream.y[rows[done : done + logits.shape[1]]]
            done += len(y)
            if value in ("error", "class"):
                predicted = logits.argmax(axis=2)
                found.append(predicted != y if value == "error" else predicted)
                continue
            true = np.take_along_axis(_log_probabilities(logits), y[None, :, None], axis=2)[..., 0]
            found.append(-true if value == "loss" else (1 - np.exp(true)) ** 2)
        return np.concatenate([np.zeros((len(models), 0)), *found], axis=1)

    def test(self, state: State, t: int) -> tuple[Ints, Ints]:
        """How many of S_c^(t) each client gets right when its models vote, and how many there are."""
        sizes = self.stream.counts[t]
        used = np.flatnonzero(state.votes.any(axis=0))
        voters = take(state.models, used, [state.models.ids[m] for m in used])
        rows = np.arange(self.stream.starts[t, 0], self.stream.starts[t, 0] + sizes.sum())
        owner = np.repeat(np.arange(len(sizes)), sizes)
        right, done = np.zeros_like(sizes), 0
        for logits in self.logits(voters, rows):
            here = slice(done, done + logits.shape[1])
            done = here.stop
            if state.ballot == "hard":
                ballots = np.eye(logits.shape[2])[logits.argmax(axis=2)]  # [m, row, class]
            else:
                ballots = np.exp(_log_probabilities(logits))
            totals = np.einsum("mrk,rm->rk", ballots, state.votes[owner[here]][:, used])
            np.add.at(right, owner[here], totals.argmax(axis=1) == self.stream.y[rows[here]])
        return right, sizes


def _log_probabilities(logits: npt.NDArray[np.float32]) -> Floats:
    shifted = logits.astype(np.float64) - logits.max(axis=2, keepdims=True)
    log_probabilities: Floats = shifted - np.log(np.exp(shifted).sum(axis=2, keepdims=True))
    return log_probabilities


class TimeStep(ABC):
    """The Federation at time tau; it lives as long as the optimiser moments do: one time step."""

    def __init__(self, engine: Engine, tau: int) -> None:
        stream = engine.stream
        if not 0 <= tau < stream.n_steps:
            raise ConfigError(f"tau must be in 0..{stream.n_steps - 1}, got {tau}")
        self._engine = engine
        self.tau = tau
        self.n_clients, self.n_classes = stream.n_clients, stream.n_classes
        self.features: tuple[int, ...] = stream.x.shape[1:]
        self.counts: Ints = stream.counts[: tau + 1]
        self.reachable: Bools = np.ones(self.n_clients, dtype=bool)
        self.concepts: Ints | None = None if stream.concepts is None else stream.concepts[: tau + 1]
        self.local = engine.local
        self.round = 0  # rounds trained so far
        self._numbers: Ints = np.zeros(self.n_clients, dtype=np.int64)  # parameters to and from each client so far
        self._model_size = 1  # parameters of a model
        self._scored: set[tuple[int, str, int]] = set()  # client, and the trunk or head it has for scoring, unchanged

    @property
    def sent(self) -> Floats:
        """[c], models to and from each client so far; a trunk or a head alone is the part of a model that it is."""
        return self._numbers / self._model_size

    def key(self, purpose: str, *names: int) -> rng.Words:
        return rng.derive(self._engine.seed, purpose, self.tau, *names)

    def fresh(self, n: int = 1, distinct: bool = False) -> Models:
        seed, init = self._engine.seed, self._engine.net.init
        one = [init(rng.derive(seed, "init", i if distinct else 0)) for i in range(n)]
        params = tree_map(lambda *leaves: np.stack(leaves), *one)
        return Models(params, tuple(range(n)), trunk=trunk_of(self._engine.net, params))

    def evaluate(self, models: Models, metric: Metric = "error") -> Floats:
        loss = np.full((self.n_clients, len(models)), np.nan)
        clients = self._new_data()
        self._count_scoring(clients, models)
        cells = [self._rows(self.tau, int(c)) for c in clients]
        loss[clients] = (self._sums(models, cells, metric) / self.counts[self.tau, clients]).T
        return loss

    def confusion(self, models: Models) -> Ints:
        counts = np.zeros((self.n_clients, len(models), self.n_classes, self.n_classes), dtype=np.int64)
        clients = self._new_data()
        self._count_scoring(clients, models)
        for c in clients:
            rows = self._rows(self.tau, int(c))
            predicted = self._engine.per_row(models, rows, "class").astype(np.int64)
            for m in range(len(models)):
                np.add.at(counts[c, m], (self._engine.stream.y[rows], predicted[m]), 1)
        return counts

    def cross_evaluate(self, models: Models, w: Floats, metric: Metric = "error") -> Floats:
        w = self._checked(w, models)
        used = (w > 0).any(axis=2) & (self.counts > 0) & self.reachable
        cells = np.argwhere(used)
        self._count_scoring(np.unique(cells[:, 1]), models)
        samples = [self._sample(t, c) for t, c in cells]
        sums = self._sums(models, samples, metric)
        sizes = np.array([len(s) for s in samples])
        mass = w[used] * self.counts[used][:, None]  # [cell, j]
        with np.errstate(invalid="ignore"):  # a model without data: 0 / 0
            L: Floats = ((sums / sizes) @ mass) / mass.sum(axis=0)
        return L

    def local_updates(self, models: Models, w: Floats, local: Local | None = None) -> Updates:
        lanes = self._lanes(models, self._checked(w, models))
        if not len(lanes.client):
            return replace(lanes, params=per_axis(lambda leaf, _: leaf[:0], models, None, None))
        self._count_training(models, lanes, 1, local or self.local)
        trained = self._local_updates(models, lanes, w, local or self.local)
        self.round += 1
        return trained

    def train(self, models: Models, w: Floats, rounds: int | None = None, local: Local | None = None) -> Models:
        local = local or self.local
        rounds = local.rounds if rounds is None else rounds
        lanes = self._lanes(models, self._checked(w, models))
        if not len(lanes.client) or not rounds:
            return models
        self._count_training(models, lanes, rounds, local)
        trained = self._train(models, lanes, w, rounds, local)
        self.round += rounds
        if local.trains == "head":  # an average of equal trunks may differ in its last bits
            same = per_axis(lambda new, old, trunk: old if trunk else new, trained, False, True, models.params)
            return replace(trained, params=same)
        return trained

    def tournament(self, models: Models, w: Floats, parent: Ints, starts: Sequence[Start]) -> Tournament:
        expected = (self.tau, self.n_clients, len(models))
        if w.shape != expected or parent.shape != (self.n_clients,):
            raise ValueError(f"a tournament needs w of shape (t, c, m) = {expected}, got {w.shape}, and a parent each")
        if models.mask is not None:
            raise ValueError("models that see different inputs hold no tournament")
        found = Tournament.nobody(self.n_clients, len(starts))
        clients = np.flatnonzero((parent >= 0) & (self.counts[self.tau] > 1) & self.reachable)
        if not len(clients):
            return found
        judged = [self._shuffled(self.tau, int(c)) for c in clients]
        judged = [rows[int(sampling.trained_rows(np.array(len(rows)), JUDGED)) :] for rows in judged]
        found.rows[clients] = [len(rows) for rows in judged]
        ends = np.cumsum(found.rows[clients])[:-1]
        mistakes: list[list[Bools]] = []  # [start][client][row]
        for start in starts:
            contender, given, position = self._contender(models, w, parent, clients, start)
            apart = self._engine.at(self.tau)  # what happens there is no part of the run
            trains: Literal["all", "head"] = "head" if start == "head" else "all"
            local = replace(self.local, hold_out=JUDGED, bags=False, trains=trains)
            trained = apart.train(contender, given, local=local)
            wrong = self._engine.per_row(trained, np.concatenate(judged), "error") > 0
            mistakes.append([part[m] for m, part in zip(position, np.split(wrong, ends, axis=1), strict=True)])
        for a, b in np.ndindex(len(starts), len(starts)):
            found.wrong[clients, a, b] = [np.sum(x & y) for x, y in zip(mistakes[a], mistakes[b], strict=True)]
        return found

    def _contender(
        self, models: Models, w: Floats, parent: Ints, clients: Ints, start: Start
    ) -> tuple[Models, Floats, Ints]:
        """What each client trains to try a start, on which data, and where the one that it is about stands."""
        source, blocks, given = models, [], np.zeros((self.tau + 1, self.n_clients, 0))
        for c in clients:
            block = [int(parent[c])]  # the new model, a copy of its parent, or a fresh one
            if start == "joint":  # beside the models on the same trunk that it has data for
                kin = np.asarray(models.family) == models.family[parent[c]]
                block += np.flatnonzero(kin & (w[:, c] * self.counts[:-1, c, None] > 0).any(axis=0)).tolist()
            part = np.zeros((self.tau + 1, self.n_clients, len(block)))
            part[:-1, c, 1:] = w[:, c, block[1:]]
            part[-1, c, 0] = 1
            blocks.append(block)
            given = np.concatenate([given, part], axis=2)
        if start == "fresh":
            source, blocks = self.fresh(), [[0]] * len(clients)
        first = np.cumsum([0, *(len(block) for block in blocks)])[:-1]
        family = np.repeat(TRIAL + clients, [len(block) for block in blocks])  # a client's draws depend on it alone
        positions = [m for block in blocks for m in block]
        return take(source, positions, range(len(positions)), family.tolist()), given, first

    @abstractmethod
    def _local_updates(self, models: Models, lanes: Updates, w: Floats, local: Local) -> Updates: ...

    @abstractmethod
    def _train(self, models: Models, lanes: Updates, w: Floats, rounds: int, local: Local) -> Models: ...

    def _new_data(self) -> Ints:
        """The clients that can be scored."""
        return np.flatnonzero(self.reachable & (self.counts[self.tau] > 0))

    def _lanes(self, models: Models, w: Floats) -> Updates:
        """The pairs (client, model) with work: the model's family is in use at tau and the client has data for it."""
        on = models.stands_on
        used = np.unique(on[(w[self.tau, self.reachable] > 0).any(axis=0)])
        size = np.einsum("tcm,tc->cm", w, self.counts) * np.isin(on, used) * self.reachable[:, None]
        m, c = np.nonzero(size.T)  # by model, then client
        _, lane = np.unique(on[m] * self.n_clients + c, return_inverse=True)
        return Updates(None, client=c, model=m, size=size[c, m], lane=lane)

    def _checked(self, w: Floats, models: Models) -> Floats:
        expected = (self.tau + 1, self.n_clients, len(models))
        if w.shape != expected:
            raise ValueError(f"w must have shape (t, c, m) = {expected} at tau = {self.tau}, got {w.shape}")
        if not (np.isfinite(w).all() and (w >= 0).all()):
            raise ValueError("w must be finite and not negative")
        return w

    def _rows(self, t: int, c: int) -> Ints:
        rows = self._engine.stream.rows(t, c)
        return np.arange(rows.start, rows.stop)

    def _sample(self, t: int, c: int) -> Ints:
        rows = self._rows(t, c)
        if len(rows) > SCORE_ROWS:
            rows = np.sort(rows[rng.permutation(self.key("score", t, c), len(rows))[:SCORE_ROWS]])
        return rows

    def _shuffled(self, t: int, c: int) -> Ints:
        """The rows of a cell in the order of this time step."""
        rows = self._rows(t, c)
        return rows[sampling.shuffled(self._engine.seed, self.tau, t, c, len(rows))]

    def _bag(self, t: int, c: int, model_id: int) -> Ints:
        """A lane's bootstrap of a cell, for the whole time step."""
        rows = self._rows(t, c)
        return rows[sampling.bag(self._engine.seed, self.tau, t, c, model_id, len(rows))]

    def _sums(self, models: Models, cells: Sequence[Ints], metric: Metric) -> Floats:
        """[m, cell]: mistakes, or losses added up, over the rows of each cell."""
        if metric not in ("error", "loss", "brier"):
            raise ConfigError(f"metric must be error, loss or brier, got {metric!r}")
        if not cells:
            return np.zeros((len(models), 0))
        values = self._engine.per_row(models, np.concatenate(cells), metric)
        starts = np.cumsum([0, *(len(rows) for rows in cells[:-1])])
        return np.add.reduceat(values, starts, axis=1)

    def _count_scoring(self, clients: Ints, models: Models) -> None:
        trunk, head = self._sizes(models)
        parts = {("trunk", i): trunk for i in models.families} | {("head", i): head for i in models.ids}
        for c in clients:
            for (kind, i), size in parts.items():
                if (int(c), kind, i) not in self._scored:
                    self._numbers[c] += size
                    self._scored.add((int(c), kind, i))

    def _count_training(self, models: Models, lanes: Updates, rounds: int, local: Local) -> None:
        trunk, head = self._sizes(models)
        changed = {("head", models.ids[m]) for m in lanes.model}
        if local.trains == "all":
            _, first = np.unique(lanes.lane, return_index=True)
            np.add.at(self._numbers, lanes.client[first], 2 * rounds * trunk)  # down and up
            changed |= {("trunk", models.family[m]) for m in lanes.model}
        np.add.at(self._numbers, lanes.client, 2 * rounds * head)
        self._scored = {(c, kind, i) for c, kind, i in self._scored if (kind, i) not in changed}

    def _sizes(self, models: Models) -> tuple[int, int]:
        """How many parameters a trunk has, and a head."""
        parts = ([], leaves(models.params)) if models.trunk is None else split(models.params, models.trunk)
        trunk, head = (sum(int(np.prod(leaf.shape[1:])) for leaf in part) for part in parts)
        self._model_size = trunk + head
        return trunk, head
