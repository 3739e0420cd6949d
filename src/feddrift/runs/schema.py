"""The lines of a record: one header, then each time step's events and rows, then an end.

Where there are many clients, a time step's rows are one line of columns: it is read a hundred times faster.
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
from pydantic import Field, TypeAdapter, ValidationError

from feddrift.errors import DataError

SCHEMA = 1

Status = Literal["complete", "interrupted", "failed"]
Whole = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(ge=1, lt=2**63)]
Share = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[float, Field(ge=-1e15, le=1e15)]
Amount = Annotated[float, Field(ge=0, le=1e15)]  # sums of them stay numbers


@dataclass(frozen=True)
class HeaderLine:
    """What was run, and on what."""

    kind: Literal["header"]
    schema: Literal[1]
    stream: str
    algorithm: str
    settings: dict[str, Any]  # the algorithm's hyper-parameters, resolved
    overrides: dict[str, Any]  # run options that differ from the stream's own: rounds, pattern, engine, ...
    seed: Whole
    local: dict[str, Any]  # the fields of types.Local
    engine: str
    n_steps: Positive  # T
    n_clients: Positive  # P
    clients: list[str]
    concepts: list[list[Whole]] | None  # [T + 1][c]; null without ground truth
    same: dict[str, Whole]  # concept -> the lower id it is equal to
    versions: dict[str, str]
    device: str
    started: str  # ISO time
    times: list[str] = field(default_factory=list)  # [T + 1], what the time steps are called, if they have names
    model_bytes: Positive | None = None  # of one model's parameters

    def __post_init__(self) -> None:
        if not 1970 <= datetime.fromisoformat(self.started).year < 9999:  # others have no timestamp in every time zone
            raise ValueError("started must be a time since 1970")
        if type(self.local.get("rounds")) is not int or not 1 <= self.local["rounds"] < 2**63:
            raise ValueError("local must say its rounds, at least 1")
        if not all(k.isdecimal() and len(k) < 20 and v < int(k) for k, v in self.same.items()):
            raise ValueError("same must map concept ids to lower ones")
        for name in ("settings", "overrides", "local"):
            _check_finite(name, getattr(self, name))
        if len(self.clients) != self.n_clients:
            raise ValueError(f"clients must be {self.n_clients} names")
        if self.times and len(self.times) != self.n_steps + 1:
            raise ValueError(f"times must be {self.n_steps + 1} names")
        if self.concepts is not None and (
            len(self.concepts) != self.n_steps + 1 or any(len(row) != self.n_clients for row in self.concepts)
        ):
            raise ValueError(f"concepts must be {self.n_steps + 1} rows of {self.n_clients} clients")


@dataclass(frozen=True)
class EventLine:
    """A turn in the life of a model at time t."""

    kind: Literal["event"]
    t: Whole
    event: Literal["created", "merged", "retired", "revived"]
    model: Whole
    cause: dict[str, Any]  # of a merge: at least into, a model, and distance

    def __post_init__(self) -> None:
        into, distance = self.cause.get("into"), self.cause.get("distance")
        _check_finite("cause", self.cause)
        near = isinstance(distance, int | float) and not isinstance(distance, bool) and abs(distance) <= 1e15
        known = type(into) is int and 0 <= into < 2**63 and near
        if self.event == "merged" and not known:
            raise ValueError("the cause of a merge must say into which model and at what distance")


@dataclass(frozen=True)
class RowLine:
    """What client c had at time t."""

    kind: Literal["row"]
    t: Whole
    c: Whole
    accuracy: Share | None  # on the data of t + 1; null without any
    tested: Whole  # test examples
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


@dataclass(frozen=True)
class ColumnsLine:
    """The rows of time t, in lists over the clients."""

    kind: Literal["columns"]
    t: Whole
    accuracy: list[Share | None]
    tested: list[Whole]
    concept: list[Whole | None]
    next_concept: list[Whole | None]
    model: list[Whole]
    n_models: list[Whole]
    drift: list[bool]
    models_sent: list[Amount]
    sent_scoring: list[Amount | None] | None = None
    received: list[Whole | None] | None = None
    loss: list[Number | None] | None = None

    def __post_init__(self) -> None:
        if len({len(column) for name in COLUMNS if (column := getattr(self, name)) is not None}) != 1:
            raise ValueError("all columns must have the same length")


COLUMNS = tuple(column.name for column in fields(RowLine) if column.name not in ("kind", "t", "c"))


@dataclass(frozen=True)
class EndLine:
    """How the run ended; a record without an end is unfinished: still running, or killed."""

    kind: Literal["end"]
    status: Status
    seconds: Amount


_LINE: TypeAdapter[Any] = TypeAdapter(
    Annotated[HeaderLine | EventLine | RowLine | ColumnsLine | EndLine, Field(discriminator="kind")]
)


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
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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


def check_order(line: Mapping[str, Any], header: Mapping[str, Any], n_rows: int, where: str) -> None:
    """Whether a line may follow a header and so many rows: whole time steps in order, clients in order."""
    (t, c), steps = divmod(n_rows, header["n_clients"]), header["n_steps"]
    if line["kind"] == "columns" and len(line["model"]) != header["n_clients"]:
        raise DataError(f"{where}: columns must be {header['n_clients']} long, got {len(line['model'])}")
    if line["kind"] == "end":
        if line["status"] == "complete" and (t, c) != (steps, 0):
            raise DataError(f"{where}: complete means {steps} time steps, got {t}")
    elif t >= steps or line["t"] != t or (c > 0 and line["kind"] != "row") or line.get("c", c) != c:
        got = f"{line['kind']} of time {line['t']}" + (f", client {line['c']}" if "c" in line else "")
        raise DataError(f"{where}: expected time {t}, client {c} of {steps} time steps, got the {got}")
