"""Resume point of a federation: the content of its newest intact checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from feddrift._internal import checkpoint
from feddrift.deploy.monitor.alerts import Notice, log_and_audit
from feddrift.engines.flower import model_parts
from feddrift.engines.flower.server.federation import Flower
from feddrift.errors import DataError
from feddrift.runs.journal import StepProgress
from feddrift.simulation import NO_LOOP_STATE, LoopState, TrainedStep, add_newcomers
from feddrift.types import Event, State

RESTORED_MARKER = "restored"  # file in the folder `state` of a server that has not run since it was restored


@dataclass(frozen=True)
class ResumePoint:
    """State from which a federation continues; the defaults are those of a new federation."""

    steps_done: int = 0  # time steps
    state: State | None = None
    loop: LoopState = NO_LOOP_STATE
    inside: StepProgress | None = None  # progress of the next time step, if it has begun
    untested: TrainedStep | None = None  # the last time step, if it is not tested yet
    seconds: float = 0.0
    checkpoint_file: Path | None = None  # the checkpoint at the end of the last time step
    events: tuple[Event, ...] = ()  # of a rollback, to be recorded with the next time step
    rollback_time: int | None = None  # counted from 1; the clients first get the models of this time


def read_resume_point(checkpoints: checkpoint.Folder, engine: Flower, about: dict[str, Any]) -> ResumePoint:
    """Read the newest intact checkpoint, and report damaged ones in the log and the audit log.

    Args:
        checkpoints: The folder of checkpoints; an empty one means a new federation.
        engine: The engine of the federation; its row counts are set from the checkpoint.
        about: The description of the federation, which must equal that in the checkpoint.

    Raises:
        DataError: If all checkpoints are damaged, or belong to another federation or other clients.
    """
    first_damage = ""
    for saved in checkpoints.newest_first():
        if isinstance(saved, DataError):
            now = datetime.now(UTC).isoformat(timespec="seconds")
            log_and_audit(checkpoints.path.parents[1], Notice("damaged", now, None, str(saved)))
            first_damage = first_damage or str(saved)
            continue
        if saved.about.get("federation") != about:
            raise DataError(
                f"{saved.path} is of a federation with other settings: {saved.about.get('federation')}, "
                f"this is {about}; use the old settings, or create a new federation"
            )
        old_clients = saved.about.get("clients", [])
        clients = list(engine.roster.clients)
        if clients[: len(old_clients)] != old_clients:
            raise DataError(
                f"{saved.path} is of clients {old_clients}: new clients must be added after these, got {clients}"
            )
        n_new = len(clients) - len(old_clients)
        template = model_parts.init_template(engine.net)
        state, inside, events, statistics, counts, *stored = saved.decode(template)
        loop = LoopState.from_checkpoint(saved, stored, template)
        engine.counts = np.pad(counts, ((0, 0), (0, n_new)))
        if n_new:  # the time step starts again, with the new clients
            state = state and add_newcomers(state, len(clients))
            inside = None
            if statistics is not None:  # the new clients did not take part in the last time step
                fill_values = (0, np.nan, 0, 0)
                pairs = zip(statistics, fill_values, strict=True)
                statistics = tuple(np.append(values, np.full(n_new, fill, values.dtype)) for values, fill in pairs)
        steps_done = int(saved.about["steps"])
        point = ResumePoint(steps_done, state, loop, seconds=float(saved.about.get("seconds", 0.0)))
        if statistics is None:
            if inside is not None:
                return replace(point, inside=StepProgress(*inside), events=tuple(events))
            return replace(point, events=tuple(events), rollback_time=saved.about.get("back_to"))
        received, loss, sent, scoring = statistics
        last = TrainedStep(
            tau=steps_done - 1,
            state=state,
            received=received,
            loss=loss,
            sent=sent,
            sent_scoring=scoring,
            events=events,
            loop=loop,
        )
        return replace(point, untested=last, checkpoint_file=saved.path)
    if first_damage:
        raise DataError(
            f"none of the checkpoints in {checkpoints.path} is intact ({first_damage}): restore one from a backup to "
            "continue, or move this folder and the record beside it away to start again at time 0"
        )
    return ResumePoint()
