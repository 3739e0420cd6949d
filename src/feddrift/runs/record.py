"""One record per run, as JSON lines (their fields are in `schema`): written while it runs, read for reports."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from feddrift.errors import BusyError, DataError, FeddriftError
from feddrift.runs import schema
from feddrift.runs.schema import SCHEMA, Status
from feddrift.types import Bools, Floats, Ints

KINDS = {"Floats": (np.float64, np.nan), "Ints": (np.int64, -1), "Bools": (np.bool_, False)}  # of Rows; where unknown
MANY_CLIENTS = 100  # with more, the rows of a time step are written as one line of columns


@dataclass(frozen=True, eq=False)
class Rows:
    """The whole time steps of a record: the fields of its rows as arrays [t, c]."""

    accuracy: Floats  # NaN without test data
    tested: Ints
    concept: Ints  # -1 where unknown
    next_concept: Ints  # -1 where unknown
    model: Ints
    n_models: Ints
    drift: Bools
    models_sent: Floats
    sent_scoring: Floats  # NaN where unknown
    received: Ints  # -1 where unknown
    loss: Floats  # NaN where unknown

    @property
    def steps(self) -> int:
        """The number of time steps done."""
        return len(self.accuracy)


@dataclass(frozen=True, eq=False)
class Record:
    """A run as read from its file; header and events are the lines themselves."""

    header: dict[str, Any]
    rows: Rows
    events: tuple[dict[str, Any], ...]
    status: Literal["complete", "interrupted", "failed", "unfinished"]  # unfinished: still running, or killed


def configuration(header: Mapping[str, Any]) -> str:
    """What runs that differ in their seed only have in common, as text."""
    parts = [header[key] for key in ("stream", "algorithm", "settings", "overrides")]
    return json.dumps(schema.plain(parts), sort_keys=True)


def file_name(header: Mapping[str, Any]) -> str:
    """A readable name, one per configuration and seed.

    >>> file_name({"stream": "folder:my data", "algorithm": "FedDrift", "settings": {}, "overrides": {}, "seed": 0})
    'folder-my-data_FedDrift_a8577acc_seed0'
    """
    names = (re.sub(r"[^A-Za-z0-9.-]+", "-", header[key])[:60].strip(".-") for key in ("stream", "algorithm"))
    digest = hashlib.sha256(configuration(header).encode()).hexdigest()[:8]
    return f"{'_'.join(names)}_{digest}_seed{header['seed']}"


class Writer:
    """Writes a record step by step to ``<name>.jsonl.part`` and moves it to ``<name>.jsonl`` when closed.

    As a context manager it closes itself: complete after all time steps, else interrupted or failed. With `done` it
    goes on after so many time steps of a record that is there already, which took so many seconds.
    """

    def __init__(self, out: str | Path, header: Mapping[str, Any], done: int = 0, seconds: float = 0.0) -> None:
        self.path = Path(out) / f"{file_name(header)}.jsonl"
        self.part = part_of(self.path)
        self._start = time.monotonic() - seconds
        self._n_rows = 0
        text = schema.dump({"kind": "header", "schema": SCHEMA, **header})
        self._header = schema.parse(text, "header")
        check_folder(self.part.parent)
        with _writable(self.part):
            self._file = self._locked()
        try:
            if done:
                self._go_on(done)
                return
            with _writable(self.part):
                self._file.truncate(0)
            self._write(text)
        except FeddriftError:
            self._file.close()
            if not done:
                self.part.unlink(missing_ok=True)
            raise

    def _go_on(self, done: int) -> None:
        """Keep the first time steps of the part, or of a record that was closed before its end."""
        kept = beginning(self.part, done)
        if kept is None:
            kept = beginning(self.path, done)
            if kept is None:
                raise DataError(f"cannot go on after {done} time steps: {self.path} has not so many")
            with _writable(self.part):
                self._file.truncate(0)
            self._write(kept.decode())
        else:
            with _writable(self.part):
                self._file.truncate(len(kept))
        self._header = schema.parse(kept.partition(b"\n")[0], f"{self.part}, line 1")
        self._n_rows = done * self._header["n_clients"]

    def _locked(self) -> io.FileIO:
        """The part, held by this run alone for as long as it is open."""
        while True:
            # Unbuffered, so that a time step is one system call, which Ctrl-C cannot cut in two.
            file = open(self.part, "ab", buffering=0)  # noqa: SIM115
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.close()
                raise BusyError(f"another run is writing {self.part}: wait for it, or choose another folder") from None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self.part)):
                    return file
            file.close()  # the other run has just finished and renamed it

    def step(self, rows: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]] = ()) -> None:
        """Write one whole time step: its events, and one row per client in order, both without their "kind"."""
        n_clients = self._header["n_clients"]
        where = f"time {self._n_rows // n_clients}"
        if len(rows) != n_clients:
            raise DataError(f"{where}: a time step has {n_clients} rows, got {len(rows)}")
        # Events first: once the rows are there, nothing of the step can be missing.
        lines: list[dict[str, Any]] = [{"kind": "event", **event} for event in events]
        if n_clients > MANY_CLIENTS:
            if any((row["t"], row["c"]) != (rows[0]["t"], c) for c, row in enumerate(rows)):
                raise DataError(f"{where}: rows must be of one time step, in the order of the clients")
            told = [name for name in schema.COLUMNS if any(name in row for row in rows)]
            columns = {name: [row.get(name) for row in rows] for name in told}
            lines.append({"kind": "columns", "t": rows[0]["t"], **columns})
        else:
            lines += [{"kind": "row", **row} for row in rows]
        texts = [schema.dump(line) for line in lines]
        for i, text in enumerate(texts):
            n_rows = self._n_rows + max(0, i - len(events))
            schema.check_order(schema.parse(text, where), self._header, n_rows, where)
        self._write("".join(texts))
        self._n_rows += len(rows)

    def close(self, status: Status, seconds: float) -> None:
        """Write the end and give the record its final name, unless a complete one would be lost by it."""
        if self._file.closed:
            return
        with self._file:
            text = schema.dump({"kind": "end", "status": status, "seconds": seconds})
            schema.check_order(schema.parse(text, "end"), self._header, self._n_rows, "end")
            self._write(text)
            if status == "complete" or not is_complete(self.path):
                with _writable(self.path):
                    os.replace(self.part, self.path)

    @property
    def seconds(self) -> float:
        """How long the run has taken so far."""
        return time.monotonic() - self._start

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = self.seconds
        if error is None:
            whole = self._n_rows == self._header["n_steps"] * self._header["n_clients"]
            self.close("complete" if whole else "interrupted", seconds)
        else:
            with suppress(FeddriftError):  # the first error is the one to tell
                self.close("failed" if isinstance(error, Exception) else "interrupted", seconds)

    def _write(self, text: str) -> None:
        data, size = text.encode(), self._file.seek(0, os.SEEK_END)
        with _writable(self.part):
            try:
                while data:
                    data = data[self._file.write(data) :]
            except OSError:
                with suppress(OSError):
                    self._file.truncate(size)  # no half a step on a full disk
                raise


def part_of(path: Path) -> Path:
    """Where a record is written before it has its final name."""
    return path.with_name(f"{path.name}.part")


def beginning(path: Path, steps: int) -> bytes | None:
    """The header and the first whole time steps of a record as they were written, or None if it has not so many."""
    try:
        whole = path.read_bytes()
    except OSError:
        return None
    end, rows, n_clients = 0, 0, 0
    for line in whole.splitlines(keepends=True):
        end += len(line)
        if not line.endswith(b"\n"):
            break
        found = schema.parse(line, str(path))
        if found["kind"] == "header":
            n_clients = found["n_clients"]
        rows += 1 if found["kind"] == "row" else n_clients if found["kind"] == "columns" else 0
        if n_clients and rows == steps * n_clients:
            return whole[:end]
    return None


def check_folder(folder: Path) -> None:
    """Make the folder, or say why records cannot be written there."""
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise DataError(f"cannot write records into {folder}: it is a file, not a folder")
    with _writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise DataError(f"cannot write records into {folder}: permission denied")


def read(path: str | Path) -> Record:
    """Read a record; a last line that was cut off is left out, and so is a last time step that is not whole."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    if not schema.is_json(lines[-1]):  # nothing after the last newline, or a line cut off
        lines.pop()
    if not lines:
        raise DataError(f"{path}: not a record, it has no header")
    header = schema.parse(lines[0], f"{path}, line 1")
    if header["kind"] != "header":
        raise DataError(f"{path}, line 1: a record starts with its header, got {header['kind']!r}")
    found: dict[str, list[dict[str, Any]]] = {"event": [], "end": []}
    columns: dict[str, list[Any]] = {name: [] for name in schema.COLUMNS}
    for number, text in enumerate(lines[1:], start=2):
        where = f"{path}, line {number}"
        line = schema.parse(text, where)
        if line["kind"] == "header":
            raise DataError(f"{where}: a record has one header, got a second")
        if found["end"]:
            raise DataError(f"{where}: nothing may follow the end, got {line['kind']!r}")
        schema.check_order(line, header, len(columns["model"]), where)
        if line["kind"] == "row":
            for name, values in columns.items():
                values.append(line.get(name))
        elif line["kind"] == "columns":
            for name, values in columns.items():
                values += line.get(name) or [None] * header["n_clients"]
        else:
            found[line["kind"]].append(line)
    rows = _rows(columns, header["n_clients"])
    events = tuple(event for event in found["event"] if event["t"] < rows.steps)
    return Record(header, rows, events, status=found["end"][0]["status"] if found["end"] else "unfinished")


def read_all(folder: str | Path) -> list[Record]:
    """All records below a folder, by configuration and seed, or the one of a file.

    An unfinished part is left out where a record of the same name is there.
    """
    if os.path.isfile(folder):  # unlike Path's, it takes any string
        return [read(folder)]
    if not os.path.isdir(folder):
        raise DataError(f"{folder} is neither a folder of records nor a record")
    paths = sorted(Path(folder).rglob("*.jsonl"))
    paths += [part for part in sorted(Path(folder).rglob("*.jsonl.part")) if not part.with_suffix("").exists()]
    if not paths:
        raise DataError(f"no records (*.jsonl) below {folder}")
    return sorted((read(path) for path in paths), key=lambda r: (configuration(r.header), r.header["seed"]))


def _rows(columns: Mapping[str, Sequence[Any]], n_clients: int) -> Rows:
    arrays: dict[str, Any] = {}
    for field in fields(Rows):
        dtype, missing = KINDS[str(field.type)]
        whole = columns[field.name][: len(columns[field.name]) // n_clients * n_clients]
        values = [missing if value is None else value for value in whole]
        arrays[field.name] = np.array(values, dtype=dtype).reshape(-1, n_clients)
    return Rows(**arrays)


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from None


def is_complete(path: Path) -> bool:
    """Whether there is a record of a whole run."""
    try:
        return read(path).status == "complete"
    except DataError:
        return False
