"""The server of a deployment: the loop over time on real clients, with a record, and a checkpoint after every round.

Killed at any moment and started again, it takes the time step up again with the answers that it has, at the round
where it stopped.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from feddrift import algorithms
from feddrift._internal import checkpoint
from feddrift._internal.system import alone
from feddrift._version import __version__
from feddrift.deploy.monitor import logs
from feddrift.deploy.monitor.alerts import Notice, warn
from feddrift.deploy.pki import app_signature
from feddrift.deploy.server.archive import Archive
from feddrift.deploy.server.recording import add_test, fill, header, opened
from feddrift.deploy.server.resume_point import RESTORED, last_saved
from feddrift.deploy.settings import MAX_ARCHIVED, Settings
from feddrift.engines.conditions.conditions import Conditions
from feddrift.engines.flower.server.connection import Roster
from feddrift.engines.flower.server.federation import Flower
from feddrift.engines.server.federation import TimeStep
from feddrift.errors import DataError
from feddrift.runs.journal import Inside, Journal
from feddrift.runs.record import is_complete
from feddrift.runs.recorded_run import lines_of
from feddrift.simulation import Step, Trained, steps_on
from feddrift.types import Algorithm, Event, State

_log = logging.getLogger("feddrift")


def federate(
    engine: Flower, algorithm: Algorithm, folder: Path, about: dict[str, Any] | None = None, archive: int = MAX_ARCHIVED
) -> Iterator[Step]:
    """Time steps as they are tested, from where the folder's checkpoints say; its record tells all of it at once."""
    with alone(folder, f"another server is at work on {folder}"):
        yield from _steps(engine, algorithm, folder, about or {}, Archive(folder, archive))


def _steps(
    engine: Flower, algorithm: Algorithm, folder: Path, about: dict[str, Any], archive: Archive
) -> Iterator[Step]:
    checkpoints = checkpoint.Folder(folder / "checkpoints")
    now = last_saved(checkpoints, engine, about)
    engine.begun = -1 if now.inside is None else now.done
    path = folder / f"{engine.roster.experiment}.jsonl"
    if engine.n_steps is not None and now.done >= engine.n_steps and is_complete(path):
        _log.info("the federation is finished, after %d time steps", now.done)
        return
    with opened(path, header(engine, algorithm, about), now) as record:
        fill(record, folder, engine, now)
        engine.on_exchange = lambda exchange: record.add("exchange", **exchange.line())
        if now.state is None:
            archive.put_aside()
        elif now.file is not None:
            _keep(archive, now.done, now.file)  # where the server was killed just before it did
        if now.state is not None and now.back_to is not None:
            _give_back(engine, now.state, now.done, now.back_to)

        def save(steps_done: int, state: State, inside: Inside | None = None, last: Trained | None = None) -> Path:
            description = {"federation": about, "clients": list(engine.roster.clients), "feddrift": __version__}
            events, work = (last.events, last.work) if last else (now.events if steps_done == now.done else (), None)
            value = state, inside and inside.plain(), events, work, engine.counts
            rounds = 0 if inside is None else inside.rounds
            return checkpoints.write(steps_done, rounds, description | {"seconds": record.seconds}, value)

        if (restored := folder / RESTORED).exists():
            if now.inside is not None and now.state is not None:  # the clients may have gone on since, begin it anew
                checkpoints.keep_only(save(now.done, now.state))
                now = replace(now, inside=None)
            restored.unlink()

        def journal(state: State, fed: TimeStep) -> Journal:
            if record.order.begun == fed.tau:
                record.add("time", t=fed.tau, name=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"))
            before = now.inside if fed.tau == now.done else None
            if before is not None:
                _log.info("going on at time %d, after %d rounds", fed.tau, before.rounds)
            return Journal(fed, 1, lambda inside: save(fed.tau, state, inside), before)

        def sink(step: Trained) -> None:
            if step.tau == now.done and now.events:
                step = replace(step, events=(*now.events, *_because(now.events[0].cause["reason"], step.events)))
            record.step(*lines_of(step))
            _keep(archive, step.tau + 1, save(step.tau + 1, step.state, last=step))
            alarms = [name for name, drift in zip(engine.roster.clients, step.drifted, strict=True) if drift]
            alarm_text = f", alarm at {', '.join(alarms)}" if alarms else ""
            _log.info("time %d is trained: %d models%s", step.tau, len(step.state.models), alarm_text)

        for step in steps_on(
            engine, algorithm, done=now.done, state=now.state, untested=now.untested, journal=journal, sink=sink
        ):
            add_test(record, step)
            _log.info("time %d is tested", step.tau)
            yield step


def _keep(archive: Archive, time: int, file: Path) -> None:
    """Archive a time step; where that fails the federation goes on, and log and audit say so."""
    try:
        archive.keep(time, file)
    except DataError as error:
        warn(archive.path.parents[1], Notice("archive", f"time {time}", None, str(error)))


def _give_back(engine: Flower, state: State, tau: int, time: int) -> None:
    """Tell the clients to use earlier models again, ere the next time step starts from these."""
    right, tested = engine.test(state, tau)
    share = f"{100 * right.sum() / tested.sum():.2f} % right on the new data" if tested.any() else "not tested"
    _log.info("the clients use the models of time %d again, %s", time, share)


def _because(reason: str, events: Sequence[Event]) -> list[Event]:
    """The events of a time step after an operator went back, which is why models are used again."""
    return [replace(e, cause={**e.cause, "reason": reason}) if e.kind == "revived" else e for e in events]


def run(grid: Grid, settings: Settings, roster: Roster, folder: Path) -> None:
    """The server of a deployment, from beginning or checkpoint to the end."""
    net = settings.net(folder.parent)  # where federation.toml is
    conditions = Conditions(
        participation=settings.participation, rest=settings.rest, route=settings.route, defend=settings.defend
    )
    engine = Flower(
        *(grid, roster, net, settings.local, settings.seed, settings.waiting, conditions, settings.time_steps),
        explain=settings.explain,
    )
    algorithm = algorithms.algorithm(settings.algorithm, **settings.settings)
    about = {
        "experiment": settings.experiment,
        "algorithm": settings.algorithm,
        "seed": settings.seed,
        "settings": json.loads(json.dumps(settings.settings)),
        "local": settings.local.plain(),
        "participation": settings.participation,
        **({"rest": settings.rest} if settings.rest else {}),
        **({"route": settings.route} if settings.route != "none" else {}),
        **({"defend": True} if settings.defend else {}),
    }
    for _ in federate(engine, algorithm, folder, about, settings.archive):
        pass


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """What `feddrift deploy run` starts."""
    folder = Path(str(context.run_config["folder"]))
    state = folder / "state"
    state.mkdir(exist_ok=True)
    _log.addHandler(logs.handler(state / "server.log"))
    _log.setLevel(logging.INFO)
    try:
        app_signature.vouch(folder)
        settings = Settings.read(folder / "federation.toml")
        run(grid, settings, settings.roster(folder / "keys"), state)
    except Exception:
        _log.exception("the server stops")
        raise
