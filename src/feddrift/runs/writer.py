"""Writing a record while a run goes on: every line at once, whole time steps or nothing, by one run alone."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from feddrift.errors import DataError, FeddriftError
from feddrift.runs import schema
from feddrift.runs.line_sequence import Order
from feddrift.runs.locks import lock
from feddrift.runs.record import file_name, is_complete, part_of
from feddrift.runs.schema import Status

MANY_CLIENTS = 100  # with more, the rows of a time step are written as one line of columns


class Writer:
    """Writes a record line by line to ``<name>.jsonl.part`` and moves it to ``<name>.jsonl`` when closed.

    As a context manager it closes itself: complete after all time steps, else interrupted or failed. With `done` it
    goes on after so many time steps of a record that is there already, which took so many seconds. A `part` that is
    `held` already is not locked again. The record of a federation is on the disk before a checkpoint that relies on it.
    """

    def __init__(
        self,
        out: str | Path,
        header: Mapping[str, Any],
        done: int | None = None,
        seconds: float = 0.0,
        name: str | None = None,
        part: io.FileIO | None = None,
    ) -> None:
        self.path = Path(out) / f"{name or file_name(header)}.jsonl"
        self.part = part_of(self.path)
        self._start = time.monotonic() - seconds
        number = 2 if header["n_steps"] is None else 1
        text = schema.dump({"kind": "header", "schema": number, **header})
        self.order = Order.after(schema.parse(text, "header"))  # how far it has come
        self._file = _hold(self.part) if part is None else part
        try:
            if done is not None:
                self._go_on(done)
                return
            with _writable(self.part):
                self._file.truncate(0)
            self._write(text)
        except BaseException:
            self._file.close()
            if done is None:
                self.part.unlink(missing_ok=True)
            raise

    def _go_on(self, done: int) -> None:
        """Keep the first time steps of the part, or of a record that was closed, which becomes the part again."""
        clients = self.order.header["clients"]
        start = beginning(self.part, done, clients)
        moved = start is None
        if start is None:
            start = beginning(self.path, done, clients)
        if start is None:
            raise DataError(f"cannot go on after {done} time steps: {self.path} has not so many")
        kept, self.order = start
        if moved:
            with _writable(self.part):
                if self.order.header["schema"] == 1 and is_complete(self.path):  # it is replaced by a complete one only
                    self._file.truncate(0)
                    self._write(kept.decode())
                else:
                    closed = lock(self.path)
                    os.replace(self.path, self.part)
                    self._file.close()
                    self._file = closed
        with _writable(self.part):
            self._file.truncate(len(kept))

    def step(self, rows: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]] = ()) -> None:
        """Write one whole time step: its events, and one row per client in order, both without their "kind"."""
        n_clients, where = self.order.n_clients, f"time {self.order.steps}"
        if len(rows) != n_clients:
            raise DataError(f"{where}: a time step has {n_clients} rows, got {len(rows)}")
        # Events first: once the rows are there, nothing of the step can be missing.
        lines: list[dict[str, Any]] = [{"kind": "event", **event} for event in events]
        if n_clients > MANY_CLIENTS:
            if any((row["t"], row["c"]) != (rows[0]["t"], c) for c, row in enumerate(rows)):
                raise DataError(f"{where}: rows must be of one time step, in the order of the clients")
            given = set[str]().union(*rows)
            columns = {name: [row.get(name) for row in rows] for name in schema.COLUMNS if name in given}
            lines.append({"kind": "columns", "t": rows[0]["t"], **columns})
        else:
            lines += [{"kind": "row", **row} for row in rows]
        self._add(lines, where)

    def add(self, kind: Literal["client", "time", "test", "exchange"], **values: Any) -> None:
        """Write a line that only federations of real machines have."""
        self._add([{"kind": kind, **values}], kind)

    def _add(self, lines: Sequence[Mapping[str, Any]], where: str) -> None:
        """Write all of these lines, or none."""
        texts, order = [schema.dump(line) for line in lines], replace(self.order)
        for text in texts:
            order.take(schema.parse(text, where), where)
        self._write("".join(texts))
        if order.header["schema"] == 2 and lines[-1]["kind"] != "exchange":
            with _writable(self.part):
                os.fsync(self._file.fileno())
        self.order = order

    def close(self, status: Status, seconds: float) -> None:
        """Write the end and give the record its final name, unless a complete one would be lost by it."""
        if self._file.closed:
            return
        with self._file:
            text = schema.dump({"kind": "end", "status": status, "seconds": seconds})
            self.order.take(schema.parse(text, "end"), "end")
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
            whole = self.order.header["n_steps"] in (None, self.order.steps)
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


def beginning(path: Path, steps: int, clients: Sequence[str] | None = None) -> tuple[bytes, Order] | None:
    """A record up to the next line of a later time step or its end, or None if it has not so many time steps.

    Its bytes, and how far they go. It also ends before a client joins who is not one of these after all, and before a
    line that was torn.
    """
    try:
        whole = path.read_bytes()
    except OSError:
        return None
    end, order = 0, None
    lines = whole.splitlines(keepends=True)
    for line in lines:
        if not line.endswith(b"\n"):
            break
        try:
            parsed = schema.parse(line, str(path))
        except DataError:
            if line is lines[-1]:
                break
            raise
        later = parsed["kind"] in ("event", "row", "columns") and parsed["t"] >= steps
        if later or parsed["kind"] == "end":
            break
        if parsed["kind"] == "client" and clients is not None and clients[parsed["c"] :][:1] != [parsed["name"]]:
            break
        if order is None:
            order = Order.after(parsed)
        else:
            order.take(parsed, str(path))
        end += len(line)
    return (whole[:end], order) if order is not None and order.steps >= steps else None


@contextmanager
def held(path: Path, alone: bool = True) -> Iterator[io.FileIO]:
    """The part of a record, which nobody else has meanwhile; it is gone afterwards if nothing was written."""
    part = part_of(path)
    file = _hold(part, alone)
    try:
        yield file
    finally:
        if not file.closed:
            with file:
                if not file.seek(0, os.SEEK_END):
                    part.unlink(missing_ok=True)


def _hold(part: Path, alone: bool = True) -> io.FileIO:
    """The part, locked by this run for as long as it is open."""
    check_folder(part.parent)
    while True:
        with _writable(part):
            file = lock(part, alone)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(part)):
                return file
        file.close()  # the other run has just finished and renamed it


def check_folder(folder: Path) -> None:
    """Make the folder, or say why records cannot be written there."""
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise DataError(f"cannot write records into {folder}: it is a file, not a folder")
    with _writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise DataError(f"cannot write records into {folder}: permission denied")


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from None
