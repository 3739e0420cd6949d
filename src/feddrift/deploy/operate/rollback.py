"""Going back: the next time step starts from the models of an earlier one (docs/decisions/0020-archive.md)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from feddrift._internal import checkpoint
from feddrift._internal.system import exclusive_lock
from feddrift.deploy.monitor.alerts import audit_change
from feddrift.deploy.monitor.status import read_status
from feddrift.deploy.server.archive import Archive
from feddrift.deploy.settings import Settings
from feddrift.engines.flower import model_parts
from feddrift.errors import DataError
from feddrift.reports.event_text import ROLLBACK_REASON_PREFIX
from feddrift.simulation import add_newcomers, add_skipped_steps
from feddrift.types import Event, State


def roll_back(server: Path, time: int) -> int:
    """Make the federation go on from the models of this time, counted from 1; how many time steps it has done."""
    settings, state = Settings.read(server / "federation.toml"), server / "state"
    with exclusive_lock(state, f"the federation of {server} runs: stop `feddrift deploy server` first, then go back"):
        old = Archive(state).read_checkpoint(time)
        checkpoints = checkpoint.Folder(state / "checkpoints")
        newest = next((saved for saved in checkpoints.newest_first() if not isinstance(saved, DataError)), None)
        if newest is None:
            raise DataError(f"{checkpoints.path} has no whole checkpoint to go on from: put one back first")
        if old.about.get("federation") != newest.about.get("federation"):
            raise DataError(f"{old.path} is of a federation with other settings than {newest.path}")
        steps, federation = int(newest.about["steps"]), read_status(server)
        if federation is not None and federation.state == "finished" and (settings.time_steps or steps + 1) <= steps:
            raise DataError(
                f"the federation is finished after {steps} time steps: give it more time_steps, then go back"
            )
        like = model_parts.init_template(settings.create_net(server))
        now, _, told, work, counts = newest.decode(like)
        pending = tuple(told) if work is None else ()  # of going back before, which no time step has told yet
        gone = build_rollback_state(old.decode(like)[0], now)
        value = gone, None, (*pending, *build_rollback_events(time, now, gone)), None, counts
        about: dict[str, Any] = {**newest.about, "back_to": time}
        checkpoints.keep_only(checkpoints.write(steps, 0, about, value))
    audit_change(server, None, f"{ROLLBACK_REASON_PREFIX} {time}, after time {steps}")
    return steps


def build_rollback_state(old: State, now: State) -> State:
    """The old state as the one that the next time step starts from.

    Data that came since train nothing. Private models are at their clients as they are now. Ids are not given twice.
    """
    state = add_skipped_steps(add_newcomers(old, len(now.votes)), len(now.w))
    held = {(i, c): label for i, c, label in zip(now.models.ids, now.models.owner, now.models.held, strict=True)}
    pairs = zip(old.models.ids, old.models.owner, old.models.held, strict=True)
    labels = tuple(held.get((i, c), label) if c >= 0 else label for i, c, label in pairs)
    born = {"born": max(old.born, now.born)} if hasattr(old, "born") and hasattr(now, "born") else {}
    return replace(state, models=replace(state.models, held=labels), **born)


def build_rollback_events(time: int, now: State, gone: State) -> tuple[Event, ...]:
    """What the record says of it: the decision, and which shared models are no more."""
    reason = f"{ROLLBACK_REASON_PREFIX} {time}"
    private = now.models.private
    lost = [i for m, i in enumerate(now.models.ids) if not private[m] and i not in gone.models.ids]
    decision = Event("decided", gone.models.ids[0], {"clients": [], "reason": reason})
    return (decision, *(Event("retired", i, {"reason": reason}) for i in lost))
