"""Order of the lines of a record: whole time steps, clients in order, a test after its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from feddrift.errors import DataError


@dataclass
class LineSequence:
    """Position in a record after some of its lines, which determines the lines that may follow."""

    header: Mapping[str, Any]
    n_clients: int
    complete_steps: int = 0  # number of time steps with all rows
    n_rows: int = 0  # of the next time step
    begun_steps: int = 0  # number of time steps that have begun
    tested_steps: int = 0  # number of time steps that are tested; only in schema 2
    n_clients_of_last_step: int = 0  # of the last time step with all rows
    ended: bool = False

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> LineSequence:
        """Return the position after the header."""
        return cls(header, header["n_clients"])

    def add_line(self, line: Mapping[str, Any], where: str) -> None:
        """Advance by a line.

        Args:
            line: The parsed line.
            where: The place of the line, for the message of an error.

        Raises:
            DataError: If this line may not follow.
        """
        kind = line["kind"]
        if self.ended:
            raise DataError(f"{where}: nothing may follow the end, got {kind!r}")
        if kind == "header":
            raise DataError(f"{where}: a record has one header, got a second")
        if kind in ("event", "row", "columns"):
            self._add_step_line(line, where)
        elif kind == "end":
            self._add_end(line, where)
        elif self.header["schema"] == 1 or self.n_rows:
            place = "between the rows of a time step" if self.n_rows else "in schema 1"
            raise DataError(f"{where}: a line {kind!r} is not allowed {place}")
        elif kind == "client":
            if (line["t"], line["c"]) != (self.complete_steps, self.n_clients):
                raise _sequence_error(line, f"client {self.n_clients}", where)
            self.n_clients += 1
        elif kind == "time":
            if not line["t"] == self.complete_steps == self.begun_steps:
                raise _sequence_error(line, f"time {self.complete_steps} to begin once", where)
            self.begun_steps += 1
        elif kind == "test":
            if (line["t"], len(line["tested"])) != (self.complete_steps - 1, self.n_clients_of_last_step):
                raise _sequence_error(line, f"a test of time {self.complete_steps - 1}", where)
            self.tested_steps = self.complete_steps
        else:
            if line["t"] > self.complete_steps or any(c >= self.n_clients for c in line["c"]):
                raise _sequence_error(line, f"time {self.complete_steps} at most, and {self.n_clients} clients", where)

    def _add_step_line(self, line: Mapping[str, Any], where: str) -> None:
        kind = line["kind"]
        n_steps = self.header["n_steps"]
        if kind == "columns" and len(line["model"]) != self.n_clients:
            raise DataError(f"{where}: columns must be {self.n_clients} long, got {len(line['model'])}")
        is_out_of_order = line["t"] != self.complete_steps or line.get("c", self.n_rows) != self.n_rows
        if (
            is_out_of_order
            or (n_steps is not None and self.complete_steps >= n_steps)
            or (self.n_rows and kind != "row")
        ):
            total = "" if n_steps is None else f" of {n_steps} time steps"
            raise _sequence_error(line, f"time {self.complete_steps}, client {self.n_rows}{total}", where)
        if kind != "event":
            self._add_rows(line["tested"] if kind == "columns" else [line["tested"]], where)

    def _add_rows(self, tested: Sequence[int | None], where: str) -> None:
        test_follows = self.header["schema"] == 2  # as a separate line
        if test_follows and self.tested_steps < self.complete_steps:
            raise DataError(f"{where}: time {self.complete_steps - 1} must be tested before time {self.complete_steps}")
        if any((n is None) != test_follows for n in tested):
            raise DataError(f"{where}: tested must be {'null in schema 2' if test_follows else 'a number'}")
        self.n_rows += len(tested)
        if self.n_rows == self.n_clients:
            self.complete_steps += 1
            self.n_rows = 0
            self.n_clients_of_last_step = self.n_clients
            self.begun_steps = self.complete_steps

    def _add_end(self, line: Mapping[str, Any], where: str) -> None:
        n_steps = self.header["n_steps"]
        if n_steps is not None and line["status"] == "complete" and (self.complete_steps, self.n_rows) != (n_steps, 0):
            raise DataError(f"{where}: complete means {n_steps} time steps, got {self.complete_steps}")
        self.ended = True


def _sequence_error(line: Mapping[str, Any], expected: str, where: str) -> DataError:
    got = f"{line['kind']} of time {line['t']}" + (f", client {line['c']}" if "c" in line else "")
    return DataError(f"{where}: expected {expected}, got the {got}")
