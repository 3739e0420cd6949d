"""Training loop of a deployment's server, with a record, and a checkpoint after every round.

A server that was killed continues with the interrupted round, and reuses the replies that it has received.
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
from feddrift._internal.system import lock_folder
from feddrift._version import __version__
from feddrift.deploy.monitor import logs
from feddrift.deploy.monitor.alerts import Notice, log_and_audit
from feddrift.deploy.pki import app_signature
from feddrift.deploy.server.archive import Archive
from feddrift.deploy.server.recording import add_missing_lines, add_test, build_header, open_record
from feddrift.deploy.server.resume_point import RESTORED_MARKER, read_resume_point
from feddrift.deploy.server.revocation_book import ServerRevocations
from feddrift.deploy.settings import MAX_ARCHIVED_TIME_STEPS, Settings
from feddrift.engines.flower.server.connection import Roster
from feddrift.engines.flower.server.federation import Flower
from feddrift.engines.server.federation import TimeStep
from feddrift.errors import DataError
from feddrift.runs.journal import Journal, StepProgress
from feddrift.runs.record import is_complete
from feddrift.runs.recorded_run import build_lines
from feddrift.simulation import LoopState, Step, TrainedStep, run_steps
from feddrift.types import Algorithm, Event, State

_log = logging.getLogger("feddrift")


def federate(
    engine: Flower,
    algorithm: Algorithm,
    folder: Path,
    about: dict[str, Any] | None = None,
    archive: int = MAX_ARCHIVED_TIME_STEPS,
) -> Iterator[Step]:
    """Run a federation from its newest checkpoint, and yield each time step when it is tested.

    Training, tests and exchanges are written to the record as they happen.

    Args:
        engine: The engine that exchanges messages with the clients.
        algorithm: The algorithm.
        folder: The folder of checkpoints, archive and record.
        about: A description of the federation, which must be the same at each start.
        archive: The number of past time steps whose models are kept.

    Raises:
        BusyError: If another server runs in this folder.
        DataError: If the checkpoints are damaged or belong to another federation.
    """
    with lock_folder(folder, f"another server is running in {folder}: stop it first"):
        yield from _run_steps(engine, algorithm, folder, about or {}, Archive(folder, archive))


def _run_steps(
    engine: Flower, algorithm: Algorithm, folder: Path, about: dict[str, Any], archive: Archive
) -> Iterator[Step]:
    checkpoints = checkpoint.Folder(folder / "checkpoints")
    resumed = read_resume_point(checkpoints, engine, about)
    engine.resumed_step = -1 if resumed.inside is None else resumed.steps_done
    path = folder / f"{engine.roster.experiment}.jsonl"
    if engine.n_steps is not None and resumed.steps_done >= engine.n_steps and is_complete(path):
        _log.info("the federation is finished after %d time steps", resumed.steps_done)
        return
    with open_record(path, build_header(engine, algorithm, about), resumed) as record:
        add_missing_lines(record, folder, engine, resumed)
        engine.on_exchange = lambda exchange: record.write_line("exchange", **exchange.to_record_line())
        if resumed.state is None:
            archive.rename_existing()
        elif resumed.checkpoint_file is not None:  # the server may have been killed before it archived this step
            _archive_step(archive, resumed.steps_done, resumed.checkpoint_file)
        if resumed.state is not None and resumed.rollback_time is not None:
            _redistribute_models(engine, resumed.state, resumed.steps_done, resumed.rollback_time)

        def save_checkpoint(
            steps_done: int,
            state: State,
            loop: LoopState,
            inside: StepProgress | None = None,
            last: TrainedStep | None = None,
        ) -> Path:
            clients = list(engine.roster.clients)
            pending_events = resumed.events if steps_done == resumed.steps_done else ()
            events = last.events if last else pending_events
            value = state, inside and inside.to_tuple(), events, last and last.statistics, engine.counts, loop.to_dict()
            return checkpoints.write(
                steps_done,
                0 if inside is None else inside.rounds,
                {"federation": about, "clients": clients, "feddrift": __version__, "seconds": record.seconds},
                value,
            )

        restored_marker = folder / RESTORED_MARKER
        if restored_marker.exists():
            if resumed.inside is not None and resumed.state is not None:
                # The clients may have continued since the backup: the time step starts again.
                checkpoints.keep_only(save_checkpoint(resumed.steps_done, resumed.state, resumed.loop))
                resumed = replace(resumed, inside=None)
            restored_marker.unlink()

        def start_journal(state: State, loop: LoopState, fed: TimeStep) -> Journal:
            if record.sequence.begun_steps == fed.tau:
                record.write_line("time", t=fed.tau, name=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"))
            progress = resumed.inside if fed.tau == resumed.steps_done else None
            if progress is not None:
                _log.info("time %d continues after round %d", fed.tau, progress.rounds)
            return Journal(fed, 1, lambda inside: save_checkpoint(fed.tau, state, loop, inside), progress)

        def store_trained_step(step: TrainedStep) -> None:
            if step.tau == resumed.steps_done and resumed.events:
                reason = resumed.events[0].cause["reason"]
                step = replace(step, events=(*resumed.events, *_replace_reason(reason, step.events)))
            record.write_step(*build_lines(step))
            _archive_step(archive, step.tau + 1, save_checkpoint(step.tau + 1, step.state, step.loop, last=step))
            alarms = [name for name, drift in zip(engine.roster.clients, step.drifted, strict=True) if drift]
            alarm_text = f", alarm at {', '.join(alarms)}" if alarms else ""
            _log.info("time %d is trained: %d models%s", step.tau, len(step.state.models), alarm_text)

        for step in run_steps(
            engine,
            algorithm,
            done=resumed.steps_done,
            state=resumed.state,
            loop=resumed.loop,
            untested=resumed.untested,
            journal=start_journal,
            sink=store_trained_step,
        ):
            add_test(record, step)
            _log.info("time %d is tested", step.tau)
            yield step


def _archive_step(archive: Archive, time_number: int, file: Path) -> None:
    """Archive a time step; if that fails, the federation continues, and the failure is logged and audited."""
    try:
        archive.add_checkpoint(time_number, file)
    except DataError as error:
        log_and_audit(archive.path.parents[1], Notice("archive", f"time {time_number}", None, str(error)))


def _redistribute_models(engine: Flower, state: State, tau: int, time_number: int) -> None:
    """Send the clients the models of an earlier time; the next time step starts from these."""
    right, tested = engine.test(state, tau)
    accuracy = f"{100 * right.sum() / tested.sum():.2f} % accuracy on the new data" if tested.any() else "not tested"
    _log.info("the clients use the models of time %d again: %s", time_number, accuracy)


def _replace_reason(reason: str, events: Sequence[Event]) -> list[Event]:
    """Return events in which each revived model has this reason, here the operator's rollback."""
    return [
        replace(event, cause={**event.cause, "reason": reason}) if event.kind == "revived" else event
        for event in events
    ]


def run_federation(grid: Grid, settings: Settings, roster: Roster, folder: Path) -> None:
    """Run a federation to its end, from the beginning or its newest checkpoint.

    Args:
        grid: The Flower connection to the clients.
        settings: The settings of the federation.
        roster: The clients and their keys.
        folder: The folder `state` of the server.
    """
    algorithm = algorithms.algorithm(settings.algorithm, **settings.settings)
    engine = Flower(
        grid,
        roster,
        settings.create_net(folder.parent),  # the folder of federation.toml
        settings.local,
        settings.seed,
        settings.waiting_rules,
        settings.conditions,
        settings.time_steps,
        explain=settings.explain,
    )
    about = {
        "experiment": settings.experiment,
        "algorithm": settings.algorithm,
        "seed": settings.seed,
        "settings": json.loads(json.dumps(settings.settings)),
        "local": settings.local.to_dict(),
        "participation": settings.participation,
        **({"rest": settings.rest} if settings.rest else {}),
        **({"share_from": settings.share_from} if settings.share_from else {}),
        **({"route": settings.route} if settings.route != "none" else {}),
        **({"defend": settings.defend} if settings.defend else {}),
    }
    engine.plan = {name: about[name] for name in ("algorithm", "settings", "local")}
    engine.needs = {*getattr(algorithm, "needs_consent", ()), *(("describe",) if settings.route != "none" else ())}
    for _ in federate(engine, algorithm, folder, about, settings.archive):
        pass


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the server of a deployment: the entry point of the app that `feddrift deploy run` starts."""
    folder = Path(str(context.run_config["folder"]))
    state = folder / "state"
    state.mkdir(exist_ok=True)
    _log.addHandler(logs.create_log_handler(state / "server.log"))
    _log.setLevel(logging.INFO)
    try:
        app_signature.publish_signature(folder)
        settings = Settings.read(folder / "federation.toml")
        roster = replace(settings.read_roster(folder / "keys"), revocations=ServerRevocations(folder))
        run_federation(grid, settings, roster, state)
    except Exception:
        _log.exception("the server stops because of an error")
        raise
