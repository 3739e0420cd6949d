"""Rollback: the next time step starts from the models of an earlier one (docs/decisions/0020-archive.md)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from feddrift._internal import checkpoint
from feddrift._internal.system import lock_folder
from feddrift.deploy.monitor.alerts import audit_change
from feddrift.deploy.monitor.status import read_status
from feddrift.deploy.server.archive import Archive
from feddrift.deploy.settings import Settings
from feddrift.engines.flower import model_parts
from feddrift.errors import DataError
from feddrift.reports.event_text import ROLLBACK_REASON_PREFIX
from feddrift.simulation import LoopState, add_newcomers, add_skipped_steps
from feddrift.types import Event, State


def roll_back(server: Path, time: int) -> int:
    """Make a federation continue from the models of an earlier time step.

    Args:
        server: The server's folder.
        time: The time step, counted from 1.

    Returns:
        The number of time steps that the federation has done.

    Raises:
        BusyError: If the server is running.
        DataError: If the models of this time are not in the archive or belong to another federation, or the federation
            is finished.
    """
    settings = Settings.read(server / "federation.toml")
    state = server / "state"
    with lock_folder(state, f"the federation of {server} runs: stop `feddrift deploy server` first, then roll back"):
        old = Archive(state).read_checkpoint(time)
        checkpoints = checkpoint.Folder(state / "checkpoints")
        newest = next((saved for saved in checkpoints.newest_first() if not isinstance(saved, DataError)), None)
        if newest is None:
            raise DataError(f"{checkpoints.path} has no intact checkpoint: restore one from a backup first")
        if old.about.get("federation") != newest.about.get("federation"):
            raise DataError(
                f"{old.path} is of a federation with other settings than {newest.path}: choose another time"
            )
        steps = int(newest.about["steps"])
        federation = read_status(server)
        if federation is not None and federation.state == "finished" and (settings.time_steps or steps + 1) <= steps:
            raise DataError(f"the federation is finished after {steps} time steps: increase time_steps, then roll back")
        template = model_parts.init_template(settings.create_net(server))
        current, _, events, statistics, counts, *_ = newest.decode(template)
        pending = tuple(events) if statistics is None else ()  # of an earlier rollback, not in the record yet
        past, _, _, _, _, *stored = old.decode(template)
        restored = build_rollback_state(past, current)
        loop = LoopState.from_checkpoint(old, stored, template).to_dict()
        value = restored, None, (*pending, *build_rollback_events(time, current, restored)), None, counts, loop
        about: dict[str, Any] = {**newest.about, "back_to": time}
        checkpoints.keep_only(checkpoints.write(steps, 0, about, value))
    audit_change(server, None, f"{ROLLBACK_REASON_PREFIX} {time}, after time {steps}")
    return steps


def build_rollback_state(past: State, current: State) -> State:
    """Return the state from which the next time step starts: the models of the past one, at the current time.

    The data of the time steps between the two states train no model. Private models keep their current versions, which
    only their clients have. If the states count the models (`next_id`), ids of later models are not used again.
    """
    state = add_skipped_steps(add_newcomers(past, len(current.votes)), len(current.w))
    models = current.models
    versions = {(i, c): version for i, c, version in zip(models.ids, models.owner, models.held, strict=True)}
    past_versions = zip(past.models.ids, past.models.owner, past.models.held, strict=True)
    held = tuple(versions.get((i, c), version) if c >= 0 else version for i, c, version in past_versions)
    next_ids = [state.next_id for state in (past, current) if hasattr(state, "next_id")]
    counter = {"next_id": max(next_ids)} if hasattr(past, "next_id") else {}
    return replace(state, models=replace(state.models, held=held), **counter)


def build_rollback_events(time: int, current: State, restored: State) -> tuple[Event, ...]:
    """Return the events of a rollback: the decision, and the retirement of shared models that it removes.

    Args:
        time: The time step of the restored models, counted from 1.
        current: The state before the rollback.
        restored: The state after it.
    """
    reason = f"{ROLLBACK_REASON_PREFIX} {time}"
    is_private = current.models.private
    lost = [i for m, i in enumerate(current.models.ids) if not is_private[m] and i not in restored.models.ids]
    decision = Event("decided", restored.models.ids[0], {"clients": [], "reason": reason})
    return (decision, *(Event("retired", i, {"reason": reason}) for i in lost))
