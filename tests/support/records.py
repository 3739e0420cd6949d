"""Records without a run: a header and rows made by hand, written by the real RecordWriter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from feddrift.runs.record import Record, read
from feddrift.runs.writer import RecordWriter


def make_header(n_steps: int | None = 2, n_clients: int = 2, **changes: Any) -> dict[str, Any]:
    """Return the header of a small run without ground truth, with the given fields replaced."""
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


def make_rows(header: dict[str, Any], t: int, /, **columns: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the rows of time t; a column has the values of the field of that name, client by client."""
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


def make_merge_event(t: int, model: int, into: int) -> dict[str, Any]:
    """Return the event of a merge."""
    return {"t": t, "event": "merged", "model": model, "cause": {"into": into, "distance": 0.01}}


def write_record(
    out: Path,
    head: dict[str, Any],
    columns: Mapping[str, Any] | None = None,
    events: Sequence[dict[str, Any]] = (),
    steps: int | None = None,
) -> Record:
    """Write a record with these columns [t, c] and read it; with fewer steps than T it is an interrupted one."""
    cells = {name: np.asarray(values, dtype=object) for name, values in (columns or {}).items()}
    with RecordWriter(out, head) as writer:
        for t in range(head["n_steps"] if steps is None else steps):
            step = make_rows(head, t, **{name: values[t] for name, values in cells.items()})
            writer.write_step(step, [event for event in events if event["t"] == t])
    return read(writer.path)


def write_federation_record(out: Path) -> Record:
    """Write an unfinished federation: two clients, then a third; the last step is not tested, another one twice."""
    head = make_header(None, 2, engine="flower")
    writer = RecordWriter(out, head, name="fed")
    asked = {"t": 0, "round": None, "at": "2026-01-01T00:00:01.500+00:00", "c": [0, 1], "sent": [900, 0]}
    answered = {"took": 1.5, "answered": [300, 0], "seconds": [1.25, None], "trouble": [None, "it is not connected"]}
    untested: dict[str, Any] = {"accuracy": [None] * 3, "tested": [None] * 3, "received": [20] * 3}
    writer.write_line("exchange", asked="hello", **asked, **answered)
    writer.write_line("time", t=0, name="day 0")
    writer.write_line("exchange", asked="train", **asked | {"round": 0}, **answered)
    writer.write_step(make_rows(head, 0, **untested))
    writer.write_line("test", t=0, accuracy=[0.5, None], tested=[10, 0])
    writer.write_line("time", t=1, name="day 1")
    created = {"t": 1, "event": "created", "model": 1, "cause": {"clients": [1], "from": 0}}
    writer.write_step(make_rows(head, 1, **untested | {"model": [0, 1], "drift": [False, True]}), [created])
    writer.write_line("test", t=1, accuracy=[0.5, None], tested=[10, 0])
    writer.write_line("client", t=2, c=2, name="2")
    writer.write_line("test", t=1, accuracy=[0.75, 0.8], tested=[10, 10])
    writer.write_line("time", t=2, name="day 2")
    writer.write_step(make_rows(head | {"n_clients": 3}, 2, **untested | {"model": [0, 1, 1]}))
    writer._file.close()  # as if it had been killed
    return read(writer.part_path)
