"""Time steps of a federation that its record lacks: begun by version 0.1, which wrote another file, or lost."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from feddrift.runs.record import OLD_HISTORY
from feddrift.runs.recorded_run import lines_of
from feddrift.simulation import Trained
from feddrift.types import Ints, State

Lines = tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any] | None]  # rows, events, and the test

_log = logging.getLogger("feddrift")


def past_steps(
    folder: Path, clients: Sequence[str], state: State, times: range, untested: Trained | None, counts: Ints
) -> Iterator[Lines]:
    """What is known of these time steps: by the old file, else by the state, which knows whose data are where."""
    history = _history(folder / OLD_HISTORY)
    if lost := [t for t in times if t not in history]:
        _log.warning("of %d time steps in the past the record has only what the state tells of them", len(lost))
    for t in times:
        if untested is not None and t == untested.tau:
            yield *lines_of(untested), None
        else:
            yield _past(t, clients, state, counts, history.get(t, {}))
    with suppress(FileNotFoundError):
        (folder / OLD_HISTORY).rename(folder / "history.old")


def _past(t: int, clients: Sequence[str], state: State, counts: Ints, step: dict[str, Any]) -> Lines:
    owners = np.asarray(state.models.ids)[np.asarray(state.w[t]).argmax(axis=1)].tolist()
    by_client = [step.get("clients", {}).get(name, {}) for name in clients]
    rows = [
        {
            "t": t,
            "c": c,
            "accuracy": None,
            "tested": None,
            "concept": None,
            "next_concept": None,
            "model": row.get("model", owners[c]),
            "n_models": len(step.get("models", state.models)),
            "drift": row.get("drift", False),
            "models_sent": row.get("sent", 0),
            "received": int(counts[t, c]),
        }
        for c, row in enumerate(by_client)
    ]
    events = [{"t": t, **event} for event in step.get("events", [])]
    test = {
        "accuracy": [row.get("accuracy") for row in by_client],
        "tested": [row.get("tested", 0) for row in by_client],
    }
    return rows, events, test


def _history(path: Path) -> dict[int, dict[str, Any]]:
    """The lines of the old file by time; of a time step that has two, as after a kill, the last."""
    steps: dict[int, dict[str, Any]] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, KeyError, TypeError):  # the last line of a server that was killed
                step = json.loads(line)
                steps[int(step["t"])] = step
    return steps
