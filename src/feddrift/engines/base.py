"""What the in-process engines share: which rows a verb touches, what it costs, how counts become L."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from feddrift import rng
from feddrift.averaging import averaged, finite
from feddrift.data import Stream
from feddrift.engines import sampling, trials
from feddrift.engines.conditions import IDEAL, Conditions
from feddrift.engines.entries import Entries, begins_of
from feddrift.errors import ConfigError
from feddrift.models import take
from feddrift.nets.voting import log_probabilities, totals
from feddrift.trees import leaves, per_axis, split, tree_map, trunk_of
from feddrift.types import (
    Bools,
    Floats,
    Ints,
    Local,
    Metric,
    Models,
    Net,
    Start,
    State,
    Tournament,
    Updates,
    Weights,
)

log = logging.getLogger(__name__)

# Cross-evaluation looks at a keyed sample of at most so many rows of a stored cell.
SCORE_ROWS = 512
SCORE_ROOM = 1 << 22  # pairs of a row and a model that are scored at a time

SCORING, TRAINING = 0, 1  # what models are sent for


class Engine(ABC):
    """Holds the clients' data and does their work; `at(tau)` is the federation of one time step."""

    def __init__(self, stream: Stream, net: Net, local: Local, seed: int, conditions: Conditions = IDEAL) -> None:
        self.stream, self.net, self.local, self.seed, self.conditions = stream, net, local, seed, conditions
        self.in_reach = conditions.in_reach(stream.counts[:-1], seed)
        self.lane_rounds = 0  # rounds of all lanes so far, trials included: the work done

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
            true = np.take_along_axis(log_probabilities(logits), y[None, :, None], axis=2)[..., 0]
            found.append(-true if value == "loss" else (1 - np.exp(true)) ** 2)
        return np.concatenate([np.zeros((len(models), 0)), *found], axis=1)

    def sums(self, models: Models, rows: Ints, sizes: Ints, metric: Metric) -> Floats:
        """[m, cell]: mistakes, or losses added up, over each cell's rows, which lie one cell after the other."""
        return np.add.reduceat(self.per_row(models, rows, metric), begins_of(sizes), axis=1)

    def wrong(self, models: Models, rows: Ints, sizes: Ints, which: Ints) -> Bools:
        """[row]: whether the model at position which[cell] is mistaken."""
        found, of_row = np.zeros(len(rows), dtype=bool), np.repeat(which, sizes)
        for m in np.unique(which):
            at = np.flatnonzero(of_row == m)
            found[at] = self.per_row(take(models, [m], [models.ids[m]]), rows[at], "error")[0] > 0
        return found

    def shuffle(self, keys: rng.Words, starts: Ints, counts: Ints, order: npt.NDArray[np.int32]) -> None:
        """order[starts[k]:][:counts[k]] becomes those rows in the permutation of key k."""
        for k, (first, n) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
            order[first : first + n] = first + rng.permutation((keys[0][k], keys[1][k]), n)

    def test(self, state: State, t: int) -> tuple[Ints, Ints]:
        """How many of S_c^(t) each client gets right when its models vote, and how many there are."""
        sizes = self.stream.counts[t]
        used = np.flatnonzero(state.votes.any(axis=0))
        voters = take(state.models, used, [state.models.ids[m] for m in used])
        rows = np.arange(self.stream.starts[t, 0], self.stream.starts[t, 0] + sizes.sum())
        owner = np.repeat(np.arange(len(sizes)), sizes)
        if ((state.votes > 0).sum(axis=1) == 1).all():  # one model decides
            which = np.searchsorted(used, state.votes.argmax(axis=1))
            return sizes - np.bincount(owner, self.wrong(voters, rows, sizes, which), len(sizes)).astype(int), sizes
        right, done = np.zeros_like(sizes), 0
        for logits in self.logits(voters, rows):
            here = slice(done, done + logits.shape[1])
            done = here.stop
            cast = totals(logits, state.votes[owner[here]][:, used], state.ballot)
            np.add.at(right, owner[here], cast.argmax(axis=1) == self.stream.y[rows[here]])
        return right, sizes


def _at(t: int, clients: Ints) -> Ints:
    """The cells [n, (t, c)] of these clients at one time."""
    return np.stack([np.full_like(clients, t), clients], axis=1)


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
        self.counts: Ints = np.where(engine.in_reach, stream.counts[:-1], 0)[: tau + 1]
        self.reachable: Bools = engine.in_reach[tau]
        self.concepts: Ints | None = None if stream.concepts is None else stream.concepts[: tau + 1]
        self.local, self.conditions = engine.local, engine.conditions
        self.round = 0  # rounds trained so far
        self._numbers: Ints = np.zeros(
            (2, self.n_clients), dtype=np.int64
        )  # parameters to and from clients, by purpose
        self._model_size = 1  # parameters of a model
        self._scored: dict[tuple[str, int], Bools] = {}  # of a trunk or head, unchanged: [c], who has it for scoring
        self._losses: dict[int, Floats] = {}  # by the id of a model: [c], how it did before anything was trained

    @property
    def sent(self) -> Floats:
        """[c], models to and from each client so far; a trunk or a head alone is the part of a model that it is."""
        return np.asarray(self._numbers.sum(axis=0) / self._model_size)

    @property
    def sent_scoring(self) -> Floats:
        """[c], the part of `sent` that was scored and not trained."""
        return np.asarray(self._numbers[SCORING] / self._model_size)

    def losses(self, ids: Ints) -> Floats:
        """[c], how the model with this id scored on the client's new data before any training; NaN if not asked."""
        known = [self._losses.get(int(i)) for i in ids]
        return np.array([np.nan if loss is None else loss[c] for c, loss in enumerate(known)])

    def key(self, purpose: str, *names: int | Ints) -> rng.Words:
        return rng.derive(self._engine.seed, purpose, self.tau, *names)

    def fresh(self, n: int = 1, distinct: bool = False) -> Models:
        seed, init = self._engine.seed, self._engine.net.init
        one = [init(rng.derive(seed, "init", i if distinct else 0)) for i in range(n)]
        params = tree_map(lambda *leaves: np.stack(leaves), *one)
        return Models(params, tuple(range(n)), trunk=trunk_of(self._engine.net, params))

    def evaluate(self, models: Models, metric: Metric = "error") -> Floats:
        loss = self._evaluate(models, metric)
        if self.round == 0:
            self._losses = dict(zip(models.ids, loss.T.copy(), strict=True)) | self._losses
        return loss

    def _evaluate(self, models: Models, metric: Metric) -> Floats:
        loss = np.full((self.n_clients, len(models)), np.nan)
        clients = self._new_data()
        self._count_scoring(clients, models)
        for part, rows, sizes in self._blocks(_at(self.tau, clients), len(models)):
            loss[clients[part]] = (self._sums(models, rows, sizes, metric) / sizes).T
        return np.where(np.isfinite(loss), loss, np.nan)

    def confusion(self, models: Models) -> Ints:
        counts = np.zeros((self.n_clients, len(models), self.n_classes, self.n_classes), dtype=np.int64)
        clients = self._new_data()
        self._count_scoring(clients, models)
        for part, rows, sizes in self._blocks(_at(self.tau, clients), len(models)):
            predicted = self._engine.per_row(models, rows, "class").astype(np.int64)
            owner, of_model = np.repeat(clients[part], sizes), np.arange(len(models))[:, None]
            np.add.at(counts, (owner, of_model, self._engine.stream.y[rows], predicted), 1)
        return counts

    def cross_evaluate(self, models: Models, w: Weights, metric: Metric = "error") -> Floats:
        entries = Entries.of(w, (self.tau + 1, self.n_clients, len(models)))
        entries = entries.only((self.counts[entries.t, entries.c] > 0) & self.reachable[entries.c])
        of_cell = entries.t * self.n_clients + entries.c
        names, first = np.unique(of_cell, return_index=True)
        cells = np.stack([entries.t[first], entries.c[first]], axis=1)
        self._count_scoring(np.unique(entries.c), models)
        behind = entries.value * self.counts[entries.t, entries.c]
        L, total = np.zeros((len(models),) * 2), np.bincount(entries.m, behind, len(models))
        by_cell = np.argsort(of_cell, kind="stable")
        for part, rows, sizes in self._blocks(cells, len(models), SCORE_ROWS):
            mean = self._sums(models, rows, sizes, metric) / sizes  # [m, cell]
            here = by_cell[slice(*np.searchsorted(of_cell[by_cell], [names[part][0], names[part][-1] + 1]))]
            here = here[np.argsort(entries.m[here], kind="stable")]
            theirs, begins = np.unique(entries.m[here], return_index=True)
            of_entry = mean[:, np.searchsorted(names[part], of_cell[here])] * behind[here]
            L[:, theirs] += np.add.reduceat(of_entry, begins, axis=1)
        with np.errstate(invalid="ignore"):  # a model without data: 0 / 0
            return np.asarray(L / total)

    def local_updates(self, models: Models, w: Weights | Entries, local: Local | None = None) -> Updates:
        used, local = self._in_use(models, w), local or self.local
        entries = self._drawn(used)
        lanes = self._lanes(models, entries)
        if len(lanes.client):
            self._count_training(models, lanes, 1, local)
            updates = self._local_updates(models, lanes, entries, local)
            updates = self.conditions.received(models, updates, partial(self.key, "garbage", self.round))
        else:
            updates = replace(lanes, params=per_axis(lambda leaf, _: leaf[:0], models, None, None))
        self.round += len(used.t) > 0
        return updates

    def train(
        self, models: Models, w: Weights | Entries, rounds: int | None = None, local: Local | None = None
    ) -> Models:
        local = local or self.local
        rounds = local.rounds if rounds is None else rounds
        entries = self._in_use(models, w)
        if not len(entries.t) or not rounds:
            return models
        trained = models
        if local.average != "mean" or self.conditions.garbage:  # the server looks at every update
            for _ in range(rounds):
                updates = self.local_updates(trained, entries, local)
                self._tell(trained, updates, (~finite(trained, updates)).astype(int))
                trained = averaged(trained, updates, local.average)
        elif self.conditions.participation < 1:
            for _ in range(rounds):
                trained = self._trained(trained, self._drawn(entries), 1, local)
        else:
            trained = self._trained(trained, entries, rounds, local)
        if local.trains == "head":  # an average of equal trunks may differ in its last bits
            same = per_axis(lambda new, old, trunk: old if trunk else new, trained, False, True, models.params)
            return replace(trained, params=same)
        return trained

    def _trained(self, models: Models, entries: Entries, rounds: int, local: Local) -> Models:
        lanes = self._lanes(models, entries)
        if len(lanes.client):
            self._count_training(models, lanes, rounds, local)
            models = self._train(models, lanes, entries, rounds, local)
        self.round += rounds
        return models

    def _tell(self, models: Models, lanes: Updates, refused: Ints) -> None:
        """Say whose updates were no numbers, in how many rounds."""
        for lane in np.flatnonzero(refused):
            pairs = np.flatnonzero(lanes.lane == lane)
            log.warning(
                "time %d: client %s sent updates of model %s that are not finite, left out of %d rounds",
                self.tau,
                self._engine.stream.clients[lanes.client[pairs[0]]],
                ", ".join(str(models.ids[m]) for m in lanes.model[pairs]),
                refused[lane],
            )

    def _drawn(self, entries: Entries) -> Entries:
        """Those of the clients that take part in the next round."""
        if self.conditions.participation == 1:
            return entries
        return entries.only(self.conditions.drawn(self.reachable, self.key("participation", self.round))[entries.c])

    def tournament(self, models: Models, w: Weights, parent: Ints, starts: Sequence[Start]) -> Tournament:
        return trials.tournament(self, models, w, parent, starts)

    def progress(self) -> dict[str, Any]:
        """What the rest of this time step depends on, for a checkpoint: `restore` is the way back."""
        scored = [(*part, has) for part, has in self._scored.items()]
        own = {"round": self.round, "numbers": self._numbers, "model_size": self._model_size, "scored": scored}
        own |= {"losses": list(self._losses.items())}
        return own | {"moments": self._moments()}

    def restore(self, progress: dict[str, Any]) -> None:
        """Go on where a time step stood."""
        self.round, self._numbers = progress["round"], progress["numbers"]
        self._model_size = progress["model_size"]
        self._scored = {(kind, i): has for kind, i, has in progress["scored"]}
        self._losses = dict(progress["losses"])
        self._recall(progress["moments"])

    @abstractmethod
    def _moments(self) -> Any:
        """All optimiser moments of this time step."""

    @abstractmethod
    def _recall(self, moments: Any) -> None: ...

    @abstractmethod
    def _local_updates(self, models: Models, lanes: Updates, w: Entries, local: Local) -> Updates: ...

    @abstractmethod
    def _train(self, models: Models, lanes: Updates, w: Entries, rounds: int, local: Local) -> Models: ...

    def _new_data(self) -> Ints:
        """The clients that can be scored."""
        return np.flatnonzero(self.reachable & (self.counts[self.tau] > 0))

    def _in_use(self, models: Models, w: Weights | Entries) -> Entries:
        """The data in reach for models whose family is in use at tau."""
        w, on = Entries.of(w, (self.tau + 1, self.n_clients, len(models))), models.stands_on
        w = w.only(self.reachable[w.c])
        return w.only(np.isin(on[w.m], on[w.m[w.t == self.tau]]) & (self.counts[w.t, w.c] > 0))

    def _lanes(self, models: Models, w: Entries) -> Updates:
        """The pairs (client, model) with work."""
        on = models.stands_on
        pairs, entry = np.unique(w.m * self.n_clients + w.c, return_inverse=True)  # by model, then client
        m, c = np.divmod(pairs, self.n_clients)
        size: Floats = np.bincount(entry, w.value * self.counts[w.t, w.c], len(pairs)).astype(np.float64)
        _, lane = np.unique(on[m] * self.n_clients + c, return_inverse=True)
        return Updates(None, client=c, model=m, size=size, lane=lane)

    def _blocks(self, cells: Ints, n_models: int, most: int | None = None) -> Iterator[tuple[slice, Ints, Ints]]:
        """Cells [n, (t, c)] in blocks that fit into memory: which, their rows (a sample of at most `most`), sizes."""
        starts, counts = self._engine.stream.starts, self._engine.stream.counts
        first, n = starts[cells[:, 0], cells[:, 1]], counts[cells[:, 0], cells[:, 1]]
        sizes = n if most is None else np.minimum(n, most)
        ends, done = np.cumsum(sizes), 0
        while done < len(cells):
            room = (ends[done - 1] if done else 0) + SCORE_ROOM // n_models
            part = slice(done, max(done + 1, int(np.searchsorted(ends, room, side="right"))))
            begins = begins_of(sizes[part])
            rows = np.arange(sizes[part].sum()) + np.repeat(first[part] - begins, sizes[part])
            large = np.flatnonzero(n[part] > sizes[part])
            keys = self.key("score", cells[done + large, 0], cells[done + large, 1])
            ordered, places = np.zeros(n[done + large].sum(), dtype=np.int32), begins_of(n[done + large])
            self._engine.shuffle(keys, places, n[done + large], ordered)
            for k, at in zip(large, places, strict=True):
                rows[begins[k] : begins[k] + most] = first[done + k] + np.sort(ordered[at : at + most] - at)
            yield part, rows, sizes[part]
            done = part.stop

    def _rows(self, t: int, c: int) -> Ints:
        rows = self._engine.stream.rows(t, c)
        return np.arange(rows.start, rows.stop)

    def _shuffled(self, t: int, c: int) -> Ints:
        """The rows of a cell in the order of this time step."""
        rows = self._rows(t, c)
        return rows[sampling.shuffled(self._engine.seed, self.tau, t, c, len(rows))]

    def _bag(self, t: int, c: int, model_id: int) -> Ints:
        """A lane's bootstrap of a cell, for the whole time step."""
        rows = self._rows(t, c)
        return rows[sampling.bag(self._engine.seed, self.tau, t, c, model_id, len(rows))]

    def _sums(self, models: Models, rows: Ints, sizes: Ints, metric: Metric) -> Floats:
        if metric not in ("error", "loss", "brier"):
            raise ConfigError(f"metric must be error, loss or brier, got {metric!r}")
        return self._engine.sums(models, rows, sizes, metric)

    def _count_scoring(self, clients: Ints, models: Models) -> None:
        trunk, head = self._sizes(models)
        parts = {("trunk", i): trunk for i in models.families} | {("head", i): head for i in models.ids}
        for part, size in parts.items():
            has = self._scored.setdefault(part, np.zeros(self.n_clients, dtype=bool))
            self._numbers[SCORING, clients[~has[clients]]] += size
            has[clients] = True

    def _count_training(self, models: Models, lanes: Updates, rounds: int, local: Local) -> None:
        trunk, head = self._sizes(models)
        self._engine.lane_rounds += int(lanes.lane.max() + 1) * rounds
        changed = {("head", models.ids[m]) for m in lanes.model}
        if local.trains == "all":
            _, first = np.unique(lanes.lane, return_index=True)
            np.add.at(self._numbers[TRAINING], lanes.client[first], 2 * rounds * trunk)  # down and up
            changed |= {("trunk", models.family[m]) for m in lanes.model}
        np.add.at(self._numbers[TRAINING], lanes.client, 2 * rounds * head)
        self._scored = {part: has for part, has in self._scored.items() if part not in changed}

    def _sizes(self, models: Models) -> tuple[int, int]:
        """How many parameters a trunk has, and a head."""
        parts = ([], leaves(models.params)) if models.trunk is None else split(models.params, models.trunk)
        trunk, head = (sum(int(np.prod(leaf.shape[1:])) for leaf in part) for part in parts)
        self._model_size = trunk + head
        return trunk, head
