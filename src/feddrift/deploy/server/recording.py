"""Record of a federation: its header, its continuation, and lines that are missing after the server was killed."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from feddrift import algorithms
from feddrift.deploy.server.legacy_history import read_past_steps
from feddrift.deploy.server.resume_point import ResumePoint
from feddrift.engines.conditions.conditions import IDEAL
from feddrift.engines.flower import model_parts
from feddrift.engines.flower.server.federation import Flower
from feddrift.errors import DataError
from feddrift.runs.record import get_part_path
from feddrift.runs.recorded_run import get_versions, round_scores
from feddrift.runs.writer import RecordWriter, read_prefix
from feddrift.simulation import Step
from feddrift.trees import tree_leaves
from feddrift.types import Algorithm


def build_header(engine: Flower, algorithm: Algorithm, about: dict[str, Any]) -> dict[str, Any]:
    """Return the header of this federation's record."""
    names = ("participation", "rest", "share_from", "route", "defend")
    overrides = {name: getattr(engine.conditions, name) for name in names}
    return {
        "stream": engine.roster.experiment,
        "algorithm": about.get("algorithm", type(algorithm).__name__),
        "settings": algorithms.get_settings(algorithm),
        "overrides": {name: value for name, value in overrides.items() if value != getattr(IDEAL, name)},
        "seed": engine.seed,
        "local": engine.local.to_dict(),
        "engine": "flower",
        "n_steps": None,
        "n_clients": len(engine.roster.clients),
        "clients": list(engine.roster.clients),
        "concepts": None,
        "same": {},
        "versions": get_versions(),
        "device": "the clients'",
        "started": datetime.now(UTC).isoformat(),
        "model_bytes": sum(int(np.asarray(leaf).nbytes) for leaf in tree_leaves(model_parts.init_template(engine.net))),
    }


def open_record(path: Path, header: dict[str, Any], resume_point: ResumePoint) -> RecordWriter:
    """Open the record of a federation, and cut it after the last time step that the checkpoint also contains.

    Args:
        path: The record.
        header: The header of a new record.
        resume_point: The content of the newest checkpoint.

    Raises:
        DataError: If the record has time steps, and the checkpoint is missing.
    """

    def has_steps(steps: int) -> bool:
        files = (path, get_part_path(path))
        return any(read_prefix(file, steps, header["clients"]) is not None for file in files)

    if resume_point.state is None:
        if has_steps(1):
            raise DataError(
                f"{path} has time steps, but none of the checkpoints beside it is intact: restore one from a backup to "
                "continue, or move the record away to start again"
            )
        return RecordWriter(path.parent, header, name=path.stem)
    common_steps = next((steps for steps in range(resume_point.steps_done, -1, -1) if has_steps(steps)), None)
    return RecordWriter(path.parent, header, common_steps, resume_point.seconds, path.stem)


def add_missing_lines(record: RecordWriter, folder: Path, engine: Flower, resume_point: ResumePoint) -> None:
    """Write lines for new clients, and for time steps that the record has lost or that are in a file of version 0.1."""
    clients = engine.roster.clients
    state = resume_point.state
    for c in range(record.sequence.n_clients, len(clients)):
        record.write_line("client", t=record.sequence.complete_steps, c=c, name=clients[c])
    if state is not None and record.sequence.complete_steps < resume_point.steps_done:
        times = range(record.sequence.complete_steps, resume_point.steps_done)
        for rows, events, test in read_past_steps(folder, clients, state, times, resume_point.untested, engine.counts):
            _add_empty_test(record)
            record.write_step(rows, events)
            if test is not None:
                record.write_line("test", t=rows[0]["t"], **test)
    if resume_point.untested is None:
        _add_empty_test(record)


def _add_empty_test(record: RecordWriter) -> None:
    """Write a test on no examples if the test of the last time step was lost."""
    sequence = record.sequence
    if sequence.tested_steps < sequence.complete_steps:
        accuracy: list[Any] = [None] * sequence.n_clients_of_last_step
        record.write_line(
            "test", t=sequence.complete_steps - 1, accuracy=accuracy, tested=[0] * sequence.n_clients_of_last_step
        )


def add_test(record: RecordWriter, step: Step) -> None:
    """Write the test of a time step; clients that joined after its training are left out."""
    old = slice(record.sequence.n_clients_of_last_step)
    tested = step.tested[old]
    scores = {name: values[old] for name, values in round_scores(step).items()}
    accuracy = np.where(tested > 0, step.accuracy[old], np.nan)
    record.write_line("test", t=step.tau, accuracy=accuracy, tested=tested, **scores)
