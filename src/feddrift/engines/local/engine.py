"""Clients whose data are in this process: which rows a question is about, and how scores become sums."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from feddrift import numerics, rng
from feddrift.data import Stream
from feddrift.drift_explanation import Shifts, asked, shifts, told
from feddrift.engines.conditions import routed_voting
from feddrift.engines.conditions.conditions import IDEAL, Conditions
from feddrift.engines.local import sampling, trials
from feddrift.engines.server import feature_statistics
from feddrift.engines.server.engine import Engine
from feddrift.engines.sparse_weights import Entries, begins_of, by_group
from feddrift.engines.worker import Known, Question, Scored, Work, Worker, in_turn
from feddrift.errors import ConfigError
from feddrift.models import fresh, take
from feddrift.nets import below_the_head, layer_width, voting
from feddrift.nets.voting import log_probabilities
from feddrift.scores import measure
from feddrift.types import (
    Ballot,
    Bools,
    Floats,
    Ints,
    Layer,
    Local,
    Metric,
    Models,
    Moments,
    Net,
    Parting,
    Router,
    Start,
    State,
    Tournament,
    Updates,
    Votes,
)

SCORE_ROOM = 1 << 22  # pairs of a row and a model that are scored at a time
MIN_VALUES_FOR_THREADS = 1 << 14  # numbers in a cell: of smaller cells threads wait for each other most of the time


class InProcess(Engine):
    """An engine whose clients are in this process: it holds their data."""

    programs: Path | None = None  # the folder where compiled programs are kept; None: the user's cache

    def __init__(self, stream: Stream, net: Net, local: Local, seed: int, conditions: Conditions = IDEAL) -> None:
        self.stream, self.net, self.local, self.seed, self.conditions = stream, net, local, seed, conditions
        self.in_reach, self.n_steps = conditions.in_reach(stream.counts[:-1], seed), stream.n_steps
        self._counted_votes: tuple[State, int, tuple[Floats, Ints, Ints]] | None = None  # of the last test
        self._counted: tuple[int, Ints] = 0, np.zeros((stream.n_clients, stream.n_classes), dtype=np.int64)

    @abstractmethod
    def logits(self, models: Models, rows: Ints, net: Net | None = None) -> Iterator[npt.NDArray[np.float32]]:
        """The logits [m, row, class] of these rows, in blocks of rows; with `net`, what that makes of them."""

    def hidden(self, models: Models, rows: Ints) -> Iterator[npt.NDArray[np.float32]]:
        """What the heads of these models see of these rows, in blocks of rows."""
        return self.logits(models, rows, below_the_head(self.net))

    def per_row(self, models: Models, rows: Ints, value: Metric | Literal["class"]) -> Floats:
        """[m, row]: error is 0 or 1, loss the cross-entropy, brier (1 - p)^2, class the predicted one."""
        blocks, rows_done = [], 0
        for logits in self.logits(models, rows):
            y = self.stream.y[rows[rows_done : rows_done + logits.shape[1]]]
            rows_done += len(y)
            if value in ("error", "class"):
                predicted = logits.argmax(axis=2)
                blocks.append(predicted != y if value == "error" else predicted)
                continue
            true = np.take_along_axis(log_probabilities(logits), y[None, :, None], axis=2)[..., 0]
            blocks.append(-true if value == "loss" else (1 - numerics.exp(true)) ** 2)
        return np.concatenate([np.zeros((len(models), 0)), *blocks], axis=1)

    def team_logits(
        self, models: Models, rows: Ints, team_of: Ints, teams: Ints
    ) -> Iterator[tuple[Ints, npt.NDArray[np.float32]]]:
        """Yield the logits of each row from the models of its team alone, in blocks of rows.

        Args:
            models: All models.
            rows: Rows of the stream.
            team_of: [row], the team of each row.
            teams: [team, k], the positions of its members; -1: none.

        Yields:
            Positions in `rows`, and the logits [k, row, class] of the k-th member of each row's team, 0 without one.
        """
        order = np.argsort(team_of, kind="stable")
        sizes = np.bincount(team_of, minlength=len(teams))
        ends = np.cumsum(sizes)
        max_rows = max(1, SCORE_ROOM // max(1, teams.shape[1] * self.stream.n_classes))
        begin, done = 0, 0
        while begin < len(teams):
            end = max(begin + 1, int(np.searchsorted(ends, done + max_rows, side="right")))
            block = order[done : ends[end - 1]]
            if len(block):
                yield block, self.member_logits(models, rows[block], sizes[begin:end], teams[begin:end])
            begin, done = end, int(ends[end - 1])

    def member_logits(self, models: Models, rows: Ints, sizes: Ints, teams: Ints) -> npt.NDArray[np.float32]:
        """Return the logits [k, row, class] of the k-th member of each team; sizes[team] rows belong to each team."""
        found = np.zeros((teams.shape[1], len(rows), self.stream.n_classes), dtype=np.float32)
        distinct, of_team = np.unique(teams, axis=0, return_inverse=True)
        for group, at in by_group(np.repeat(of_team.reshape(-1), sizes)):
            (place,) = np.nonzero(distinct[group] >= 0)
            if len(place):
                members = distinct[group][place]
                blocks = self.logits(take(models, members, [models.ids[m] for m in members]), rows[at])
                found[place[:, None], at] = np.concatenate(list(blocks), axis=1)
        return found

    def layer(self, models: Models, rows: Ints, layer: Layer) -> Iterator[npt.NDArray[Any]]:
        """What a layer of these models makes of these rows, [m, row, number], in blocks of rows."""
        if layer == "logits":
            yield from self.logits(models, rows)
        elif layer == "input":
            x = self.stream.x[rows]
            masks = [None] * len(models) if models.mask is None else models.mask
            yield np.stack([x if mask is None else x * mask.astype(np.float32) for mask in masks])
        else:
            yield from self.hidden(models, rows)

    def sums(self, models: Models, rows: Ints, sizes: Ints, metric: Metric) -> Floats:
        """[m, cell]: mistakes, or losses added up, over each cell's rows, which lie one cell after the other."""
        return np.add.reduceat(self.per_row(models, rows, metric), begins_of(sizes), axis=1)

    def wrong(self, models: Models, rows: Ints, sizes: Ints, which: Ints) -> Bools:
        """[row]: whether the model at position which[cell] is mistaken."""
        mistaken = np.zeros(len(rows), dtype=bool)
        for m, at in by_group(np.repeat(which, sizes)):
            mistaken[at] = self.per_row(take(models, [m], [models.ids[m]]), rows[at], "error")[0] > 0
        return mistaken

    def shuffle(self, keys: rng.Words, starts: Ints, counts: Ints, order: npt.NDArray[np.int32]) -> None:
        """order[starts[k]:][:counts[k]] becomes those rows in the permutation of key k."""
        for k, (first, n) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
            order[first : first + n] = first + rng.permutation((keys[0][k], keys[1][k]), n)

    def test(self, state: State, t: int) -> tuple[Ints, Ints]:
        sizes = self.stream.counts[t]
        if state.router is not None:
            rows, owner = self._tested(t)
            ways = routed_voting.at_test(self, state, rows, sizes)
            hits = routed_voting.right(self, state.models, state.ballot, rows, ways)
            return np.bincount(owner, hits, len(sizes)).astype(int), sizes
        votes = Votes.of(state.votes)
        rows, owner = self._tested(t)
        if ((votes.weight > 0).sum(axis=1) == 1).all():  # one model decides
            used = np.flatnonzero(votes.used)
            voters = take(state.models, used, [state.models.ids[m] for m in used])
            which = np.searchsorted(used, votes.argmax(axis=1))
            return sizes - np.bincount(owner, self.wrong(voters, rows, sizes, which), len(sizes)).astype(int), sizes
        _, predicted, _ = self._count_votes(state, t)
        hits = predicted == self.stream.y[rows]
        return np.bincount(owner, hits, len(sizes)).astype(int), sizes

    def scores(self, state: State, t: int) -> Mapping[str, Floats]:
        stream, sizes = self.stream, self.stream.counts[t]
        rows, owner = self._tested(t)
        chances, predicted, of_row = self._count_votes(state, t)
        self._counted_votes = None
        scores = measure(chances, predicted, stream.y[rows], sizes, self._received(t))
        if state.router is not None:
            away = np.bincount(owner, of_row >= len(sizes), len(sizes))
            scores["routed"] = np.divide(away, sizes, out=np.full(len(sizes), np.nan), where=sizes > 0)
        has_votes = np.zeros(len(sizes), dtype=bool)
        has_votes[: len(state.votes)] = Votes.of(state.votes).has_any
        return {name: np.where(has_votes, values, np.nan) for name, values in scores.items()}

    def _count_votes(self, state: State, t: int) -> tuple[Floats, Ints, Ints]:
        """Return the probabilities [row, class] at the test of time t, the predicted classes, and whose votes count.

        `test` and `scores` ask for the same, one after the other.
        """
        if self._counted_votes is not None and self._counted_votes[0] is state and self._counted_votes[1] == t:
            return self._counted_votes[2]
        rows, _ = self._tested(t)
        chances, predicted = np.zeros((len(rows), self.stream.n_classes)), np.zeros(len(rows), dtype=np.int64)
        votes, of_row = routed_voting.at_test(self, state, rows, self.stream.counts[t])
        voted = np.flatnonzero(votes.has_any[of_row])
        for part, logits in self.team_logits(state.models, rows[voted], of_row[voted], votes.model):
            block = voted[part]
            weights = votes.weight[of_row[block]]
            chances[block] = voting.chances(logits, weights)
            if state.ballot == "soft" and (weights.sum(axis=1) == 1).all():
                predicted[block] = chances[block].argmax(axis=1)
            else:
                predicted[block] = voting.totals(logits, weights, state.ballot).argmax(axis=1)
        self._counted_votes = state, t, (chances, predicted, of_row)
        return chances, predicted, of_row

    def _received(self, t: int) -> Ints:
        """[c, class], how many rows each client has received before time t; counted on from the time asked for last."""
        since, counts = self._counted if self._counted[0] <= t else (0, self._counted[1] * 0)
        for past in range(since, t):  # one after the other: a hundred thousand clients have tens of millions of rows
            rows, client = self._tested(past)
            pairs = client * self.stream.n_classes + self.stream.y[rows]
            counts = counts + np.bincount(pairs, minlength=counts.size).reshape(counts.shape)
        self._counted = t, counts
        return counts

    def _tested(self, t: int) -> tuple[Ints, Ints]:
        """The rows of all cells of time t, and the client of each."""
        first, sizes = int(self.stream.starts[t, 0]), self.stream.counts[t]
        return np.arange(first, first + sizes.sum()), np.repeat(np.arange(len(sizes)), sizes)

    def shifts(self, tau: int, clients: Sequence[int]) -> Mapping[int, Shifts]:
        counts = np.where(self.in_reach, self.stream.counts[:-1], 0)
        everybody = asked(clients, np.flatnonzero(counts[tau]).tolist())
        values_per_cell = counts[tau].max() * math.prod(self.stream.features)

        def compare(c: int) -> Shifts | None:
            return shifts(self.stream, tau, c, counts[:, c])

        if values_per_cell < MIN_VALUES_FOR_THREADS:
            answers = {c: compare(c) for c in everybody}
        else:
            with ThreadPoolExecutor() as pool:  # sorting numbers lets others work meanwhile
                answers = dict(zip(everybody, pool.map(compare, everybody), strict=True))
        return told({c: answer for c, answer in answers.items() if answer is not None}, clients)


def count_members(teams: Ints) -> tuple[Ints, Floats]:
    """Return the distinct members of each team in ascending order, -1: none, and how often each is named.

    >>> count_members(np.array([[5, 2, 5], [4, -1, -1]]))
    (array([[ 2,  5, -1],
           [ 4, -1, -1]]), array([[1., 2., 0.],
           [1., 0., 0.]]))
    """
    named = np.sort(np.where(teams < 0, np.iinfo(np.int64).max, teams), axis=1)
    present = named < np.iinfo(np.int64).max
    first = present & np.concatenate([np.ones((len(named), 1), dtype=bool), named[:, 1:] != named[:, :-1]], axis=1)
    rank = np.cumsum(first, axis=1) - 1
    members, counts = np.full(named.shape, -1), np.zeros(named.shape)
    team, place = np.nonzero(present)
    members[team, rank[team, place]] = named[team, place]
    np.add.at(counts, (team, rank[team, place]), 1.0)
    return members, counts


class Lane(NamedTuple):
    """What one client draws from to train one family; a cell is a pair of t and head, heads innermost."""

    counts: Ints  # [cell], rows, or places of its table
    mass: Floats  # [cell], by which it is drawn, beside w
    tables: dict[int, Ints]  # the rows of a cell, where it has a table; else `InProcessWorker.trained`


class InProcessWorker(Worker):
    """The clients' work at time tau, on data that are here; what is left to say is how they train."""

    engine: InProcess

    def __init__(self, engine: InProcess, tau: int) -> None:
        stream = engine.stream
        if not 0 <= tau < stream.n_steps:
            raise ConfigError(f"tau must be in 0..{stream.n_steps - 1}, got {tau}")
        self.engine, self.tau = engine, tau
        counts = np.where(engine.in_reach, stream.counts[:-1], 0)[: tau + 1]
        concepts = None if stream.concepts is None else stream.concepts[: tau + 1]
        shape = stream.x.shape[1:]
        groups = 0 if stream.group is None else int(stream.group.max()) + 1
        there = engine.in_reach[tau].copy()  # a server may cease to listen to somebody
        self.known = Known(stream.clients, shape, stream.n_classes, counts, there, concepts, groups)

    @abstractmethod
    def updates(self, models: Models, work: Work, round: int, local: Local) -> Updates: ...

    @abstractmethod
    def save(self) -> Any: ...

    @abstractmethod
    def load(self, saved: Any) -> None: ...

    def score(
        self, models: Models, cells: Ints, metric: Metric, most: int | None = None, by: Parting | None = None
    ) -> Iterator[Scored]:
        for block, rows, sizes in self._blocks(cells, len(models), most):
            which = np.arange(block.start, block.stop)
            if by is None:
                yield which, self.engine.sums(models, rows, sizes, metric), sizes
            else:
                yield which, *self._sums_by(by, models, rows, sizes, metric)

    def _sums_by(self, by: Parting, models: Models, rows: Ints, sizes: Ints, metric: Metric) -> tuple[Floats, Ints]:
        """Sums [m, cell, part] over the rows of each class or group, and how many rows [cell, part] these are."""
        engine, stream = self.engine, self.engine.stream
        labels, n_parts = (stream.y, stream.n_classes) if by == "class" else (stream.group, self.known.n_groups)
        assert labels is not None
        place = np.repeat(np.arange(len(sizes)), sizes) * n_parts + labels[rows]
        if metric == "error":  # as `sums` has it
            values = [engine.wrong(models, rows, sizes, np.full(len(sizes), m)) for m in range(len(models))]
        else:
            values = list(engine.per_row(models, rows, metric))
        sums: list[Floats] = [np.bincount(place, row, len(sizes) * n_parts).astype(np.float64) for row in values]
        counts: Ints = np.bincount(place, minlength=len(sizes) * n_parts)
        return np.stack(sums).reshape(len(models), len(sizes), n_parts), counts.reshape(len(sizes), n_parts)

    def confusion(self, models: Models, clients: Ints) -> Ints:
        n, cells = self.known.n_classes, np.stack([np.full_like(clients, self.tau), clients], axis=1)
        counts = np.zeros((len(clients), len(models), n, n), dtype=np.int64)
        for part, rows, sizes in self._blocks(cells, len(models)):
            predicted = self.engine.per_row(models, rows, "class").astype(np.int64)
            owner, of_model = np.repeat(np.arange(part.start, part.stop), sizes), np.arange(len(models))[:, None]
            np.add.at(counts, (owner, of_model, self.engine.stream.y[rows], predicted), 1)
        return counts

    def describe(self, models: Models, clients: Ints, question: Question) -> Moments:
        engine, known = self.engine, self.known
        width = layer_width(engine.net, question.layer, known.features, known.n_classes)
        matrix, (parts, size) = question.matrix(width), question.shape(width, known.n_classes)
        moments = Moments.nobody(len(clients), len(models), parts, size)
        cells = np.stack([np.full_like(clients, self.tau), clients], axis=1)
        for block, rows, sizes in self._blocks(cells, len(models) * width):
            of_row = np.repeat(np.arange(block.start, block.stop), sizes) * parts
            if question.by == "class":
                of_row += engine.stream.y[rows]
            values = feature_statistics.vectors(engine.layer(models, rows, question.layer), matrix)
            feature_statistics.put(moments, of_row, values, question.square)
        return moments

    def reroute(self, models: Models, votes: Floats | Votes, ballot: Ballot, routers: Mapping[int, Router]) -> Ints:
        sizes = np.where(np.isin(np.arange(len(votes)), list(routers)), self.known.counts[self.tau], 0)
        rows = np.concatenate([np.zeros(0, dtype=np.int64), *(self.rows(self.tau, c) for c in sorted(routers))])
        of_row, counts = np.repeat(np.arange(len(sizes)), sizes), [sizes]
        own_votes = Votes.of(votes)
        for ways in ((own_votes, of_row), routed_voting.polled(self.engine, own_votes, routers, rows, sizes)):
            wrong = ~routed_voting.right(self.engine, models, ballot, rows, ways)
            counts.append(np.bincount(of_row, wrong, len(sizes)).astype(np.int64))
        return np.stack(counts, axis=1)

    def rounds(self, models: Models, work: Work, first: int, last: int, local: Local) -> tuple[Models, Ints]:
        return in_turn(self, models, work, first, last, local)

    def trial(self, models: Models, older: Entries, parent: Ints, starts: Sequence[Start], local: Local) -> Tournament:
        return trials.hold_trials(self, models, older, parent, starts, local)

    def contest(self, models: Models, teams: Ints, held_by: Local | None) -> Tournament:
        clients = np.flatnonzero((teams >= 0).any(axis=2).all(axis=0))
        if not len(clients):
            return Tournament.nobody(teams.shape[1], len(teams))
        judged = [self._judged(int(c), held_by) for c in clients]
        mistakes = self._mistaken(models, teams[:, clients], judged)
        return trials.counted(teams.shape[1], clients, np.array([len(rows) for rows in judged]), mistakes)

    def _judged(self, c: int, held_by: Local | None) -> Ints:
        """The rows of client c on which a contest is decided."""
        if held_by is None:
            return self.rows(self.tau, c)
        rows = self.shuffled(self.tau, c)
        return rows[sampling.held_rows(len(rows), held_by.hold_out, held_by.holds)]

    def _mistaken(self, models: Models, teams: Ints, judged: Sequence[Ints]) -> Bools:
        """Return, for each contestant and row, whether its team at the row's client is mistaken.

        Args:
            models: All models.
            teams: [contestant, client, k], the positions of the members, -1: none; one named twice counts twice.
            judged: The rows of each client.
        """
        sizes = np.array([len(rows) for rows in judged])
        rows = np.concatenate(judged)
        alone = (teams >= 0).sum(axis=2) == 1
        if alone.all():
            return np.stack([self.wrong(models, rows, sizes, team.max(axis=1)) for team in teams])
        of_row = np.repeat(np.arange(len(judged)), sizes)
        members, _ = count_members(np.concatenate(list(teams), axis=1))  # of all contestants at a client
        width = int((members >= 0).sum(axis=1).max())
        members = members[:, :width]
        named = (teams[..., None] == members[None, :, None]) & (teams[..., None] >= 0)
        votes = named.sum(axis=2).astype(np.float64)  # [contestant, client, member]
        mistaken = np.zeros((len(teams), len(rows)), dtype=bool)
        for part, logits in self.engine.team_logits(models, rows, of_row, members):
            client, labels = of_row[part], self.engine.stream.y[rows[part]]
            chances = [voting.probabilities(of_member) for of_member in logits]
            for k in range(len(teams)):
                predicted = voting.mean_probabilities(chances, votes[k, client]).argmax(axis=1)
                single = np.flatnonzero(alone[k, client])
                predicted[single] = logits[votes[k, client[single]].argmax(axis=1), single].argmax(axis=1)
                mistaken[k, part] = predicted != labels
        return mistaken

    def apart(self) -> InProcessWorker:
        """Another worker at the same time: what happens there is no part of the run."""
        worker = self.engine.worker(self.tau)
        assert isinstance(worker, InProcessWorker)
        return worker

    def fresh(self) -> Models:
        """The start that all models of a run have in common."""
        return fresh(self.engine.net, self.engine.seed)

    def wrong(self, models: Models, rows: Ints, sizes: Ints, which: Ints) -> Bools:
        """[row]: whether the model at position which[cell] is mistaken."""
        return self.engine.wrong(models, rows, sizes, which)

    def rows(self, t: int, c: int) -> Ints:
        """Where a cell lies in the stream."""
        rows = self.engine.stream.rows(t, c)
        return np.arange(rows.start, rows.stop)

    def shuffled(self, t: int, c: int) -> Ints:
        """The rows of a cell in the order of this time step."""
        rows = self.rows(t, c)
        return rows[sampling.shuffled(self.engine.seed, self.tau, t, c, len(rows))]

    def bag(self, t: int, c: int, model_id: int) -> Ints:
        """A lane's bootstrap of a cell, for the whole time step."""
        rows = self.rows(t, c)
        return rows[sampling.bag(self.engine.seed, self.tau, t, c, model_id, len(rows))]

    def trained(self, t: int, c: int, model_id: int, local: Local) -> Ints:
        """The rows of a cell that a lane trains on, in the order of this time step."""
        rows = self.bag(t, c, model_id) if local.bags else self.shuffled(t, c)
        n = int(sampling.trained_rows(np.array(len(rows)), local.hold_out))
        return rows[:n] if local.holds == "last" else rows[len(rows) - n :]

    def tables(self, c: int, model_id: int, times: Ints, w: Floats, local: Local) -> sampling.Tables:
        """The tables of a client's cells at these times, which train this model with these weights."""
        cells = [self.trained(int(t), c, model_id, local) for t in times]
        rows, sizes = np.concatenate(cells), np.array([len(cell) for cell in cells])
        y = self.engine.stream.y[rows]
        tables = sampling.even(y, sizes, local.even) if local.even else sampling.balanced(y, sizes, w)
        return tables._replace(rows=rows[tables.rows])

    def lane(self, c: int, ids: Sequence[int], w: Floats, local: Local) -> Lane:
        """What a client draws from to train the models of these ids on its data, by w[t, head]."""
        counts = np.repeat(sampling.trained_rows(self.known.counts[:, c], local.hold_out), len(ids))
        lane = Lane(counts, counts.astype(np.float64), {})
        for h, model_id in enumerate(ids if local.by_class else ()):
            times = np.flatnonzero(w[:, h])
            tables, at = self.tables(c, model_id, times, w[times, h], local), times * len(ids) + h
            lane.counts[at], lane.mass[at] = tables.sizes, tables.mass
            lane.tables.update(zip(at.tolist(), np.split(tables.rows, np.cumsum(tables.sizes)[:-1]), strict=True))
        return lane

    def looks(self, c: int, w: Floats, lane: Lane, local: Local) -> tuple[Ints, Floats, int]:
        """For `Local.patience`: the held-out rows of a lane, their weights [head, row] by w[t, head], and after how
        many local steps it looks at them."""
        times = np.flatnonzero(w.any(axis=1))
        held = [self.shuffled(int(t), c) for t in times]
        held = [rows[sampling.held_rows(len(rows), local.hold_out, local.holds)] for rows in held]
        weight = np.repeat(w[times], [len(rows) for rows in held], axis=0).T
        n = int(lane.counts[w.reshape(-1) > 0].sum())
        return np.concatenate(held), weight / (weight.sum() or 1.0), -(-n // local.batch)

    def _blocks(self, cells: Ints, n_models: int, most: int | None = None) -> Iterator[tuple[slice, Ints, Ints]]:
        """Cells [n, (t, c)] in blocks that fit into memory: which, their rows (a sample of at most `most`), sizes."""
        starts, counts = self.engine.stream.starts, self.engine.stream.counts
        first, n = starts[cells[:, 0], cells[:, 1]], counts[cells[:, 0], cells[:, 1]]
        sizes = n if most is None else np.minimum(n, most)
        ends, done = np.cumsum(sizes), 0
        while done < len(cells):
            room = (ends[done - 1] if done else 0) + SCORE_ROOM // n_models
            part = slice(done, max(done + 1, int(np.searchsorted(ends, room, side="right"))))
            begins = begins_of(sizes[part])
            rows = np.arange(sizes[part].sum()) + np.repeat(first[part] - begins, sizes[part])
            large = np.flatnonzero(n[part] > sizes[part])
            at = cells[done + large]
            keys = rng.derive(self.engine.seed, "score", self.tau, at[:, 0], at[:, 1])
            ordered, places = np.zeros(n[done + large].sum(), dtype=np.int32), begins_of(n[done + large])
            self.engine.shuffle(keys, places, n[done + large], ordered)
            for k, place in zip(large, places, strict=True):
                rows[begins[k] : begins[k] + most] = first[done + k] + np.sort(ordered[place : place + most] - place)
            yield part, rows, sizes[part]
            done = part.stop
