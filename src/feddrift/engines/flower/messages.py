"""Messages between server and clients: a type per request, and its reply. A change of a message changes `PROTOCOL`.

A request is a dataclass whose fields are the body that is sent. A function reads each reply, and raises
InvalidMessageError if its content is not valid, before any of it is used. Models are sent as the names of their parts
(see `model_parts`); parts that the client lacks are sent beside the body.

Each body also contains `version`, each request `about` (see RequestContext), and each reply `client`. A reply without
an answer contains `missing` (names of parts that the server must send), `refused` (the rule of the client's policy that
the request breaks) or `failed` (the reason; without `client` if the client could not be created). A reply with an
answer may contain `lost` (private models) and `damaged` (batches in the client's store). A reply to a hello may contain
`revocations` (see `revocations.ClientRevocations`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Self, get_args

import numpy as np
from flwr.app import Array

from feddrift._version import __version__
from feddrift.drift_explanation import (
    MAX_NAMED_SHIFTS,
    MAX_REPORTED_INPUTS,
    MAX_STATISTIC,
    MAX_WITHIN_CLASS_SHIFTS,
    Shift,
    ShiftKind,
    Shifts,
)
from feddrift.engines.flower import serialization
from feddrift.engines.flower.model_parts import Body, Part, Shapes
from feddrift.engines.flower.serialization import InvalidMessageError, check_int, check_numbers
from feddrift.engines.sparse_weights import Entries
from feddrift.engines.worker import MAX_SCORED_ROWS
from feddrift.errors import to_one_line
from feddrift.scores import MAX_LOG_LOSS, SCORES
from feddrift.types import Ballot, Ints, Metric, Start

PROTOCOL = 7
VERSION = f"{__version__}/{PROTOCOL}"
MAX_CELL_ROWS = 10**9
MAX_MODEL_ID = 2**62  # also the maximum version label of a private model
MAX_SIZE = 10**6  # maximum number of time steps, clients, classes, or features along an axis
MAX_NAME_LENGTH = 100  # characters of the name of an input or a class

RawParts = Mapping[str, list[Array]]  # parts of models as they were received
PackedEntries = list[list[Any]]  # a client's part of w: times, positions of models, values


@dataclass(frozen=True)
class RequestContext:
    """Description of the federation, the client and the time step, which every request contains."""

    experiment: str
    client: str
    index: int
    n_clients: int
    n_classes: int
    features: tuple[int, ...]
    seed: int
    tau: int

    @classmethod
    def from_body(cls, about: Any) -> Self:
        """Read and check the part `about` of a request's body."""
        names = [field.name for field in fields(cls)]
        if not isinstance(about, dict) or set(about) != set(names):
            raise InvalidMessageError(f"its description of the federation must consist of {', '.join(names)}")
        sizes = [about[name] for name in ("index", "n_clients", "n_classes", "tau")]
        for number in [*sizes, *about["features"]]:
            check_int(number, 0, MAX_SIZE)  # a client creates arrays of these sizes
        check_int(about["seed"], 0, 2**63)
        return cls(**{**about, "features": tuple(about["features"])})


@dataclass(frozen=True)
class Request:
    """Request to a client."""

    action: ClassVar[str]  # type of the message in Flower
    deadline: ClassVar[str]  # field of WaitingRules with its deadline

    def to_body(self) -> Body:
        """Return the request as plain values, to be sent as JSON."""
        return asdict(self)

    @classmethod
    def from_body(cls, body: Body) -> Self:
        """Build the request from a body; a missing field raises KeyError."""
        return cls(**{field.name: body[field.name] for field in fields(cls)})


@dataclass(frozen=True)
class Hello(Request):
    """Request to report which data have arrived; with models to `serve`, also to test and use these from now on."""

    action = "query.hello"
    deadline = "hello"

    serve: Body | None = None  # tau, models, votes, ballot, perhaps router
    seen: int | None = -1  # newest time step of which the server has row counts, -1: none; None: take no new data now
    revocations: Body | None = None  # highest serial number, perhaps the list; None: the server has no revocations
    plan: Body | None = None  # algorithm, its settings, and the fields of Local, which clients pin

    @classmethod
    def with_models(
        cls, tau: int, models: list[Body], votes: list[float], ballot: Ballot, router: Body | None = None
    ) -> Self:
        """Return a request to test these models, which were trained at time tau, and to use them from then."""
        optional = {} if router is None else {"router": router}
        return cls({"tau": tau, "models": models, "votes": votes, "ballot": ballot, **optional})

    def to_body(self) -> Body:
        optional = {"serve": self.serve, "revocations": self.revocations, "plan": self.plan}
        return {name: value for name, value in optional.items() if value is not None} | {"seen": self.seen}

    @classmethod
    def from_body(cls, body: Body) -> Self:
        seen = body.get("seen", -1)
        checked = None if seen is None else check_int(seen, -1, MAX_SIZE)
        return cls(body.get("serve"), checked, body.get("revocations"), body.get("plan"))


@dataclass(frozen=True)
class Evaluate(Request):
    """Request to score models: on the newest data, and on a sample of every cell that is stored."""

    action = "evaluate.models"
    deadline = "evaluate"

    metric: str  # a Metric, or confusion
    models: list[Body]
    by: str | None = None  # class: separately for each class

    def to_body(self) -> Body:
        return {"metric": self.metric, "models": self.models} | ({} if self.by is None else {"by": self.by})

    @classmethod
    def from_body(cls, body: Body) -> Self:
        return cls(body["metric"], body["models"], body.get("by"))


@dataclass(frozen=True)
class Train(Request):
    """Request for one round of local training.

    Private models may be trained for several `rounds`; the result is stored at the client. Shared models that no other
    client trains may be trained for up to `more` further rounds; the reply contains the number of further rounds.
    """

    action = "train.round"
    deadline = "train"

    round: int
    local: Body  # the fields of Local
    models: list[Body]
    w: PackedEntries
    rounds: int = 1
    keep: int = 0  # version label under which private models are stored; 0: the models are shared, and sent back
    pull: float | None = None  # weight of a pull in the loss; None: no pull
    to: list[Body] = field(default_factory=list)  # target models of the pull; empty: the models before the round
    more: int = 0  # maximum number of further rounds
    within: float = 0.0  # seconds after which no further round begins


@dataclass(frozen=True)
class Trial(Request):
    """Request to compare starts of a new model: see `Federation.tournament`."""

    action = "train.tournament"
    deadline = "train"

    models: list[Body]
    parent: int
    starts: list[Start]
    local: Body
    w: PackedEntries


@dataclass(frozen=True)
class Explain(Request):
    """Request to report what changed in the client's data, after an alarm at this or another client."""

    action = "query.explain"
    deadline = "hello"


@dataclass(frozen=True)
class Contest(Request):
    """Request to let teams of models compete: see `Federation.contest`."""

    action = "evaluate.contest"
    deadline = "evaluate"

    models: list[Body]
    teams: list[list[int]]  # [contestant], positions of its models
    held_by: Body | None  # the fields of the Local whose hold-out is used; None: all new data


@dataclass(frozen=True)
class Describe(Request):
    """Request for statistics of the values of a layer of these models on the newest data."""

    action = "evaluate.describe"
    deadline = "evaluate"

    models: list[Body]
    layer: str
    by: str
    project: Any  # None, a matrix as lists, or key and size of a random matrix
    square: bool


@dataclass(frozen=True)
class Reroute(Request):
    """Request to compare these votes with those that a router chooses by inputs, on the newest data."""

    action = "evaluate.reroute"
    deadline = "evaluate"

    models: list[Body]
    votes: list[float]
    ballot: Ballot
    router: Body


REQUESTS: dict[str, type[Request]] = {
    "hello": Hello,
    "evaluate": Evaluate,
    "train": Train,
    "tournament": Trial,
    "explain": Explain,
    "contest": Contest,
    "describe": Describe,
    "reroute": Reroute,
}
REFUSABLE = "explain", "describe", "sgd"  # what a client may refuse always: kinds of requests, and an optimizer
KIND_BY_REQUEST = {cls: kind for kind, cls in REQUESTS.items()}


@dataclass(frozen=True)
class HelloReply:
    """Reply to Hello: the client's data, and the test of the models to serve on the newest of them."""

    cells: dict[int, int]  # by time step, the number of rows in the client's store
    tested: tuple[int, int] | None = None  # number of correct predictions, and of rows
    scores: dict[str, float] = field(default_factory=dict)  # finite scores of the same test, by name
    backlog: int = 0  # number of batches that have arrived and are not assigned to a time step yet
    gap: int | None = None  # number of a batch that has not arrived and must come before them
    refuses: tuple[str, ...] = ()  # those of REFUSABLE that the client always refuses, by its operator's choice

    def to_body(self) -> Body:
        """Return the reply as plain values, to be sent as JSON."""
        right = {} if self.tested is None else {"right": self.tested[0], "tested": self.tested[1]}
        waiting = {"backlog": self.backlog, "gap": self.gap} if self.backlog else {}
        refuses = {"refuses": list(self.refuses)} if self.refuses else {}
        return {"cells": [[t, n] for t, n in self.cells.items()]} | right | {"scores": self.scores} | waiting | refuses

    @classmethod
    def from_body(cls, body: Body, tau: int) -> Self:
        """Read and check the body of a reply at time tau."""
        cells = [(check_int(t, 0, tau), check_int(n, 1, MAX_CELL_ROWS)) for t, n in body["cells"]]
        if len(dict(cells)) != len(cells):
            raise InvalidMessageError("it names a time step twice")
        gap = None if body.get("gap") is None else check_int(body["gap"], 0, MAX_SIZE)
        refuses = tuple(name for name in REFUSABLE if name in list(body.get("refuses", ())))
        reply = cls(dict(cells), backlog=check_int(body.get("backlog", 0), 0, MAX_SIZE), gap=gap, refuses=refuses)
        if "right" not in body:
            return reply
        n = dict(cells).get(tau, 0)
        maxima = {name: 1.0 if score.share else MAX_LOG_LOSS for name, score in SCORES.items()} | {"routed": 1.0}
        if unknown := sorted(body["scores"].keys() - maxima.keys()):
            raise InvalidMessageError(f"it has an unknown score, {unknown[0]!r}")
        scores = {name: check_numbers([value], 1, maxima[name], False)[0] for name, value in body["scores"].items()}
        return replace(reply, tested=(check_int(body["right"], 0, n), check_int(body["tested"], n, n)), scores=scores)


# The number of rows, and [m] the sum of each model's scores on them; by class, each number is a list over the classes.
ScoreSums = tuple[Any, list[Any]]


@dataclass(frozen=True)
class EvaluateReply:
    """Reply to Evaluate: sums of each model's scores over the newest data, and over a sample of each stored cell."""

    new: ScoreSums | None  # None: no new data
    stored: dict[int, ScoreSums]  # by time

    def to_body(self) -> Body:
        """Return the reply as plain values, to be sent as JSON."""
        new: Body = {} if self.new is None else {"new": self.new[1]}
        if self.new is not None and isinstance(self.new[0], list):
            new["sizes"] = self.new[0]
        return new | {"stored": [[t, size, sums] for t, (size, sums) in self.stored.items()]}

    @classmethod
    def from_body(cls, body: Body, counts: Ints, n_models: int, metric: Metric, n_parts: int | None = None) -> Self:
        """Read and check the body of a reply.

        Args:
            body: The body.
            counts: [t], the number of the client's rows of each time step up to this one.
            n_models: The number of models that it scored.
            metric: The score of a row.
            n_parts: The number of classes, if it scored each class separately.

        Raises:
            InvalidMessageError: The content is not valid.
        """
        is_count = metric == "error"
        n = int(counts[-1])
        tau = len(counts) - 1
        size = n if n_parts is None or not n else body["sizes"]
        new = _read_sums(size, body["new"], n, n_models, n_parts, is_count) if n else None
        stored = {}
        for t, size, sums in body["stored"]:
            n_rows = int(counts[t]) if isinstance(t, int) and 0 <= t <= tau else 0
            if n_rows:  # else the data arrived too late for this time step
                stored[t] = _read_sums(size, sums, min(n_rows, MAX_SCORED_ROWS), n_models, n_parts, is_count)
        if set(stored) != set(np.flatnonzero(counts).tolist()):
            raise InvalidMessageError("expected sums for each stored time step")
        return cls(new, stored)


def _read_sums(size: Any, sums: Any, n: int, n_models: int, n_parts: int | None, is_count: bool) -> ScoreSums:
    """Check the sums of a cell with n rows; `is_count` means that they are numbers of mistakes."""
    maximum = n if is_count else np.finfo(np.float64).max
    if n_parts is None:
        return check_int(size, n, n), check_numbers(sums, n_models, maximum, is_count)
    sizes = [check_int(rows, 0, n) for rows in size]
    if len(sizes) != n_parts or sum(sizes) != n or len(sums) != n_models:
        raise InvalidMessageError(
            f"expected {n_parts} numbers of rows that add up to {n}, and sums of {n_models} models"
        )
    checked = [check_numbers(model_sums, n_parts, maximum, is_count) for model_sums in sums]
    if is_count and any(wrong > rows for counts in checked for wrong, rows in zip(counts, sizes, strict=True)):
        raise InvalidMessageError("expected no more mistakes than rows")
    return sizes, checked


def read_confusion(body: Body, shape: tuple[int, ...], n: int) -> Ints:
    """Read the reply to Evaluate with metric confusion: counts of this shape, which add up to n for each model."""
    confusion = np.array(body["confusion"])
    are_counts = confusion.shape == shape and confusion.dtype.kind == "i" and not (confusion < 0).any()
    if not are_counts or (confusion.sum(axis=(1, 2)) != n).any():
        raise InvalidMessageError(f"expected counts of shape {shape}, each model's adding up to {n}")
    return confusion


def read_reroute_reply(body: Body, n: int) -> list[int]:
    """Read the reply to Reroute: n, the mistakes of the client's votes on n rows, and those of the router's votes."""
    own, chosen = body["wrong"]
    return [check_int(body["rows"], n, n), check_int(own, 0, n), check_int(chosen, 0, n)]


def read_train_reply(
    body: Body, raw: RawParts, round: int, trunks: list[Shapes], heads: list[Shapes], max_more: int = 0
) -> tuple[int, list[list[Part]]]:
    """Read the reply to Train.

    Args:
        body: The body.
        raw: The parts trunk-0, ... and head-0, ... as they were received.
        round: The round of the request.
        trunks: The shapes of each trunk that was trained.
        heads: The shapes of each head that was trained.
        max_more: The maximum number of further rounds.

    Returns:
        The number of further rounds, and the trained trunks and heads.

    Raises:
        InvalidMessageError: The content is not valid.
    """
    check_int(body["round"], round, round)
    more = check_int(body["more"], 0, max_more)
    names = {f"trunk-{k}" for k in range(len(trunks))} | {f"head-{k}" for k in range(len(heads))}
    if set(raw) != names:
        raise InvalidMessageError(f"it has {len(raw)} parts of models, expected {len(names)}")
    kinds = {"trunk": trunks, "head": heads}
    return more, [
        [serialization.read_arrays(raw[f"{kind}-{k}"], shapes, f"a {kind}") for k, shapes in enumerate(expected)]
        for kind, expected in kinds.items()
    ]


def read_tournament_reply(body: Body, n_contestants: int, min_rows: int, max_rows: int) -> tuple[int, Ints]:
    """Read the reply to Trial or Contest: the number of rows, and the common mistakes of each pair of contestants."""
    rows = check_int(body["rows"], min_rows, max_rows)
    wrong = np.array(body["wrong"])
    are_counts = wrong.shape == (n_contestants,) * 2 and wrong.dtype.kind == "i"
    if not are_counts or not ((wrong >= 0) & (wrong <= rows)).all():
        raise InvalidMessageError(f"expected a table of {n_contestants} by {n_contestants} counts up to {rows}")
    own = wrong.diagonal()
    if (wrong != wrong.T).any() or (wrong > np.minimum.outer(own, own)).any():
        raise InvalidMessageError(
            "expected counts of common mistakes: a symmetric table, and no more than the mistakes of each contestant"
        )
    return rows, wrong


def read_shifts(body: Body, tau: int) -> Shifts | None:
    """Read the reply to Explain; None: the client has no earlier data, or does not permit explanations."""
    shifts = body["shifts"]
    if shifts is None:
        return None
    before, after = shifts["rows"]
    moved = [_read_shift(**shift) for shift in shifts["moved"]]
    maximum = MAX_REPORTED_INPUTS + MAX_WITHIN_CLASS_SHIFTS + MAX_NAMED_SHIFTS
    if len(moved) > maximum:
        raise InvalidMessageError(f"it names {len(moved)} inputs and classes, at most {maximum} are allowed")
    rows = check_int(before, 1, MAX_CELL_ROWS), check_int(after, 1, MAX_CELL_ROWS)
    return Shifts(check_int(shifts["since"], 0, tau - 1), rows, tuple(moved), check_int(shifts["more"], 0, MAX_SIZE**2))


def _read_shift(what: Any, name: Any, before: Any, after: Any, distance: Any, within: Any = None) -> Shift:
    if what not in get_args(ShiftKind):
        raise InvalidMessageError(f"unknown shift {str(what)[:40]!r}, legal are {', '.join(get_args(ShiftKind))}")
    for text in (name, "" if within is None else within):
        if not isinstance(text, str) or len(text) > MAX_NAME_LENGTH:
            raise InvalidMessageError(
                f"expected a name of at most {MAX_NAME_LENGTH} characters, got {str(text)[:40]!r}"
            )
    maximum = MAX_STATISTIC if what in ("mean", "deviation") else 1.0
    check_numbers([abs(value) if what == "mean" else value for value in (before, after)], 2, maximum, False)
    distance = check_numbers([distance], 1, 1.0, False)[0]
    within = None if within is None else to_one_line(within)
    return Shift(what, to_one_line(name), float(before), float(after), distance, within)


def pack_entries(data: Entries, models: Sequence[int] | Ints | None = None) -> PackedEntries:
    """Pack a client's part of w for a message; with `models` (ascending), positions refer to this list."""
    m = data.m if models is None else np.searchsorted(models, data.m)
    return [data.t.tolist(), m.tolist(), data.value.tolist()]


def unpack_entries(w: PackedEntries, client: int, shape: tuple[int, int, int]) -> Entries:
    """Return the entries of w that `pack_entries` packed.

    Args:
        w: The packed entries.
        client: The index of the client.
        shape: The shape of the whole w: times, clients, models.
    """
    t, m = (np.array(part, dtype=np.int64) for part in w[:2])
    return Entries(t, np.full_like(t, client), m, np.array(w[2], dtype=np.float64), shape)
