"""The configuration of a run: names and options, from which its stream, algorithm and conditions are built."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_serializer,
)

from feddrift import algorithms, engines, streams
from feddrift.data import Stream
from feddrift.engines.conditions.conditions import DEFEND_VALUES, Conditions
from feddrift.errors import ConfigError, DataError, describe_validation_error, safe_repr
from feddrift.nets import default_net, named_net
from feddrift.router import Route
from feddrift.runs.poison import ByzantineClients, parse_poison, poison_stream
from feddrift.runs.stream_fingerprint import hash_stream, reorder_clients
from feddrift.streams.patterns import SHIPPED, parse_table
from feddrift.tables.arrange import format_names, parse_names
from feddrift.tables.times import parse_every
from feddrift.training import Precision
from feddrift.types import Algorithm, Average, Bools, Local, Net


def _check_defend(value: Any, check_type: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check_type(value)
    except ValidationError:
        raise ValueError(f"must be {DEFEND_VALUES}, got {safe_repr(value)}") from None


DefendOption = Annotated[bool | Literal["robust"], WrapValidator(_check_defend)]
TRAINING_OPTIONS = ("rounds", "steps", "batch", "lr", "average", "balance", "precision")
TABLE_OPTIONS = ("client", "time", "every", "missing", "categories", "scale", "drop", "features")
MAX_SEEDS = 10_000


class RunConfig(BaseModel):
    """The options of a run; an option that is None has the default of the stream."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stream: str = Field(
        description="a name from `feddrift list`, a table FILE.csv or FILE.parquet, a recipe FILE.toml, folder:DIR, or "
        "your own package.module:make"
    )
    algorithm: str = Field(
        default=algorithms.RECOMMENDED,
        description="a name from `feddrift list`, or your own package.module:Name; "
        f"default: {algorithms.RECOMMENDED}, which needs no settings",
    )
    settings: dict[str, Any] = Field(default={}, description="hyper-parameters of the algorithm, e.g. delta=0.1")
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of initial models and minibatches")
    data_seed: int | Literal["seed"] = Field(
        default=0,
        description="seed of synthetic data and random patterns; 0: the published data; seed: the seed of the run",
    )
    rounds: int | None = Field(default=None, ge=1, le=1_000_000, description="R, communication rounds per time step")
    steps: int | None = Field(default=None, ge=1, le=1_000_000, description="K, local steps per round")
    batch: int | None = Field(default=None, ge=1, le=100_000, description="B, minibatch size")
    lr: float | None = Field(default=None, gt=0, le=1e6, allow_inf_nan=False, description="eta, step size")
    average: Average | None = Field(
        default=None,
        description="how updates are averaged: mean, or median, trimmed or clipped against Byzantine clients",
    )
    balance: bool | None = Field(
        default=None, description="train as if all classes in a client's data were equally frequent"
    )
    precision: Precision | None = Field(
        default=None,
        description="precision of matrix products in training on a GPU: float32 (the default), or the faster tf32",
    )
    participation: float = Field(default=1.0, gt=0, le=1, description="share of the clients that train in a round")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="probability that a client misses a time step")
    trace: Path | None = Field(
        default=None,
        description="file of the reachable clients: 1 or 0 in a row per time step and a column per client",
    )
    poison: str | None = Field(
        default=None,
        description="Byzantine clients: flip:0,3 (wrong labels), relabel:0 (the first class becomes the last), "
        "backdoor:0 (rows with a trigger), garbage:0 (noise instead of models), reverse:0 (opposite updates), "
        "collude:0,3 (replace the mean), stale:0 (return what they received), claims:0 (false row counts), alarms:0 "
        "(an alarm in every second time step), glue:0 (confirms all merges), losses:0 (random error counts), or "
        "several, joined by +",
    )
    defend: DefendOption = Field(
        default=False,
        description="limit the influence of each client on others: robust limits its weight, its updates, its alarms "
        "and its part in merges; true does not limit updates, as in version 0.3",
    )
    rest: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="time steps without use after which a model is scored only where all others score badly; "
        "0: always scored",
    )
    share_from: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="number of clients that must have trained a model before it is sent to all; until then only they, "
        "clients with such models, and badly served clients receive it; 0: off",
    )
    route: Route = Field(
        default="none",
        description="row, running or batch: at a test, each input, the inputs so far or all inputs choose the voting "
        "model, once labels have shown that this saves mistakes",
    )
    pattern: str | None = Field(
        default=None,
        description="drift pattern: a name (Y, F, R0..R4), a file of integers, or random:every=2,concepts=4",
    )
    engine: str = Field(default="simulator", description="simulator, reference, or your own package.module:Name")
    data_dir: Path | None = Field(
        default=None, description="folder of data files; default: $FEDDRIFT_DATA, else a cache"
    )
    weights: Path | None = Field(
        default=None, description="for streams of pictures: torchvision's file with the weights of a ResNet-18"
    )
    net: str | None = Field(
        default=None,
        description="linear, mlp:64,64 (its hidden layers), or your own package.module:make; default: the stream's net",
    )
    label: str = Field(
        default="label",
        description="name of the label column of a table or of folder:DIR; for a table also an expression: "
        "'delay > 15' (also <, <=, >=, ==, !=) or 'carrier in (AA, DL)' makes the labels yes and no",
    )
    client: str | None = Field(default=None, description="tables only: name of the client column")
    time: str | None = Field(default=None, description="tables only: name of the column of times")
    every: str | None = Field(
        default=None,
        description="tables only: length of a time step: year, quarter, month, week, or a number (of days, or of units "
        "of the column); default: each distinct time is a time step",
    )
    missing: Literal["drop", "mean", "indicator"] | None = Field(
        default=None,
        description="tables only: rows with a missing value: drop them, fill in the mean of the first time step, or "
        "also add a 0/1 indicator feature; default: they are an error",
    )
    categories: Literal["onehot"] | None = Field(
        default=None, description="tables only: onehot makes a 0/1 feature of each word; default: words are an error"
    )
    scale: bool = Field(
        default=True,
        description="tables only: standardise numbers by mean and standard deviation of the first time step",
    )
    drop: tuple[str, ...] = Field(default=(), description="tables only: columns that are not features")
    features: tuple[str, ...] | None = Field(
        default=None,
        description="tables only: the columns that are features, with commas between them; default: all others",
    )

    @field_validator(
        "seed", "rounds", "steps", "batch", "lr", "participation", "dropout", "rest", "share_from", mode="before"
    )
    @classmethod
    def _reject_bool(cls, value: Any) -> Any:
        if isinstance(value, bool):  # in Python, True is also the number 1
            raise ValueError(f"must be a number, got {value}")
        return value

    @field_validator("data_seed", mode="before")
    @classmethod
    def _check_data_seed(cls, value: Any) -> Any:
        if isinstance(value, str) and value.isdecimal() and len(value) < 11:
            value = int(value)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if value != "seed" and not (is_whole and 0 <= value < 2**32):
            raise ValueError(f"must be a whole number from 0 to {2**32 - 1}, or seed, got {safe_repr(value)}")
        return value

    @field_validator("every", mode="before")
    @classmethod
    def _check_step_length(cls, value: Any) -> Any:
        return None if parse_every(value) is None else str(value)

    @field_validator("drop", "features", mode="before")
    @classmethod
    def _parse_names(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None:
            return () if info.field_name == "drop" else None
        return parse_names(str(info.field_name), value)

    @model_serializer(mode="wrap")
    def _leave_out_new_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out options that earlier versions do not know, unless they are given."""
        values: dict[str, Any] = serialize(self)
        return {name: value for name, value in values.items() if name not in ("drop", "features") or value}

    @classmethod
    def from_values(cls, **values: Any) -> RunConfig:
        """Return the configuration with these values.

        Raises:
            ConfigError: If a name is unknown or a value is not allowed.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(describe_validation_error(error)) from None

    def load_stream(self, clients: Sequence[str] = ()) -> Stream:
        """Load the stream of this run; the option `poison` may change the data of some clients.

        Args:
            clients: Names of clients that come first, in this order; in an update, those of the replaced run.
        """
        engines.engine(self.engine)  # report unknown names before loading the data, which may take a while
        algorithms.algorithm(self.algorithm, **self.settings)
        loaded = streams.stream(
            self.stream,
            seed=self.seed,
            data_seed=self._resolve_data_seed(),
            pattern=self.pattern,
            data_dir=self.data_dir,
            label=self.label,
            **{name: getattr(self, name) for name in TABLE_OPTIONS},
        )
        stream = reorder_clients(loaded, clients)
        return poison_stream(stream, self._parse_poison(stream))

    def build_stream_key(self) -> tuple[Any, ...]:
        """Return a key that is equal for configs whose `load_stream()` gives the same stream.

        The key contains the seed only if the pattern of drifts may depend on it.
        """
        pattern = self.pattern or streams.find_own_pattern(self.stream)
        fixed_pattern = pattern is not None and (pattern in SHIPPED or os.path.isfile(pattern))
        depends_on_seed = not fixed_pattern and (self.pattern is not None or streams.is_synthetic(self.stream))
        names = ("stream", "pattern", "data_dir", "label", "poison", *TABLE_OPTIONS)
        values = [getattr(self, name) for name in names]
        return (*values, self._resolve_data_seed(), self.seed if depends_on_seed else None)

    def _resolve_data_seed(self) -> int:
        """Return the data seed as a number; 0 if it follows the seed and the stream is not synthetic."""
        if self.data_seed != "seed":
            return self.data_seed
        return self.seed if streams.is_synthetic(self.stream) else 0

    def build_conditions(self, stream: Stream) -> Conditions:
        """Return the conditions of the clients: reachability, participation and Byzantine behaviour."""
        poison = self._parse_poison(stream)
        conditions = Conditions(
            participation=self.participation,
            dropout=self.dropout,
            trace=None if self.trace is None else read_trace(self.trace),
            garbage=poison.garbage,
            rest=self.rest,
            share_from=self.share_from,
            route=self.route,
            defend=self.defend,
            lies=poison.behaviour,
        )
        conditions.check_algorithm(algorithms.algorithm(self.algorithm, **self.settings))
        conditions.draw_reachable(stream.counts[:-1], self.seed)  # raises an error if the trace has the wrong shape
        return conditions

    def _parse_poison(self, stream: Stream) -> ByzantineClients:
        return ByzantineClients() if self.poison is None else parse_poison(self.poison, stream.n_clients)

    def resolve_algorithm(self, stream: Stream) -> tuple[Algorithm, Local]:
        """Return the algorithm with its settings, and the training settings, for this stream."""
        engines.engine(self.engine)
        algorithm = algorithms.algorithm(self.algorithm, stream, **self.settings)
        if getattr(algorithm, "needs_truth", False) and stream.concepts is None:
            raise ConfigError(f"{self.algorithm} needs a stream with known true concepts, {self.stream} has none")
        training = {name: getattr(self, name) for name in TRAINING_OPTIONS if getattr(self, name) is not None}
        return algorithm, replace(stream.local, **training)

    def find_net(self, stream: Stream) -> Net:
        """Return the net with the configured name, else the stream's own."""
        if self.net is not None and self.weights is not None:
            raise ConfigError(f"weights are for the net of a stream of pictures: leave out net={self.net}")
        return default_net(stream, self.weights) if self.net is None else named_net(self.net, stream)

    def list_overrides(self, stream: Stream) -> dict[str, Any]:
        """Return the run options that differ from the stream's own, as they are written into the record's header."""
        training = {name: getattr(self, name) for name in TRAINING_OPTIONS}
        overrides = {k: v for k, v in training.items() if v is not None and v != getattr(stream.local, k)}
        if self.pattern is not None and self.pattern != streams.find_own_pattern(self.stream):
            overrides["pattern"] = self.pattern
            if os.path.isfile(self.pattern):  # two files may have the same name
                digest = hashlib.sha256(Path(self.pattern).read_bytes()).hexdigest()[:8]
                overrides["pattern"] = f"{Path(self.pattern).name}@{digest}"
        if not streams.is_in_catalogue(self.stream):  # the same name may have other data later
            overrides["data"] = streams.hash_recipe(self.stream) or hash_stream(stream)
            for name in ("label", *TABLE_OPTIONS):
                if getattr(self, name) != RunConfig.model_fields[name].default:
                    value = getattr(self, name)
                    overrides[name] = format_names(value) if isinstance(value, tuple) else value
        if self.weights is not None:
            try:
                overrides["weights"] = hashlib.sha256(self.weights.read_bytes()).hexdigest()[:8]
            except (OSError, ValueError) as error:  # ValueError: the name cannot be that of a file
                reason = getattr(error, "strerror", None) or error
                raise ConfigError(f"cannot read the weights {self.weights}: {reason}") from None
        if self.net is not None:
            overrides["net"] = self.net
        if self.data_seed and (self.data_seed != "seed" or streams.is_synthetic(self.stream)):
            overrides["data_seed"] = self.data_seed
        for name in ("participation", "dropout", "rest", "share_from", "route", "defend"):
            if getattr(self, name) != RunConfig.model_fields[name].default:
                overrides[name] = getattr(self, name)
        if self.trace is not None:
            digest = hashlib.sha256(read_trace(self.trace).tobytes()).hexdigest()[:8]
            overrides["trace"] = f"{self.trace.name}@{digest}"
        if self.poison is not None:
            overrides["poison"] = str(self._parse_poison(stream))
        if self.engine != "simulator":
            overrides["engine"] = self.engine
        return overrides

    checked = from_values  # names of these methods in version 0.3
    load = load_stream
    resolve = resolve_algorithm


def parse_seeds(text: str) -> list[int]:
    """Parse a range or a list of seeds.

    >>> parse_seeds("0-3"), parse_seeds("7,2")
    ([0, 1, 2, 3], [7, 2])
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last if dash else first)
        if not all(end.isdecimal() and len(end) < 20 for end in ends):
            raise ConfigError(f"seeds are a range such as 0-4 or a list such as 0,2,5, got '{text}'")
        if int(ends[1]) < int(ends[0]):
            raise ConfigError(
                f"a range of seeds goes from the lower to the higher one, got '{text}': write {last}-{first}"
            )
        if len(seeds) + int(ends[1]) - int(ends[0]) >= MAX_SEEDS:
            raise ConfigError(f"seeds are at most {MAX_SEEDS}, got '{text}'")
        seeds += range(int(ends[0]), int(ends[1]) + 1)
    return list(dict.fromkeys(seeds))


def read_trace(path: str | Path) -> Bools:
    """Read the reachable clients from a file with a row per time step and a column per client: 1 reachable, 0 not."""
    try:
        rows = parse_table(Path(path).read_text(encoding="utf-8-sig"), f"trace {path}", "expected 1 (reachable) or 0")
    except (OSError, ValueError) as error:  # the file is missing or not text
        raise DataError(f"trace {path} cannot be read as text: {getattr(error, 'strerror', None) or error}") from None
    if not len(rows):
        raise DataError(f"trace {path}: needs a row per time step, got none")
    if rows.max() > 1:
        raise DataError(f"trace {path}: expected 1 (reachable) or 0, got '{rows.max()}'")
    return rows.astype(bool)
