"""Records without a run: a header and rows made by hand, written by the real Writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from feddrift.runs.record import Record, Writer, read


def header(n_steps: int = 2, n_clients: int = 2, **changes: Any) -> dict[str, Any]:
    """A header of a small run without ground truth, with any field replaced."""
    return {
        "stream": "sine-2",
        "algorithm": "FedDrift",
        "settings": {"delta": 0.1, "init": "warm"},
        "overrides": {},
        "seed": 0,
        "local": {"rounds": 5, "steps": 2, "batch": 50, "lr": 0.01, "optimizer": "adam", "weight_decay": 0.001},
        "engine": "simulator",
        "n_steps": n_steps,
        "n_clients": n_clients,
        "clients": [str(c) for c in range(n_clients)],
        "concepts": None,
        "same": {},
        "versions": {"feddrift": "0.1"},
        "device": "cpu",
        "started": "2026-01-01T00:00:00+00:00",
        **changes,
    }


def rows(header: dict[str, Any], t: int, /, **columns: Sequence[Any]) -> list[dict[str, Any]]:
    """The rows of time t; a column replaces the field of that name, client by client."""
    concepts = header["concepts"]
    return [
        {
            "t": t,
            "c": c,
            "accuracy": 0.9,
            "tested": 500,
            "concept": None if concepts is None else concepts[t][c],
            "next_concept": None if concepts is None else concepts[t + 1][c],
            "model": 0,
            "n_models": 1,
            "drift": False,
            "models_sent": 10,
            **{name: values[c] for name, values in columns.items()},
        }
        for c in range(header["n_clients"])
    ]


def merged(t: int, model: int, into: int) -> dict[str, Any]:
    """The event of a merge."""
    return {"t": t, "event": "merged", "model": model, "cause": {"into": into, "distance": 0.01}}


def make(
    out: Path,
    head: dict[str, Any],
    columns: Mapping[str, Any] | None = None,
    events: Sequence[dict[str, Any]] = (),
    steps: int | None = None,
) -> Record:
    """A record with these columns [t, c], written and read back; fewer steps than T make it an interrupted one."""
    cells = {name: np.asarray(values, dtype=object) for name, values in (columns or {}).items()}
    with Writer(out, head) as writer:
        for t in range(head["n_steps"] if steps is None else steps):
            step = rows(head, t, **{name: values[t] for name, values in cells.items()})
            writer.step(step, [event for event in events if event["t"] == t])
    return read(writer.path)
