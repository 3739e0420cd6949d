"""A federation that runs on: it waits for data, takes a time step, tells the clients, and outlives its server.

After every round the server saves where it stands. Started again, it takes the time step up again with the answers
that it has, at the round where it stopped.
"""

from __future__ import annotations

import fcntl
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from feddrift import algorithms, checkpoint
from feddrift._version import __version__
from feddrift.deploy.settings import Settings
from feddrift.engines.conditions import Conditions
from feddrift.engines.flower import parts as model_parts
from feddrift.engines.flower.federation import Flower, Roster
from feddrift.errors import DataError
from feddrift.run import Step, Work, grown, lineage, work
from feddrift.runs.journal import Inside, Journal
from feddrift.types import Algorithm, Event, State

HISTORY = "history.jsonl"

_log = logging.getLogger("feddrift")


@dataclass(frozen=True)
class _Saved:
    """Where a federation stands."""

    done: int = 0
    state: State | None = None
    inside: Inside | None = None
    events: tuple[Event, ...] = ()  # of the last time step that is done,
    work: Work | None = None  # and what its clients received and sent


def federate(
    engine: Flower, algorithm: Algorithm, folder: Path, n_steps: int | None = None, about: dict[str, Any] | None = None
) -> Iterator[Step]:
    """Time steps as they are done and tested, from where the folder's checkpoints say; None: on and on."""
    checkpoints, about = checkpoint.Folder(folder / "checkpoints"), about or {}

    def save(now: _Saved) -> None:
        rounds = 0 if now.inside is None else now.inside.rounds
        value = now.state, now.inside and now.inside.plain(), now.events, now.work, engine.counts
        clients = list(engine.roster.clients)
        checkpoints.write(now.done, rounds, {"federation": about, "clients": clients, "feddrift": __version__}, value)

    now = _last(checkpoints, engine, about)
    if now.state is None:
        engine.hello(0)
        now = _Saved(0, algorithm.init(engine.at(0)))
        save(now)
    elif now.inside is None and now.done:
        _log.info("going on after %d time steps", now.done)
        yield _tested(engine, now, n_steps)
    while n_steps is None or now.done < n_steps:
        assert now.state is not None
        fed = engine.at(now.done)
        state = grown(now.state, fed.n_clients)
        if now.inside is not None:
            _log.info("going on at time %d, after %d rounds", now.done, now.inside.rounds)

        def save_inside(inside: Inside, now: _Saved = now) -> None:
            save(_Saved(now.done, now.state, inside, now.events, now.work))

        after = algorithm.step(state, Journal(fed, 1, save_inside, now.inside))
        now = _Saved(now.done + 1, after, None, lineage(state, after), work(fed, after))
        save(now)
        yield _tested(engine, now, n_steps)


def _tested(engine: Flower, now: _Saved, n_steps: int | None) -> Step:
    """Tell the clients which models they use; the last time step waits for no new data."""
    assert now.state is not None and now.work is not None
    right, tested = engine.test(now.state, now.done, wait=n_steps is None or now.done < n_steps)
    accuracy = np.divide(right, tested, out=np.full(len(tested), np.nan), where=tested > 0)
    return Step(now.done - 1, now.state, accuracy, tested, *now.work, now.events)


def _last(checkpoints: checkpoint.Folder, engine: Flower, about: dict[str, Any]) -> _Saved:
    for found in checkpoints.newest_first():
        if isinstance(found, DataError):
            _log.warning("%s", found)
            continue
        if found.about.get("federation") != about:
            raise DataError(
                f"{found.path} is of a federation with other settings: {found.about.get('federation')}, this is {about}"
            )
        known, clients = found.about.get("clients", []), list(engine.roster.clients)
        if clients[: len(known)] != known:
            raise DataError(f"{found.path} is of clients {known}: others can only be added behind them, got {clients}")
        more = len(clients) - len(known)
        state, inside, events, work, counts = found.value(model_parts.like(engine.net))
        engine.counts = np.pad(counts, ((0, 0), (0, more)))
        if more:  # with them the time step starts anew
            state, inside = state and grown(state, len(clients)), None
            if work is not None:  # nobody asked the new ones
                nothing = 0, np.nan, 0, 0
                work = tuple(np.append(v, np.full(more, of, v.dtype)) for v, of in zip(work, nothing, strict=True))
        return _Saved(int(found.about["steps"]), state, None if inside is None else Inside(*inside), events, work)
    return _Saved()


def history_line(step: Step, engine: Flower) -> dict[str, Any]:
    """One time step for people and `feddrift deploy status`."""
    names = engine.roster.clients
    return {
        "t": step.tau,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "models": list(step.state.models.ids),
        "clients": {
            name: {
                "model": int(step.model[c]),
                "drift": bool(step.drifted[c]),
                "accuracy": float(step.accuracy[c]) if step.tested[c] else None,
                "tested": int(step.tested[c]),
                "sent": float(step.sent[c]),
                "here": c in engine.present,
                "trouble": engine.trouble.get(name),
            }
            for c, name in enumerate(names)
        },
        "events": [{"event": e.kind, "model": e.model, "cause": dict(e.cause)} for e in step.events],
    }


def run(grid: Grid, settings: Settings, roster: Roster, folder: Path) -> None:
    """The server of a deployment, from beginning or checkpoint to the end."""
    net = settings.net(folder)
    some = Conditions(participation=settings.participation)
    engine = Flower(grid, roster, net, settings.local, settings.seed, settings.rules, some)
    algorithm = algorithms.algorithm(settings.algorithm, **settings.settings)
    about = {
        "experiment": settings.experiment,
        "algorithm": settings.algorithm,
        "seed": settings.seed,
        "settings": json.loads(json.dumps(settings.settings)),
        "local": asdict(settings.local),
        "participation": settings.participation,
    }
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / HISTORY, "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(f"another server is at work on {folder}") from None
        for step in federate(engine, algorithm, folder, settings.time_steps, about):
            line = history_line(step, engine)
            file.write(json.dumps(line) + "\n")
            file.flush()
            _log.info("time %d is done: %d models", step.tau, len(step.state.models))


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """What `feddrift deploy run` starts."""
    folder = Path(str(context.run_config["folder"]))
    state = folder / "state"
    state.mkdir(exist_ok=True)
    handler = logging.FileHandler(state / "server.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    try:
        settings = Settings.read(folder / "federation.toml")
        run(grid, settings, settings.roster(folder / "keys"), state)
    except Exception:
        _log.exception("the server stops")
        raise
