"""One frozen configuration per run, from names to a record."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from feddrift import __version__, algorithms, engines, streams
from feddrift.background import in_background
from feddrift.errors import ConfigError, shown
from feddrift.nets import default_net
from feddrift.record import Writer, file_name
from feddrift.run import Step, run
from feddrift.types import Algorithm, Local, Stream

TRAINING = ("rounds", "steps", "batch", "lr")
MAX_SEEDS = 10_000


class RunConfig(BaseModel):
    """What to run; what is left out is the stream's own setting, which for the paper's streams is the paper's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stream: str = Field(description="a name from `feddrift list`, or folder:DIR for your own data")
    algorithm: str = Field(description="a name from `feddrift list`")
    settings: dict[str, Any] = Field(default={}, description="hyper-parameters of the algorithm, e.g. delta=0.1")
    seed: int = Field(default=0, ge=0, lt=2**63, description="of initial models and minibatches")
    rounds: int | None = Field(default=None, ge=1, le=1_000_000, description="R, communication rounds per time step")
    steps: int | None = Field(default=None, ge=1, le=1_000_000, description="K, local steps per round")
    batch: int | None = Field(default=None, ge=1, le=100_000, description="B, minibatch size")
    lr: float | None = Field(default=None, gt=0, le=1e6, description="eta, step size")
    pattern: str | None = Field(
        default=None,
        description="drift pattern: a name (Y, F, R0..R4), a file of integers, or random:every=2,concepts=4",
    )
    engine: str = Field(default="simulator", description="simulator, or reference")
    data_dir: Path | None = Field(default=None, description="where data files lie; else $FEDDRIFT_DATA, else a cache")
    weights: Path | None = Field(
        default=None, description="of a ResNet-18, for streams of pictures: torchvision's file"
    )
    label: str = Field(default="label", description="the label column of folder:DIR")

    @field_validator("seed", *TRAINING, mode="before")
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
        return streams.stream(
            self.stream, seed=self.seed, pattern=self.pattern, data_dir=self.data_dir, label=self.label
        )

    def resolve(self, stream: Stream) -> tuple[Algorithm, Local]:
        """The algorithm and training settings that the names stand for on this stream."""
        engines.engine(self.engine)
        algorithm = algorithms.algorithm(self.algorithm, stream, **self.settings)
        if getattr(algorithm, "needs_truth", False) and stream.concepts is None:
            raise ConfigError(f"{self.algorithm} needs a stream whose true concepts are known, {self.stream} has none")
        given = {name: getattr(self, name) for name in TRAINING if getattr(self, name) is not None}
        return algorithm, replace(stream.local, **given)

    def overrides(self, stream: Stream) -> dict[str, Any]:
        """The run options that differ from the stream's own."""
        given = {name: getattr(self, name) for name in TRAINING}
        found = {k: v for k, v in given.items() if v is not None and v != getattr(stream.local, k)}
        if self.pattern is not None and self.pattern != streams.STREAMS[self.stream].pattern:
            found["pattern"] = self.pattern
            if os.path.isfile(self.pattern):  # two files may share a name
                digest = hashlib.sha256(Path(self.pattern).read_bytes()).hexdigest()[:8]
                found["pattern"] = f"{Path(self.pattern).name}@{digest}"
        if self.stream.startswith("folder:"):  # what the files held may change under the same name
            found["data"] = hashlib.sha256(stream.x.tobytes() + stream.y.tobytes()).hexdigest()[:8]
            if self.label != "label":
                found["label"] = self.label
        if self.weights is not None:
            try:
                found["weights"] = hashlib.sha256(self.weights.read_bytes()).hexdigest()[:8]
            except (OSError, ValueError) as error:  # or a name that no file can have
                reason = getattr(error, "strerror", None) or error
                raise ConfigError(f"cannot read the weights {self.weights}: {reason}") from None
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
    """A run with its record below `out`: iterate over it to run; `path` is the record once it is done."""

    def __init__(self, config: RunConfig, out: Path) -> None:
        self.config = config
        self.stream = config.load()
        self.algorithm, self.local = config.resolve(self.stream)
        self.net = default_net(self.stream, config.weights)
        self.header = _header(config, self.stream, self.algorithm, self.local)
        self.out, self.path = out, out / f"{file_name(self.header)}.jsonl"

    def __iter__(self) -> Iterator[Step]:
        """Each time step once it is trained, tested and written."""
        with Writer(self.out, self.header) as writer:
            steps = run(
                self.stream, self.algorithm, net=self.net, engine=self.config.engine, local=self.local,
                seed=self.config.seed,
            )  # fmt: skip
            for step in in_background(steps):
                writer.step(*_lines(step, self.stream))
                yield step


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
