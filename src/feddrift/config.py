"""One frozen configuration per run, from names to a record."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import math
import os
import platform
from collections.abc import Iterator
from contextlib import chdir, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from operator import index
from pathlib import Path
from typing import Any

import jax
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from feddrift import __version__, algorithms, checkpoint, engines, rng, streams
from feddrift.background import in_background
from feddrift.conditions import Conditions, flipped, read_poison, read_trace
from feddrift.engines.base import TimeStep
from feddrift.errors import ConfigError, DataError, shown
from feddrift.journal import Inside, Journal
from feddrift.nets import default_net, own_net
from feddrift.record import Writer, beginning, file_name, is_complete, part_of
from feddrift.run import Step, steps_on
from feddrift.types import Algorithm, Average, Local, Net, Params, State, Stream

log = logging.getLogger(__name__)

TRAINING = ("rounds", "steps", "batch", "lr", "average")
MAX_SEEDS = 10_000


class RunConfig(BaseModel):
    """What to run; what is left out is the stream's own setting, which for the paper's streams is the paper's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stream: str = Field(description="a name from `feddrift list`, folder:DIR, or your own package.module:make")
    algorithm: str = Field(description="a name from `feddrift list`, or your own package.module:Name")
    settings: dict[str, Any] = Field(default={}, description="hyper-parameters of the algorithm, e.g. delta=0.1")
    seed: int = Field(default=0, ge=0, lt=2**63, description="of initial models and minibatches")
    rounds: int | None = Field(default=None, ge=1, le=1_000_000, description="R, communication rounds per time step")
    steps: int | None = Field(default=None, ge=1, le=1_000_000, description="K, local steps per round")
    batch: int | None = Field(default=None, ge=1, le=100_000, description="B, minibatch size")
    lr: float | None = Field(default=None, gt=0, le=1e6, description="eta, step size")
    average: Average | None = Field(
        default=None, description="how updates become one model: mean, or against liars median, trimmed, clipped"
    )
    participation: float = Field(default=1.0, gt=0, le=1, description="the share of clients that train in a round")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="the chance of a client to miss a time step")
    trace: Path | None = Field(
        default=None,
        description="a file of who is in reach: a row of 1 and 0 per time step, a column per client",
    )
    poison: str | None = Field(
        default=None,
        description="clients that do harm: flip:0,3 (wrong labels) or garbage:0,3 (noise for models)",
    )
    pattern: str | None = Field(
        default=None,
        description="drift pattern: a name (Y, F, R0..R4), a file of integers, or random:every=2,concepts=4",
    )
    engine: str = Field(default="simulator", description="simulator, or reference")
    data_dir: Path | None = Field(default=None, description="where data files lie; else $FEDDRIFT_DATA, else a cache")
    weights: Path | None = Field(
        default=None, description="of a ResNet-18, for streams of pictures: torchvision's file"
    )
    net: str | None = Field(default=None, description="your own net, package.module:make; else the stream's")
    label: str = Field(default="label", description="the label column of folder:DIR")

    @field_validator("seed", "rounds", "steps", "batch", "lr", "participation", "dropout", mode="before")
    @classmethod
    def _is_no_bool(cls, value: Any) -> Any:
        if isinstance(value, bool):  # Python would take true for 1
            raise ValueError("input should be a number")
        return value

    @classmethod
    def checked(cls, **values: Any) -> RunConfig:
        """The configuration, or one sentence that says which value is not legal."""
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            reason = first["msg"].removeprefix("Value error, ")
            raise ConfigError(f"{name}: {reason[0].lower()}{reason[1:]}, got {shown(first['input'])}") from None

    def load(self) -> Stream:
        """The stream."""
        engines.engine(self.engine)  # wrong names first: data may take a while
        algorithms.algorithm(self.algorithm, **self.settings)
        found = streams.stream(
            self.stream, seed=self.seed, pattern=self.pattern, data_dir=self.data_dir, label=self.label
        )
        harm, clients = self._poison(found)
        return flipped(found, clients) if harm == "flip" else found

    def conditions(self, stream: Stream) -> Conditions:
        """Who is in reach, takes part and lies."""
        harm, clients = self._poison(stream)
        made = Conditions(
            self.participation, self.dropout, None if self.trace is None else read_trace(self.trace),
            clients if harm == "garbage" else (),
        )  # fmt: skip
        made.in_reach(stream.counts[:-1], self.seed)  # a trace that does not fit shows now
        return made

    def _poison(self, stream: Stream) -> tuple[str, tuple[int, ...]]:
        return ("", ()) if self.poison is None else read_poison(self.poison, stream.n_clients)

    def resolve(self, stream: Stream) -> tuple[Algorithm, Local]:
        """The algorithm and training settings that the names stand for on this stream."""
        engines.engine(self.engine)
        algorithm = algorithms.algorithm(self.algorithm, stream, **self.settings)
        if getattr(algorithm, "needs_truth", False) and stream.concepts is None:
            raise ConfigError(f"{self.algorithm} needs a stream whose true concepts are known, {self.stream} has none")
        given = {name: getattr(self, name) for name in TRAINING if getattr(self, name) is not None}
        return algorithm, replace(stream.local, **given)

    def find_net(self, stream: Stream) -> Net:
        """The net, the stream's own unless another is named."""
        if self.net is not None and self.weights is not None:
            raise ConfigError(f"weights are for the net of a stream of pictures: leave out net={self.net}")
        return own_net(self.net, stream) if self.net else default_net(stream, self.weights)

    def overrides(self, stream: Stream) -> dict[str, Any]:
        """The run options that differ from the stream's own."""
        given = {name: getattr(self, name) for name in TRAINING}
        found = {k: v for k, v in given.items() if v is not None and v != getattr(stream.local, k)}
        if self.pattern is not None and self.pattern != streams.STREAMS[self.stream].pattern:
            found["pattern"] = self.pattern
            if os.path.isfile(self.pattern):  # two files may share a name
                digest = hashlib.sha256(Path(self.pattern).read_bytes()).hexdigest()[:8]
                found["pattern"] = f"{Path(self.pattern).name}@{digest}"
        if self.stream not in streams.STREAMS:  # what the files held may change under the same name
            found["data"] = hashlib.sha256(stream.x.tobytes() + stream.y.tobytes()).hexdigest()[:8]
            if self.label != "label":
                found["label"] = self.label
        if self.weights is not None:
            try:
                found["weights"] = hashlib.sha256(self.weights.read_bytes()).hexdigest()[:8]
            except (OSError, ValueError) as error:  # or a name that no file can have
                reason = getattr(error, "strerror", None) or error
                raise ConfigError(f"cannot read the weights {self.weights}: {reason}") from None
        if self.net is not None:
            found["net"] = self.net
        for name in ("participation", "dropout"):
            if getattr(self, name) != RunConfig.model_fields[name].default:
                found[name] = getattr(self, name)
        if self.trace is not None:
            digest = hashlib.sha256(read_trace(self.trace).tobytes()).hexdigest()[:8]
            found["trace"] = f"{self.trace.name}@{digest}"
        if self.poison is not None:
            harm, clients = self._poison(stream)
            found["poison"] = f"{harm}:{','.join(map(str, clients))}"
        if self.engine != "simulator":
            found["engine"] = self.engine
        return found


def parse_seeds(text: str) -> list[int]:
    """Seeds from a range or a list.

    >>> parse_seeds("0-3"), parse_seeds("7,2")
    ([0, 1, 2, 3], [7, 2])
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last if dash else first)
        if not all(end.isdecimal() and len(end) < 20 for end in ends) or int(ends[1]) < int(ends[0]):
            raise ConfigError(f"seeds are a range such as 0-4 or a list such as 0,2,5, got '{text}'")
        if len(seeds) + int(ends[1]) - int(ends[0]) >= MAX_SEEDS:
            raise ConfigError(f"seeds are at most {MAX_SEEDS}, got '{text}'")
        seeds += range(int(ends[0]), int(ends[1]) + 1)
    return list(dict.fromkeys(seeds))


class RecordedRun:
    """A run with its record below `out`: iterate over it to run; `path` is the record once it is done.

    After each time step, and inside one after every so many rounds where `every` is above 0, a checkpoint is written
    beside the record. With `resume` a run that was stopped goes on from the last one that is whole.
    """

    def __init__(self, config: RunConfig, out: Path, *, resume: bool = False, every: int = 0) -> None:
        self.config, self.resumes, self.every = config, resume, every
        self._cwd = Path.cwd()  # what its paths are meant from
        self.stream = config.load()
        self.algorithm, self.local = config.resolve(self.stream)
        self.conditions = config.conditions(self.stream)
        self.net = config.find_net(self.stream)
        self.header = _header(config, self.stream, self.algorithm, self.local)
        self.out, self.path = out, out / f"{file_name(self.header)}.jsonl"
        self.checkpoints = checkpoint.Folder(out / f"{file_name(self.header)}.state")

    def __iter__(self) -> Iterator[Step]:
        """Each time step once it is trained, tested and written."""
        start = self._last() if self.resumes else _Start()
        if not self.resumes and self.checkpoints.path.is_dir() and not is_complete(self.path):
            log.warning("%s was stopped before its end: this starts it over, resume would go on", self.path.stem)
        with Writer(self.out, self.header, start.done, start.seconds) as writer:
            if not start.done and start.inside is None:
                self.checkpoints.clear()
                self._save(writer, 0, None)

            def watch(state: State, fed: TimeStep) -> Journal:
                def save(inside: Inside) -> None:
                    self._save(writer, fed.tau, state, inside)

                return Journal(fed, self.every, save, start.inside if fed.tau == start.done else None)

            engine = engines.engine(self.config.engine)(
                self.stream, self.net, self.local, self.config.seed, self.conditions
            )
            steps = steps_on(
                engine, self.algorithm, done=start.done, state=start.state, watch=watch if self.every else None
            )
            # A checkpoint inside a time step must not come before the record of the one that precedes it.
            for step in in_background(steps, ahead=0 if self.every else 2):
                writer.step(*_lines(step, self.stream))
                self._save(writer, step.tau + 1, step.state)
                yield step

    def _save(self, writer: Writer, done: int, state: State | None, inside: Inside | None = None) -> None:
        about = {
            "run": file_name(self.header), "local": self.header["local"], "every": self.every, "cwd": str(self._cwd),
            "config": self.config.model_dump(mode="json"), "seconds": writer.seconds, "feddrift": __version__,
        }  # fmt: skip
        rounds = 0 if inside is None else inside.rounds
        self.checkpoints.write(done, rounds, about, (state, inside and inside.plain()))

    def _last(self) -> _Start:
        """Where the last whole checkpoint of this run, whose record is there, lets it begin."""
        like = self.net.init(rng.derive(self.config.seed, "init", 0))
        for found in self.checkpoints.newest_first():
            try:
                return self._start(found, like)
            except DataError as error:
                log.warning("%s", error)
        return _Start()

    def _start(self, found: checkpoint.Checkpoint | DataError, like: Params) -> _Start:
        if isinstance(found, DataError):
            raise found
        about = found.about
        if about.get("run") != file_name(self.header) or about.get("local") != self.header["local"]:
            raise DataError(f"{found.path} belongs to another run: {about.get('run')}")
        try:
            (state, inside), done, seconds = found.value(like), index(about["steps"]), float(about["seconds"])
            every = index(about["every"])
            inside = None if inside is None else Inside(*inside)
            if min(done, every) < 0 or not 0 <= seconds < math.inf:
                raise ValueError(f"{done} steps, {seconds} seconds, every {every}")
            if not (isinstance(state, State) or (state is None and done == 0)):
                raise TypeError(f"{type(state).__name__} is no state after {done} time steps")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{found.path} is no checkpoint of a run: {error!r}") from None
        self.every = every
        if about.get("feddrift") != __version__:
            log.warning("%s was written by feddrift %s, this is %s", found.path, about.get("feddrift"), __version__)
        if done and all(beginning(path, done) is None for path in (part_of(self.path), self.path)):
            raise DataError(f"{found.path}: the record of its {done} time steps is missing")
        return _Start(done, state, inside, seconds)


@dataclass(frozen=True)
class _Start:
    """Where a run begins: after so many time steps, or inside the next."""

    done: int = 0
    state: State | None = None
    inside: Inside | None = None
    seconds: float = 0.0


def states(folder: Path) -> list[Path]:
    """The checkpoint folders of the runs below a folder."""
    if not os.path.isdir(folder):
        raise DataError(f"{folder} is no folder of records")
    return sorted(folder.resolve().rglob("*.state"))


def stopped(folder: Path) -> list[Path]:
    """The checkpoint folders of the runs below a folder that ended before their end."""
    return [state for state in states(folder) if not is_complete(state.with_suffix(".jsonl"))]


def reopened(state: Path) -> RecordedRun:
    """The run of a checkpoint folder, ready to go on."""
    found = list(checkpoint.Folder(state).newest_first())
    whole = [c for c in found if isinstance(c, checkpoint.Checkpoint)]
    if not whole:
        why = found[0] if found else "there is none"
        raise DataError(f"cannot resume {state.stem}: no checkpoint is whole ({why}); run it again")
    config, cwd = whole[0].about.get("config"), str(whole[0].about.get("cwd"))
    if not isinstance(config, dict):
        raise DataError(f"{whole[0].path} is no checkpoint of a run: it has no configuration")
    with chdir(cwd) if os.path.isdir(cwd) else nullcontext():
        run = RecordedRun(RunConfig.checked(**config), state.parent, resume=True)
    if run.checkpoints.path != state:
        raise DataError(
            f"cannot resume {state.stem}: its data, or the defaults of its method, have changed since; it would be "
            f"{run.path.stem} now: run it again"
        )
    return run


def _header(config: RunConfig, stream: Stream, algorithm: Algorithm, local: Local) -> dict[str, Any]:
    return {
        "stream": config.stream,
        "algorithm": config.algorithm,
        "settings": algorithms.settings(algorithm),
        "overrides": config.overrides(stream),
        "seed": config.seed,
        "local": asdict(local),
        "engine": config.engine,
        "n_steps": stream.n_steps,
        "n_clients": stream.n_clients,
        "clients": list(stream.clients),
        "concepts": None if stream.concepts is None else stream.concepts.tolist(),
        "same": {str(k): v for k, v in stream.same.items()},
        "versions": _versions(),
        "device": str(jax.devices()[0].device_kind),
        "started": datetime.now(UTC).isoformat(),
    }


def _lines(step: Step, stream: Stream) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    def concept(t: int, c: int) -> int | None:
        return None if stream.concepts is None else int(stream.concepts[t, c])

    model, drifted = step.model.tolist(), step.drifted.tolist()
    rows = [
        {
            "t": step.tau,
            "c": c,
            "accuracy": float(step.accuracy[c]) if step.tested[c] else None,
            "tested": int(step.tested[c]),
            "concept": concept(step.tau, c),
            "next_concept": concept(step.tau + 1, c),
            "model": model[c],
            "n_models": len(step.state.models),
            "drift": drifted[c],
            "models_sent": int(step.sent[c]) if step.sent[c].is_integer() else round(float(step.sent[c]), 6),
        }
        for c in range(stream.n_clients)
    ]
    events = [{"t": step.tau, "event": e.kind, "model": e.model, "cause": dict(e.cause)} for e in step.events]
    return rows, events


def _versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy", "scipy")}
    return {"feddrift": __version__, "python": platform.python_version(), **packages}
