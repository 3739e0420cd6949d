"""In which order the lines of a record stand: whole time steps, clients in order, a test after its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from feddrift.errors import DataError


@dataclass
class Order:
    """Which lines have come after a header, and whether another may follow."""

    header: Mapping[str, Any]
    n_clients: int
    steps: int = 0  # time steps whose rows are all there
    rows: int = 0  # rows of the next one
    begun: int = 0  # time steps that have begun, and
    tested: int = 0  # are tested; both are told in schema 2 only,
    last_clients: int = 0  # and how many clients the last one had
    ended: bool = False

    @classmethod
    def after(cls, header: Mapping[str, Any]) -> Order:
        """The order of a record that has only this header yet."""
        return cls(header, header["n_clients"])

    def take(self, line: Mapping[str, Any], where: str) -> None:
        """Note a line, or say why it cannot stand here: whole time steps in order, clients in order."""
        kind, schema = line["kind"], self.header["schema"]
        if self.ended:
            raise DataError(f"{where}: nothing may follow the end, got {kind!r}")
        if kind == "header":
            raise DataError(f"{where}: a record has one header, got a second")
        if kind in ("event", "row", "columns"):
            self._part_of_step(line, where)
        elif kind == "end":
            self._end(line, where)
        elif schema == 1 or self.rows:
            raise DataError(f"{where}: a line {kind!r} cannot stand {'among rows' if self.rows else 'in schema 1'}")
        elif kind == "client":
            if (line["t"], line["c"]) != (self.steps, self.n_clients):
                raise _unexpected(line, f"client {self.n_clients}", where)
            self.n_clients += 1
        elif kind == "time":
            if not line["t"] == self.steps == self.begun:
                raise _unexpected(line, f"time {self.steps} to begin once", where)
            self.begun += 1
        elif kind == "test":
            if (line["t"], len(line["tested"])) != (self.steps - 1, self.last_clients):
                raise _unexpected(line, f"a test of time {self.steps - 1}", where)
            self.tested = self.steps
        else:
            if line["t"] > self.steps or any(c >= self.n_clients for c in line["c"]):
                raise _unexpected(line, f"time {self.steps} at most, and {self.n_clients} clients", where)

    def _part_of_step(self, line: Mapping[str, Any], where: str) -> None:
        kind, last = line["kind"], self.header["n_steps"]
        if kind == "columns" and len(line["model"]) != self.n_clients:
            raise DataError(f"{where}: columns must be {self.n_clients} long, got {len(line['model'])}")
        out_of_turn = line["t"] != self.steps or line.get("c", self.rows) != self.rows
        if out_of_turn or (last is not None and self.steps >= last) or (self.rows and kind != "row"):
            of = "" if last is None else f" of {last} time steps"
            raise _unexpected(line, f"time {self.steps}, client {self.rows}{of}", where)
        if kind != "event":
            self._rows(line["tested"] if kind == "columns" else [line["tested"]], where)

    def _rows(self, tested: Sequence[int | None], where: str) -> None:
        two_moments = self.header["schema"] == 2
        if two_moments and self.tested < self.steps:
            raise DataError(f"{where}: time {self.steps - 1} must be tested before time {self.steps}")
        if any((n is None) != two_moments for n in tested):
            raise DataError(f"{where}: tested must be {'null in schema 2' if two_moments else 'a number'}")
        self.rows += len(tested)
        if self.rows == self.n_clients:
            self.steps, self.rows, self.last_clients = self.steps + 1, 0, self.n_clients
            self.begun = self.steps

    def _end(self, line: Mapping[str, Any], where: str) -> None:
        last = self.header["n_steps"]
        if last is not None and line["status"] == "complete" and (self.steps, self.rows) != (last, 0):
            raise DataError(f"{where}: complete means {last} time steps, got {self.steps}")
        self.ended = True


def _unexpected(line: Mapping[str, Any], expected: str, where: str) -> DataError:
    got = f"{line['kind']} of time {line['t']}" + (f", client {line['c']}" if "c" in line else "")
    return DataError(f"{where}: expected {expected}, got the {got}")
