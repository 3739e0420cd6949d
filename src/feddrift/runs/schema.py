"""The lines of a record: one header, then each time step's events and rows, then an end.

Where there are many clients, a time step's rows are one line of columns: it is read a hundred times faster.

A run on data that lie there writes schema 1: its rows come with their test. A federation of real machines writes
schema 2: nobody knows how many time steps there will be, clients may join (a line `client`), and a time step is told
in two moments, events and rows when its training ends, the line `test` when the next data come. In between stand the
lines `time`, when a time step begins, and `exchange`, one for every question to the clients.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from feddrift.errors import DataError
from feddrift.scores import SCORES

Status = Literal["complete", "interrupted", "failed"]
Whole = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(ge=1, lt=2**63)]
Share = Annotated[float, Field(ge=0, le=1)]
MAX_RECORDED_NUMBER = 1e15  # sums of such numbers stay finite
Number = Annotated[float, Field(ge=-MAX_RECORDED_NUMBER, le=MAX_RECORDED_NUMBER)]
Amount = Annotated[float, Field(ge=0, le=MAX_RECORDED_NUMBER)]
Clock = Annotated[str, AfterValidator(lambda text: _checked_time(text))]  # ISO time


@dataclass(frozen=True)
class HeaderLine:
    """What was run, and on what."""

    kind: Literal["header"]
    schema: Literal[1, 2]
    stream: str
    algorithm: str
    settings: dict[str, Any]  # the algorithm's hyper-parameters, resolved
    overrides: dict[str, Any]  # run options that differ from the stream's own: rounds, pattern, engine, ...
    seed: Whole
    local: dict[str, Any]  # the fields of types.Local
    engine: str
    n_steps: Positive | None  # T; null in schema 2: it runs on
    n_clients: Positive  # P; in schema 2 those of the beginning
    clients: list[str]
    concepts: list[list[Whole]] | None  # [T + 1][c]; null without ground truth
    same: dict[str, Whole]  # concept -> the lower id it is equal to
    versions: dict[str, str]
    device: str
    started: Clock
    times: list[str] = field(default_factory=list)  # [T + 1], what the time steps are called, if they have names
    model_bytes: Positive | None = None  # of one model's parameters

    def __post_init__(self) -> None:
        if (self.n_steps is None) != (self.schema == 2):
            raise ValueError("n_steps must be a number in schema 1, and null in schema 2")
        if type(self.local.get("rounds")) is not int or not 1 <= self.local["rounds"] < 2**63:
            raise ValueError("local must say its rounds, at least 1")
        if not all(k.isdecimal() and len(k) < 20 and v < int(k) for k, v in self.same.items()):
            raise ValueError("same must map concept ids to lower ones")
        for name in ("settings", "overrides", "local"):
            _check_finite(name, getattr(self, name))
        if len(self.clients) != self.n_clients:
            raise ValueError(f"clients must be {self.n_clients} names")
        if self.n_steps is None:
            if self.times or self.concepts is not None:
                raise ValueError("times and concepts are not known beforehand in schema 2")
            return
        if self.times and len(self.times) != self.n_steps + 1:
            raise ValueError(f"times must be {self.n_steps + 1} names")
        if self.concepts is not None and (
            len(self.concepts) != self.n_steps + 1 or any(len(row) != self.n_clients for row in self.concepts)
        ):
            raise ValueError(f"concepts must be {self.n_steps + 1} rows of {self.n_clients} clients")


@dataclass(frozen=True)
class EventLine:
    """A turn in the life of a model at time t, or a decision about clients."""

    kind: Literal["event"]
    t: Whole
    event: Literal["created", "merged", "retired", "revived", "decided"]
    model: Whole
    cause: dict[str, Any]  # of a merge: at least into, a model, and distance; of a decision: clients and reason

    def __post_init__(self) -> None:
        into, distance = self.cause.get("into"), self.cause.get("distance")
        _check_finite("cause", self.cause)
        near = (
            isinstance(distance, int | float)
            and not isinstance(distance, bool)
            and abs(distance) <= MAX_RECORDED_NUMBER
        )
        complete = type(into) is int and 0 <= into < 2**63 and near
        if self.event == "merged" and not complete:
            raise ValueError("the cause of a merge must say into which model and at what distance")
        clients, reason = self.cause.get("clients"), self.cause.get("reason")
        named = isinstance(clients, list) and all(type(c) is int and c >= 0 for c in clients)
        if self.event == "decided" and not (named and isinstance(reason, str) and reason):
            raise ValueError("the cause of a decision must name its clients by their positions, and a reason")


@dataclass(frozen=True)
class ShiftLine:
    """An input or a class share that moved: see feddrift.drift_explanation."""

    what: Literal["mean", "deviation", "share", "missing", "class"]
    name: str
    before: Number
    after: Number
    distance: Share
    within: str | None = None  # the class among whose rows it moved; null: among all
    common: bool = False  # it moved in the same way at most other clients


@dataclass(frozen=True)
class ShiftsLine:
    """What moved in the data of a client that raised an alarm, since the last time step in which it had any."""

    since: Whole
    rows: tuple[Positive, Positive]  # before and after
    moved: list[ShiftLine]
    more: Whole  # inputs that moved as well


@dataclass(frozen=True)
class RowLine:
    """What client c had at time t."""

    kind: Literal["row"]
    t: Whole
    c: Whole
    accuracy: Share | None  # on the data of t + 1; null without any, and in schema 2, where the line test has both
    tested: Whole | None  # test examples; null in schema 2
    concept: Whole | None  # of the training cell; null without ground truth
    next_concept: Whole | None  # of the test cell
    model: Whole  # the id in use
    n_models: Whole
    drift: bool  # an alarm was raised
    models_sent: Amount  # to and from this client during this step; a trunk or head alone is a part of a model
    # Older records say nothing of these.
    sent_scoring: Amount | None = None  # the part of models_sent that was scored and not trained
    received: Whole | None = None  # new examples, none if it was out of reach
    loss: Number | None = None  # how the model of this id scored on them before training and merging, if asked
    log_loss: Amount | None = None  # of the same test as accuracy, as all below: see feddrift.scores
    brier: Amount | None = None
    auc: Share | None = None
    balanced_accuracy: Share | None = None
    f1: Share | None = None
    majority: Share | None = None  # what the class most often received so far would have got
    routed: Share | None = None  # of the test's rows, where inputs chose other votes than the client's; if they may
    shifts: ShiftsLine | None = None  # written at alarms only, and only where the client says


@dataclass(frozen=True, kw_only=True)
class ScoreColumns:
    """The scores of a test, in lists over the clients; older records say nothing of them."""

    log_loss: list[Amount | None] | None = None
    brier: list[Amount | None] | None = None
    auc: list[Share | None] | None = None
    balanced_accuracy: list[Share | None] | None = None
    f1: list[Share | None] | None = None
    majority: list[Share | None] | None = None
    routed: list[Share | None] | None = None


@dataclass(frozen=True)
class ColumnsLine(ScoreColumns):
    """The rows of time t, in lists over the clients."""

    kind: Literal["columns"]
    t: Whole
    accuracy: list[Share | None]
    tested: list[Whole | None]
    concept: list[Whole | None]
    next_concept: list[Whole | None]
    model: list[Whole]
    n_models: list[Whole]
    drift: list[bool]
    models_sent: list[Amount]
    sent_scoring: list[Amount | None] | None = None
    received: list[Whole | None] | None = None
    loss: list[Number | None] | None = None
    shifts: list[ShiftsLine | None] | None = None

    def __post_init__(self) -> None:
        if len({len(column) for name in COLUMNS if (column := getattr(self, name)) is not None}) != 1:
            raise ValueError("all columns must have the same length")


COLUMNS = tuple(column.name for column in fields(RowLine) if column.name not in ("kind", "t", "c"))


@dataclass(frozen=True)
class ClientLine:
    """A client more, from time t on; it stands behind all others."""

    kind: Literal["client"]
    t: Whole
    c: Whole
    name: str


@dataclass(frozen=True)
class TimeLine:
    """Time step t has begun; its name is what people call that time."""

    kind: Literal["time"]
    t: Whole
    name: str


@dataclass(frozen=True)
class TestLine(ScoreColumns):
    """How the models in use after time t did on the next data, in lists over the clients.

    A server that was started again tests again: of each client the last test on any examples counts.
    """

    kind: Literal["test"]
    t: Whole
    accuracy: list[Share | None]
    tested: list[Whole]

    def __post_init__(self) -> None:
        columns = [self.accuracy, *(getattr(self, name) for name in (*SCORES, "routed"))]
        if any(column is not None and len(column) != len(self.tested) for column in columns):
            raise ValueError("all columns must have the same length")


@dataclass(frozen=True)
class ExchangeLine:
    """One question to some clients at time t, and what came back, in lists over these clients."""

    kind: Literal["exchange"]
    t: Whole
    asked: str  # hello, evaluate, describe, reroute, train, tournament, contest, explain
    round: Whole | None  # of training
    at: Clock  # when it was asked
    took: Amount  # seconds until all had answered, or had had their time
    c: list[Whole]
    sent: list[Whole]  # bytes to the client, 0 where it was not connected
    answered: list[Whole]  # bytes from it
    seconds: list[Amount | None]  # until the answer was there; null: none came
    trouble: list[str | None]  # why it sits out
    backlog: list[Whole] | None = None  # of a hello: batches that have come and are not shown yet; null: nobody has any
    gap: list[Whole | None] | None = None  # and the number of a missing one that they wait for
    note: list[str | None] | None = None  # what is no reason to sit out, and should be known; null: of nobody

    def __post_init__(self) -> None:
        columns = self.c, self.sent, self.answered, self.seconds, self.trouble, self.backlog, self.gap, self.note
        if len({len(column) for column in columns if column is not None}) != 1:
            raise ValueError("all columns must have the same length")


@dataclass(frozen=True)
class EndLine:
    """How the run ended; a record without an end is unfinished: still running, or killed."""

    kind: Literal["end"]
    status: Status
    seconds: Amount


_LINE: TypeAdapter[Any] = TypeAdapter(
    Annotated[
        HeaderLine | EventLine | RowLine | ColumnsLine | EndLine | ClientLine | TimeLine | TestLine | ExchangeLine,
        Field(discriminator="kind"),
    ]
)


PLAIN = (int, bool, str, type(None))  # values that are JSON as they are: most of a record of many clients


def dump(line: Mapping[str, Any]) -> str:
    """A line as text with its newline; numbers that are not finite become null.

    >>> dump({"kind": "row", "t": np.int64(3), "accuracy": float("nan")})
    '{"kind": "row", "t": 3, "accuracy": null}\\n'
    """
    return json.dumps(plain(line)) + "\n"


def plain(value: Any) -> Any:
    """The JSON value of NumPy arrays and scalars, mappings and tuples; numbers that are not finite become None."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [v if type(v) in PLAIN or (type(v) is float and math.isfinite(v)) else plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _checked_time(text: str) -> str:
    if not 1970 <= datetime.fromisoformat(text).year < 9999:  # others have no timestamp in every time zone
        raise ValueError("it must be a time since 1970")
    return text


def _check_finite(name: str, values: Mapping[str, Any]) -> None:
    if plain(values) != values:
        raise ValueError(f"{name} must hold finite numbers")


def parse(text: str | bytes, where: str) -> dict[str, Any]:
    """A line as a dictionary, after checking its keys and types."""
    try:
        _LINE.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"].startswith("union_tag"):
            raise DataError(f"{where}: not a line of a record, got {reprlib.repr(first['input'])}") from None
        key = ".".join(str(part) for part in first["loc"][1:])
        reason = first["msg"].removeprefix("Value error, ")
        got = "" if first["type"] in ("missing", "value_error") else f", got {reprlib.repr(first['input'])}"
        raise DataError(f"{where}: {key + ': ' if key else ''}{reason[0].lower() + reason[1:]}{got}") from None
    line: dict[str, Any] = json.loads(text)
    return line


def is_json(text: bytes) -> bool:
    """Whether a line is whole: no beginning of a JSON object is JSON itself."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
