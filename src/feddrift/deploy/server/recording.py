"""The record of a federation: its header, going on with it, and what it lacks after a kill."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from feddrift import algorithms
from feddrift.deploy.server.legacy_history import past_steps
from feddrift.deploy.server.resume_point import Saved
from feddrift.engines.conditions.conditions import IDEAL
from feddrift.engines.flower import model_parts
from feddrift.engines.flower.server.federation import Flower
from feddrift.errors import DataError
from feddrift.runs.record import part_of
from feddrift.runs.recorded_run import scores_of, versions
from feddrift.runs.writer import Writer, beginning
from feddrift.simulation import Step
from feddrift.trees import leaves
from feddrift.types import Algorithm


def header(engine: Flower, algorithm: Algorithm, about: dict[str, Any]) -> dict[str, Any]:
    """The header of this federation's record."""
    overrides = {name: getattr(engine.conditions, name) for name in ("participation", "rest", "route", "defend")}
    return {
        "stream": engine.roster.experiment,
        "algorithm": about.get("algorithm", type(algorithm).__name__),
        "settings": algorithms.settings(algorithm),
        "overrides": {name: value for name, value in overrides.items() if value != getattr(IDEAL, name)},
        "seed": engine.seed,
        "local": engine.local.plain(),
        "engine": "flower",
        "n_steps": None,
        "n_clients": len(engine.roster.clients),
        "clients": list(engine.roster.clients),
        "concepts": None,
        "same": {},
        "versions": versions(),
        "device": "the clients'",
        "started": datetime.now(UTC).isoformat(),
        "model_bytes": sum(int(np.asarray(leaf).nbytes) for leaf in leaves(model_parts.like(engine.net))),
    }


def opened(path: Path, header: dict[str, Any], now: Saved) -> Writer:
    """The record of a federation, to go on with as far as it and the checkpoint agree."""
    files = path, part_of(path)

    def has(steps: int) -> bool:
        return any(beginning(file, steps, header["clients"]) is not None for file in files)

    if now.state is None:
        if has(1):
            raise DataError(
                f"{path} has time steps but none of the checkpoints beside it is whole: put one back to go on, or move "
                "the record away to start over"
            )
        return Writer(path.parent, header, name=path.stem)
    agreed = next((steps for steps in range(now.done, -1, -1) if has(steps)), None)
    return Writer(path.parent, header, agreed, now.seconds, path.stem)


def fill(record: Writer, folder: Path, engine: Flower, now: Saved) -> None:
    """Write what the record lacks: clients that joined, and time steps that were lost or are in an older file."""
    clients, order = engine.roster.clients, record.order
    for c in range(order.n_clients, len(clients)):
        record.add("client", t=order.steps, c=c, name=clients[c])
    if now.state is not None and record.order.steps < now.done:
        times = range(record.order.steps, now.done)
        for rows, events, test in past_steps(folder, clients, now.state, times, now.untested, engine.counts):
            _close_test(record)
            record.step(rows, events)
            if test is not None:
                record.add("test", t=rows[0]["t"], **test)
    if now.untested is None:
        _close_test(record)


def _close_test(record: Writer) -> None:
    """Where the last time step's test was lost, write one on no examples."""
    order = record.order
    if order.tested < order.steps:
        nothing: list[Any] = [None] * order.last_clients
        record.add("test", t=order.steps - 1, accuracy=nothing, tested=[0] * order.last_clients)


def add_test(record: Writer, step: Step) -> None:
    """Write how a step's models did; clients that have joined since have no row in it and are left out."""
    old = slice(record.order.last_clients)
    accuracy, tested = step.accuracy[old], step.tested[old]
    scores = {name: values[old] for name, values in scores_of(step).items()}
    record.add("test", t=step.tau, accuracy=np.where(tested > 0, accuracy, np.nan), tested=tested, **scores)
