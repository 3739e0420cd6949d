"""The status of a federation, from the record that its server writes."""

from __future__ import annotations

import os
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from feddrift.errors import ConfigError
from feddrift.reports.exchanges import get_client_backlogs, get_last_problems
from feddrift.runs.locks import is_being_written
from feddrift.runs.record import Record, get_part_path, read_latest


@dataclass(frozen=True)
class Status:
    """The status of a federation: its record so far."""

    record: Record
    running: bool  # True while a server writes the record

    @property
    def state(self) -> Literal["finished", "running", "stopped"]:
        """The state: finished after all time steps, running, or stopped before its end."""
        if self.record.status == "complete":
            return "finished"
        return "running" if self.running else "stopped"

    @property
    def sentence(self) -> str:
        """The state, and for a stopped federation the command that continues it."""
        return self.state + (", `feddrift deploy run` continues it" if self.state == "stopped" else "")

    def describe_client(self, t: int, c: int) -> dict[str, Any]:
        """Return the row of client c at time t as JSON values; `accuracy` and `tested` are None until it is tested."""
        rows = self.record.rows
        tested = int(rows.tested[t, c]) if t < self.record.tested else None
        return {
            "model": int(rows.model[t, c]),
            "drift": bool(rows.drift[t, c]),
            "accuracy": float(rows.accuracy[t, c]) if tested else None,
            "tested": tested,
            "sent": float(rows.models_sent[t, c]),
            "received": int(rows.received[t, c]),
            **({"shifts": self.record.shifts[t, c]} if (t, c) in self.record.shifts else {}),
        }

    def describe_clients(self) -> dict[str, dict[str, Any]]:
        """Return the state of the connection and of the data of each client, by its name.

        Returns:
            `here`: True if the federation is running and the client replied to the last request.
            `trouble`: The reason why it did not reply, else None.
            `quiet`: The number of time steps since its last new data; None if it never had any.
            `backlog`: The number of its batches that wait for their time step.
            `gap`: The number of the missing batch that they wait for, else None.
        """
        problems = get_last_problems(self.record)
        backlogs = get_client_backlogs(self.record)
        received = self.record.rows.received
        clients: dict[str, dict[str, Any]] = {}
        for c, name in enumerate(self.record.header["clients"]):
            backlog, gap = backlogs.get(c, (0, None))
            steps_with_data = np.flatnonzero(received[:, c])
            clients[name] = {
                "here": self.running and c in problems and problems[c] is None,
                "trouble": problems.get(c),
                "quiet": len(received) - 1 - int(steps_with_data[-1]) if len(steps_with_data) else None,
                "backlog": backlog,
                "gap": gap,
            }
        return clients

    def to_dict(self) -> dict[str, Any]:
        """Return the whole status as JSON values."""
        header = self.record.header
        rows = self.record.rows
        events: dict[int, list[dict[str, Any]]] = {}
        for event in self.record.events:
            events.setdefault(event["t"], []).append({key: event[key] for key in ("event", "model", "cause")})
        return {
            "experiment": header["stream"],
            "algorithm": header["algorithm"],
            "status": self.state,
            "clients": self.describe_clients(),
            "steps": [
                {
                    "t": t,
                    "began": header["times"][t] or None,
                    "tested": t < self.record.tested,
                    "models": np.unique(rows.model[t]).tolist(),
                    "clients": {name: self.describe_client(t, c) for c, name in enumerate(header["clients"])},
                    "events": events.get(t, []),
                }
                for t in range(rows.steps)
            ],
        }


class RecordWatcher:
    """Reader of new time steps of a federation; the record is parsed only if a time step was trained or tested."""

    def __init__(self, server: Path) -> None:
        self._path = find_record_path(server)
        self._n_bytes = 0  # read so far
        self._n_reported = 0  # each time step is reported twice: when it is trained, and when it is tested
        self.read_new_steps()

    def read_new_steps(self) -> list[tuple[Record, int, bool]]:
        """Return (record, t, is_tested) for each time step that was trained or tested since the last call."""
        if not self._has_new_lines():
            return []
        record = read_latest(self._path)
        if record is None:
            return []
        reports = range(self._n_reported, record.rows.steps + record.tested)
        self._n_reported = max(self._n_reported, reports.stop)
        return [(record, number // 2, number % 2 == 1) for number in reports]

    def _has_new_lines(self) -> bool:
        """Return True if a row or a test was added to the file since the last call, or the file has become shorter."""
        for file in (get_part_path(self._path), self._path):
            with suppress(FileNotFoundError), open(file, "rb") as opened:
                size = opened.seek(0, os.SEEK_END)
                opened.seek(min(self._n_bytes, size))
                added = opened.read()
                is_shorter = size < self._n_bytes
                self._n_bytes = size
                return is_shorter or any(kind in added for kind in (b'"row"', b'"columns"', b'"test"'))
        return False


def read_status(server: Path) -> Status | None:
    """Return the status of the federation of a server's folder; None before it has begun."""
    path = find_record_path(server)
    running = is_being_written(path)
    record = read_latest(path)
    return None if record is None else Status(record, running)


def find_record_path(server: Path) -> Path:
    """Return the path of the federation's record; while it is being written, `.part` is appended to its name."""
    try:
        experiment = tomllib.loads((server / "federation.toml").read_text(encoding="utf-8"))["experiment"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read {server / 'federation.toml'}: {error!r}") from None
    return server / "state" / f"{experiment}.jsonl"
