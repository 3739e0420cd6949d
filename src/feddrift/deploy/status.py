"""How a federation stands, by the record that its server writes."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from feddrift.errors import ConfigError
from feddrift.reports.exchanges import last_words
from feddrift.runs.record import Record, part_of, read
from feddrift.runs.writer import is_being_written


@dataclass(frozen=True)
class Status:
    """The record so far, and whether a server is at work on it."""

    record: Record
    running: bool

    @property
    def word(self) -> str:
        """How it goes, in a few words."""
        if self.record.status == "complete":
            return "finished"
        return "running" if self.running else "stopped, `feddrift deploy run` goes on"

    def client(self, t: int, c: int) -> dict[str, Any]:
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
        }

    def plain(self) -> dict[str, Any]:
        """All of it as JSON values."""
        header, rows = self.record.header, self.record.rows
        names, words = header["clients"], last_words(self.record)
        return {
            "experiment": header["stream"],
            "algorithm": header["algorithm"],
            "status": "finished" if self.record.status == "complete" else "running" if self.running else "stopped",
            "clients": {
                name: {"here": c in words and words[c] is None, "trouble": words.get(c)} for c, name in enumerate(names)
            },
            "steps": [
                {
                    "t": t,
                    "began": header["times"][t] if t < len(header["times"]) else None,
                    "tested": t < self.record.tested,
                    "models": np.unique(rows.model[t]).tolist(),
                    "clients": {name: self.client(t, c) for c, name in enumerate(names)},
                    "events": [
                        {key: event[key] for key in ("event", "model", "cause")}
                        for event in self.record.events
                        if event["t"] == t
                    ],
                }
                for t in range(rows.steps)
            ],
        }


def status(server: Path) -> Status | None:
    """How the federation of this server stands; None before it has begun."""
    path = record_path(server)
    running = is_being_written(path)
    found = next((file for file in (part_of(path), path) if file.exists() and file.stat().st_size), None)
    return None if found is None else Status(read(found), running)


def record_path(server: Path) -> Path:
    """Where the record is when nobody writes it."""
    try:
        experiment = tomllib.loads((server / "federation.toml").read_text(encoding="utf-8"))["experiment"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read {server / 'federation.toml'}: {error!r}") from None
    return server / "state" / f"{experiment}.jsonl"
