"""The waist of the library: all that clients do in a time step, and all that a server knows of them.

A server (`federation.TimeStep`) decides, counts and averages; a `Worker` scores and trains. Simulators, nets of other
frameworks and clients at the other end of a network are Workers, and a new engine is a new Worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from feddrift.averaging import averaged, finite
from feddrift.engines.sparse_weights import Entries
from feddrift.models import only_trained
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

# Stored cells are scored on a keyed sample of at most so many rows.
SCORE_ROWS = 512

# Positions in the list of cells (at least one, ascending), sums [m, cell] over their rows, and how many rows these are;
# with `by`, both have one more axis, of classes or groups.
Scored = tuple[Ints, Floats, Ints]


@dataclass
class Known:
    """What a server may know of its clients at time tau."""

    clients: tuple[str, ...]  # their names
    features: tuple[int, ...]  # the shape of one input
    n_classes: int
    counts: Ints  # N[t, c] for t = 0..tau; 0 where a client received nothing, or was out of reach
    reachable: Bools  # [c], who can be asked; may change while the time step goes on
    concepts: Ints | None = None  # the truth for t = 0..tau, where somebody knows it
    n_groups: int = 0  # into which rows fall, where they do


@dataclass(frozen=True, eq=False)
class Question:
    """Which moments clients are asked for: see `Federation.moments`."""

    layer: Layer
    by: Literal["all", "class"] = "all"
    project: Floats | Projection | None = None
    square: bool = True

    def matrix(self, width: int) -> Floats | None:
        """[D, d], what is applied to a layer of this width; None: nothing."""
        return self.project.matrix(width) if isinstance(self.project, Projection) else self.project

    def shape(self, width: int, n_classes: int) -> tuple[int, int]:
        """How many parts the rows of a client fall into, and how many numbers describe each, for a layer so wide."""
        matrix = self.matrix(width)
        return n_classes if self.by == "class" else 1, width if matrix is None else matrix.shape[1]


@dataclass(frozen=True)
class Work:
    """Who trains which models on which data: one row per pair of a client and a model.

    The models of one family that a client trains share a lane: each local step trains the trunk and one of the heads.
    """

    client: Ints  # [pair]
    model: Ints  # [pair], a position in the stack
    size: Floats  # [pair], the data behind it: sum over t of w[t, c, m] N[t, c]
    lane: Ints  # [pair], from 0
    data: Entries  # w of these pairs
    until: int = 0  # the rounds before this one all follow, on the same data: who trains alone may do them at once

    @classmethod
    def of(cls, models: Models, data: Entries, counts: Ints) -> Work:
        """The pairs that have data to train on, by model, then client."""
        on, n_clients = models.trunk_index, data.shape[1]
        pairs, entry = np.unique(data.m * n_clients + data.c, return_inverse=True)
        m, c = np.divmod(pairs, n_clients)
        size: Floats = np.bincount(entry, data.value * counts[data.t, data.c], len(pairs)).astype(np.float64)
        _, lane = np.unique(on[m] * n_clients + c, return_inverse=True)
        return cls(c, m, size, lane, data)

    def select(self, clients: Bools, models: Bools | None = None) -> Work:
        """The part of these clients [c], and of these models [m]; lanes are counted anew."""
        models = np.ones(self.data.shape[2], dtype=bool) if models is None else models
        pairs = clients[self.client] & models[self.model]
        _, lane = np.unique(self.lane[pairs], return_inverse=True)
        data = self.data.select(clients[self.data.c] & models[self.data.m])
        return Work(self.client[pairs], self.model[pairs], self.size[pairs], lane, data, self.until)

    def updates(self, params: Params) -> Updates:
        """The updates of this work: the parameters that its pairs trained."""
        return Updates(params, self.client, self.model, self.size, self.lane)

    @property
    def n_lanes(self) -> int:
        """How many pairs of a client and a family train."""
        return int(self.lane.max()) + 1 if len(self.lane) else 0


class Worker(Protocol):
    """All that clients do at time tau; who uses which model, counts and decisions are the server's.

    A client that does not answer is out of reach (`known.reachable`) from then on; `score` and `updates` leave it out,
    `confusion`, `trial`, `contest` and `reroute` have zeros for it, `describe` no rows.
    `feddrift.testing.check_worker` says whether an engine made of one keeps the contract:

    >>> from feddrift.engines.local.reference import Reference
    >>> from feddrift.testing import check_worker
    >>> check_worker(Reference)
    """

    known: Known

    def score(
        self, models: Models, cells: Ints, metric: Metric, most: int | None = None, by: Parting | None = None
    ) -> Iterator[Scored]:
        """Mistakes, or losses added up, of every model on each cell (t, c), or on a sample of `most` of its rows."""
        ...

    def confusion(self, models: Models, clients: Ints) -> Ints:
        """Counts [client, m, true class, predicted class] on the newest data of these clients."""
        ...

    def describe(self, models: Models, clients: Ints, question: Question) -> Moments:
        """What a layer makes of the newest data of these clients, in their order: see `Federation.moments`."""
        ...

    def reroute(self, models: Models, votes: Floats | Votes, ballot: Ballot, routers: Mapping[int, Router]) -> Ints:
        """[c, 3], at the clients with a router: their new rows, the mistakes of votes[c] on them, and of its choice."""
        ...

    def updates(self, models: Models, work: Work, round: int, local: Local) -> Updates:
        """One round of local training: K steps of every pair, from the models as they are."""
        ...

    def rounds(self, models: Models, work: Work, first: int, last: int, local: Local) -> tuple[Models, Ints]:
        """Rounds first..last - 1, each averaged by the data behind; and in how many a lane was left out of it.

        `in_turn` does it with `updates`; who can do all rounds at once is faster.
        """
        ...

    def trial(self, models: Models, older: Entries, parent: Ints, starts: Sequence[Start], local: Local) -> Tournament:
        """What each client with a parent finds about these starts of a new model: see `Federation.tournament`."""
        ...

    def contest(self, models: Models, teams: Ints, held_by: Local | None) -> Tournament:
        """How many rows which contestants get wrong, at each client where all have models: see `Federation.contest`."""
        ...

    def save(self) -> Any:
        """The optimiser's moments, and whatever else the rest of the time step depends on, for a checkpoint."""
        ...

    def load(self, saved: Any) -> None:
        """The way back from `save`."""
        ...


class Through(Worker):
    """A Worker that passes every question on to another; what stands between server and clients overrides some."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.known = worker, worker.known

    def score(
        self, models: Models, cells: Ints, metric: Metric, most: int | None = None, by: Parting | None = None
    ) -> Iterator[Scored]:
        given = (models, cells, metric, most)  # an engine of somebody's own may know of no parts
        return self.worker.score(*given) if by is None else self.worker.score(*given, by)

    def confusion(self, models: Models, clients: Ints) -> Ints:
        return self.worker.confusion(models, clients)

    def describe(self, models: Models, clients: Ints, question: Question) -> Moments:
        return self.worker.describe(models, clients, question)

    def reroute(self, models: Models, votes: Floats | Votes, ballot: Ballot, routers: Mapping[int, Router]) -> Ints:
        return self.worker.reroute(models, votes, ballot, routers)

    def updates(self, models: Models, work: Work, round: int, local: Local) -> Updates:
        return self.worker.updates(models, work, round, local)

    def rounds(self, models: Models, work: Work, first: int, last: int, local: Local) -> tuple[Models, Ints]:
        return self.worker.rounds(models, work, first, last, local)

    def trial(self, models: Models, older: Entries, parent: Ints, starts: Sequence[Start], local: Local) -> Tournament:
        return self.worker.trial(models, older, parent, starts, local)

    def contest(self, models: Models, teams: Ints, held_by: Local | None) -> Tournament:
        return self.worker.contest(models, teams, held_by)

    def save(self) -> Any:
        return self.worker.save()

    def load(self, saved: Any) -> None:
        self.worker.load(saved)


def in_turn(worker: Worker, models: Models, work: Work, first: int, last: int, local: Local) -> tuple[Models, Ints]:
    """Rounds one after the other; an update that is not finite is left out of the average."""
    left_out: Ints = np.zeros(work.n_lanes, dtype=np.int64)
    for round in range(first, last):
        updates = worker.updates(models, work, round, local)
        left_out += lanes_left_out(models, work, updates)
        average = averaged(models, updates, local.average)
        models = only_trained(models, average, local.trains) if local.trains == "trunk" else average
    return models, left_out


def lanes_left_out(models: Models, work: Work, updates: Updates) -> Ints:
    """[lane], 1 where an update holds numbers that are not finite."""
    left_out: Ints = np.zeros(work.n_lanes, dtype=np.int64)
    if len(updates.client):
        bad = (~finite(models, updates))[updates.lane]
        for c, m in zip(updates.client[bad], updates.model[bad], strict=True):
            left_out[work.lane[(work.client == c) & (work.model == m)]] = 1
    return left_out


def gathered(models: Models, work: Work, parts: Sequence[Updates]) -> Updates:
    """The updates of several workers, each of which had a `select`ion of the work, as one."""
    if not parts:
        nobody = work.select(np.zeros(work.data.shape[1], dtype=bool))
        return nobody.updates(map_trunk_and_head(lambda leaf, _: leaf[:0], models, None, None))
    client, model, size = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("client", "model", "size")
    )
    firsts = [np.unique(part.lane, return_index=True)[1] for part in parts]
    lanes = [(models.trunk_index[part.model[at]], part.client[at]) for part, at in zip(parts, firsts, strict=True)]
    trunk, owner = (np.concatenate(values) for values in zip(*lanes, strict=True))
    order, lane_order = np.lexsort((client, model)), np.lexsort((owner, trunk))  # as in Work
    params = map_trunk_and_head(
        lambda _, *new_and_order: np.concatenate(new_and_order[:-1])[new_and_order[-1]],
        models,
        order,
        lane_order,
        *(part.params for part in parts),
    )
    _, lane = np.unique(models.trunk_index[model[order]] * work.data.shape[1] + client[order], return_inverse=True)
    return Updates(params, client[order], model[order], size[order], lane)
