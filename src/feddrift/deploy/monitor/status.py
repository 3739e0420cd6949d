"""How a federation stands, by the record that its server writes."""

from __future__ import annotations

import os
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from feddrift.errors import ConfigError
from feddrift.reports.exchanges import get_last_problems, get_client_backlogs
from feddrift.runs.locks import is_being_written
from feddrift.runs.record import Record, get_part_path, read_latest


@dataclass(frozen=True)
class Status:
    """The record so far, and whether a server is at work on it."""

    record: Record
    running: bool

    @property
    def state(self) -> Literal["finished", "running", "stopped"]:
        """Whether the federation is finished, runs, or was stopped."""
        if self.record.status == "complete":
            return "finished"
        return "running" if self.running else "stopped"

    @property
    def sentence(self) -> str:
        """The word, and what to do about a federation that was stopped."""
        return self.state + (", `feddrift deploy run` goes on" if self.state == "stopped" else "")

    def describe_client(self, t: int, c: int) -> dict[str, Any]:
        """What client c had at time t; without accuracy until it is tested."""
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
        """Of each client, by name, whether it answered the last question, and if not, why; and how its data come.

        `quiet` is the number of time steps since its last new data, None where it never had any; `backlog` the number
        of its batches that wait for their time step, and `gap` that of a missing batch which they wait for.
        """
        last, waits, received = get_last_problems(self.record), get_client_backlogs(self.record), self.record.rows.received
        clients: dict[str, dict[str, Any]] = {}
        for c, name in enumerate(self.record.header["clients"]):
            backlog, gap = waits.get(c, (0, None))
            with_data = np.flatnonzero(received[:, c])
            clients[name] = {
                "here": self.running and c in last and last[c] is None,
                "trouble": last.get(c),
                "quiet": len(received) - 1 - int(with_data[-1]) if len(with_data) else None,
                "backlog": backlog,
                "gap": gap,
            }
        return clients

    def plain(self) -> dict[str, Any]:
        """The whole status as JSON values."""
        header, rows = self.record.header, self.record.rows
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
    """Looks at the record of a federation, and reads it only where a time step has been trained or tested since."""

    def __init__(self, server: Path) -> None:
        self._path = find_record_path(server)
        self._size, self._seen = 0, 0
        self.read_new_steps()

    def read_new_steps(self) -> list[tuple[Record, int, bool]]:
        """What has come since the last look: the record, the time step, and whether it is tested by now."""
        if not self._has_new_lines():
            return []
        record = read_latest(self._path)
        if record is None:
            return []
        moments = range(self._seen, record.rows.steps + record.tested)  # each step is trained, and then tested
        self._seen = max(self._seen, moments.stop)
        return [(record, moment // 2, moment % 2 == 1) for moment in moments]

    def _has_new_lines(self) -> bool:
        for file in (get_part_path(self._path), self._path):
            with suppress(FileNotFoundError), open(file, "rb") as opened:
                size = opened.seek(0, os.SEEK_END)
                opened.seek(min(self._size, size))
                added = opened.read()
                grown, self._size = size >= self._size, size
                return not grown or any(kind in added for kind in (b'"row"', b'"columns"', b'"test"'))
        return False


def read_status(server: Path) -> Status | None:
    """How the federation of this server stands; None before it has begun."""
    path = find_record_path(server)
    running = is_being_written(path)
    record = read_latest(path)
    return None if record is None else Status(record, running)


def find_record_path(server: Path) -> Path:
    """Where the record is when nobody writes it."""
    try:
        experiment = tomllib.loads((server / "federation.toml").read_text(encoding="utf-8"))["experiment"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read {server / 'federation.toml'}: {error!r}") from None
    return server / "state" / f"{experiment}.jsonl"
