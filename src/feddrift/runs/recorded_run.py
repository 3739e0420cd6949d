"""A run with its record and checkpoints: from a configuration to files, and on from there after anything."""

from __future__ import annotations

import importlib.metadata
import io
import logging
import math
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from feddrift import algorithms, engines, rng, streams
from feddrift._internal import checkpoint, plugins
from feddrift._version import __version__
from feddrift.data import Stream
from feddrift.engines.server.federation import TimeStep
from feddrift.engines.simulator.lanes import device_kind
from feddrift.errors import DataError
from feddrift.nets import initial
from feddrift.runs.background import in_background
from feddrift.runs.config import RunConfig
from feddrift.runs.journal import Inside, Journal
from feddrift.runs.record import file_name, is_complete, part_of, read
from feddrift.runs.schema import MAX_RECORDED_NUMBER
from feddrift.runs.stream_fingerprint import Remembered
from feddrift.runs.writer import Writer, beginning, held
from feddrift.simulation import Step, Trained, models_in_use, n_models, steps_on
from feddrift.trees import leaves
from feddrift.types import Algorithm, Ints, Local, Params, State

log = logging.getLogger(__name__)

Lines = tuple[list[dict[str, Any]], list[dict[str, Any]]]  # the rows and events of a time step


class RecordedRun:
    """A run with its record below `out`: iterate over it to run; `path` is the record once it is done.

    After each time step, and inside one after every so many rounds where `every` is above 0, a checkpoint is written
    beside the record. With `resume` a run that was stopped goes on from the last one that is whole. Where it is the
    update of a run, its first clients are those of that one, which it `replaces` once it is complete.
    `stream` spares the loading of the data, where somebody has done that.
    """

    def __init__(
        self,
        config: RunConfig,
        out: Path,
        *,
        resume: bool = False,
        every: int = 0,
        clients: Sequence[str] = (),
        replaces: str | None = None,
        stream: Stream | None = None,
    ) -> None:
        self.config, self.resumes, self.every, self.replaces = config, resume, every, replaces
        self._cwd = Path.cwd()  # what its paths are meant from
        self.stream = config.load(clients) if stream is None else stream
        self.algorithm, self.local = config.resolve(self.stream)
        self.conditions = config.conditions(self.stream)
        self.net = config.find_net(self.stream)
        self.like = initial(self.net, rng.derive(config.seed, "init", 0))
        self.header = _header(config, self.stream, self.algorithm, self.local, self.like)
        self.out, self.path = out, out / f"{file_name(self.header)}.jsonl"
        self.checkpoints = checkpoint.Folder(out / f"{file_name(self.header)}.state")
        self.before: Ints | None = None  # [c], the models in use before the first time step that is yielded

    def __iter__(self) -> Iterator[Step]:
        """Each time step once it is trained, tested and written."""
        with held(self.path) as part:
            yield from self.steps(part)

    def is_done(self) -> bool:
        """Whether there is nothing to do: the record is complete, and of the code that is there now."""
        return is_complete(self.path) and not self.changed_since()

    def steps(self, part: io.FileIO) -> Iterator[Step]:
        """The same with the part of its record in hand: from here on what it goes on from is nobody else's."""
        start = self._last() if self.resumes else _Start()
        self.before = None if start.state is None else models_in_use(start.state)
        if not self.resumes and self.checkpoints.path.is_dir() and not is_complete(self.path):
            log.warning("%s was stopped before its end: this starts it over, resume would go on", self.path.stem)
        with Writer(self.out, self.header, start.done or None, start.seconds, part=part) as writer:
            if not start.done and start.inside is None:
                self.checkpoints.clear()
                self._save(writer, 0, None)

            def journal(state: State, fed: TimeStep) -> Journal:
                def save(inside: Inside) -> None:
                    self._save(writer, fed.tau, state, inside)

                return Journal(fed, self.every, save, start.inside if fed.tau == start.done else None)

            engine = engines.engine(self.config.engine)(
                self.stream, self.net, self.local, self.config.seed, self.conditions
            )
            steps = steps_on(
                engine, self.algorithm, done=start.done, state=start.state, journal=journal if self.every else None
            )
            # A checkpoint inside a time step must not come before the record of the one that precedes it.
            for step in in_background(steps, ahead=0 if self.every else 2):
                writer.step(*lines_of(step, self.stream.concepts))
                self._save(writer, step.tau + 1, step.state)
                yield step
        if self.replaces is not None:
            remove_replaced(self.path, self.replaces)

    def begin_after(self, past: Sequence[Lines], state: State, about: Mapping[str, Any]) -> None:
        """Write the record of time steps that another run has done, and the checkpoint to go on from."""
        self.every = int(about["every"])
        with Writer(self.out, self.header, seconds=float(about["seconds"])) as writer:
            self.checkpoints.clear()
            for rows, events in past:
                writer.step(rows, events)
            self._save(writer, len(past), state)

    @cached_property
    def _data(self) -> dict[str, Any] | None:
        """What its checkpoints say of a stream that may grow."""
        return None if streams.listed(self.config.stream) else vars(Remembered.of(self.stream))

    def _save(self, writer: Writer, steps_done: int, state: State | None, inside: Inside | None = None) -> None:
        about = {
            "run": file_name(self.header),
            "local": self.header["local"],
            "every": self.every,
            "cwd": str(self._cwd),
            "config": self.config.model_dump(mode="json"),
            "seconds": writer.seconds,
            "feddrift": __version__,
            "data": self._data,
            "replaces": self.replaces,
        }
        rounds = 0 if inside is None else inside.rounds
        self.checkpoints.write(steps_done, rounds, about, (state, inside and inside.plain()))

    def _last(self) -> _Start:
        """Where to begin: at the newest intact checkpoint whose time steps are in the record, too."""
        for saved in self.checkpoints.newest_first():
            try:
                return self._start(saved, self.like)
            except DataError as error:
                log.warning("%s", error)
        return _Start()

    def changed_since(self) -> list[str]:
        """What has other code now than when the record was begun: modules of one's own, and where it is not complete
        feddrift itself, so that no record is made by two versions; a record may not know."""
        mine = plugins.sources(self.config.algorithm, self.config.stream, self.config.net)
        if not (complete := is_complete(self.path)):
            mine["feddrift"] = __version__
        files = [self.path] if complete else [part_of(self.path), self.path]
        for path in files if mine else ():
            with suppress(DataError):  # what cannot be read is run again anyway
                then = read(path).header["versions"]
                return [module for module, code in mine.items() if then.get(module, code) != code]
        return []

    def _start(self, saved: checkpoint.Checkpoint | DataError, like: Params) -> _Start:
        if isinstance(saved, DataError):
            raise saved
        about = saved.about
        if about.get("run") != file_name(self.header) or about.get("local") != self.header["local"]:
            raise DataError(f"{saved.path} belongs to another run: {about.get('run')}")
        try:
            (state, inside), steps_done, seconds = saved.value(like), index(about["steps"]), float(about["seconds"])
            every = index(about["every"])
            inside = None if inside is None else Inside(*inside)
            if min(steps_done, every) < 0 or not 0 <= seconds < math.inf:
                raise ValueError(f"{steps_done} steps, {seconds} seconds, every {every}")
            if not (isinstance(state, State) or (state is None and steps_done == 0)):
                raise TypeError(f"{type(state).__name__} is no state after {steps_done} time steps")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{saved.path} is no checkpoint of a run: {error!r}") from None
        self.every = every
        if about.get("feddrift") != __version__:
            log.warning("%s was written by feddrift %s, this is %s", saved.path, about.get("feddrift"), __version__)
        if steps_done and all(beginning(path, steps_done) is None for path in (part_of(self.path), self.path)):
            raise DataError(f"{saved.path}: the record of its {steps_done} time steps is missing")
        return _Start(steps_done, state, inside, seconds)


@dataclass(frozen=True)
class _Start:
    """Where a run begins: after so many time steps, or inside the next."""

    done: int = 0  # time steps
    state: State | None = None
    inside: Inside | None = None
    seconds: float = 0.0


def replaced(saved: checkpoint.Checkpoint) -> str | None:
    """The name of the run that this one is an update of, and which it takes the place of once it is complete."""
    name = saved.about.get("replaces")
    if name is not None and (not isinstance(name, str) or Path(name).name != name):
        raise DataError(f"{saved.path} is no checkpoint of a run: it replaces {name!r}")
    return name


def remove_replaced(path: Path, name: str) -> None:
    """Delete the run of this name of which the one at this path is an update, once that is complete.

    A run of this name that was started since is another one, and stays.
    """
    old = path.with_name(f"{name}.jsonl")
    if is_complete(path) and is_complete(old) and read(old).header["started"] == read(path).header["started"]:
        checkpoint.Folder(old.with_suffix(".state")).clear()
        old.unlink()


def checkpoint_folders(folder: Path) -> list[Path]:
    """The checkpoint folders of the runs below a folder, or of one record."""
    if os.path.isfile(folder):
        return [state for state in [folder.resolve().with_suffix(".state")] if state.is_dir()]
    if not os.path.isdir(folder):
        raise DataError(f"{folder} is no folder of records")
    return sorted(folder.resolve().rglob("*.state"))


def unfinished_runs(folder: Path) -> list[Path]:
    """The checkpoint folders of the runs below a folder that ended before their end."""
    return [state for state in checkpoint_folders(folder) if not is_complete(state.with_suffix(".jsonl"))]


def from_checkpoints(state: Path) -> RecordedRun:
    """The run of a checkpoint folder, ready to go on."""
    checkpoints = list(checkpoint.Folder(state).newest_first())
    whole = [c for c in checkpoints if isinstance(c, checkpoint.Checkpoint)]
    if not whole:
        why = checkpoints[0] if checkpoints else "there is none"
        raise DataError(f"cannot resume {state.stem}: no checkpoint is whole ({why}); run it again")
    config, cwd = whole[0].about.get("config"), str(whole[0].about.get("cwd"))
    if not isinstance(config, dict):
        raise DataError(f"{whole[0].path} is no checkpoint of a run: it has no configuration")
    remembered, replaces = Remembered.read(whole[0].about, whole[0].path), replaced(whole[0])
    clients = remembered.clients if remembered else ()
    with chdir(cwd) if os.path.isdir(cwd) else nullcontext():
        run = RecordedRun(RunConfig.checked(**config), state.parent, resume=True, clients=clients, replaces=replaces)
    if run.checkpoints.path != state:
        raise DataError(
            f"cannot resume {state.stem}: its data, or the defaults of its method, have changed since; it would be "
            f"{run.path.stem} now: run it again, or `feddrift update` a finished run whose data have grown"
        )
    return run


def _header(config: RunConfig, stream: Stream, algorithm: Algorithm, local: Local, model: Params) -> dict[str, Any]:
    return {
        "stream": config.stream,
        "algorithm": config.algorithm,
        "settings": algorithms.settings(algorithm),
        "overrides": config.overrides(stream),
        "seed": config.seed,
        "local": local.plain(),
        "engine": config.engine,
        "n_steps": stream.n_steps,
        "n_clients": stream.n_clients,
        "clients": list(stream.clients),
        "concepts": None if stream.concepts is None else stream.concepts.tolist(),
        "same": {str(k): v for k, v in stream.same.items()},
        "versions": versions() | plugins.sources(config.algorithm, config.stream, config.net),
        "device": device_kind(),
        "started": datetime.now(UTC).isoformat(),
        "times": list(stream.times),
        "model_bytes": sum(int(np.asarray(leaf).nbytes) for leaf in leaves(model)),
    }


def lines_of(step: Trained, concepts: Ints | None = None) -> Lines:
    """The rows and events of a time step for its record; before it is tested, without accuracy."""
    model, drifted, many = step.model.tolist(), step.drifted.tolist(), n_models(step.state)
    now, later = ([None] * len(model) if concepts is None else concepts[t].tolist() for t in (step.tau, step.tau + 1))
    received, losses, sent, scored = (values.tolist() for values in step.work)
    test: list[tuple[float | None, int | None]] = [(None, None)] * len(model)
    scores: dict[str, list[float | None]] = {}
    if isinstance(step, Step):
        test = [(a if n else None, n) for a, n in zip(step.accuracy.tolist(), step.tested.tolist(), strict=True)]
        scores = scores_of(step)
    rows = [
        {
            "t": step.tau,
            "c": c,
            "accuracy": test[c][0],
            "tested": test[c][1],
            "concept": now[c],
            "next_concept": later[c],
            "model": model[c],
            "n_models": many,
            "drift": drifted[c],
            "models_sent": _short(sent[c]),
            "sent_scoring": _short(scored[c]),
            "received": received[c],
            "loss": round(losses[c], 6) if abs(losses[c]) <= MAX_RECORDED_NUMBER else None,  # NaN is not
            **{name: values[c] for name, values in scores.items()},
            **({"shifts": step.shifts[c].plain()} if c in step.shifts else {}),
        }
        for c in range(len(model))
    ]
    events = [{"t": step.tau, "event": e.kind, "model": e.model, "cause": dict(e.cause)} for e in step.events]
    return rows, events


def scores_of(step: Step) -> dict[str, list[float | None]]:
    """The scores of a test for its record: what is no number is left unknown."""
    return {
        name: [round(value, 6) if math.isfinite(value) else None for value in values.tolist()]
        for name, values in step.scores.items()
    }


def _short(models: float) -> float:
    return int(models) if models.is_integer() else round(models, 6)


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that numbers may depend on."""
    packages = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy", "scipy")}
    return {"feddrift": __version__, "python": platform.python_version(), **packages}
