"""Format of a record: one JSON object per line, a header, then the events and rows of each time step, then an end.

With many clients, the rows of a time step are written as one line of columns, which is read a hundred times faster. A
new field of rows belongs into `RowLine` and `ColumnsLine`, `record.Rows` and `recorded_run.build_lines`.

A simulated run writes schema 1: its rows contain their test. A federation of real machines writes schema 2: its number
of time steps is unknown, and clients may join (line `client`). A time step begins with the line `time`. Its events and
rows follow when its training ends, without a test, and the line `test` when the next data arrive. The line `exchange`
is written for each request to clients.
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

from feddrift.errors import DataError, describe_problem
from feddrift.scores import SCORES

Status = Literal["complete", "interrupted", "failed"]
Whole = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(ge=1, lt=2**63)]
Share = Annotated[float, Field(ge=0, le=1)]
MAX_RECORDED_NUMBER = 1e15  # sums of such numbers stay finite
Number = Annotated[float, Field(ge=-MAX_RECORDED_NUMBER, le=MAX_RECORDED_NUMBER)]
Amount = Annotated[float, Field(ge=0, le=MAX_RECORDED_NUMBER)]
Clock = Annotated[str, AfterValidator(lambda text: _check_time(text))]  # ISO time


@dataclass(frozen=True)
class HeaderLine:
    """The first line of a record: the configuration of the run and the description of its data.

    Attributes:
        kind: The kind of the line.
        schema: 1 for a simulated run, 2 for a federation of real machines.
        stream: The name of the stream, or in schema 2 of the experiment.
        algorithm: The name of the algorithm.
        settings: The values of all hyper-parameters of the algorithm.
        overrides: The run options that differ from the defaults of the stream, such as rounds, pattern or engine.
        seed: The seed of initial models and minibatches.
        local: The settings of local training: the fields of `training.Local`.
        engine: The name of the engine.
        n_steps: The number T of time steps that are trained; null in schema 2, where it is unknown.
        n_clients: The number of clients; in schema 2, when the federation began.
        clients: The names of the clients.
        concepts: [T + 1][c], the true concept of each cell; null if it is unknown.
        same: By concept, a lower concept id with the same meaning.
        versions: The versions of feddrift, Python and packages, and the digests of external modules.
        device: The kind of device that trains.
        started: The time when the run began.
        times: [T + 1], the names of the time steps; empty if they have no names.
        model_bytes: The size of one model's parameters in bytes; null in older records.
    """

    kind: Literal["header"]
    schema: Literal[1, 2]
    stream: str
    algorithm: str
    settings: dict[str, Any]
    overrides: dict[str, Any]
    seed: Whole
    local: dict[str, Any]
    engine: str
    n_steps: Positive | None
    n_clients: Positive
    clients: list[str]
    concepts: list[list[Whole]] | None
    same: dict[str, Whole]
    versions: dict[str, str]
    device: str
    started: Clock
    times: list[str] = field(default_factory=list)
    model_bytes: Positive | None = None

    def __post_init__(self) -> None:
        if (self.n_steps is None) != (self.schema == 2):
            raise ValueError("n_steps must be a number in schema 1, and null in schema 2")
        if type(self.local.get("rounds")) is not int or not 1 <= self.local["rounds"] < 2**63:
            raise ValueError("local must contain its rounds, at least 1")
        if not all(k.isdecimal() and len(k) < 20 and v < int(k) for k, v in self.same.items()):
            raise ValueError("same must map concept ids to lower ones")
        for name in ("settings", "overrides", "local"):
            _check_finite(name, getattr(self, name))
        if len(self.clients) != self.n_clients:
            raise ValueError(f"clients must be {self.n_clients} names")
        if self.n_steps is None:
            if self.times or self.concepts is not None:
                raise ValueError("a header of schema 2 has no times and concepts, which are not known beforehand")
            return
        if self.times and len(self.times) != self.n_steps + 1:
            raise ValueError(f"times must be {self.n_steps + 1} names")
        if self.concepts is not None and (
            len(self.concepts) != self.n_steps + 1 or any(len(row) != self.n_clients for row in self.concepts)
        ):
            raise ValueError(f"concepts must be {self.n_steps + 1} rows of {self.n_clients} clients")


@dataclass(frozen=True)
class EventLine:
    """A change of a model at time t, or a decision about clients.

    Attributes:
        kind: The kind of the line.
        t: The time step.
        event: The kind of the event.
        model: The id of the model.
        cause: Details. Those of a merge contain at least `into`, the id of the other model, and `distance`; those of a
            decision at least `clients`, a list of positions, and `reason`, a sentence.
    """

    kind: Literal["event"]
    t: Whole
    event: Literal["created", "merged", "retired", "revived", "decided"]
    model: Whole
    cause: dict[str, Any]

    def __post_init__(self) -> None:
        _check_finite("cause", self.cause)
        into = self.cause.get("into")
        distance = self.cause.get("distance")
        has_distance = (
            isinstance(distance, int | float)
            and not isinstance(distance, bool)
            and abs(distance) <= MAX_RECORDED_NUMBER
        )
        has_target = type(into) is int and 0 <= into < 2**63
        if self.event == "merged" and not (has_target and has_distance):
            raise ValueError("the cause of a merge must contain into, the id of a model, and distance, a number")
        clients = self.cause.get("clients")
        reason = self.cause.get("reason")
        has_clients = isinstance(clients, list) and all(type(c) is int and c >= 0 for c in clients)
        if self.event == "decided" and not (has_clients and isinstance(reason, str) and reason):
            raise ValueError("the cause of a decision must name its clients by their positions, and a reason")


@dataclass(frozen=True)
class RecordedShift:
    """A change of one input or class share: see `drift_explanation.Shift`.

    Attributes:
        what: The statistic that changed.
        name: The name of the input or the class.
        before: Its value in the earlier data.
        after: Its value in the new data.
        distance: The Kolmogorov-Smirnov distance, or the difference of two shares.
        within: The class whose rows were compared; null: all rows.
        common: True if most other clients changed in the same way.
    """

    what: Literal["mean", "deviation", "share", "missing", "class"]
    name: str
    before: Number
    after: Number
    distance: Share
    within: str | None = None
    common: bool = False


@dataclass(frozen=True)
class RecordedShifts:
    """The changes in the data of a client that raised an alarm.

    Attributes:
        since: The time step of the earlier data: the last one in which the client had data before.
        rows: The number of rows before and after.
        moved: The changes that are named.
        more: The number of further inputs that changed.
    """

    since: Whole
    rows: tuple[Positive, Positive]
    moved: list[RecordedShift]
    more: Whole


@dataclass(frozen=True)
class RowLine:
    """The result of client c at time t. A field is null if its value is unknown; older records lack the last fields.

    Attributes:
        kind: The kind of the line.
        t: The time step.
        c: The position of the client.
        accuracy: The accuracy on the data of t + 1; null without test data, and in schema 2, which has the line `test`.
        tested: The number of test examples; null in schema 2.
        concept: The true concept of the training data.
        next_concept: The true concept of the test data.
        model: The id of the model that the client uses.
        n_models: The number of shared models, and of private ones that have data of their own.
        drift: True if the client raised an alarm.
        models_sent: The number of models sent to and from the client; a trunk or head counts as a fraction of a model.
        sent_scoring: The part of `models_sent` that was sent for scoring, not for training.
        received: The number of new examples; 0 if the client could not be reached.
        loss: The score of the model of this id on the new examples before training and merging; null if not scored.
        log_loss: The logarithmic loss of the test. This and the following scores are explained in `feddrift.scores`.
        brier: The Brier score of the test.
        auc: The area under the ROC curve of the test.
        balanced_accuracy: The balanced accuracy of the test.
        f1: The F1 score of the test.
        majority: The test accuracy of always predicting the class that the client has received most often.
        routed: The share of test rows whose inputs chose other votes than the client's; null without a router.
        shifts: The changes in the client's data; only for an alarm of a client that explains its alarms.
    """

    kind: Literal["row"]
    t: Whole
    c: Whole
    accuracy: Share | None
    tested: Whole | None
    concept: Whole | None
    next_concept: Whole | None
    model: Whole
    n_models: Whole
    drift: bool
    models_sent: Amount
    # The following fields are missing in older records.
    sent_scoring: Amount | None = None
    received: Whole | None = None
    loss: Number | None = None
    log_loss: Amount | None = None
    brier: Amount | None = None
    auc: Share | None = None
    balanced_accuracy: Share | None = None
    f1: Share | None = None
    majority: Share | None = None
    routed: Share | None = None
    shifts: RecordedShifts | None = None


@dataclass(frozen=True, kw_only=True)
class ScoreColumns:
    """The scores of a test as in `RowLine`, in lists over the clients; older records lack them."""

    log_loss: list[Amount | None] | None = None
    brier: list[Amount | None] | None = None
    auc: list[Share | None] | None = None
    balanced_accuracy: list[Share | None] | None = None
    f1: list[Share | None] | None = None
    majority: list[Share | None] | None = None
    routed: list[Share | None] | None = None


@dataclass(frozen=True)
class ColumnsLine(ScoreColumns):
    """The rows of time t with the fields of `RowLine`, in lists over the clients."""

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
    shifts: list[RecordedShifts | None] | None = None

    def __post_init__(self) -> None:
        columns = [getattr(self, name) for name in COLUMN_NAMES]
        if len({len(column) for column in columns if column is not None}) != 1:
            raise ValueError("all columns must have the same length")


COLUMN_NAMES = tuple(column.name for column in fields(RowLine) if column.name not in ("kind", "t", "c"))


@dataclass(frozen=True)
class ClientLine:
    """A client that joins.

    Attributes:
        kind: The kind of the line.
        t: The first time step in which it takes part.
        c: Its position, which is after those of all earlier clients.
        name: Its name.
    """

    kind: Literal["client"]
    t: Whole
    c: Whole
    name: str


@dataclass(frozen=True)
class TimeLine:
    """The beginning of a time step.

    Attributes:
        kind: The kind of the line.
        t: The time step.
        name: Its name for readers, such as the date.
    """

    kind: Literal["time"]
    t: Whole
    name: str


@dataclass(frozen=True)
class TestLine(ScoreColumns):
    """The test of time step t on the next data, in lists over the clients; it includes the inherited scores.

    A restarted server may test again. For each client, its last test with examples is valid.

    Attributes:
        kind: The kind of the line.
        t: The time step whose models are tested.
        accuracy: The accuracy of each client; null without test data.
        tested: The number of test examples of each client.
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
    """One request to some clients at time t and their replies, in lists over these clients.

    Attributes:
        kind: The kind of the line.
        t: The time step.
        asked: The kind of the request: hello, evaluate, describe, reroute, train, tournament, contest or explain.
        round: The round of training; null for other requests.
        at: The time when the request was sent.
        took: The seconds until all replies had arrived or the deadline had passed.
        c: The positions of the clients.
        sent: The bytes sent to each client; 0 if it was not connected.
        answered: The bytes of its reply.
        seconds: The seconds until its reply arrived; null: no reply.
        trouble: The reason why its reply is missing or refused; null: its reply is used.
        backlog: For a hello, the number of batches that each client has and that are not assigned to a time step yet;
            null: no client has any.
        gap: For a hello, the number of the missing batch that these batches wait for.
        note: A remark about each client for the operator, even if its reply is used; null: no remarks.
    """

    kind: Literal["exchange"]
    t: Whole
    asked: str
    round: Whole | None
    at: Clock
    took: Amount
    c: list[Whole]
    sent: list[Whole]
    answered: list[Whole]
    seconds: list[Amount | None]
    trouble: list[str | None]
    backlog: list[Whole] | None = None
    gap: list[Whole | None] | None = None
    note: list[str | None] | None = None

    def __post_init__(self) -> None:
        columns = (self.c, self.sent, self.answered, self.seconds, self.trouble, self.backlog, self.gap, self.note)
        if len({len(column) for column in columns if column is not None}) != 1:
            raise ValueError("all columns must have the same length")


@dataclass(frozen=True)
class EndLine:
    """The last line of a record; without it the run is unfinished: still running, or killed.

    Attributes:
        kind: The kind of the line.
        status: complete: after all time steps; interrupted: stopped before its end; failed: ended by an error.
        seconds: The duration of the run.
    """

    kind: Literal["end"]
    status: Status
    seconds: Amount


_LINE: TypeAdapter[Any] = TypeAdapter(
    Annotated[
        HeaderLine | EventLine | RowLine | ColumnsLine | EndLine | ClientLine | TimeLine | TestLine | ExchangeLine,
        Field(discriminator="kind"),
    ]
)


JSON_TYPES = (
    int,
    bool,
    str,
    type(None),
)  # types of values that need no conversion


def dump_line(line: Mapping[str, Any]) -> str:
    r"""Format a line as JSON with a newline; numbers that are not finite become null.

    >>> dump_line({"kind": "row", "t": np.int64(3), "accuracy": float("nan")})
    '{"kind": "row", "t": 3, "accuracy": null}\n'
    """
    return json.dumps(to_json_value(line)) + "\n"


def to_json_value(value: Any) -> Any:
    """Convert arrays, NumPy scalars, mappings and tuples to JSON values; numbers that are not finite become None."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(k): to_json_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [
            v if type(v) in JSON_TYPES or (type(v) is float and math.isfinite(v)) else to_json_value(v) for v in value
        ]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_time(text: str) -> str:
    if not 1970 <= datetime.fromisoformat(text).year < 9999:  # other years have no timestamp in some time zones
        raise ValueError("it must be a time since 1970")
    return text


def _check_finite(name: str, values: Mapping[str, Any]) -> None:
    if to_json_value(values) != values:
        raise ValueError(f"{name} must contain finite numbers")


def parse_line(text: str | bytes, where: str) -> dict[str, Any]:
    """Parse a line of a record and check its keys and types.

    Args:
        text: The line.
        where: The place of the line, for the message of an error.

    Raises:
        DataError: If it is not a valid line of a record.
    """
    try:
        _LINE.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"].startswith("union_tag"):
            raise DataError(f"{where}: not a line of a record, got {reprlib.repr(first['input'])}") from None
        key = ".".join(str(part) for part in first["loc"][1:])
        raise DataError(f"{where}: {describe_problem(first, key, reprlib.repr(first['input']))}") from None
    line: dict[str, Any] = json.loads(text)
    return line


def is_json(text: bytes) -> bool:
    """Return True if a line is valid JSON; a line that was cut off is not."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
