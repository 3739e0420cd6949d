"""The protocol: every message between server and clients is a type of this file; change one, and its number changes.

A request is a dataclass whose fields are the body that is sent. A reply is read by a function that refuses what is
not what it should be, before anything of it counts. Models travel as the names of their parts (see `parts`), with those
parts that the client lacks beside the body. Every body also holds `version`; a request `about`, a reply `client`, and
in place of an answer perhaps `missing` (names of parts to send after all) or `failed` (why; a client that could not be
made has no `client`); beside an answer perhaps `lost` (private models) and `damaged` (batches of its store).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Self, get_args

import numpy as np
from flwr.app import Array

from feddrift._version import __version__
from feddrift.drift_explanation import MAX_STATISTIC, NAMED, TOLD, WITHIN, Shift, Shifts, What
from feddrift.engines.flower import serialization
from feddrift.engines.flower.model_parts import Body, Part, Shapes
from feddrift.engines.flower.serialization import Refused, numbers, whole
from feddrift.engines.sparse_weights import Entries
from feddrift.engines.worker import SCORE_ROWS
from feddrift.errors import one_line
from feddrift.scores import MAX_LOG_LOSS, SCORES
from feddrift.types import Ballot, Ints, Metric, Start

PROTOCOL = 6
VERSION = f"{__version__}/{PROTOCOL}"
MAX_ROWS = 10**9  # of a cell
MAX_ID = 2**62  # of a model, or a version of it
MAX_SIZE = 10**6  # time steps, clients, classes, features along an axis
MAX_NAME = 100  # characters of the name of an input or a class

Raw = Mapping[str, list[Array]]  # parts of models as they came
Slice = list[list[Any]]  # a client's slice of w: times, positions of models, values


@dataclass(frozen=True)
class About:
    """What every request says about the federation, and the time it is about."""

    experiment: str
    client: str
    index: int
    n_clients: int
    n_classes: int
    features: tuple[int, ...]
    seed: int
    tau: int

    @classmethod
    def read(cls, about: Any) -> Self:
        """What the body of a request says, after checking it."""
        if not isinstance(about, dict) or set(about) != {field.name for field in fields(cls)}:
            raise Refused("it does not say what federation it is about")
        names = ("index", "n_clients", "n_classes", "tau")
        whole_numbers = [about[name] for name in names] + list(about["features"])
        for number in whole_numbers:
            whole(number, 0, MAX_SIZE)  # a client looks for data of every time step up to tau
        whole(about["seed"], 0, 2**63)
        return cls(**{**about, "features": tuple(about["features"])})


@dataclass(frozen=True)
class Request:
    """A question to a client; `deadline` is the field of WaitingRules that says how long it may take."""

    action: ClassVar[str]  # how Flower calls it
    deadline: ClassVar[str]

    def body(self) -> Body:
        """The message as plain values, to be sent as JSON."""
        return asdict(self)

    @classmethod
    def read(cls, body: Body) -> Self:
        """The request of a body; what is missing is a KeyError."""
        return cls(**{field.name: body[field.name] for field in fields(cls)})


@dataclass(frozen=True)
class Hello(Request):
    """Who is there, and what has arrived? With models to `serve`: use them from now on, and test them."""

    action, deadline = "query.hello", "hello"

    serve: Body | None = None  # tau, models, votes, ballot, perhaps router
    seen: int | None = -1  # the newest time of which the client told data, -1: none; None: it shows nothing new now

    @classmethod
    def serving(
        cls, tau: int, models: list[Body], votes: list[float], ballot: Ballot, router: Body | None = None
    ) -> Self:
        """A hello with models to use from now on, trained at time tau."""
        chosen = {} if router is None else {"router": router}
        return cls({"tau": tau, "models": models, "votes": votes, "ballot": ballot, **chosen})

    def body(self) -> Body:
        return ({} if self.serve is None else {"serve": self.serve}) | {"seen": self.seen}

    @classmethod
    def read(cls, body: Body) -> Self:
        seen = body.get("seen", -1)
        return cls(body.get("serve"), None if seen is None else whole(seen, -1, MAX_SIZE))


@dataclass(frozen=True)
class Evaluate(Request):
    """Score these models: on the newest data, and on a sample of every cell that is stored."""

    action, deadline = "evaluate.models", "evaluate"

    metric: str  # a Metric, or confusion
    models: list[Body]
    by: str | None = None  # class: apart for each class

    def body(self) -> Body:
        return {"metric": self.metric, "models": self.models} | ({} if self.by is None else {"by": self.by})

    @classmethod
    def read(cls, body: Body) -> Self:
        return cls(body["metric"], body["models"], body.get("by"))


@dataclass(frozen=True)
class Train(Request):
    """One round of local training; of private models perhaps several, whose result stays at the client.

    Of shared models that nobody else trains it may be `more`; the answer says how many more it was.
    """

    action, deadline = "train.round", "train"

    round: int
    local: Body  # the fields of Local
    models: list[Body]
    w: Slice
    rounds: int = 1
    keep: int = 0  # the label under which private models are kept; 0: these are shared, and sent back
    pull: float | None = None  # the weight of a pull in the loss; None: there is none
    to: list[Body] = field(default_factory=list)  # the models that it pulls to; none: to what a round begins with
    more: int = 0  # rounds that follow and that nobody else takes part in,
    within: float = 0.0  # for as long as no more than so many seconds have passed


@dataclass(frozen=True)
class Trial(Request):
    """Find out how a new model should start."""

    action, deadline = "train.tournament", "train"

    models: list[Body]
    parent: int
    starts: list[Start]
    local: Body
    w: Slice


@dataclass(frozen=True)
class Explain(Request):
    """You raised an alarm: what moved in your data?"""

    action, deadline = "query.explain", "hello"


@dataclass(frozen=True)
class Contest(Request):
    """Let teams of models compete on the newest data, or on the part of them that was held out of training."""

    action, deadline = "evaluate.contest", "evaluate"

    models: list[Body]
    teams: list[list[int]]  # [contestant], positions of its models
    held_by: Body | None  # the fields of Local


@dataclass(frozen=True)
class Describe(Request):
    """Tell moments of what a layer of these models makes of the newest data."""

    action, deadline = "evaluate.describe", "evaluate"

    models: list[Body]
    layer: str
    by: str
    project: Any  # None, a matrix as lists, or the key and size of a map that is drawn
    square: bool


@dataclass(frozen=True)
class Reroute(Request):
    """On the newest data, whose labels are there: would your inputs have chosen better votes than these?"""

    action, deadline = "evaluate.reroute", "evaluate"

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
KIND_OF = {cls: kind for kind, cls in REQUESTS.items()}


@dataclass(frozen=True)
class Present:
    """The answer to Hello: how many rows of each time step are held, and how the models served do on the newest."""

    cells: dict[int, int]
    tested: tuple[int, int] | None = None  # how many are right, of how many
    scores: dict[str, float] = field(default_factory=dict)  # by name, of the same test, where they are numbers
    backlog: int = 0  # batches that have come and are not shown yet
    gap: int | None = None  # the number of the batch that they wait for, which has not come

    def body(self) -> Body:
        """The message as plain values, to be sent as JSON."""
        right = {} if self.tested is None else {"right": self.tested[0], "tested": self.tested[1]}
        waiting = {"backlog": self.backlog, "gap": self.gap} if self.backlog else {}
        return {"cells": [[t, n] for t, n in self.cells.items()]} | right | {"scores": self.scores} | waiting

    @classmethod
    def read(cls, body: Body, tau: int) -> Self:
        """What the body of a reply says, checked for a client at time tau."""
        cells = [(whole(t, 0, tau), whole(n, 1, MAX_ROWS)) for t, n in body["cells"]]
        if len(dict(cells)) != len(cells):
            raise Refused("it names a time step twice")
        gap = None if body.get("gap") is None else whole(body["gap"], 0, MAX_SIZE)
        present = cls(dict(cells), backlog=whole(body.get("backlog", 0), 0, MAX_SIZE), gap=gap)
        if "right" not in body:
            return present
        n = dict(cells).get(tau, 0)
        most = {name: 1.0 if score.share else MAX_LOG_LOSS for name, score in SCORES.items()} | {"routed": 1.0}
        if unknown := sorted(body["scores"].keys() - most.keys()):
            raise Refused(f"it has a score that nobody asked for, {unknown[0]!r}")
        scores = {name: numbers([value], 1, most[name], False)[0] for name, value in body["scores"].items()}
        return replace(present, tested=(whole(body["right"], 0, n), whole(body["tested"], n, n)), scores=scores)


Sums = tuple[Any, list[Any]]  # how many rows, and the sum of each model; by class, lists over classes in their places


@dataclass(frozen=True)
class Scores:
    """The answer to Evaluate: of each model the sum over the newest data, and over a sample of each stored cell."""

    new: Sums | None  # None: nothing is new
    stored: dict[int, Sums]  # by time

    def body(self) -> Body:
        """The message as plain values, to be sent as JSON."""
        new: Body = {} if self.new is None else {"new": self.new[1]}
        if self.new is not None and isinstance(self.new[0], list):
            new["sizes"] = self.new[0]
        return new | {"stored": [[t, size, sums] for t, (size, sums) in self.stored.items()]}

    @classmethod
    def read(cls, body: Body, counts: Ints, n_models: int, metric: Metric, n_parts: int | None = None) -> Self:
        """What the body of a reply says, checked for a client that has counts[t] rows of each time t."""
        mistakes, n, tau = metric == "error", int(counts[-1]), len(counts) - 1
        size = n if n_parts is None or not n else body["sizes"]
        new = _read_sums(size, body["new"], n, n_models, n_parts, mistakes) if n else None
        stored = {}
        for t, size, sums in body["stored"]:
            n_rows = int(counts[t]) if isinstance(t, int) and 0 <= t <= tau else 0
            if n_rows:  # else it came too late for this time step
                stored[t] = _read_sums(size, sums, min(n_rows, SCORE_ROWS), n_models, n_parts, mistakes)
        if set(stored) != set(np.flatnonzero(counts).tolist()):
            raise Refused("expected sums for every stored time step")
        return cls(new, stored)


def _read_sums(size: Any, sums: Any, n: int, n_models: int, n_parts: int | None, mistakes: bool) -> Sums:
    top = np.finfo(np.float64).max
    if n_parts is None:
        return whole(size, n, n), numbers(sums, n_models, n if mistakes else top, mistakes)
    sizes = [whole(rows, 0, n) for rows in size]
    if len(sizes) != n_parts or sum(sizes) != n or len(sums) != n_models:
        raise Refused(f"expected {n_parts} numbers of rows that add up to {n}, and sums of {n_models} models")
    checked = [numbers(of_model, n_parts, n if mistakes else top, mistakes) for of_model in sums]
    if mistakes and any(wrong > rows for row in checked for wrong, rows in zip(row, sizes, strict=True)):
        raise Refused("expected no more mistakes than rows")
    return sizes, checked


def read_confusion(body: Body, shape: tuple[int, ...], n: int) -> Ints:
    """The answer to Evaluate with metric confusion: counts of this shape, which add up to n for each model."""
    confusion = np.array(body["confusion"])
    counts = confusion.shape == shape and confusion.dtype.kind == "i" and not (confusion < 0).any()
    if not counts or (confusion.sum(axis=(1, 2)) != n).any():
        raise Refused(f"expected counts of shape {shape}, each model's adding up to {n}")
    return confusion


def read_rerouted(body: Body, n: int) -> list[int]:
    """The answer to Reroute: of n rows how many the votes get wrong, and how many those that inputs chose."""
    own, chosen = body["wrong"]
    return [whole(body["rows"], n, n), whole(own, 0, n), whole(chosen, 0, n)]


def read_trained(
    body: Body, raw: Raw, round: int, trunks: list[Shapes], heads: list[Shapes], most: int = 0
) -> tuple[int, list[list[Part]]]:
    """The answer to Train: the round, how many more it was, and beside the body trunk-0, ... and head-0, ..."""
    whole(body["round"], round, round)
    more = whole(body["more"], 0, most)
    legal = {f"trunk-{k}" for k in range(len(trunks))} | {f"head-{k}" for k in range(len(heads))}
    if set(raw) != legal:
        raise Refused(f"it brings {len(raw)} parts of models, expected {len(legal)}")
    kinds = {"trunk": trunks, "head": heads}
    return more, [
        [serialization.arrays(raw[f"{kind}-{k}"], shapes, f"a {kind}") for k, shapes in enumerate(expected)]
        for kind, expected in kinds.items()
    ]


def read_tournament(body: Body, n_contestants: int, least: int, most: int) -> tuple[int, Ints]:
    """The answer to Trial and to Contest: how many rows there were, and how many of them two contestants get wrong."""
    rows, wrong = whole(body["rows"], least, most), np.array(body["wrong"])
    counts = wrong.shape == (n_contestants,) * 2 and wrong.dtype.kind == "i"
    if not counts or not ((wrong >= 0) & (wrong <= rows)).all():
        raise Refused(f"expected a table of {n_contestants} by {n_contestants} counts up to {rows}")
    own = wrong.diagonal()
    if (wrong != wrong.T).any() or (wrong > np.minimum.outer(own, own)).any():
        raise Refused("expected counts of common mistakes: both ways the same, and no more than each makes alone")
    return rows, wrong


def read_shifts(body: Body, tau: int) -> Shifts | None:
    """The answer to Explain; None: the client does not say."""
    if (shifts := body["shifts"]) is None:
        return None
    before, after = shifts["rows"]
    moved = [_read_shift(**shift) for shift in shifts["moved"]]
    if len(moved) > (most := TOLD + WITHIN + NAMED):
        raise Refused(f"it names {len(moved)} inputs and classes, at most {most} are legal")
    rows = whole(before, 1, MAX_ROWS), whole(after, 1, MAX_ROWS)
    return Shifts(whole(shifts["since"], 0, tau - 1), rows, tuple(moved), whole(shifts["more"], 0, MAX_SIZE**2))


def _read_shift(what: Any, name: Any, before: Any, after: Any, distance: Any, within: Any = None) -> Shift:
    if what not in get_args(What):
        raise Refused(f"it says of an input {str(what)[:40]!r}, legal are {', '.join(get_args(What))}")
    for text in (name, "" if within is None else within):
        if not isinstance(text, str) or len(text) > MAX_NAME:
            raise Refused(f"expected a name of at most {MAX_NAME} characters, got {str(text)[:40]!r}")
    most = MAX_STATISTIC if what in ("mean", "deviation") else 1.0
    numbers([abs(value) if what == "mean" else value for value in (before, after)], 2, most, False)
    short = numbers([distance], 1, 1.0, False)[0]
    return Shift(what, one_line(name), float(before), float(after), short, None if within is None else one_line(within))


def slice_of(data: Entries, models: Sequence[int] | Ints | None = None) -> Slice:
    """A client's part of w; with `models`, positions are those in this list."""
    m = data.m if models is None else np.searchsorted(models, data.m)
    return [data.t.tolist(), m.tolist(), data.value.tolist()]


def entries_of(w: Slice, client: int, shape: tuple[int, int, int]) -> Entries:
    """The entries of w that `slice_of` made this slice of, with the client's index."""
    t, m = (np.array(part, dtype=np.int64) for part in w[:2])
    return Entries(t, np.full_like(t, client), m, np.array(w[2], dtype=np.float64), shape)
