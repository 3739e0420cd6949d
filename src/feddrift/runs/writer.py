"""Writing of records during a run: whole time steps, immediately, by one process at a time."""

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
from feddrift.runs.line_sequence import LineSequence
from feddrift.runs.locks import lock_file
from feddrift.runs.record import build_record_name, get_part_path, is_complete
from feddrift.runs.schema import Status

MAX_CLIENTS_IN_ROWS = 100  # with more, the rows of a time step are written as one line of columns


class RecordWriter:
    """Writer of a record: it writes lines to ``<name>.jsonl.part`` and renames the file to ``<name>.jsonl`` at the end.

    As a context manager it closes the record: as complete after all time steps, else as interrupted or failed. Lines of
    a federation of real machines are flushed to the disk at once, since checkpoints rely on them.

    Args:
        out: The folder of the record.
        header: The fields of the header, without `kind` and `schema`.
        n_done: The number of time steps to keep of an existing record; None: write a new one.
        seconds: The duration of these time steps.
        name: The name of the record without its suffix; by default that of the configuration and seed.
        part_file: The file of the record if it is open and locked already, see `lock_record`.

    Raises:
        BusyError: If another process writes the record.
        DataError: If the record has fewer than `n_done` time steps, or the file cannot be written.
    """

    def __init__(
        self,
        out: str | Path,
        header: Mapping[str, Any],
        n_done: int | None = None,
        seconds: float = 0.0,
        name: str | None = None,
        part_file: io.FileIO | None = None,
    ) -> None:
        self.path = Path(out) / f"{name or build_record_name(header)}.jsonl"
        self.part_path = get_part_path(self.path)
        self._start = time.monotonic() - seconds
        schema_number = 2 if header["n_steps"] is None else 1
        text = schema.dump_line({"kind": "header", "schema": schema_number, **header})
        self.sequence = LineSequence.from_header(schema.parse_line(text, "header"))  # after the lines that are written
        self._file = _open_part(self.part_path) if part_file is None else part_file
        try:
            if n_done is not None:
                self._continue_record(n_done)
                return
            with _convert_write_errors(self.part_path):
                self._file.truncate(0)
            self._append_text(text)
        except BaseException:
            self._file.close()
            if n_done is None:
                self.part_path.unlink(missing_ok=True)
            raise

    def _continue_record(self, n_done: int) -> None:
        """Keep the first time steps of the unfinished record, or else reopen or copy the closed one."""
        clients = self.sequence.header["clients"]
        prefix = read_prefix(self.part_path, n_done, clients)
        use_closed = prefix is None
        if prefix is None:
            prefix = read_prefix(self.path, n_done, clients)
        if prefix is None:
            raise DataError(f"cannot continue after {n_done} time steps: {self.path} has fewer")
        kept, self.sequence = prefix
        if use_closed:
            with _convert_write_errors(self.part_path):
                if self.sequence.header["schema"] == 1 and is_complete(self.path):
                    # A complete record stays until another complete one replaces it: copy it.
                    self._file.truncate(0)
                    self._append_text(kept.decode())
                else:
                    closed = lock_file(self.path)
                    os.replace(self.path, self.part_path)
                    self._file.close()
                    self._file = closed
        with _convert_write_errors(self.part_path):
            self._file.truncate(len(kept))

    def write_step(self, rows: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]] = ()) -> None:
        """Write one whole time step.

        Args:
            rows: One row for each client, in order, without `kind`.
            events: The events of the time step, without `kind`.

        Raises:
            DataError: If the rows or events are invalid or not those of the next time step, or cannot be written.
        """
        n_clients = self.sequence.n_clients
        where = f"time {self.sequence.complete_steps}"
        if len(rows) != n_clients:
            raise DataError(f"{where}: a time step has {n_clients} rows, got {len(rows)}")
        # Events come first: a record that has the rows of a time step then has all of its lines.
        lines: list[dict[str, Any]] = [{"kind": "event", **event} for event in events]
        if n_clients > MAX_CLIENTS_IN_ROWS:
            if any((row["t"], row["c"]) != (rows[0]["t"], c) for c, row in enumerate(rows)):
                raise DataError(f"{where}: rows must be of one time step, in the order of the clients")
            names = set[str]().union(*rows)
            columns = {name: [row.get(name) for row in rows] for name in schema.COLUMN_NAMES if name in names}
            lines.append({"kind": "columns", "t": rows[0]["t"], **columns})
        else:
            lines += [{"kind": "row", **row} for row in rows]
        self._write_lines(lines, where)

    def write_line(self, kind: Literal["client", "time", "test", "exchange"], **values: Any) -> None:
        """Write a line of a kind that only federations of real machines have."""
        self._write_lines([{"kind": kind, **values}], kind)

    def _write_lines(self, lines: Sequence[Mapping[str, Any]], where: str) -> None:
        """Write all of these lines, or none of them."""
        texts = [schema.dump_line(line) for line in lines]
        sequence = replace(self.sequence)
        for text in texts:
            sequence.add_line(schema.parse_line(text, where), where)
        self._append_text("".join(texts))
        if sequence.header["schema"] == 2 and lines[-1]["kind"] != "exchange":
            with _convert_write_errors(self.part_path):
                os.fsync(self._file.fileno())
        self.sequence = sequence

    def close(self, status: Status, seconds: float) -> None:
        """Write the last line and rename the record; an incomplete record does not replace a complete one."""
        if self._file.closed:
            return
        with self._file:
            text = schema.dump_line({"kind": "end", "status": status, "seconds": seconds})
            self.sequence.add_line(schema.parse_line(text, "end"), "end")
            self._append_text(text)
            if status == "complete" or not is_complete(self.path):
                with _convert_write_errors(self.path):
                    os.replace(self.part_path, self.path)

    @property
    def seconds(self) -> float:
        """The duration of the run so far."""
        return time.monotonic() - self._start

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = self.seconds
        if error is None:
            is_complete_run = self.sequence.header["n_steps"] in (None, self.sequence.complete_steps)
            self.close("complete" if is_complete_run else "interrupted", seconds)
        else:
            with suppress(FeddriftError):  # the first error is the one to report
                self.close("failed" if isinstance(error, Exception) else "interrupted", seconds)

    def _append_text(self, text: str) -> None:
        data = text.encode()
        size = self._file.seek(0, os.SEEK_END)
        with _convert_write_errors(self.part_path):
            try:
                while data:
                    data = data[self._file.write(data) :]
            except OSError:
                with suppress(OSError):
                    self._file.truncate(size)  # the disk may be full: remove the part that was written
                raise


def read_prefix(path: Path, steps: int, clients: Sequence[str] | None = None) -> tuple[bytes, LineSequence] | None:
    """Read the first time steps of a record.

    Args:
        path: The record.
        steps: The number of time steps.
        clients: The names of all clients; a line by which another client joins ends the prefix.

    Returns:
        The bytes up to the first line of a later time step, the last line, or a line that was cut off, and the state of
        their sequence. None if the record has fewer time steps or cannot be opened.

    Raises:
        DataError: If a line is invalid.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return None
    end = 0
    sequence = None
    lines = content.splitlines(keepends=True)
    for line in lines:
        if not line.endswith(b"\n"):
            break
        try:
            parsed = schema.parse_line(line, str(path))
        except DataError:
            if line is lines[-1]:
                break
            raise
        is_later = parsed["kind"] in ("event", "row", "columns") and parsed["t"] >= steps
        if is_later or parsed["kind"] == "end":
            break
        if parsed["kind"] == "client" and clients is not None and clients[parsed["c"] :][:1] != [parsed["name"]]:
            break
        if sequence is None:
            sequence = LineSequence.from_header(parsed)
        else:
            sequence.add_line(parsed, str(path))
        end += len(line)
    return (content[:end], sequence) if sequence is not None and sequence.complete_steps >= steps else None


@contextmanager
def lock_record(path: Path, allow_unlocked: bool = True) -> Iterator[io.FileIO]:
    """Open and lock the file of an unfinished record in the block; afterwards delete it if it is empty.

    Args:
        path: The path of the closed record.
        allow_unlocked: Continue without a lock on a file system that has no locks.

    Raises:
        BusyError: If another process writes the record.
        NoLocksError: If the file system has no locks and `allow_unlocked` is False.
        DataError: If the file cannot be written.
    """
    part = get_part_path(path)
    file = _open_part(part, allow_unlocked)
    try:
        yield file
    finally:
        if not file.closed:
            with file:
                if not file.seek(0, os.SEEK_END):
                    part.unlink(missing_ok=True)


def _open_part(part: Path, allow_unlocked: bool = True) -> io.FileIO:
    """Open the file of an unfinished record; it is locked as long as it is open."""
    prepare_folder(part.parent)
    while True:
        with _convert_write_errors(part):
            file = lock_file(part, allow_unlocked)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(part)):
                return file
        file.close()  # another run has just finished and renamed the file: open the new one


def prepare_folder(folder: Path) -> None:
    """Create the folder of records if it does not exist.

    Raises:
        DataError: If records cannot be written there.
    """
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise DataError(f"cannot write records into {folder}: it is a file, not a folder")
    with _convert_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise DataError(f"cannot write records into {folder}: permission denied")


@contextmanager
def _convert_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from None
