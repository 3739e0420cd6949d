"""Past time steps that are missing in the record of a federation.

The record has lost them, or version 0.1 wrote them to another file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from feddrift.runs.record import LEGACY_HISTORY_FILE
from feddrift.runs.recorded_run import build_lines
from feddrift.simulation import TrainedStep
from feddrift.types import Ints, State

StepLines = tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any] | None]  # rows, events, test

_log = logging.getLogger("feddrift")


def read_past_steps(
    folder: Path, clients: Sequence[str], state: State, times: range, untested: TrainedStep | None, counts: Ints
) -> Iterator[StepLines]:
    """Yield the record lines of past time steps, from the file of version 0.1 or else from the state.

    Args:
        folder: The folder that may contain the file of version 0.1; afterwards the file has another name.
        clients: The names of the clients.
        state: The state of the algorithm after these time steps.
        times: The time steps.
        untested: The last time step, if it is trained and not tested yet.
        counts: The number of rows by time and client.
    """
    history = _read_history(folder / LEGACY_HISTORY_FILE)
    n_lost = sum(t not in history for t in times)
    if n_lost:
        _log.warning("%d time steps are missing in the record: it gets their models, but not their tests", n_lost)
    for t in times:
        if untested is not None and t == untested.tau:
            yield *build_lines(untested), None
        else:
            yield _build_past_lines(t, clients, state, counts, history.get(t, {}))
    with suppress(FileNotFoundError):
        (folder / LEGACY_HISTORY_FILE).rename(folder / "history.old")


def _build_past_lines(t: int, clients: Sequence[str], state: State, counts: Ints, step: dict[str, Any]) -> StepLines:
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


def _read_history(path: Path) -> dict[int, dict[str, Any]]:
    """Read the lines of the old file by time; if a time step has several, as after a kill, the last one is used."""
    steps: dict[int, dict[str, Any]] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, KeyError, TypeError):  # an incomplete last line, since the server was killed
                step = json.loads(line)
                steps[int(step["t"])] = step
    return steps
