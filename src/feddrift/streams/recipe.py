"""Recipes of composed streams: base data, label shares, concept maps, and a drift pattern."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from feddrift.errors import (
    ConfigError,
    DataError,
    FeddriftError,
    describe_validation_error,
    safe_repr,
    unknown_name_error,
)
from feddrift.streams import patterns
from feddrift.streams.maps import Map, parse_maps
from feddrift.types import Ints, Local

OPTIONS = ("components", "rows", "shares", "fixed", "group_share")  # options after a name, as in NAME:components=32
SMALL_NET = "mlp:28"  # the default net on components
NUMERIC_FIELDS = ("clients", "steps", "rows", "components", "rounds", "lr", "group_share", "burst_share")

_DIRICHLET = re.compile(r"dirichlet\(\s*([0-9.]{1,10})\s*,\s*([0-9]{1,6})\s*\)")
_OPTION_SEPARATOR = re.compile(r",(?![^(]*\))")  # a comma outside of parentheses

Rows = tuple[tuple[int, ...], ...]


class Recipe(BaseModel):
    """A recipe of a composed stream; its fields are the keys of a FILE.toml."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: Literal["mnist", "fashion", "cifar10", "sea"] = Field(description="the base data that rows are drawn from")
    concepts: tuple[str, ...] = Field(min_length=1, description="the maps of concepts 0, 1, ..., such as swap(1,2)")
    pattern: str | Rows = Field(
        description="Y, F, R0 .. R4, R (one of these by seed), random:every=2,concepts=4, or rows such as 0011"
    )
    clients: int | None = Field(
        default=None, ge=1, le=100_000, description="number of clients of a random pattern, by default 10"
    )
    steps: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description="number of time steps T of a random pattern, by default 10, without the step that only tests",
    )
    rows: int = Field(default=500, ge=1, le=100_000, description="rows of each cell; with dirichlet, their mean number")
    shares: str = Field(default="even", description="shares of the classes: even, or dirichlet(alpha,least)")
    components: int | None = Field(
        default=None, ge=1, le=3072, description="number of principal components that replace the pixels of pictures"
    )
    fixed: bool = Field(default=False, description="each step repeats the client's rows, with labels of its concept")
    mixed: bool = Field(
        default=False, description="within its first cell, a new concept gradually replaces the previous one"
    )
    over_time: tuple[str, ...] = Field(
        default=(), description="maps of all rows at steps 0, 1, ...; later steps use the last one"
    )
    group_share: float = Field(
        default=0.0, ge=0, le=1, description="share of each cell that is group 0; only its rows have concepts"
    )
    group_map: str = Field(default="keep", description="the map of group 0")
    burst_share: float = Field(default=0.0, ge=0, le=1, description="share of all cells that burst_map changes")
    burst_map: str = Field(default="noise(0.4)", description="the map of these cells; their concept does not change")
    rounds: int | None = Field(
        default=None, ge=1, le=1_000_000, description="R, by default 20 for pictures and 100 for sea"
    )
    lr: float | None = Field(default=None, gt=0, le=1e6, allow_inf_nan=False, description="learning rate eta")
    net: str | None = Field(default=None, description=f"the net, as for --net; by default {SMALL_NET} on components")

    @field_validator(*NUMERIC_FIELDS, mode="before")
    @classmethod
    def _refuse_bool(cls, value: Any) -> Any:
        if isinstance(value, bool):  # Python treats true as 1
            raise ValueError(f"must be a number, got {value}")
        return value

    @field_validator("pattern", mode="before")
    @classmethod
    def _parse_pattern(cls, value: Any) -> Any:
        if isinstance(value, str):
            return value
        legal = "a name, random:..., or rows of concepts such as 0011, one for each step, all of one length"
        if not isinstance(value, list | tuple) or not all(isinstance(row, str | list | tuple) for row in value):
            raise ValueError(f"expected {legal}, got {safe_repr(value)}")
        tokens = [[*row.replace(" ", "")] if isinstance(row, str) else [safe_repr(k) for k in row] for row in value]
        if not all(re.fullmatch("[0-9]{1,6}", token) for row in tokens for token in row):
            raise ValueError(f"concepts are whole numbers from 0: expected {legal}")
        if len(tokens) < 2 or len({len(row) for row in tokens}) != 1 or not tokens[0]:
            raise ValueError(f"expected {legal}, and at least 2, one to train and one to test")
        return tuple(tuple(int(token) for token in row) for row in tokens)

    @model_validator(mode="after")
    def _check_parts(self) -> Recipe:
        try:
            for conflict in self._find_conflicts():
                raise ValueError(conflict)
            self.build_concept_ids(0, 0)  # checks the pattern
        except FeddriftError as error:
            raise ValueError(str(error)) from None
        return self

    def _find_conflicts(self) -> Iterator[str]:
        """Yield a sentence for each conflict between fields."""
        kinds = [{map_.kind for map_ in maps} for maps in self.concept_maps]
        others = [self.read_maps(text) for text in (self.group_map, self.burst_map, *self.over_time)]
        if any(map_.kind in ("show", "plane") for maps in others for map_ in maps):
            yield "show and plane are maps for concepts only"
        if any(sum(map_.kind == "show" for map_ in maps) > 1 for maps in self.concept_maps):
            yield "a concept may have only one show, such as show(1,2)"
        if any("show" in concept_kinds for concept_kinds in kinds) and (self.dirichlet or self.fixed):
            yield "show chooses rows itself, so shares must be even and fixed false"
        if self.base == "sea" and not all("plane" in concept_kinds for concept_kinds in kinds):
            yield "each concept of the base sea needs a plane, such as plane(8)"
        if self.base == "sea" and (self.dirichlet or self.components):
            yield "the base sea has no pictures: shares must be even, and components left out"
        if self.dirichlet and self.dirichlet[1] * self.n_classes > self.rows:
            min_rows = self.dirichlet[1]
            yield f"{min_rows} rows of each of {self.n_classes} classes must fit into a cell, got rows = {self.rows}"
        if self.group_map != "keep" and not self.group_share:
            yield f"group_map needs a group_share above 0, got group_map = {self.group_map}"

    @property
    def n_classes(self) -> int:
        """The number of classes of the base data."""
        return 2 if self.base == "sea" else 10

    @property
    def concept_maps(self) -> tuple[tuple[Map, ...], ...]:
        """The maps of each concept."""
        return tuple(self.read_maps(text) for text in self.concepts)

    def read_maps(self, text: str) -> tuple[Map, ...]:
        """Parse maps for the base data of this recipe."""
        return parse_maps(text, self.base, self.n_classes)

    @property
    def dirichlet(self) -> tuple[float, int] | None:
        """Alpha and the minimum number of rows of a class in a cell; None if shares are even."""
        if self.shares == "even":
            return None
        match = _DIRICHLET.fullmatch(self.shares)
        if match is None or not match[1].strip(".") or match[1].count(".") > 1 or not 0.01 <= float(match[1]) <= 1e6:
            raise ConfigError(
                f"shares must be even or dirichlet(alpha,least) with alpha from 0.01, such as dirichlet(0.5,2), "
                f"got '{self.shares}'"
            )
        return float(match[1]), int(match[2])

    @property
    def local(self) -> Local:
        """The training settings of the stream."""
        pictures = self.base != "sea"
        lr = 1e-3 if pictures and not self.components else 1e-2
        return Local(rounds=self.rounds or (20 if pictures else 100), lr=self.lr or lr)

    def build_concept_ids(self, seed: int, data_seed: int, spec: str | None = None) -> Ints:
        """Return [T + 1, c], the concept of each client at each time step.

        Args:
            seed: The seed of random patterns; for R, it chooses one of R0 to R4.
            data_seed: The data seed; values other than 0 draw other random patterns.
            spec: A pattern, as for `build_pattern`; None: the pattern of the recipe.

        Raises:
            ConfigError: The pattern is unknown, or does not fit the recipe.
        """
        pattern = self.pattern if spec is None else spec
        if pattern == "R":
            pattern = "random:every=2,concepts=4" if data_seed else f"R{seed % 5}"
        if isinstance(pattern, str):
            if spec is None and pattern not in patterns.SHIPPED and not pattern.startswith("random:"):
                raise unknown_name_error(
                    "pattern", pattern, [*patterns.SHIPPED, "R", "random:every=2,concepts=4", "rows"]
                )
            n_steps, n_clients = self.pattern_shape
            ids = patterns.build_pattern(pattern, seed, data_seed, clients=n_clients, steps=n_steps)
        else:
            ids = np.array(pattern, dtype=np.int64)
        if spec is None:
            for key, value, legal in (("clients", self.clients, ids.shape[1]), ("steps", self.steps, len(ids) - 1)):
                if value not in (None, legal):
                    raise ConfigError(f"{key} must be left out or {legal} as in the pattern, got {value}")
        if ids.max() >= len(self.concepts):
            name = pattern if isinstance(pattern, str) else "in rows"
            raise ConfigError(
                f"the pattern {name} uses concept {ids.max()}, but there are {len(self.concepts)} concepts"
            )
        return ids

    @property
    def pattern_shape(self) -> tuple[int, int]:
        """The number of time steps T and of clients of the pattern."""
        if isinstance(self.pattern, str):
            return self.steps or 10, self.clients or 10
        return len(self.pattern) - 1, len(self.pattern[0])


def build_recipe(source: str, values: dict[str, Any]) -> Recipe:
    """Build a recipe.

    Args:
        source: The name of the file or stream, for messages.
        values: The fields.

    Raises:
        ConfigError: A field is unknown or has an illegal value.
    """
    for key in values:
        if key not in Recipe.model_fields:
            raise ConfigError(f"{source}: {unknown_name_error('key', key, Recipe.model_fields)}")
    try:
        return Recipe(**values)
    except ValidationError as error:
        raise ConfigError(f"{source}: {describe_validation_error(error)}") from None


def read_recipe(path: str) -> Recipe:
    """Read the recipe of a FILE.toml.

    Raises:
        ConfigError: A key is unknown or has an illegal value.
        DataError: The file cannot be read.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:  # missing, not text, not TOML
        raise DataError(f"{path} cannot be read as TOML: {getattr(error, 'strerror', None) or error}") from None
    return build_recipe(path, values)


def apply_options(name: str, recipe: Recipe, text: str) -> Recipe:
    """Return a recipe with the options that follow its name.

    Args:
        name: The name of the composed stream, for messages.
        recipe: The recipe.
        text: The options, such as ``components=32,fixed=true``.

    Raises:
        ConfigError: An option is unknown or has an illegal value.
    """
    values: dict[str, Any] = {}
    for option in _OPTION_SEPARATOR.split(text):
        key, equals, value = (part.strip() for part in option.partition("="))
        if key not in OPTIONS:
            raise unknown_name_error(f"option of {name}", key, OPTIONS)
        if not equals or key in values:
            raise ConfigError(f"options of {name} are KEY=VALUE, each once, such as components=32, got '{text}'")
        values[key] = value
    return build_recipe(f"{name}:{text}", recipe.model_dump() | values)
