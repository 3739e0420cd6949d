"""What a composed stream is made of: base data, label shares, concept maps, and who has which concept when."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from feddrift.errors import ConfigError, DataError, FeddriftError, problem, safe_repr, unknown
from feddrift.streams import patterns
from feddrift.streams.maps import Map, parse
from feddrift.types import Ints, Local

OPTIONS = ("components", "rows", "shares", "fixed", "group_share")  # what may follow a name, NAME:components=32
SMALL_NET = "mlp:28"  # the usual net on components
NUMBERS = ("clients", "steps", "rows", "components", "rounds", "lr", "group_share", "burst_share")

_DIRICHLET = re.compile(r"dirichlet\(\s*([0-9.]{1,10})\s*,\s*([0-9]{1,6})\s*\)")
_COMMA = re.compile(r",(?![^(]*\))")  # outside of parentheses

Rows = tuple[tuple[int, ...], ...]


class Recipe(BaseModel):
    """A composed stream in words: the keys of a FILE.toml."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: Literal["mnist", "fashion", "cifar10", "sea"] = Field(description="what rows are drawn from")
    concepts: tuple[str, ...] = Field(min_length=1, description="the maps of concepts 0, 1, ..., such as swap(1,2)")
    pattern: str | Rows = Field(
        description="Y, F, R0 .. R4, R (one of these by seed), random:every=2,concepts=4, or rows such as 0011"
    )
    clients: int | None = Field(default=None, ge=1, le=100_000, description="how many, of random patterns; else 10")
    steps: int | None = Field(default=None, ge=1, le=100_000, description="T, likewise; one more only tests")
    rows: int = Field(default=500, ge=1, le=100_000, description="of a cell; with dirichlet of a cell in the mean")
    shares: str = Field(default="even", description="of the classes: even, or dirichlet(alpha,least)")
    components: int | None = Field(default=None, ge=1, le=3072, description="principal components instead of pictures")
    fixed: bool = Field(default=False, description="each step repeats the client's rows, with the step's labels")
    mixed: bool = Field(default=False, description="where a concept changes, more and more rows of the cell have it")
    over_time: tuple[str, ...] = Field(default=(), description="maps of all rows of step 0, 1, ...; the last one stays")
    group_share: float = Field(default=0.0, ge=0, le=1, description="of each cell: group 0, which alone has concepts")
    group_map: str = Field(default="keep", description="the map of group 0")
    burst_share: float = Field(default=0.0, ge=0, le=1, description="of all cells: those that burst_map befalls")
    burst_map: str = Field(default="noise(0.4)", description="what befalls them; their concept stays")
    rounds: int | None = Field(default=None, ge=1, le=1_000_000, description="R; else 20 for pictures, 100 for sea")
    lr: float | None = Field(default=None, gt=0, le=1e6, allow_inf_nan=False, description="eta")
    net: str | None = Field(default=None, description=f"as --net has it; else {SMALL_NET} on components")

    @field_validator(*NUMBERS, mode="before")
    @classmethod
    def _is_no_bool(cls, value: Any) -> Any:
        if isinstance(value, bool):  # Python would take true for 1
            raise ValueError(f"input should be a number, got {value}")
        return value

    @field_validator("pattern", mode="before")
    @classmethod
    def _is_a_pattern(cls, value: Any) -> Any:
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
    def _fits_together(self) -> Recipe:
        try:
            for reason in self._reasons():
                raise ValueError(reason)
            self.concept_ids(0, 0)
        except FeddriftError as error:
            raise ValueError(str(error)) from None
        return self

    def _reasons(self) -> Iterator[str]:
        """What the parts have against each other."""
        kinds = [{one.kind for one in maps} for maps in self.concept_maps]
        others = [self.maps(text) for text in (self.group_map, self.burst_map, *self.over_time)]
        if any(one.kind in ("show", "plane") for maps in others for one in maps):
            yield "show and plane are for concepts"
        if any(sum(one.kind == "show" for one in maps) > 1 for maps in self.concept_maps):
            yield "a concept shows classes once, such as show(1,2)"
        if any("show" in found for found in kinds) and (self.dirichlet or self.fixed):
            yield "show chooses rows itself, so shares must be even and fixed false"
        if self.base == "sea" and not all("plane" in found for found in kinds):
            yield "each concept of the base sea needs a plane, such as plane(8)"
        if self.base == "sea" and (self.dirichlet or self.components):
            yield "the base sea has no pictures: shares must be even, and components left out"
        if self.dirichlet and self.dirichlet[1] * self.n_classes > self.rows:
            least, rows = self.dirichlet[1], self.rows
            yield f"{least} rows of each of {self.n_classes} classes must fit into a cell, got rows = {rows}"
        if self.group_map != "keep" and not self.group_share:
            yield f"group_map needs a group_share above 0, got group_map = {self.group_map}"

    @property
    def n_classes(self) -> int:
        """How many classes the base has."""
        return 2 if self.base == "sea" else 10

    @property
    def concept_maps(self) -> tuple[tuple[Map, ...], ...]:
        """What each concept does to rows."""
        return tuple(self.maps(text) for text in self.concepts)

    def maps(self, text: str) -> tuple[Map, ...]:
        """The maps that a text names."""
        return parse(text, self.base, self.n_classes)

    @property
    def dirichlet(self) -> tuple[float, int] | None:
        """Alpha and the least number of rows of a class in a cell; None: shares are even."""
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
        """How clients train on it."""
        pictures = self.base != "sea"
        lr = 1e-3 if pictures and not self.components else 1e-2
        return Local(rounds=self.rounds or (20 if pictures else 100), lr=self.lr or lr)

    def concept_ids(self, seed: int, data_seed: int, spec: str | None = None) -> Ints:
        """Which concept [T + 1, c] each client has when: by its own pattern, or another that is given."""
        pattern = self.pattern if spec is None else spec
        if pattern == "R":
            pattern = "random:every=2,concepts=4" if data_seed else f"R{seed % 5}"
        if isinstance(pattern, str):
            if spec is None and pattern not in patterns.SHIPPED and not pattern.startswith("random:"):
                raise unknown("pattern", pattern, [*patterns.SHIPPED, "R", "random:every=2,concepts=4", "rows"])
            own = (self.steps or 10, self.clients or 10) if isinstance(self.pattern, str) else self.shape
            ids = patterns.pattern(pattern, seed, data_seed, clients=own[1], steps=own[0])
        else:
            ids = np.array(pattern, dtype=np.int64)
        if spec is None:
            for what, given, has in (("clients", self.clients, ids.shape[1]), ("steps", self.steps, len(ids) - 1)):
                if given not in (None, has):
                    raise ConfigError(f"{what} must be left out or {has} as the pattern has it, got {given}")
        if ids.max() >= len(self.concepts):
            named = pattern if isinstance(pattern, str) else "in rows"
            raise ConfigError(
                f"the pattern {named} uses concept {ids.max()}, but there are {len(self.concepts)} concepts"
            )
        return ids

    @property
    def shape(self) -> tuple[int, int]:
        """Time steps to train and clients of rows that are written out."""
        return len(self.pattern) - 1, len(self.pattern[0])


def checked(where: str, values: dict[str, Any]) -> Recipe:
    """The recipe of these keys, or one sentence that says which is not legal."""
    for key in values:
        if key not in Recipe.model_fields:
            raise ConfigError(f"{where}: {unknown('key', key, Recipe.model_fields)}")
    try:
        return Recipe(**values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {problem(error)}") from None


def read(path: str) -> Recipe:
    """The recipe of a FILE.toml."""
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:  # not there, not text, not TOML
        raise DataError(f"{path} cannot be read as TOML: {getattr(error, 'strerror', None) or error}") from None
    return checked(path, values)


def with_options(name: str, recipe: Recipe, text: str) -> Recipe:
    """The recipe with what follows its name: ``components=32,fixed=true``."""
    values: dict[str, Any] = {}
    for option in _COMMA.split(text):
        key, equals, value = (part.strip() for part in option.partition("="))
        if key not in OPTIONS:
            raise unknown(f"option of {name}", key, OPTIONS)
        if not equals or key in values:
            raise ConfigError(f"options of {name} are KEY=VALUE, each once, such as components=32, got '{text}'")
        values[key] = value
    return checked(f"{name}:{text}", recipe.model_dump() | values)
