"""The server of a deployment: the loop over time on real clients, with a record, and a checkpoint after every round.

Killed at any moment and started again, it takes the time step up again with the answers that it has, at the round
where it stopped.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from feddrift import algorithms, checkpoint
from feddrift._version import __version__
from feddrift.deploy import logs, pin
from feddrift.deploy.archive import MOST, Archive
from feddrift.deploy.backup import RESTORED
from feddrift.deploy.notices import Notice, audit
from feddrift.deploy.past import past_steps
from feddrift.deploy.settings import Settings
from feddrift.engines.conditions import IDEAL, Conditions
from feddrift.engines.federation import TimeStep
from feddrift.engines.flower import parts as model_parts
from feddrift.engines.flower.federation import Flower, Roster
from feddrift.errors import DataError
from feddrift.run import Step, Trained, steps_on, with_newcomers
from feddrift.runs.journal import Inside, Journal
from feddrift.runs.record import is_complete, part_of
from feddrift.runs.recorded import lines_of, scores_of, versions
from feddrift.runs.writer import Writer, beginning
from feddrift.system import alone
from feddrift.trees import leaves
from feddrift.types import Algorithm, Event, State

_log = logging.getLogger("feddrift")


@dataclass(frozen=True)
class _Saved:
    """Where a federation goes on, by its newest checkpoint."""

    done: int = 0  # time steps
    state: State | None = None
    inside: Inside | None = None  # the next time step, as far as it has come
    untested: Trained | None = None  # else the last one
    seconds: float = 0.0
    file: Path | None = None  # the checkpoint that the last time step ended with
    events: tuple[Event, ...] = ()  # of an operator who went back, for the record of the next time step
    back_to: int | None = None  # the time, counted from 1, whose models the clients are to be given first


def federate(
    engine: Flower, algorithm: Algorithm, folder: Path, about: dict[str, Any] | None = None, archive: int = MOST
) -> Iterator[Step]:
    """Time steps as they are tested, from where the folder's checkpoints say; its record tells all of it at once."""
    with alone(folder, f"another server is at work on {folder}"):
        yield from _steps(engine, algorithm, folder, about or {}, Archive(folder, archive))


def _steps(
    engine: Flower, algorithm: Algorithm, folder: Path, about: dict[str, Any], archive: Archive
) -> Iterator[Step]:
    checkpoints = checkpoint.Folder(folder / "checkpoints")
    now = _last(checkpoints, engine, about)
    engine.begun = -1 if now.inside is None else now.done
    path = folder / f"{engine.roster.experiment}.jsonl"
    if engine.n_steps is not None and now.done >= engine.n_steps and is_complete(path):
        _log.info("the federation is finished, after %d time steps", now.done)
        return
    with _opened(path, _header(engine, algorithm, about), now) as record:
        _fill(record, folder, engine, now)
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
            if step.tau == now.done:
                step = replace(step, events=(*now.events, *step.events))
            record.step(*lines_of(step))
            _keep(archive, step.tau + 1, save(step.tau + 1, step.state, last=step))
            alarms = [name for name, drift in zip(engine.roster.clients, step.drifted, strict=True) if drift]
            alarm_text = f", alarm at {', '.join(alarms)}" if alarms else ""
            _log.info("time %d is trained: %d models%s", step.tau, len(step.state.models), alarm_text)

        for step in steps_on(
            engine, algorithm, done=now.done, state=now.state, untested=now.untested, journal=journal, sink=sink
        ):
            _add_test(record, step)
            _log.info("time %d is tested", step.tau)
            yield step


def _keep(archive: Archive, time: int, file: Path) -> None:
    """Archive a time step; where that fails the federation goes on, and log and audit say so."""
    try:
        archive.keep(time, file)
    except DataError as error:
        _log.warning("%s", error)
        with suppress(OSError):  # the disk is full, perhaps
            audit(archive.path.parents[1], Notice("archive", f"time {time}", None, str(error)))


def _give_back(engine: Flower, state: State, tau: int, time: int) -> None:
    """Tell the clients to use earlier models again, ere the next time step starts from these."""
    right, tested = engine.test(state, tau)
    share = f"{100 * right.sum() / tested.sum():.2f} % right on the new data" if tested.any() else "not tested"
    _log.info("the clients use the models of time %d again, %s", time, share)


def _add_test(record: Writer, step: Step) -> None:
    """Write how a step's models did; clients that have joined since have no row in it and are left out."""
    old = slice(record.order.last_clients)
    accuracy, tested = step.accuracy[old], step.tested[old]
    scores = {name: values[old] for name, values in scores_of(step).items()}
    record.add("test", t=step.tau, accuracy=np.where(tested > 0, accuracy, np.nan), tested=tested, **scores)


def _header(engine: Flower, algorithm: Algorithm, about: dict[str, Any]) -> dict[str, Any]:
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


def _opened(path: Path, header: dict[str, Any], now: _Saved) -> Writer:
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


def _fill(record: Writer, folder: Path, engine: Flower, now: _Saved) -> None:
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


def _last(checkpoints: checkpoint.Folder, engine: Flower, about: dict[str, Any]) -> _Saved:
    damage = ""
    for saved in checkpoints.newest_first():
        if isinstance(saved, DataError):
            _log.warning("%s", saved)
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
        found = _Saved(steps_done, state, seconds=seconds)
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
    return _Saved()


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
        pin.vouch(folder)
        settings = Settings.read(folder / "federation.toml")
        run(grid, settings, settings.roster(folder / "keys"), state)
    except Exception:
        _log.exception("the server stops")
        raise
