"""Reading of records, which are files of JSON lines, one for each run; `schema` describes the lines."""

from __future__ import annotations

import hashlib
import itertools
import json
import lzma
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from feddrift.errors import DataError
from feddrift.runs import schema
from feddrift.runs.line_sequence import LineSequence
from feddrift.scores import ACCURACY, SCORES, Score, find_score
from feddrift.types import Bools, Floats, Ints

MAX_ATTEMPTS = 5  # to open a file that another process may rename or lock for a moment
PACKED_SUFFIX = ".jsonl.xz"
HEADER_PATTERN = re.compile(rb'\{"kind": ?"header"')  # the beginning of each record in a packed file
LEGACY_HISTORY_FILE = "history.jsonl"  # written by deployments of version 0.1
AUDIT_FILE = "audit.jsonl"  # the audit log, which the server of a deployment writes beside its record
REQUEST_LOG_FILE = "requests.jsonl"  # the log of requests, which a client of a deployment writes into its folder
OTHER_LOG_FILES = LEGACY_HISTORY_FILE, AUDIT_FILE, REQUEST_LOG_FILE  # these are not records
Weigh = Literal["clients", "rows"]
# The type of a column of Rows, and the value where it is unknown, by its annotation.
COLUMN_TYPES = {"Floats": (np.float64, np.nan), "Ints": (np.int64, -1), "Bools": (np.bool_, False)}


@dataclass(frozen=True, eq=False, repr=False)
class Rows:
    """The complete time steps of a record: the fields of `schema.RowLine` as arrays [t, c].

    Unknown values are NaN in arrays of floats, -1 in arrays of integers, and 0 in `tested`.
    """

    accuracy: Floats  # NaN without test data
    tested: Ints
    concept: Ints
    next_concept: Ints
    model: Ints
    n_models: Ints
    drift: Bools
    models_sent: Floats
    sent_scoring: Floats
    received: Ints
    loss: Floats
    log_loss: Floats
    brier: Floats
    auc: Floats
    balanced_accuracy: Floats
    f1: Floats
    majority: Floats
    routed: Floats  # NaN if inputs did not choose their votes

    @property
    def steps(self) -> int:
        """The number of complete time steps."""
        return len(self.accuracy)

    def __repr__(self) -> str:
        return f"Rows({self.steps} time steps, {self.model.shape[1]} clients)"


@dataclass(frozen=True, eq=False, repr=False)
class Record:
    """A run as read from its file; header, events and exchanges are lines of the file.

    In a federation of real machines (`n_steps` is None), the header also has the clients that joined later and the
    times so far. A client that joined later received no data in the rows before.

    >>> import tempfile
    >>> from feddrift import record
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = record("sine-2", "FedDrift", out=folder, rounds=1)
    >>> run, run.rows.accuracy.shape, run.header["settings"]["delta"]
    (Record(sine-2, FedDrift, seed 0: complete, 10 of 10 time steps, 10 clients), (10, 10), 0.1)
    """

    header: dict[str, Any]
    rows: Rows
    events: tuple[dict[str, Any], ...]
    status: Literal["complete", "interrupted", "failed", "unfinished"]  # unfinished: still running, or killed
    tested: int  # number of time steps that are tested: all, or all but the last
    exchanges: tuple[dict[str, Any], ...] = ()  # the requests to clients of real machines
    seconds: float | None = None  # duration of the run, once it has ended
    score: Score = ACCURACY  # the score in rows.accuracy: see `select_score`
    accuracy: Floats | None = None  # the accuracy, if rows.accuracy contains another score
    weigh: Weigh = "clients"  # the unit with equal weight in means over tests: see `weights`
    shifts: Mapping[tuple[int, int], dict[str, Any]] = field(default_factory=dict)  # by (t, c): changes at an alarm

    @property
    def weights(self) -> Floats:
        """[t, c], the weight of each test in means: 1, or its number of rows."""
        tested = self.rows.tested
        return tested.astype(np.float64) if self.weigh == "rows" else np.ones(tested.shape)

    @property
    def runs_on(self) -> bool:
        """True if the number of time steps is not known in advance: a federation of real machines."""
        return self.header["n_steps"] is None

    def __repr__(self) -> str:
        total = "" if self.runs_on else f" of {self.header['n_steps']}"
        name = f"{self.header['stream']}, {self.header['algorithm']}, seed {self.header['seed']}"
        size = f"{self.rows.steps}{total} time steps, {self.header['n_clients']} clients"
        return f"Record({name}: {self.status}, {size})"


def select_score(records: Iterable[Record], name: str) -> list[Record]:
    """Put another score in place of the accuracy, so that everything computed from accuracies uses this score.

    Args:
        records: The records, in which another score may have been selected before.
        name: The name of a score, or accuracy.

    Raises:
        DataError: If none of the records has this score.
    """
    score = find_score(name)
    originals = [record if record.accuracy is None else _restore_accuracy(record) for record in records]
    if score == ACCURACY:
        return originals
    if originals and all(np.isnan(getattr(record.rows, name)).all() for record in originals):
        why = "an older version made them, no step is tested yet, or (AUC) no test has two classes"
        raise DataError(f"these records have no {score.title}: {why}")
    return [
        replace(
            record,
            score=score,
            rows=replace(record.rows, accuracy=getattr(record.rows, name)),
            accuracy=record.rows.accuracy,
        )
        for record in originals
    ]


def _restore_accuracy(record: Record) -> Record:
    """Undo `select_score`."""
    assert record.accuracy is not None
    rows = replace(record.rows, accuracy=record.accuracy)
    return replace(record, score=ACCURACY, rows=rows, accuracy=None)


HeaderFilter = Callable[[Mapping[str, Any]], bool]  # True for the headers of records that are wanted


def build_configuration_key(header: Mapping[str, Any]) -> str:
    """Return a text that is equal for runs that differ only in their seeds."""
    parts = [header[key] for key in ("stream", "algorithm", "settings", "overrides")]
    if header.get("n_steps", 0) is None:  # two federations may have the same name
        parts += [header["clients"], header["local"]]
    return json.dumps(schema.to_json_value(parts), sort_keys=True)


def build_record_name(header: Mapping[str, Any]) -> str:
    """Return the name of a record without its suffix: readable, and different for each configuration and seed.

    >>> header = {"stream": "folder:my data", "algorithm": "FedDrift", "settings": {}, "overrides": {}, "seed": 0}
    >>> build_record_name(header)
    'folder-my-data_FedDrift_a8577acc_seed0'
    """
    names = (re.sub(r"[^A-Za-z0-9.-]+", "-", header[key])[:60].strip(".-") for key in ("stream", "algorithm"))
    digest = hashlib.sha256(build_configuration_key(header).encode()).hexdigest()[:8]
    return f"{'_'.join(names)}_{digest}_seed{header['seed']}"


def get_part_path(path: Path) -> Path:
    """Return the path of a record while it is written."""
    return path.with_name(f"{path.name}.part")


def read(path: str | Path) -> Record:
    """Read a record; a last line or last time step that is incomplete is left out.

    Raises:
        DataError: If the file cannot be read or is not a record.
    """
    try:
        return _read_file(Path(path))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


def read_latest(path: Path) -> Record | None:
    """Read a record that may still be written.

    Args:
        path: The path of the closed record.

    Returns:
        The closed record if it is complete, else the unfinished one, else the closed one; None if neither exists.

    Raises:
        DataError: If a file cannot be read or is not a record.
    """
    for _ in range(MAX_ATTEMPTS):  # the record may be renamed after one path and before the other is opened
        candidates = []
        for file in (path, get_part_path(path)):
            try:
                if file == path or file.stat().st_size:  # an empty file is locked by a run that has not begun
                    candidates.append(_read_file(file))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise DataError(f"cannot read {file}: {error.strerror or error}") from None
        if candidates:
            return candidates[0] if candidates[0].status == "complete" else candidates[-1]
    return None


def _read_file(path: Path) -> Record:
    return _parse_record(path.read_bytes().split(b"\n"), path)


def find_packed_files(folder: str | Path) -> list[Path]:
    """Return the packed files (``*.jsonl.xz``) below a folder in order of their paths, or the given packed file."""
    if os.path.isfile(folder):  # Path.is_file raises errors for some strings
        return [Path(folder)] if str(folder).endswith(PACKED_SUFFIX) else []
    return sorted(Path(folder).rglob(f"*{PACKED_SUFFIX}")) if os.path.isdir(folder) else []


def split_packed_file(path: Path) -> list[list[bytes]]:
    """Decompress a packed file and return the lines of each record, without line ends, in the order of the file.

    Args:
        path: A file that contains one record after the other, each of which begins with its header.

    Raises:
        DataError: If the file cannot be read or decompressed, or does not begin with a header.
    """
    try:
        lines = lzma.decompress(path.read_bytes()).split(b"\n")
    except (lzma.LZMAError, OSError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    if not lines[-1]:  # nothing after the last newline
        lines.pop()
    starts = [k for k, line in enumerate(lines) if HEADER_PATTERN.match(line)]
    if not starts or starts[0] != 0:
        raise DataError(f"{path}: not a file of records, it has no header in its first line")
    return [lines[start:end] for start, end in itertools.pairwise([*starts, len(lines)])]


def read_packed_file(path: Path, wanted: HeaderFilter = lambda header: True) -> Iterator[Record]:
    """Yield the records of a packed file for whose header `wanted` returns True; decompress the file once."""
    first_line = 1
    for lines in split_packed_file(path):
        if wanted(schema.parse_line(lines[0], f"{path}, line {first_line}")):
            yield _parse_record(lines.copy(), path, first_line)
        first_line += len(lines)


def _parse_record(lines: list[bytes], path: Path, first_line: int = 1) -> Record:
    """Parse the lines of a record.

    Args:
        lines: The lines without line ends; an incomplete last line is removed from the list.
        path: The file, for messages.
        first_line: The number of the first line in the file, for messages.
    """
    if not schema.is_json(lines[-1]):  # nothing after the last newline, or a line cut off
        lines.pop()
    if not lines:
        raise DataError(f"{path}: not a record, it has no header")
    header = schema.parse_line(lines[0], f"{path}, line {first_line}")
    if header["kind"] != "header":
        raise DataError(f"{path}, line {first_line}: a record starts with its header, got {header['kind']!r}")
    sequence = LineSequence.from_header(header)
    by_kind: dict[str, list[dict[str, Any]]] = {}
    columns: dict[str, list[Any]] = {name: [] for name in schema.COLUMN_NAMES}
    n_clients: list[int] = []  # of each time step
    for number, text in enumerate(lines[1:], start=first_line + 1):
        where = f"{path}, line {number}"
        line = schema.parse_line(text, where)
        steps_before = sequence.complete_steps
        sequence.add_line(line, where)
        if line["kind"] == "row":
            for name, values in columns.items():
                values.append(line.get(name))
        elif line["kind"] == "columns":
            for name, values in columns.items():
                values += line.get(name) or [None] * sequence.n_clients
        else:
            by_kind.setdefault(line["kind"], []).append(line)
        n_clients += [sequence.n_clients] * (sequence.complete_steps - steps_before)
    starts = [0, *itertools.accumulate(n_clients)]  # [t], the position of its first row in the columns
    for test in by_kind.get("test", []):
        for c, tested in enumerate(test["tested"]):
            k = starts[test["t"]] + c
            if tested or not columns["tested"][k]:  # a test without data must not replace an earlier one with data
                for name in ("accuracy", "tested", *SCORES, "routed"):
                    columns[name][k] = test[name][c] if test.get(name) is not None else None
    if header["schema"] == 2:
        new_clients = [line["name"] for line in by_kind.get("client", [])]
        time_names = {line["t"]: line["name"] for line in by_kind.get("time", [])}
        times = [time_names.get(t, "") for t in range(sequence.begun_steps)]
        header |= {"n_clients": sequence.n_clients, "clients": header["clients"] + new_clients, "times": times}
    return Record(
        header=header,
        rows=_build_rows(columns, n_clients, sequence.n_clients),
        events=tuple(event for event in by_kind.get("event", []) if event["t"] < sequence.complete_steps),
        status=by_kind["end"][0]["status"] if sequence.ended else "unfinished",
        tested=sequence.tested_steps if header["schema"] == 2 else sequence.complete_steps,
        exchanges=tuple(by_kind.get("exchange", [])),
        seconds=by_kind["end"][0]["seconds"] if sequence.ended else None,
        shifts=_index_shifts(columns["shifts"], starts),
    )


def read_all(folder: str | Path, wanted: HeaderFilter = lambda header: True) -> list[Record]:
    """Read the records below a folder, sorted by configuration and seed.

    An unfinished record is left out if a complete one has the same name.

    Args:
        folder: A folder, the file of one record, or a packed file ``*.jsonl.xz``, which contains many records.
        wanted: Returns True for the headers of the records to read.

    Raises:
        DataError: If records are missing, or one cannot be read.
    """
    packed_files = find_packed_files(folder)
    records = [record for path in packed_files for record in read_packed_file(path, wanted)]
    if os.path.isfile(folder):
        records += [] if packed_files else [read(folder)]
    else:
        paths = find_record_paths(folder, allow_empty=bool(packed_files))
        records += [record for record in map(read_latest, paths) if record is not None]
    return sorted(
        (r for r in records if wanted(r.header)), key=lambda r: (build_configuration_key(r.header), r.header["seed"])
    )


def read_beside(paths: Iterable[Path], headers: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Read the other finished records in the folders of these ones, if they have the same data and options.

    Args:
        paths: The records.
        headers: Their headers.
    """
    own = set(paths)
    keys = ("stream", "overrides", "n_steps", "clients")
    data = [[header[key] for key in keys] for header in headers]
    found = []
    for folder in sorted({path.parent for path in own}):
        for path in sorted(set(folder.glob("*.jsonl")) - own):
            header = _read_header(path)
            if header is not None and [header[key] for key in keys] in data:
                with suppress(DataError):  # `feddrift report` says what is wrong with it
                    found.append(read(path))
    return [record for record in found if record.status == "complete"]


def _read_header(path: Path) -> dict[str, Any] | None:
    """Read only the header of a file; None if it is not a record."""
    try:
        with open(path, "rb") as file:
            header = schema.parse_line(file.readline(), str(path))
    except (OSError, DataError):
        return None
    return header if header["kind"] == "header" else None


def find_record_paths(folder: str | Path, allow_empty: bool = False) -> list[Path]:
    """Return the final paths of the plain records below a folder, or of one file, for `read_latest`.

    Args:
        folder: A folder of records, or the file of one record. Packed files are not listed: see `find_packed_files`.
        allow_empty: Return an empty list if the folder contains no plain records.

    Raises:
        DataError: If there is neither a folder nor a record of this name, or if the folder contains no records.
    """
    if not os.path.isdir(folder):
        if allow_empty and find_packed_files(folder):
            return []
        if os.path.isfile(folder) or os.path.isfile(f"{folder}.part"):
            return [Path(str(folder).removesuffix(".part"))]
        raise DataError(f"{folder} is neither a folder of records nor a record")
    paths = {path for path in Path(folder).rglob("*.jsonl") if path.name not in OTHER_LOG_FILES}
    paths |= {path.with_suffix("") for path in Path(folder).rglob("*.jsonl.part")}
    if not paths and not allow_empty:
        raise DataError(f"no records (*.jsonl) below {folder}")
    return sorted(paths)


def _build_rows(columns: Mapping[str, Sequence[Any]], n_clients: Sequence[int], n_columns: int) -> Rows:
    """Convert the columns of a record to arrays.

    Args:
        columns: By field, the values of all rows.
        n_clients: The number of clients in each complete time step.
        n_columns: The number of clients after the last time step.
    """
    arrays: dict[str, Any] = {}
    for column in fields(Rows):
        dtype, missing = COLUMN_TYPES[str(column.type)]
        values = columns[column.name][: sum(n_clients)]
        array: np.ndarray[Any, Any] = np.array([missing if value is None else value for value in values], dtype=dtype)
        if all(n == n_columns for n in n_clients):
            arrays[column.name] = array.reshape(-1, n_columns)
            continue
        arrays[column.name] = np.zeros((len(n_clients), n_columns), dtype=dtype)
        for t, row in enumerate(np.split(array, np.cumsum(n_clients)[:-1])):
            arrays[column.name][t, : len(row)] = row
            arrays[column.name][t, len(row) :] = _get_value_before_joining(column.name, row, missing)
    arrays["tested"] = np.maximum(arrays["tested"], 0)  # 0 for cells that are not tested yet
    return Rows(**arrays)


def _index_shifts(
    column: Sequence[dict[str, Any] | None], starts: Sequence[int]
) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the changes at alarms in complete time steps, by (t, c).

    Args:
        column: The values of all rows.
        starts: The position of the first row of each time step, and the end of the last one.
    """
    shifts = {}
    for k, value in enumerate(column[: starts[-1]]):
        if value is not None:
            t = bisect_right(starts, k) - 1
            shifts[t, k - starts[t]] = value
    return shifts


def _get_value_before_joining(name: str, row: np.ndarray[Any, Any], missing: Any) -> Any:
    """Return the value of a column for clients that join later; their model is the one that most others use.

    Args:
        name: The column.
        row: The values of the clients that have joined.
        missing: The value of the column where it is unknown.
    """
    if name == "model":
        ids, counts = np.unique(row, return_counts=True)
        return ids[counts.argmax()]
    if name == "n_models":
        return row[0]
    return 0 if name in ("tested", "received", "models_sent", "sent_scoring") else missing


def is_complete(path: Path) -> bool:
    """Return True if the file is the record of a complete run."""
    try:
        return read(path).status == "complete"
    except DataError:
        return False
