"""Runs with a record and checkpoints: they start from a configuration, and resume from their files after a stop."""

from __future__ import annotations

import importlib.metadata
import io
import logging
import math
import operator
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from feddrift import algorithms, engines, rng, streams
from feddrift._internal import checkpoint, plugins
from feddrift._version import __version__
from feddrift.data import Stream
from feddrift.engines.server.federation import TimeStep
from feddrift.engines.simulator.lanes import get_device_name
from feddrift.errors import DataError
from feddrift.nets import init_params
from feddrift.runs.background import iterate_in_background
from feddrift.runs.config import RunConfig
from feddrift.runs.journal import Journal, StepProgress
from feddrift.runs.record import build_record_name, get_part_path, is_complete, read
from feddrift.runs.schema import MAX_RECORDED_NUMBER
from feddrift.runs.stream_fingerprint import StreamFingerprint
from feddrift.runs.writer import RecordWriter, lock_record, read_prefix
from feddrift.simulation import (
    NO_LOOP_STATE,
    LoopState,
    Step,
    TrainedStep,
    count_models,
    find_models_in_use,
    run_steps,
)
from feddrift.trees import tree_leaves
from feddrift.types import Algorithm, Ints, Local, Params, State

log = logging.getLogger(__name__)

StepLines = tuple[list[dict[str, Any]], list[dict[str, Any]]]  # the rows and events of a time step


class RecordedRun:
    """A run with its record and checkpoints: iterate over it to run.

    A checkpoint is written beside the record after each time step.

    Args:
        config: The configuration.
        out: The folder of the record.
        resume: True to continue a stopped run from its last intact checkpoint.
        every: Number of rounds between checkpoints within a time step; 0: checkpoints only after time steps.
        clients: In an update, the clients of the replaced run, which come first in this one.
        replaces: In an update, the name of the replaced run, which is deleted when this one is complete.
        stream: The data of the configuration, if they are loaded already.

    Attributes:
        path: The path of the record when the run has ended.
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
        self.config = config
        self.resumes = resume
        self.checkpoint_every = every
        self.replaces = replaces
        self._cwd = Path.cwd()  # paths in the configuration may be relative to it
        self.stream = config.load_stream(clients) if stream is None else stream
        self.algorithm, self.local = config.resolve_algorithm(self.stream)
        self.conditions = config.build_conditions(self.stream)
        self.net = config.find_net(self.stream)
        self.param_template = init_params(self.net, rng.derive_key(config.seed, "init", 0))
        self.header = _build_header(config, self.stream, self.algorithm, self.local, self.param_template)
        self.out = out
        self.path = out / f"{build_record_name(self.header)}.jsonl"
        self.checkpoints = checkpoint.Folder(out / f"{build_record_name(self.header)}.state")
        self.previous_models: Ints | None = None  # [c], the models in use before the first time step that is yielded

    def __iter__(self) -> Iterator[Step]:
        """Run, and yield each time step when it is trained, tested and written."""
        with lock_record(self.path) as part_file:
            yield from self.run_steps(part_file)

    def is_done(self) -> bool:
        """Return True if the record is complete and was made by the current code."""
        return is_complete(self.path) and not self.find_changed_code()

    def run_steps(self, part_file: io.FileIO) -> Iterator[Step]:
        """Run while the caller holds the lock of the record.

        Args:
            part_file: The locked file of the unfinished record: see `lock_record`.

        Yields:
            Each time step when it is trained, tested and written.
        """
        start = self._find_resume_point() if self.resumes else _ResumePoint()
        self.previous_models = None if start.state is None else find_models_in_use(start.state)
        if not self.resumes and self.checkpoints.path.is_dir() and not is_complete(self.path):
            log.warning("%s was stopped before its end and starts again; resume would continue it", self.path.stem)
        with RecordWriter(
            self.out, self.header, start.steps_done or None, start.seconds, part_file=part_file
        ) as writer:
            if not start.steps_done and start.step_progress is None:
                self.checkpoints.clear()
                self._save_checkpoint(writer, 0, None, NO_LOOP_STATE)

            def journal(state: State, loop: LoopState, fed: TimeStep) -> Journal:
                def save(progress: StepProgress) -> None:
                    self._save_checkpoint(writer, fed.tau, state, loop, progress)

                progress = start.step_progress if fed.tau == start.steps_done else None
                return Journal(fed, self.checkpoint_every, save, progress)

            engine = engines.engine(self.config.engine)(
                self.stream, self.net, self.local, self.config.seed, self.conditions
            )
            steps = run_steps(
                engine,
                self.algorithm,
                done=start.steps_done,
                state=start.state,
                loop=start.loop,
                journal=journal if self.checkpoint_every else None,
            )
            # A checkpoint within a time step must not be written before the record of the previous time step.
            for step in iterate_in_background(steps, prefetch=0 if self.checkpoint_every else 2):
                writer.write_step(*build_lines(step, self.stream.concepts))
                self._save_checkpoint(writer, step.tau + 1, step.state, step.loop)
                yield step
        if self.replaces is not None:
            remove_replaced_run(self.path, self.replaces)

    def write_history(self, past: Sequence[StepLines], state: State, loop: LoopState, about: Mapping[str, Any]) -> None:
        """Write the record of time steps that another run has done, and a checkpoint from which this run continues.

        Args:
            past: The rows and events of each of these time steps.
            state: The state after them.
            loop: The data of conditions after them.
            about: The description in the checkpoint of the other run.
        """
        self.checkpoint_every = int(about["every"])
        with RecordWriter(self.out, self.header, seconds=float(about["seconds"])) as writer:
            self.checkpoints.clear()
            for rows, events in past:
                writer.write_step(rows, events)
            self._save_checkpoint(writer, len(past), state, loop)

    @cached_property
    def _fingerprint(self) -> dict[str, Any] | None:
        """The fingerprint of a stream that may grow, for checkpoints; None for streams of the catalogue."""
        return None if streams.is_in_catalogue(self.config.stream) else vars(StreamFingerprint.from_stream(self.stream))

    def _save_checkpoint(
        self,
        writer: RecordWriter,
        steps_done: int,
        state: State | None,
        loop: LoopState,
        progress: StepProgress | None = None,
    ) -> None:
        about = {
            "run": build_record_name(self.header),
            "local": self.header["local"],
            "every": self.checkpoint_every,
            "cwd": str(self._cwd),
            "config": self.config.model_dump(mode="json"),
            "seconds": writer.seconds,
            "feddrift": __version__,
            "data": self._fingerprint,
            "replaces": self.replaces,
        }
        rounds = 0 if progress is None else progress.rounds
        self.checkpoints.write(steps_done, rounds, about, (state, progress and progress.to_tuple(), loop.to_dict()))

    def _find_resume_point(self) -> _ResumePoint:
        """Return the newest intact checkpoint whose time steps are in the record, else the beginning of the run."""
        for saved in self.checkpoints.newest_first():
            try:
                return self._read_resume_point(saved)
            except DataError as error:
                log.warning("%s", error)
        return _ResumePoint()

    def find_changed_code(self) -> list[str]:
        """Return the modules whose code has changed since the record was begun.

        These are modules of the user, and feddrift if the record is incomplete, because one version makes a whole
        record. A module whose version is not in the record counts as unchanged.
        """
        versions = plugins.list_sources(self.config.algorithm, self.config.stream, self.config.net)
        complete = is_complete(self.path)
        if not complete:
            versions["feddrift"] = __version__
        files = [self.path] if complete else [get_part_path(self.path), self.path]
        for path in files if versions else ():
            with suppress(DataError):  # a run whose record cannot be read starts again anyway
                recorded = read(path).header["versions"]
                return [module for module, version in versions.items() if recorded.get(module, version) != version]
        return []

    def _read_resume_point(self, saved: checkpoint.Checkpoint | DataError) -> _ResumePoint:
        """Return the resume point of a checkpoint; raise DataError if the checkpoint cannot be used."""
        if isinstance(saved, DataError):
            raise saved
        about = saved.about
        if about.get("run") != build_record_name(self.header) or about.get("local") != self.header["local"]:
            raise DataError(f"{saved.path} belongs to another run: {about.get('run')}")
        try:
            state, progress, *stored = saved.decode(self.param_template)
            loop = LoopState.from_checkpoint(saved, stored, self.param_template)
            steps_done = operator.index(about["steps"])
            seconds = float(about["seconds"])
            every = operator.index(about["every"])
            progress = None if progress is None else StepProgress(*progress)
            if min(steps_done, every) < 0 or not 0 <= seconds < math.inf:
                raise ValueError(f"{steps_done} steps, {seconds} seconds, every {every}")
            if not (isinstance(state, State) or (state is None and steps_done == 0)):
                raise TypeError(f"{type(state).__name__} is not a state after {steps_done} time steps")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{saved.path} is not a checkpoint of a run: {error!r}") from None
        self.checkpoint_every = every
        if about.get("feddrift") != __version__:
            log.warning("%s was written by feddrift %s, this is %s", saved.path, about.get("feddrift"), __version__)
        if steps_done and all(read_prefix(path, steps_done) is None for path in (get_part_path(self.path), self.path)):
            raise DataError(f"{saved.path}: the record of its {steps_done} time steps is missing")
        return _ResumePoint(steps_done, state, loop, progress, seconds)


@dataclass(frozen=True)
class _ResumePoint:
    """Point at which a run begins: after the time steps that are done, or within the next one."""

    steps_done: int = 0
    state: State | None = None  # after these time steps
    loop: LoopState = NO_LOOP_STATE
    step_progress: StepProgress | None = None  # within the next one
    seconds: float = 0.0  # duration of the run until this point


def get_replaced_name(saved: checkpoint.Checkpoint) -> str | None:
    """Return the name of the run that this update replaces; None if the run is not an update.

    Args:
        saved: A checkpoint of the run.

    Raises:
        DataError: If the name is not that of a record.
    """
    name = saved.about.get("replaces")
    if name is not None and (not isinstance(name, str) or Path(name).name != name):
        raise DataError(f"{saved.path} is not a checkpoint of a run: it replaces {name!r}")
    return name


def remove_replaced_run(path: Path, name: str) -> None:
    """Delete a run that a complete update has replaced.

    A run of the same name that was started later is kept.

    Args:
        path: The record of the update.
        name: The name of the replaced run.
    """
    old = path.with_name(f"{name}.jsonl")
    if is_complete(path) and is_complete(old) and read(old).header["started"] == read(path).header["started"]:
        checkpoint.Folder(old.with_suffix(".state")).clear()
        old.unlink()


def find_checkpoint_folders(folder: Path) -> list[Path]:
    """Return the checkpoint folders of the runs below a folder, or of one record."""
    if os.path.isfile(folder):
        return [path for path in [folder.resolve().with_suffix(".state")] if path.is_dir()]
    if not os.path.isdir(folder):
        raise DataError(f"{folder} is not a folder of records")
    return sorted(folder.resolve().rglob("*.state"))


def find_unfinished_runs(folder: Path) -> list[Path]:
    """Return the checkpoint folders of the unfinished runs below a folder."""
    return [path for path in find_checkpoint_folders(folder) if not is_complete(path.with_suffix(".jsonl"))]


def load_stopped_run(checkpoint_folder: Path) -> RecordedRun:
    """Return the run of a checkpoint folder, ready to continue.

    Args:
        checkpoint_folder: One of `find_unfinished_runs`.

    Raises:
        DataError: If no checkpoint is intact, or the data or the defaults of the algorithm have changed.
    """
    checkpoints = list(checkpoint.Folder(checkpoint_folder).newest_first())
    newest = next((c for c in checkpoints if isinstance(c, checkpoint.Checkpoint)), None)
    if newest is None:
        why = checkpoints[0] if checkpoints else "the folder is empty"
        raise DataError(f"cannot resume {checkpoint_folder.stem}: no checkpoint is intact ({why}); run it again")
    config = newest.about.get("config")
    cwd = str(newest.about.get("cwd"))
    if not isinstance(config, dict):
        raise DataError(f"{newest.path} is not a checkpoint of a run: it has no configuration")
    fingerprint = StreamFingerprint.from_checkpoint(newest.about, newest.path)
    replaces = get_replaced_name(newest)
    clients = fingerprint.clients if fingerprint else ()
    with chdir(cwd) if os.path.isdir(cwd) else nullcontext():
        run = RecordedRun(
            RunConfig.from_values(**config), checkpoint_folder.parent, resume=True, clients=clients, replaces=replaces
        )
    if run.checkpoints.path != checkpoint_folder:
        raise DataError(
            f"cannot resume {checkpoint_folder.stem}: its data, or the defaults of its method, have changed since; "
            f"it would be {run.path.stem} now: run it again, or `feddrift update` a finished run whose data have grown"
        )
    return run


def _build_header(
    config: RunConfig, stream: Stream, algorithm: Algorithm, local: Local, params: Params
) -> dict[str, Any]:
    return {
        "stream": config.stream,
        "algorithm": config.algorithm,
        "settings": algorithms.get_settings(algorithm),
        "overrides": config.list_overrides(stream),
        "seed": config.seed,
        "local": local.to_dict(),
        "engine": config.engine,
        "n_steps": stream.n_steps,
        "n_clients": stream.n_clients,
        "clients": list(stream.clients),
        "concepts": None if stream.concepts is None else stream.concepts.tolist(),
        "same": {str(k): v for k, v in stream.same.items()},
        "versions": get_versions() | plugins.list_sources(config.algorithm, config.stream, config.net),
        "device": get_device_name(),
        "started": datetime.now(UTC).isoformat(),
        "times": list(stream.times),
        "model_bytes": sum(int(np.asarray(leaf).nbytes) for leaf in tree_leaves(params)),
    }


def build_lines(step: TrainedStep, concepts: Ints | None = None) -> StepLines:
    """Return the rows and events of a time step for its record.

    Args:
        step: The time step; without its test, the rows have no accuracy.
        concepts: [T + 1, c], the true concept of each cell; None: unknown.
    """
    model = step.model.tolist()
    drifted = step.drifted.tolist()
    n_models = count_models(step.state)
    concept, next_concept = (
        [None] * len(model) if concepts is None else concepts[t].tolist() for t in (step.tau, step.tau + 1)
    )
    received, losses, sent, sent_scoring = (values.tolist() for values in step.statistics)
    tests: list[tuple[float | None, int | None]] = [(None, None)] * len(model)  # accuracy and number of examples
    scores: dict[str, list[float | None]] = {}
    if isinstance(step, Step):
        tests = [(a if n else None, n) for a, n in zip(step.accuracy.tolist(), step.tested.tolist(), strict=True)]
        scores = round_scores(step)
    rows = [
        {
            "t": step.tau,
            "c": c,
            "accuracy": tests[c][0],
            "tested": tests[c][1],
            "concept": concept[c],
            "next_concept": next_concept[c],
            "model": model[c],
            "n_models": n_models,
            "drift": drifted[c],
            "models_sent": _round_count(sent[c]),
            "sent_scoring": _round_count(sent_scoring[c]),
            "received": received[c],
            "loss": round(losses[c], 6) if abs(losses[c]) <= MAX_RECORDED_NUMBER else None,  # also for NaN
            **{name: values[c] for name, values in scores.items()},
            **({"shifts": step.shifts[c].to_dict()} if c in step.shifts else {}),
        }
        for c in range(len(model))
    ]
    events = [{"t": step.tau, "event": e.kind, "model": e.model, "cause": dict(e.cause)} for e in step.events]
    return rows, events


def round_scores(step: Step) -> dict[str, list[float | None]]:
    """Return the scores of a test for its record; None for values that are not finite."""
    return {
        name: [round(value, 6) if math.isfinite(value) else None for value in values.tolist()]
        for name, values in step.scores.items()
    }


def _round_count(models: float) -> float:
    """Round a number of models, which is a fraction if parts of models were sent."""
    return int(models) if models.is_integer() else round(models, 6)


def get_versions() -> dict[str, str]:
    """Return the versions of feddrift, of Python and of the packages on which results may depend."""
    packages = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy", "scipy")}
    return {"feddrift": __version__, "python": platform.python_version(), **packages}
