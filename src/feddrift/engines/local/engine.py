"""Base of engines and workers whose data are in this process: selection of rows, scores, votes and trials."""

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
from feddrift.drift_explanation import Shifts, choose_reporting_clients, find_shifts, mark_common_shifts
from feddrift.engines.conditions import routed_voting
from feddrift.engines.conditions.conditions import IDEAL, Conditions
from feddrift.engines.local import sampling, trials
from feddrift.engines.server import feature_statistics
from feddrift.engines.server.engine import Engine
from feddrift.engines.sparse_weights import Entries, compute_offsets, iterate_groups
from feddrift.engines.worker import (
    CellScores,
    FederationInfo,
    StatisticsRequest,
    TrainingPlan,
    Worker,
    run_rounds_sequentially,
)
from feddrift.errors import ConfigError
from feddrift.models import init_models, take
from feddrift.nets import get_layer_width, remove_head, voting
from feddrift.nets.voting import log_softmax
from feddrift.scores import compute_scores
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

MAX_SCORED_VALUES = 1 << 22  # values, such as scores of a row by a model, that are computed at a time
MIN_VALUES_FOR_THREADS = 1 << 14  # numbers in a cell; for smaller cells threads do not save time


class InProcess(Engine):
    """Engine whose clients and their data are in this process."""

    programs: Path | None = None  # the folder in which compiled programs are stored; None: the user's cache

    def __init__(self, stream: Stream, net: Net, local: Local, seed: int, conditions: Conditions = IDEAL) -> None:
        self.stream = stream
        self.net = net
        self.local = local
        self.seed = seed
        self.conditions = conditions
        self.reachable = conditions.draw_reachable(stream.counts[:-1], seed)
        self.n_steps = stream.n_steps
        self._last_vote: tuple[State, int, tuple[Floats, Ints, Ints]] | None = None  # see `_count_votes`
        # A time t, and [c, class] the number of rows before t: see `_count_received_classes`.
        self._received_classes: tuple[int, Ints] = 0, np.zeros((stream.n_clients, stream.n_classes), dtype=np.int64)

    @abstractmethod
    def logits(self, models: Models, rows: Ints, net: Net | None = None) -> Iterator[npt.NDArray[np.float32]]:
        """Yield the logits [m, row, class] of these rows in blocks of rows, or the outputs of another net.

        Args:
            models: The models.
            rows: Positions of rows in the stream.
            net: The net that is applied to the parameters of the models; None: the net of the engine.
        """

    def compute_head_inputs(self, models: Models, rows: Ints) -> Iterator[npt.NDArray[np.float32]]:
        """Yield the inputs [m, row, ...] of the models' heads for these rows, in blocks of rows."""
        return self.logits(models, rows, remove_head(self.net))

    def score_rows(self, models: Models, rows: Ints, value: Metric | Literal["class"]) -> Floats:
        """Return a value [m, row] for each model and row.

        Args:
            models: The models.
            rows: Positions of rows in the stream.
            value: "error" (0 or 1), "loss" (cross-entropy), "brier" ((1 - p)^2, p: probability of the true class) or
                "class" (the predicted class).
        """
        blocks = []
        rows_done = 0
        for logits in self.logits(models, rows):
            y = self.stream.y[rows[rows_done : rows_done + logits.shape[1]]]
            rows_done += len(y)
            if value in ("error", "class"):
                predicted = logits.argmax(axis=2)
                blocks.append(predicted != y if value == "error" else predicted)
                continue
            log_probability = np.take_along_axis(log_softmax(logits), y[None, :, None], axis=2)[..., 0]
            blocks.append(-log_probability if value == "loss" else (1 - numerics.exp(log_probability)) ** 2)
        return np.concatenate([np.zeros((len(models), 0)), *blocks], axis=1)

    def compute_team_logits(
        self, models: Models, rows: Ints, team_of_row: Ints, teams: Ints
    ) -> Iterator[tuple[Ints, npt.NDArray[np.float32]]]:
        """Yield the logits of each row from the models of its team only, in blocks of rows.

        Args:
            models: All models.
            rows: Positions of rows in the stream.
            team_of_row: [row], the team of each row.
            teams: [team, k], the positions of the members of each team; -1: none.

        Yields:
            Positions in `rows`, and the logits [k, row, class] of the k-th member of each row's team; 0: no member.
        """
        order = np.argsort(team_of_row, kind="stable")
        sizes = np.bincount(team_of_row, minlength=len(teams))
        ends = np.cumsum(sizes)
        max_rows = max(1, MAX_SCORED_VALUES // max(1, teams.shape[1] * self.stream.n_classes))
        begin = 0
        rows_done = 0
        while begin < len(teams):
            end = max(begin + 1, int(np.searchsorted(ends, rows_done + max_rows, side="right")))
            block = order[rows_done : ends[end - 1]]
            if len(block):
                yield block, self.compute_member_logits(models, rows[block], sizes[begin:end], teams[begin:end])
            begin = end
            rows_done = int(ends[end - 1])

    def compute_member_logits(self, models: Models, rows: Ints, sizes: Ints, teams: Ints) -> npt.NDArray[np.float32]:
        """Return the logits [k, row, class] of the k-th member of each row's team; 0: no member.

        Args:
            models: All models.
            rows: Positions of rows in the stream; the rows of a team follow each other.
            sizes: [team], the number of rows of each team.
            teams: [team, k], the positions of the members of each team; -1: none.
        """
        logits = np.zeros((teams.shape[1], len(rows), self.stream.n_classes), dtype=np.float32)
        distinct, index_of_team = np.unique(teams, axis=0, return_inverse=True)
        for group, group_rows in iterate_groups(np.repeat(index_of_team.reshape(-1), sizes)):
            (place,) = np.nonzero(distinct[group] >= 0)
            if len(place):
                members = distinct[group][place]
                blocks = self.logits(take(models, members, [models.ids[m] for m in members]), rows[group_rows])
                logits[place[:, None], group_rows] = np.concatenate(list(blocks), axis=1)
        return logits

    def compute_layer(self, models: Models, rows: Ints, layer: Layer) -> Iterator[npt.NDArray[Any]]:
        """Yield the values [m, row, ...] of a layer of these models for these rows, in blocks of rows."""
        if layer == "logits":
            yield from self.logits(models, rows)
        elif layer == "input":
            x = self.stream.x[rows]
            masks = [None] * len(models) if models.mask is None else models.mask
            yield np.stack([x if mask is None else x * mask.astype(np.float32) for mask in masks])
        else:
            yield from self.compute_head_inputs(models, rows)

    def sum_scores(self, models: Models, rows: Ints, sizes: Ints, metric: Metric) -> Floats:
        """Return [m, cell], the number of mistakes or the sum of the losses over the rows of each cell.

        Args:
            models: The models.
            rows: Positions of rows in the stream; the rows of a cell follow each other.
            sizes: [cell], the number of rows of each cell.
            metric: The score of a row.
        """
        return np.add.reduceat(self.score_rows(models, rows, metric), compute_offsets(sizes), axis=1)

    def find_mistakes(self, models: Models, rows: Ints, sizes: Ints, model_of_cell: Ints) -> Bools:
        """Return [row], whether the prediction of the cell's model is wrong.

        Args:
            models: The models.
            rows: Positions of rows in the stream; the rows of a cell follow each other.
            sizes: [cell], the number of rows of each cell.
            model_of_cell: [cell], the position of the model of each cell.
        """
        mistaken = np.zeros(len(rows), dtype=bool)
        for m, model_rows in iterate_groups(np.repeat(model_of_cell, sizes)):
            one_model = take(models, [m], [models.ids[m]])
            mistaken[model_rows] = self.score_rows(one_model, rows[model_rows], "error")[0] > 0
        return mistaken

    def shuffle_cells(self, keys: rng.Words, starts: Ints, counts: Ints, order: npt.NDArray[np.int32]) -> None:
        """Write the rows of cells into `order`, each cell in the permutation of its key.

        Args:
            keys: The keys of the cells.
            starts: [cell], the first row of each cell, also the position in `order` at which it is written.
            counts: [cell], the number of rows of each cell.
            order: The array that is written to.
        """
        for k, (first, n) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
            order[first : first + n] = first + rng.permutation((keys[0][k], keys[1][k]), n)

    def test(self, state: State, t: int) -> tuple[Ints, Ints]:
        sizes = self.stream.counts[t]
        rows, owner = self._find_rows_of_time(t)
        votes = Votes.of(state.votes)
        if state.router is not None:
            votes_of_rows = self._choose_votes(state, rows, sizes)
            correct = routed_voting.find_correct_rows(self, state.models, state.ballot, rows, votes_of_rows)
        elif ((votes.weight > 0).sum(axis=1) == 1).all():  # every client votes with a single model
            used = np.flatnonzero(votes.used)
            voters = take(state.models, used, [state.models.ids[m] for m in used])
            correct = ~self.find_mistakes(voters, rows, sizes, np.searchsorted(used, votes.argmax(axis=1)))
        else:
            _, predicted, _ = self._count_votes(state, t)
            correct = predicted == self.stream.y[rows]
        return np.bincount(owner, correct, len(sizes)).astype(int), sizes

    def scores(self, state: State, t: int) -> Mapping[str, Floats]:
        sizes = self.stream.counts[t]
        rows, owner = self._find_rows_of_time(t)
        probabilities, predicted, vote_of_row = self._count_votes(state, t)
        self._last_vote = None
        labels = self.stream.y[rows]
        scores = compute_scores(probabilities, predicted, labels, sizes, self._count_received_classes(t))
        if state.router is not None:
            n_routed = np.bincount(owner, vote_of_row >= len(sizes), len(sizes))  # rows without the client's own votes
            scores["routed"] = np.divide(n_routed, sizes, out=np.full(len(sizes), np.nan), where=sizes > 0)
        has_votes = np.zeros(len(sizes), dtype=bool)
        has_votes[: len(state.votes)] = Votes.of(state.votes).has_any
        return {name: np.where(has_votes, values, np.nan) for name, values in scores.items()}

    def _count_votes(self, state: State, t: int) -> tuple[Floats, Ints, Ints]:
        """Return the probabilities [row, class] at the test of time t, [row] the predictions, and [row] the votes.

        A row's votes are a position in the votes of `_choose_votes`. The result of the last call is stored, since
        `test` and `scores` both need it.
        """
        if self._last_vote is not None and self._last_vote[0] is state and self._last_vote[1] == t:
            return self._last_vote[2]
        rows, _ = self._find_rows_of_time(t)
        probabilities = np.zeros((len(rows), self.stream.n_classes))
        predicted = np.zeros(len(rows), dtype=np.int64)
        votes, vote_of_row = self._choose_votes(state, rows, self.stream.counts[t])
        voted = np.flatnonzero(votes.has_any[vote_of_row])
        for part, logits in self.compute_team_logits(state.models, rows[voted], vote_of_row[voted], votes.model):
            block = voted[part]
            weights = votes.weight[vote_of_row[block]]
            probabilities[block] = voting.compute_vote_probabilities(logits, weights)
            if state.ballot == "soft" and (weights.sum(axis=1) == 1).all():
                predicted[block] = probabilities[block].argmax(axis=1)
            else:
                predicted[block] = voting.add_votes(logits, weights, state.ballot).argmax(axis=1)
        self._last_vote = state, t, (probabilities, predicted, vote_of_row)
        return probabilities, predicted, vote_of_row

    def _choose_votes(self, state: State, rows: Ints, sizes: Ints) -> tuple[Votes, Ints]:
        """Return votes, first those of the clients, and [row] the position of the votes for each row of a test.

        A client that has not joined yet has no votes.
        """
        votes = Votes.of(state.votes)
        if len(votes) < len(sizes):
            nothing = np.zeros((len(sizes) - len(votes), 0))
            votes = Votes.concatenate([votes, Votes(nothing.astype(np.int64), nothing, votes.n_models)])
        if state.router is not None:
            return routed_voting.choose_test_votes(self, votes, state.router, rows, sizes)
        return votes, np.repeat(np.arange(len(sizes)), sizes)

    def _count_received_classes(self, t: int) -> Ints:
        """Return [c, class], the number of rows that each client has received before time t.

        Counting continues from the time of the last call.
        """
        last_time, last_counts = self._received_classes
        since, counts = (last_time, last_counts) if last_time <= t else (0, last_counts * 0)
        for past in range(since, t):  # all at once needs much memory: 100,000 clients have tens of millions of rows
            rows, client = self._find_rows_of_time(past)
            pairs = client * self.stream.n_classes + self.stream.y[rows]
            counts = counts + np.bincount(pairs, minlength=counts.size).reshape(counts.shape)
        self._received_classes = t, counts
        return counts

    def _find_rows_of_time(self, t: int) -> tuple[Ints, Ints]:
        """Return the rows of all cells of time t, and the client of each row."""
        first = int(self.stream.starts[t, 0])
        sizes = self.stream.counts[t]
        return np.arange(first, first + sizes.sum()), np.repeat(np.arange(len(sizes)), sizes)

    def shifts(self, tau: int, clients: Sequence[int]) -> Mapping[int, Shifts]:
        counts = np.where(self.reachable, self.stream.counts[:-1], 0)
        have_data = np.flatnonzero(counts[tau]).tolist()
        compared = choose_reporting_clients(clients, have_data)
        n_others = len(set(have_data) - set(clients))
        values_per_cell = counts[tau].max() * math.prod(self.stream.features)

        def compare(c: int) -> Shifts | None:
            return find_shifts(self.stream, tau, c, counts[:, c])

        if values_per_cell < MIN_VALUES_FOR_THREADS:
            shifts = {c: compare(c) for c in compared}
        else:
            with ThreadPoolExecutor() as pool:  # NumPy releases the interpreter lock while it sorts
                shifts = dict(zip(compared, pool.map(compare, compared), strict=True))
        return mark_common_shifts({c: shift for c, shift in shifts.items() if shift is not None}, clients, n_others)


def find_distinct_members(teams: Ints) -> Ints:
    """Return the distinct members of each team in ascending order, -1: none.

    >>> find_distinct_members(np.array([[5, 2, 5], [4, -1, -1]]))
    array([[ 2,  5, -1],
           [ 4, -1, -1]])
    """
    ordered = np.sort(np.where(teams < 0, np.iinfo(np.int64).max, teams), axis=1)
    present = ordered < np.iinfo(np.int64).max
    differs = np.concatenate([np.ones((len(ordered), 1), dtype=bool), ordered[:, 1:] != ordered[:, :-1]], axis=1)
    rank = np.cumsum(present & differs, axis=1) - 1
    members = np.full(ordered.shape, -1)
    team, place = np.nonzero(present)
    members[team, rank[team, place]] = ordered[team, place]
    return members


class LaneCells(NamedTuple):
    """Cells of one lane; a cell is a pair of a time t and a head, and the index of the head changes fastest."""

    counts: Ints  # [cell], the number of rows, or of places in the cell's table
    mass: Floats  # [cell], a cell is drawn in proportion to its mass times w
    tables: dict[int, Ints]  # by cell; for cells without a table see `InProcessWorker.select_training_rows`


class InProcessWorker(Worker):
    """Base of Workers with data in this process; a subclass trains, and saves and loads the optimiser's moments."""

    engine: InProcess

    def __init__(self, engine: InProcess, tau: int) -> None:
        stream = engine.stream
        if not 0 <= tau < stream.n_steps:
            raise ConfigError(f"tau must be in 0..{stream.n_steps - 1}, got {tau}")
        self.engine = engine
        self.tau = tau
        counts = np.where(engine.reachable, stream.counts[:-1], 0)[: tau + 1]
        concepts = None if stream.concepts is None else stream.concepts[: tau + 1]
        shape = stream.x.shape[1:]
        n_groups = 0 if stream.group is None else int(stream.group.max()) + 1
        reachable = engine.reachable[tau].copy()  # clients may become unreachable during the time step
        self.known = FederationInfo(
            clients=stream.clients,
            features=shape,
            n_classes=stream.n_classes,
            counts=counts,
            reachable=reachable,
            concepts=concepts,
            n_groups=n_groups,
        )

    @abstractmethod
    def updates(self, models: Models, plan: TrainingPlan, round: int, local: Local) -> Updates: ...

    @abstractmethod
    def save(self) -> Any: ...

    @abstractmethod
    def load(self, saved: Any) -> None: ...

    def score(
        self, models: Models, cells: Ints, metric: Metric, max_rows: int | None = None, by: Parting | None = None
    ) -> Iterator[CellScores]:
        for block, rows, sizes in self._split_into_blocks(cells, len(models), max_rows):
            positions = np.arange(block.start, block.stop)
            if by is None:
                yield positions, self.engine.sum_scores(models, rows, sizes, metric), sizes
            else:
                yield positions, *self._sum_parts(by, models, rows, sizes, metric)

    def _sum_parts(self, by: Parting, models: Models, rows: Ints, sizes: Ints, metric: Metric) -> tuple[Floats, Ints]:
        """Return sums [m, cell, part] over the rows of each class or group, and their numbers of rows [cell, part]."""
        engine = self.engine
        stream = self.engine.stream
        parts, n_parts = (stream.y, stream.n_classes) if by == "class" else (stream.group, self.known.n_groups)
        assert parts is not None
        part_of_row = np.repeat(np.arange(len(sizes)), sizes) * n_parts + parts[rows]
        if metric == "error":  # the predictions of `sum_scores`
            values = [engine.find_mistakes(models, rows, sizes, np.full(len(sizes), m)) for m in range(len(models))]
        else:
            values = list(engine.score_rows(models, rows, metric))
        sums: list[Floats] = [np.bincount(part_of_row, row, len(sizes) * n_parts).astype(np.float64) for row in values]
        counts: Ints = np.bincount(part_of_row, minlength=len(sizes) * n_parts)
        return np.stack(sums).reshape(len(models), len(sizes), n_parts), counts.reshape(len(sizes), n_parts)

    def confusion(self, models: Models, clients: Ints) -> Ints:
        n = self.known.n_classes
        cells = np.stack([np.full_like(clients, self.tau), clients], axis=1)
        counts = np.zeros((len(clients), len(models), n, n), dtype=np.int64)
        for block, rows, sizes in self._split_into_blocks(cells, len(models)):
            predicted = self.engine.score_rows(models, rows, "class").astype(np.int64)
            owner = np.repeat(np.arange(block.start, block.stop), sizes)
            m = np.arange(len(models))[:, None]
            np.add.at(counts, (owner, m, self.engine.stream.y[rows], predicted), 1)
        return counts

    def describe(self, models: Models, clients: Ints, question: StatisticsRequest) -> Moments:
        engine = self.engine
        known = self.known
        width = get_layer_width(engine.net, question.layer, known.features, known.n_classes)
        matrix = question.matrix(width)
        n_parts, size = question.shape(width, known.n_classes)
        moments = Moments.empty(len(clients), len(models), n_parts, size)
        cells = np.stack([np.full_like(clients, self.tau), clients], axis=1)
        for block, rows, sizes in self._split_into_blocks(cells, len(models) * width):
            part_of_row = np.repeat(np.arange(block.start, block.stop), sizes) * n_parts
            if question.by == "class":
                part_of_row += engine.stream.y[rows]
            values = feature_statistics.project_rows(engine.compute_layer(models, rows, question.layer), matrix)
            feature_statistics.store_statistics(moments, part_of_row, values, question.square)
        return moments

    def reroute(self, models: Models, votes: Floats | Votes, ballot: Ballot, routers: Mapping[int, Router]) -> Ints:
        sizes = np.where(np.isin(np.arange(len(votes)), list(routers)), self.known.counts[self.tau], 0)
        rows = np.concatenate(
            [np.zeros(0, dtype=np.int64), *(self.get_cell_rows(self.tau, c) for c in sorted(routers))]
        )
        owner = np.repeat(np.arange(len(sizes)), sizes)
        counts = [sizes]
        own_votes = Votes.of(votes)
        routed_votes = routed_voting.choose_row_votes(self.engine, own_votes, routers, rows, sizes)
        for votes_of_rows in ((own_votes, owner), routed_votes):
            wrong = ~routed_voting.find_correct_rows(self.engine, models, ballot, rows, votes_of_rows)
            counts.append(np.bincount(owner, wrong, len(sizes)).astype(np.int64))
        return np.stack(counts, axis=1)

    def rounds(self, models: Models, plan: TrainingPlan, first: int, last: int, local: Local) -> tuple[Models, Ints]:
        return run_rounds_sequentially(self, models, plan, first, last, local)

    def trial(self, models: Models, older: Entries, parent: Ints, starts: Sequence[Start], local: Local) -> Tournament:
        return trials.run_trials(self, models, older, parent, starts, local)

    def contest(self, models: Models, teams: Ints, held_by: Local | None) -> Tournament:
        clients = np.flatnonzero((teams >= 0).any(axis=2).all(axis=0))
        if not len(clients):
            return Tournament.empty(teams.shape[1], len(teams))
        contest_rows = [self._find_contest_rows(int(c), held_by) for c in clients]
        mistakes = self._find_team_mistakes(models, teams[:, clients], contest_rows)
        sizes = np.array([len(rows) for rows in contest_rows])
        return trials.count_common_mistakes(teams.shape[1], clients, sizes, mistakes)

    def _find_contest_rows(self, c: int, held_by: Local | None) -> Ints:
        """Return the rows of client c on which contestants are compared."""
        if held_by is None:
            return self.get_cell_rows(self.tau, c)
        rows = self.shuffle_cell(self.tau, c)
        return rows[sampling.get_held_out_slice(len(rows), held_by.hold_out, held_by.holds)]

    def _find_team_mistakes(self, models: Models, teams: Ints, client_rows: Sequence[Ints]) -> Bools:
        """Return [contestant, row], whether the prediction of the contestant's team at the row's client is wrong.

        Args:
            models: All models.
            teams: [contestant, client, k], the positions of the members, -1: none; a member that is listed twice has
                two votes.
            client_rows: The rows of each client.
        """
        sizes = np.array([len(rows) for rows in client_rows])
        rows = np.concatenate(client_rows)
        is_single = (teams >= 0).sum(axis=2) == 1
        if is_single.all():
            return np.stack([self.find_mistakes(models, rows, sizes, team.max(axis=1)) for team in teams])
        owner = np.repeat(np.arange(len(client_rows)), sizes)
        members = find_distinct_members(np.concatenate(list(teams), axis=1))  # of all contestants at a client
        members = members[:, : int((members >= 0).sum(axis=1).max())]
        matches = (teams[..., None] == members[None, :, None]) & (teams[..., None] >= 0)
        votes = matches.sum(axis=2).astype(np.float64)  # [contestant, client, member]
        mistaken = np.zeros((len(teams), len(rows)), dtype=bool)
        for part, logits in self.engine.compute_team_logits(models, rows, owner, members):
            client = owner[part]
            labels = self.engine.stream.y[rows[part]]
            probabilities = [voting.softmax(member_logits) for member_logits in logits]
            for k in range(len(teams)):
                predicted = voting.average_probabilities(probabilities, votes[k, client]).argmax(axis=1)
                single = np.flatnonzero(is_single[k, client])
                predicted[single] = logits[votes[k, client[single]].argmax(axis=1), single].argmax(axis=1)
                mistaken[k, part] = predicted != labels
        return mistaken

    def make_scratch_worker(self) -> InProcessWorker:
        """Return a new worker of the same time step, whose training does not affect the run."""
        worker = self.engine.worker(self.tau)
        assert isinstance(worker, InProcessWorker)
        return worker

    def make_fresh_model(self) -> Models:
        """Return a new model with the initial parameters of all models of the run."""
        return init_models(self.engine.net, self.engine.seed)

    def find_mistakes(self, models: Models, rows: Ints, sizes: Ints, model_of_cell: Ints) -> Bools:
        """Return [row], whether the prediction of the cell's model is wrong: see `InProcess.find_mistakes`."""
        return self.engine.find_mistakes(models, rows, sizes, model_of_cell)

    def get_cell_rows(self, t: int, c: int) -> Ints:
        """Return the positions of a cell's rows in the stream."""
        rows = self.engine.stream.rows(t, c)
        return np.arange(rows.start, rows.stop)

    def shuffle_cell(self, t: int, c: int) -> Ints:
        """Return the rows of a cell in the order of this time step."""
        rows = self.get_cell_rows(t, c)
        return rows[sampling.draw_row_order(self.engine.seed, self.tau, t, c, len(rows))]

    def bootstrap_cell(self, t: int, c: int, model_id: int) -> Ints:
        """Return a bootstrap of a cell for the model with this id, the same in the whole time step."""
        rows = self.get_cell_rows(t, c)
        return rows[sampling.draw_bootstrap(self.engine.seed, self.tau, t, c, model_id, len(rows))]

    def select_training_rows(self, t: int, c: int, model_id: int, local: Local) -> Ints:
        """Return the rows of a cell that train the model with this id, in the order of this time step."""
        rows = self.bootstrap_cell(t, c, model_id) if local.bags else self.shuffle_cell(t, c)
        n = int(sampling.count_training_rows(np.array(len(rows)), local.hold_out))
        return rows[:n] if local.holds == "last" else rows[len(rows) - n :]

    def build_tables(self, c: int, model_id: int, times: Ints, w: Floats, local: Local) -> sampling.SamplingTables:
        """Return the tables of a client's cells that train a model.

        Args:
            c: The client.
            model_id: The id of the model.
            times: The times of the cells.
            w: The weights of the cells.
            local: The settings of local training; `local.by_class` is true.
        """
        cells = [self.select_training_rows(int(t), c, model_id, local) for t in times]
        rows = np.concatenate(cells)
        sizes = np.array([len(cell) for cell in cells])
        y = self.engine.stream.y[rows]
        tables = (
            sampling.build_even_tables(y, sizes, local.even)
            if local.even
            else sampling.build_balanced_tables(y, sizes, w)
        )
        return tables._replace(rows=rows[tables.rows])

    def build_lane(self, c: int, ids: Sequence[int], w: Floats, local: Local) -> LaneCells:
        """Return the cells from which a client draws to train the models of one family.

        Args:
            c: The client.
            ids: The ids of the models.
            w: [t, head], the weights of the client's data for each model.
            local: The settings of local training.
        """
        counts = np.repeat(sampling.count_training_rows(self.known.counts[:, c], local.hold_out), len(ids))
        lane = LaneCells(counts, counts.astype(np.float64), {})
        for h, model_id in enumerate(ids if local.by_class else ()):
            times = np.flatnonzero(w[:, h])
            tables = self.build_tables(c, model_id, times, w[times, h], local)
            cells = times * len(ids) + h
            lane.counts[cells] = tables.sizes
            lane.mass[cells] = tables.mass
            lane.tables.update(zip(cells.tolist(), np.split(tables.rows, np.cumsum(tables.sizes)[:-1]), strict=True))
        return lane

    def prepare_validation(self, c: int, w: Floats, lane: LaneCells, local: Local) -> tuple[Ints, Floats, int]:
        """Return the held-out rows of a lane for early stopping (`Local.patience`).

        Args:
            c: The client.
            w: [t, head], the weights of the client's data for each model.
            lane: The cells of the lane.
            local: The settings of local training.

        Returns:
            The held-out rows, their weights [head, row] with sum 1, and the number of local steps between two checks.
        """
        times = np.flatnonzero(w.any(axis=1))
        held_out = [self.shuffle_cell(int(t), c) for t in times]
        held_out = [rows[sampling.get_held_out_slice(len(rows), local.hold_out, local.holds)] for rows in held_out]
        weight = np.repeat(w[times], [len(rows) for rows in held_out], axis=0).T
        n = int(lane.counts[w.reshape(-1) > 0].sum())
        return np.concatenate(held_out), weight / (weight.sum() or 1.0), -(-n // local.batch)

    def _split_into_blocks(
        self, cells: Ints, values_per_row: int, max_rows: int | None = None
    ) -> Iterator[tuple[slice, Ints, Ints]]:
        """Yield blocks of cells [n, (t, c)] that fit into memory.

        Args:
            cells: Pairs of a time and a client.
            values_per_row: The number of values that are computed for each row.
            max_rows: Draw a sample of this number of rows from larger cells; None: all rows.

        Yields:
            The cells of a block, their rows, and the number of rows of each cell.
        """
        starts = self.engine.stream.starts[cells[:, 0], cells[:, 1]]
        counts = self.engine.stream.counts[cells[:, 0], cells[:, 1]]
        sizes = counts if max_rows is None else np.minimum(counts, max_rows)
        ends = np.cumsum(sizes)
        first = 0
        while first < len(cells):
            max_end = (ends[first - 1] if first else 0) + MAX_SCORED_VALUES // values_per_row
            block = slice(first, max(first + 1, int(np.searchsorted(ends, max_end, side="right"))))
            begins = compute_offsets(sizes[block])
            rows = np.arange(sizes[block].sum()) + np.repeat(starts[block] - begins, sizes[block])
            sampled = np.flatnonzero(counts[block] > sizes[block])
            sampled_cells = cells[first + sampled]
            keys = rng.derive_key(self.engine.seed, "score", self.tau, sampled_cells[:, 0], sampled_cells[:, 1])
            sampled_counts = counts[first + sampled]
            order = np.zeros(sampled_counts.sum(), dtype=np.int32)
            offsets = compute_offsets(sampled_counts)
            self.engine.shuffle_cells(keys, offsets, sampled_counts, order)
            for k, offset in zip(sampled, offsets, strict=True):
                sample = np.sort(order[offset : offset + max_rows] - offset)
                rows[begins[k] : begins[k] + max_rows] = starts[first + k] + sample
            yield block, rows, sizes[block]
            first = block.stop
