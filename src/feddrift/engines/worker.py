"""Interface between server and clients: the requests of a time step, and the information that a server has of clients.

A server (`engines.server.federation.TimeStep`) counts traffic and averages models; a `Worker` scores and trains them.
The simulator, models of other frameworks and remote clients have a Worker each; a new engine needs another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from feddrift._renamed import forward_renamed_names
from feddrift.averaging import average_updates, find_finite_lanes
from feddrift.engines.sparse_weights import Entries
from feddrift.models import restore_untrained_part
from feddrift.trees import map_trunk_and_head
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
    Params,
    Parting,
    Projection,
    Router,
    Start,
    Tournament,
    Updates,
    Votes,
)

MAX_SCORED_ROWS = 512  # of a cell in a cross-evaluation; of a larger cell, a random sample is scored

# Positions in the list of cells (at least one, ascending), the sums [m, cell] over the rows of these cells, and the
# numbers of rows [cell]. If scores are divided (`by`), sums and numbers have a further axis, of classes or groups.
CellScores = tuple[Ints, Floats, Ints]

if not TYPE_CHECKING:  # a type checker must report names that do not exist
    __getattr__ = forward_renamed_names(__name__)


@dataclass
class FederationInfo:
    """Information about the clients that is available to the server at time tau."""

    clients: tuple[str, ...]  # names
    features: tuple[int, ...]  # shape of one input
    n_classes: int
    counts: Ints  # N[t, c] for t = 0..tau; 0 if the client received no rows or was unreachable
    reachable: Bools  # [c]; a client that does not reply becomes unreachable for the rest of the time step
    concepts: Ints | None = None  # true concepts for t = 0..tau, if known
    n_groups: int = 0  # number of groups of rows; 0: rows have no groups


@dataclass(frozen=True, eq=False)
class StatisticsRequest:
    """A request for feature statistics of the clients' newest data; the fields are those of `Federation.moments`."""

    layer: Layer
    by: Literal["all", "class"] = "all"
    project: Floats | Projection | None = None
    square: bool = True

    def matrix(self, width: int) -> Floats | None:
        """Return the matrix [width, d] that projects a layer of this width; None: no projection."""
        return self.project.matrix(width) if isinstance(self.project, Projection) else self.project

    def shape(self, width: int, n_classes: int) -> tuple[int, int]:
        """Return the size of the statistics of one model at one client.

        Args:
            width: The number of values of the layer for one row.
            n_classes: The number of classes.

        Returns:
            The number of means (1, or one for each class), and the length of each mean.
        """
        matrix = self.matrix(width)
        return n_classes if self.by == "class" else 1, width if matrix is None else matrix.shape[1]


@dataclass(frozen=True)
class TrainingPlan:
    """Clients, models and data of a training: one row for each pair of a client and a model.

    The models of one family that a client trains form a lane: each local step trains the shared trunk and one head.
    """

    client: Ints  # [pair]
    model: Ints  # [pair], a position in the stack
    size: Floats  # [pair], number of weighted examples: sum over t of w[t, c, m] N[t, c]
    lane: Ints  # [pair], number of the lane, from 0
    data: Entries  # the entries of w of these pairs
    until: int = 0  # rounds before this one use the same plan; a model with a single client may run them all at once

    @classmethod
    def of(cls, models: Models, data: Entries, counts: Ints) -> TrainingPlan:
        """Return the plan for all pairs that have data, sorted by model, then by client.

        Args:
            models: The models.
            data: The entries of w to train on.
            counts: N[t, c].
        """
        n_clients = data.shape[1]
        pairs, entry = np.unique(data.m * n_clients + data.c, return_inverse=True)
        m, c = np.divmod(pairs, n_clients)
        size: Floats = np.bincount(entry, data.value * counts[data.t, data.c], len(pairs)).astype(np.float64)
        _, lane = np.unique(models.trunk_index[m] * n_clients + c, return_inverse=True)
        return cls(c, m, size, lane, data)

    def select(self, clients: Bools, models: Bools | None = None) -> TrainingPlan:
        """Return the part of the plan with these clients [c] and models [m]; lanes are numbered from 0 again."""
        models = np.ones(self.data.shape[2], dtype=bool) if models is None else models
        pairs = clients[self.client] & models[self.model]
        _, lane = np.unique(self.lane[pairs], return_inverse=True)
        data = self.data.select(clients[self.data.c] & models[self.data.m])
        return TrainingPlan(self.client[pairs], self.model[pairs], self.size[pairs], lane, data, self.until)

    def updates(self, params: Params) -> Updates:
        """Return the updates of this plan with these trained parameters, by pair and (for trunks) by lane."""
        return Updates(params, self.client, self.model, self.size, self.lane)

    @property
    def n_lanes(self) -> int:
        """Number of pairs of a client and a family."""
        return int(self.lane.max()) + 1 if len(self.lane) else 0


class Worker(Protocol):
    """Interface of the clients at time tau: they reply to the requests of the server.

    A Worker exists for one time step. A client that does not reply is unreachable (`known.reachable`) from then on:
    `score` and `updates` omit it, `confusion`, `trial`, `contest` and `reroute` have zeros for it, and `describe` has
    counts of 0.

    A client is a position c, a time is t, and a model is a position m in the stack of a request.
    `feddrift.testing.check_worker` checks whether the Workers of an engine fulfil this contract:

    >>> from feddrift.engines.local.reference import Reference
    >>> from feddrift.testing import check_worker
    >>> check_worker(Reference)
    """

    known: FederationInfo

    def score(
        self, models: Models, cells: Ints, metric: Metric, max_rows: int | None = None, by: Parting | None = None
    ) -> Iterator[CellScores]:
        """Yield the number of mistakes, or the sum of losses, of every model on cells, in blocks of cells.

        Args:
            models: The models.
            cells: [cell, 2], pairs (t, c).
            metric: The score of a row.
            max_rows: Score a random sample of this number of rows of larger cells, the same in each call; None: all.
            by: Sum the rows of each class or group separately; None: sum all rows.

        Yields:
            The positions in `cells` of a block, its sums, and its numbers of rows: see `CellScores`.
        """
        ...

    def confusion(self, models: Models, clients: Ints) -> Ints:
        """Count the rows of the newest data by their true and their predicted class.

        Args:
            models: The models.
            clients: Positions of clients, ascending.

        Returns:
            Counts [client, m, true class, predicted class], one row for each of `clients`.
        """
        ...

    def describe(self, models: Models, clients: Ints, question: StatisticsRequest) -> Moments:
        """Compute statistics of a layer's output on the newest data: see `Federation.moments`.

        Args:
            models: The models.
            clients: Positions of clients, ascending.
            question: The layer, its projection, and the statistics to return.

        Returns:
            Counts, means and deviations, one row for each of `clients`.
        """
        ...

    def reroute(self, models: Models, votes: Floats | Votes, ballot: Ballot, routers: Mapping[int, Router]) -> Ints:
        """Compare each client's own votes with the choice of its router on the client's newest data.

        Args:
            models: The models.
            votes: [c, m], the weight of each model in the vote at each client.
            ballot: The rule by which votes are counted.
            routers: The router of each client that takes part, by the client's position.

        Returns:
            [c, 3]: the number of new rows, the mistakes of votes[c], and those of the router's choice; zeros for
            clients without a router.
        """
        ...

    def updates(self, models: Models, plan: TrainingPlan, round: int, local: Local) -> Updates:
        """Run one round of local training: every client runs K local steps from the given models.

        Args:
            models: The models before the round.
            plan: The pairs of clients and models, and their data.
            round: The number of the round in this time step, from 0.
            local: The settings of local training.

        Returns:
            The parameters that each pair has trained, not averaged.
        """
        ...

    def rounds(self, models: Models, plan: TrainingPlan, first: int, last: int, local: Local) -> tuple[Models, Ints]:
        """Run the rounds first..last - 1; after each round the averages of the updates replace the models.

        `run_rounds_sequentially` implements it by calls of `updates`; one program for all rounds is faster.

        Args:
            models: The models before the rounds.
            plan: The pairs of clients and models, and their data, the same in all rounds.
            first: The number of the first round in this time step, from 0.
            last: The number after that of the last round.
            local: The settings of local training.

        Returns:
            The trained models, and [lane] the number of rounds whose average left the lane out.
        """
        ...

    def trial(self, models: Models, older: Entries, parent: Ints, starts: Sequence[Start], local: Local) -> Tournament:
        """Let clients train a new model from several starts and count its mistakes: see `Federation.tournament`.

        Args:
            models: The models.
            older: The entries of w before tau, for the start "joint".
            parent: [c], the position of the model that the new one is compared with; -1: the client takes no part.
            starts: The starts that every client compares.
            local: The settings of local training.

        Returns:
            By client, the number of evaluated rows and the common mistakes of each two starts.
        """
        ...

    def contest(self, models: Models, teams: Ints, held_by: Local | None) -> Tournament:
        """Count the common mistakes of contestants at each client: see `Federation.contest`.

        Args:
            models: The models.
            teams: [contestant, client, k], the positions of the models of each contestant, -1: none. A client without
                a model for each contestant takes no part.
            held_by: Evaluate on the rows that training with these settings holds out; None: on all new rows.

        Returns:
            By client, the number of evaluated rows and the common mistakes of each two contestants.
        """
        ...

    def save(self) -> Any:
        """Return the state that the rest of the time step depends on, such as the optimiser's moments.

        Checkpoints contain it, so it consists of numbers, strings and arrays in dictionaries, lists and tuples.
        """
        ...

    def load(self, saved: Any) -> None:
        """Restore the state that `save` returned."""
        ...


class WorkerProxy(Worker):
    """A Worker that forwards every request to another Worker; subclasses change some requests or replies."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.known = worker.known

    def score(
        self, models: Models, cells: Ints, metric: Metric, max_rows: int | None = None, by: Parting | None = None
    ) -> Iterator[CellScores]:
        return score_cells(self.worker, models, cells, metric, max_rows, by)

    def confusion(self, models: Models, clients: Ints) -> Ints:
        return self.worker.confusion(models, clients)

    def describe(self, models: Models, clients: Ints, question: StatisticsRequest) -> Moments:
        return self.worker.describe(models, clients, question)

    def reroute(self, models: Models, votes: Floats | Votes, ballot: Ballot, routers: Mapping[int, Router]) -> Ints:
        return self.worker.reroute(models, votes, ballot, routers)

    def updates(self, models: Models, plan: TrainingPlan, round: int, local: Local) -> Updates:
        return self.worker.updates(models, plan, round, local)

    def rounds(self, models: Models, plan: TrainingPlan, first: int, last: int, local: Local) -> tuple[Models, Ints]:
        return self.worker.rounds(models, plan, first, last, local)

    def trial(self, models: Models, older: Entries, parent: Ints, starts: Sequence[Start], local: Local) -> Tournament:
        return self.worker.trial(models, older, parent, starts, local)

    def contest(self, models: Models, teams: Ints, held_by: Local | None) -> Tournament:
        return self.worker.contest(models, teams, held_by)

    def save(self) -> Any:
        return self.worker.save()

    def load(self, saved: Any) -> None:
        self.worker.load(saved)


def score_cells(
    worker: Worker, models: Models, cells: Ints, metric: Metric, max_rows: int | None, by: Parting | None
) -> Iterator[CellScores]:
    """Call `worker.score`, without the argument `by` if it is None, since Workers of other packages may lack it."""
    if by is None:
        return worker.score(models, cells, metric, max_rows)
    return worker.score(models, cells, metric, max_rows, by)


def run_rounds_sequentially(
    worker: Worker, models: Models, plan: TrainingPlan, first: int, last: int, local: Local
) -> tuple[Models, Ints]:
    """Run rounds one after the other (Algorithm 1); averages leave out updates that are not finite.

    Args:
        worker: The clients.
        models: The models before the rounds.
        plan: The pairs of clients and models, and their data.
        first: The number of the first round.
        last: The number after that of the last round.
        local: The settings of local training.

    Returns:
        The trained models, and [lane] the number of rounds whose average left the lane out.
    """
    left_out: Ints = np.zeros(plan.n_lanes, dtype=np.int64)
    for round in range(first, last):
        updates = worker.updates(models, plan, round, local)
        left_out += find_nonfinite_lanes(models, plan, updates)
        average = average_updates(models, updates, local.average)
        models = restore_untrained_part(models, average, local.trains) if local.trains == "trunk" else average
    return models, left_out


def find_nonfinite_lanes(models: Models, plan: TrainingPlan, updates: Updates) -> Ints:
    """Return [lane], 1 where an update contains numbers that are not finite or too large to compute with."""
    left_out: Ints = np.zeros(plan.n_lanes, dtype=np.int64)
    if len(updates.client):
        nonfinite = (~find_finite_lanes(models, updates))[updates.lane]
        for c, m in zip(updates.client[nonfinite], updates.model[nonfinite], strict=True):
            left_out[plan.lane[(plan.client == c) & (plan.model == m)]] = 1
    return left_out


def concatenate_updates(models: Models, plan: TrainingPlan, parts: Sequence[Updates]) -> Updates:
    """Join the updates of several workers, each of which trained a selection of a plan.

    Args:
        models: The models before the training.
        plan: The whole plan.
        parts: The updates of the selections, in any order.

    Returns:
        The updates of all of them, with pairs and lanes in the order of the plan.
    """
    if not parts:
        empty = plan.select(np.zeros(plan.data.shape[1], dtype=bool))
        return empty.updates(map_trunk_and_head(lambda leaf, _: leaf[:0], models, None, None))
    n_clients = plan.data.shape[1]
    client, model, size = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("client", "model", "size")
    )
    lane_numbers = [models.trunk_index[part.model] * n_clients + part.client for part in parts]  # of each pair
    first_pairs = [np.unique(part.lane, return_index=True)[1] for part in parts]  # of each lane
    pair_order = np.lexsort((client, model))  # as in TrainingPlan.of
    lane_order = np.argsort(
        np.concatenate([numbers[first] for numbers, first in zip(lane_numbers, first_pairs, strict=True)]),
        kind="stable",
    )
    params = map_trunk_and_head(
        lambda _, *leaves_and_order: np.concatenate(leaves_and_order[:-1])[leaves_and_order[-1]],
        models,
        pair_order,
        lane_order,
        *(part.params for part in parts),
    )
    _, lane = np.unique(np.concatenate(lane_numbers)[pair_order], return_inverse=True)
    return Updates(params, client[pair_order], model[pair_order], size[pair_order], lane)
