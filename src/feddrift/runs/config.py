"""One frozen configuration per run: from names to a stream, an algorithm and the conditions of its clients."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from feddrift import algorithms, engines, streams
from feddrift.data import Stream
from feddrift.engines.conditions.conditions import Conditions
from feddrift.errors import ConfigError, DataError, problem
from feddrift.nets import default_net, named_net
from feddrift.router import Route
from feddrift.runs.poison import Poison, flipped, read_poison
from feddrift.runs.stream_fingerprint import digest_of, in_order
from feddrift.streams.patterns import SHIPPED, table
from feddrift.tables.times import read_every
from feddrift.training import Precision
from feddrift.types import Algorithm, Average, Bools, Local, Net

TRAINING = ("rounds", "steps", "batch", "lr", "average", "balance", "precision")
TABLE = ("client", "time", "every", "missing", "categories", "scale")
MAX_SEEDS = 10_000


class RunConfig(BaseModel):
    """What to run; what is left out is the stream's own setting, which for the paper's streams is the paper's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stream: str = Field(
        description="a name from `feddrift list`, a table FILE.csv, a recipe FILE.toml, folder:DIR, or your own "
        "package.module:make"
    )
    algorithm: str = Field(
        default=algorithms.RECOMMENDED,
        description="a name from `feddrift list`, or your own package.module:Name; "
        f"left out: {algorithms.RECOMMENDED}, which needs no settings",
    )
    settings: dict[str, Any] = Field(default={}, description="hyper-parameters of the algorithm, e.g. delta=0.1")
    seed: int = Field(default=0, ge=0, lt=2**63, description="of initial models and minibatches")
    data_seed: int | Literal["seed"] = Field(
        default=0,
        description="any but 0 draws other data and random patterns of streams that are made; seed: each seed its own",
    )
    rounds: int | None = Field(default=None, ge=1, le=1_000_000, description="R, communication rounds per time step")
    steps: int | None = Field(default=None, ge=1, le=1_000_000, description="K, local steps per round")
    batch: int | None = Field(default=None, ge=1, le=100_000, description="B, minibatch size")
    lr: float | None = Field(default=None, gt=0, le=1e6, allow_inf_nan=False, description="eta, step size")
    average: Average | None = Field(
        default=None, description="how updates become one model: mean, or against liars median, trimmed, clipped"
    )
    balance: bool | None = Field(
        default=None, description="train as if all classes in a client's data were equally frequent"
    )
    precision: Precision | None = Field(
        default=None, description="of matrix products in training on a GPU: float32 (the default), or tf32, quicker"
    )
    participation: float = Field(default=1.0, gt=0, le=1, description="the share of clients that train in a round")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="the chance of a client to miss a time step")
    trace: Path | None = Field(
        default=None,
        description="a file of who is in reach: a row of 1 and 0 per time step, a column per client",
    )
    poison: str | None = Field(
        default=None,
        description="clients that do harm: flip:0,3 (wrong labels), garbage:0,3 (noise for models), claims:0 (rows "
        "that it has not), alarms:0 (every second time step), glue:0 (confirms all merges), losses:0 (random counts), "
        "or several, joined by +",
    )
    defend: bool = Field(
        default=False,
        description="bound what one client can do to the others: its weight, its alarms, its say in merges",
    )
    rest: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="after so many time steps unused, a model is scored only where all others do badly; 0: never rest",
    )
    route: Route = Field(
        default="none",
        description="row, running or batch: each input, those so far, or all at once choose w"
        "hich model votes at a test, where it has paid",
    )
    pattern: str | None = Field(
        default=None,
        description="drift pattern: a name (Y, F, R0..R4), a file of integers, or random:every=2,concepts=4",
    )
    engine: str = Field(default="simulator", description="simulator, reference, or your own package.module:Name")
    data_dir: Path | None = Field(default=None, description="where data files lie; else $FEDDRIFT_DATA, else a cache")
    weights: Path | None = Field(
        default=None, description="of a ResNet-18, for streams of pictures: torchvision's file"
    )
    net: str | None = Field(
        default=None,
        description="linear, mlp:64,64 (its hidden layers), or your own package.module:make; else the stream's",
    )
    label: str = Field(default="label", description="the label column of FILE.csv or folder:DIR")
    client: str | None = Field(default=None, description="of a table FILE.csv: the column of the clients")
    time: str | None = Field(default=None, description="of a table: the column of times")
    every: str | None = Field(
        default=None,
        description="of a table: how long a time step is, year, quarter, month, week, or a number (of days, or of the "
        "units of the column); else each time is a step",
    )
    missing: Literal["drop", "mean", "indicator"] | None = Field(
        default=None,
        description="of a table: rows without a value: drop them, fill in the first step's mean, or that and an "
        "indicator, a 0/1 feature; else they are refused",
    )
    categories: Literal["onehot"] | None = Field(
        default=None, description="of a table: onehot makes a 0/1 column of each word"
    )
    scale: bool = Field(
        default=True, description="of a table: scale numbers by mean and standard deviation of the first time step"
    )

    @field_validator("seed", "rounds", "steps", "batch", "lr", "participation", "dropout", "rest", mode="before")
    @classmethod
    def _is_no_bool(cls, value: Any) -> Any:
        if isinstance(value, bool):  # Python would take true for 1
            raise ValueError("input should be a number")
        return value

    @field_validator("data_seed", mode="before")
    @classmethod
    def _is_a_data_seed(cls, value: Any) -> Any:
        if isinstance(value, str) and value.isdecimal() and len(value) < 11:
            value = int(value)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value != "seed" and not (whole and 0 <= value < 2**32):
            raise ValueError(f"input should be a whole number from 0 to {2**32 - 1}, or seed")
        return value

    @field_validator("every", mode="before")
    @classmethod
    def _is_a_length(cls, value: Any) -> Any:
        return None if read_every(value) is None else str(value)

    @classmethod
    def checked(cls, **values: Any) -> RunConfig:
        """The configuration, or one sentence that says which value is not legal."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(problem(error)) from None

    def load(self, clients: Sequence[str] = ()) -> Stream:
        """The stream of this run, these clients first, with the labels flipped that `poison` says."""
        engines.engine(self.engine)  # wrong names first: data may take a while
        algorithms.algorithm(self.algorithm, **self.settings)
        found = streams.stream(
            self.stream,
            seed=self.seed,
            data_seed=self._drawn(),
            pattern=self.pattern,
            data_dir=self.data_dir,
            label=self.label,
            **{name: getattr(self, name) for name in TABLE},
        )
        stream = in_order(found, clients)
        return flipped(stream, self._poison(stream).flip)

    def stream_key(self) -> tuple[Any, ...]:
        """Return a key that is equal for configs whose `load()` gives the same stream.

        The seed is part of it only where the pattern of drifts may depend on it.
        """
        pattern = self.pattern or streams.own_pattern(self.stream)
        fixed_pattern = pattern is not None and (pattern in SHIPPED or os.path.isfile(pattern))
        depends_on_seed = not fixed_pattern and (self.pattern is not None or streams.is_made(self.stream))
        names = ("stream", "pattern", "data_dir", "label", "poison", *TABLE)
        values = [getattr(self, name) for name in names]
        return (*values, self._drawn(), self.seed if depends_on_seed else None)

    def _drawn(self) -> int:
        """The data seed; where it follows the seed, streams that are not made stay what they are."""
        if self.data_seed != "seed":
            return self.data_seed
        return self.seed if streams.is_made(self.stream) else 0

    def conditions(self, stream: Stream) -> Conditions:
        """Who is in reach, takes part and lies."""
        poison = self._poison(stream)
        conditions = Conditions(
            self.participation,
            self.dropout,
            None if self.trace is None else read_trace(self.trace),
            poison.garbage,
            self.rest,
            self.route,
            self.defend,
            poison.lies,
        )
        conditions.in_reach(stream.counts[:-1], self.seed)  # a trace that does not fit shows now
        return conditions

    def _poison(self, stream: Stream) -> Poison:
        return Poison() if self.poison is None else read_poison(self.poison, stream.n_clients)

    def resolve(self, stream: Stream) -> tuple[Algorithm, Local]:
        """The algorithm and training settings that the names stand for on this stream."""
        engines.engine(self.engine)
        algorithm = algorithms.algorithm(self.algorithm, stream, **self.settings)
        if getattr(algorithm, "needs_truth", False) and stream.concepts is None:
            raise ConfigError(f"{self.algorithm} needs a stream whose true concepts are known, {self.stream} has none")
        training = {name: getattr(self, name) for name in TRAINING if getattr(self, name) is not None}
        return algorithm, replace(stream.local, **training)

    def find_net(self, stream: Stream) -> Net:
        """The net, the stream's own unless another is named."""
        if self.net is not None and self.weights is not None:
            raise ConfigError(f"weights are for the net of a stream of pictures: leave out net={self.net}")
        return default_net(stream, self.weights) if self.net is None else named_net(self.net, stream)

    def overrides(self, stream: Stream) -> dict[str, Any]:
        """The run options that differ from the stream's own."""
        training = {name: getattr(self, name) for name in TRAINING}
        overrides = {k: v for k, v in training.items() if v is not None and v != getattr(stream.local, k)}
        if self.pattern is not None and self.pattern != streams.own_pattern(self.stream):
            overrides["pattern"] = self.pattern
            if os.path.isfile(self.pattern):  # two files may share a name
                digest = hashlib.sha256(Path(self.pattern).read_bytes()).hexdigest()[:8]
                overrides["pattern"] = f"{Path(self.pattern).name}@{digest}"
        if not streams.listed(self.stream):  # what the files held may change under the same name
            overrides["data"] = streams.recipe_digest(self.stream) or digest_of(stream)
            for name in ("label", *TABLE):
                if getattr(self, name) != RunConfig.model_fields[name].default:
                    overrides[name] = getattr(self, name)
        if self.weights is not None:
            try:
                overrides["weights"] = hashlib.sha256(self.weights.read_bytes()).hexdigest()[:8]
            except (OSError, ValueError) as error:  # or a name that no file can have
                reason = getattr(error, "strerror", None) or error
                raise ConfigError(f"cannot read the weights {self.weights}: {reason}") from None
        if self.net is not None:
            overrides["net"] = self.net
        if self.data_seed and (self.data_seed != "seed" or streams.is_made(self.stream)):
            overrides["data_seed"] = self.data_seed
        for name in ("participation", "dropout", "rest", "route", "defend"):
            if getattr(self, name) != RunConfig.model_fields[name].default:
                overrides[name] = getattr(self, name)
        if self.trace is not None:
            digest = hashlib.sha256(read_trace(self.trace).tobytes()).hexdigest()[:8]
            overrides["trace"] = f"{self.trace.name}@{digest}"
        if self.poison is not None:
            overrides["poison"] = str(self._poison(stream))
        if self.engine != "simulator":
            overrides["engine"] = self.engine
        return overrides


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


def read_trace(path: str | Path) -> Bools:
    """A file of 1 (in reach) and 0: a row per time step, a column per client."""
    try:
        rows = table(Path(path).read_text(encoding="utf-8-sig"), f"trace {path}", "expected 1 for in reach or 0")
    except (OSError, ValueError) as error:  # not there, or not text
        raise DataError(f"trace {path} cannot be read as text: {getattr(error, 'strerror', None) or error}") from None
    if not len(rows):
        raise DataError(f"trace {path}: needs a row per time step, got none")
    if rows.max() > 1:
        raise DataError(f"trace {path}: expected 1 for in reach or 0, got '{rows.max()}'")
    return rows.astype(bool)
