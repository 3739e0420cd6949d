"""Where a federation goes on: what its newest whole checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from feddrift._internal import checkpoint
from feddrift.deploy.monitor.alerts import Notice, warn
from feddrift.engines.flower import model_parts
from feddrift.engines.flower.server.federation import Flower
from feddrift.errors import DataError
from feddrift.runs.journal import Inside
from feddrift.simulation import Trained, with_newcomers
from feddrift.types import Event, State

RESTORED = "restored"  # a file in a server's state: it was restored from a backup and has not run since


@dataclass(frozen=True)
class Saved:
    """Where a federation goes on, by its newest checkpoint."""

    done: int = 0  # time steps
    state: State | None = None
    inside: Inside | None = None  # the next time step, as far as it has come
    untested: Trained | None = None  # else the last one
    seconds: float = 0.0
    file: Path | None = None  # the checkpoint that the last time step ended with
    events: tuple[Event, ...] = ()  # of an operator who went back, for the record of the next time step
    back_to: int | None = None  # the time, counted from 1, whose models the clients are to be given first


def last_saved(checkpoints: checkpoint.Folder, engine: Flower, about: dict[str, Any]) -> Saved:
    """By the newest that is whole; others are named, and where none is left of them that is an error."""
    damage = ""
    for saved in checkpoints.newest_first():
        if isinstance(saved, DataError):
            now = datetime.now(UTC).isoformat(timespec="seconds")
            warn(checkpoints.path.parents[1], Notice("damaged", now, None, str(saved)))
            damage = damage or str(saved)
            continue
        if saved.about.get("federation") != about:
            raise DataError(
                f"{saved.path} is of a federation with other settings: {saved.about.get('federation')}, this is {about}"
            )
        old_clients, clients = saved.about.get("clients", []), list(engine.roster.clients)
        if clients[: len(old_clients)] != old_clients:
            raise DataError(
                f"{saved.path} is of clients {old_clients}: others can only be added behind them, got {clients}"
            )
        n_new = len(clients) - len(old_clients)
        state, inside, events, work, counts = saved.value(model_parts.like(engine.net))
        engine.counts = np.pad(counts, ((0, 0), (0, n_new)))
        if n_new:  # with them the time step starts anew
            state, inside = state and with_newcomers(state, len(clients)), None
            if work is not None:  # nobody asked the new ones
                nothing = 0, np.nan, 0, 0
                work = tuple(np.append(v, np.full(n_new, of, v.dtype)) for v, of in zip(work, nothing, strict=True))
        steps_done, seconds = int(saved.about["steps"]), float(saved.about.get("seconds", 0.0))
        found = Saved(steps_done, state, seconds=seconds)
        if work is None:
            back_to = None if inside is not None else saved.about.get("back_to")
            within = None if inside is None else Inside(*inside)
            return replace(found, inside=within, events=tuple(events), back_to=back_to)
        received, loss, sent, scoring = work
        last = Trained(steps_done - 1, state, received, loss, sent, scoring, events)
        return replace(found, untested=last, file=saved.path)
    if damage:
        raise DataError(
            f"none of the checkpoints in {checkpoints.path} is whole ({damage}): put one back from a backup to go on, "
            "or move this folder and the record beside it away to start over at time 0"
        )
    return Saved()
