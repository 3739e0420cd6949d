"""Streams by name: the paper's and others, a recipe or data in your own files, or a function of your own."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from feddrift._internal import plugins
from feddrift.data import Stream
from feddrift.errors import ConfigError, safe_repr, unknown
from feddrift.streams import air, elec, fmow, folder, mnist, patterns, recipe, synthetic, table
from feddrift.streams.compose import compose
from feddrift.streams.composed import COMPOSED
from feddrift.streams.recipe import Recipe
from feddrift.tables.arrange import Plan


@dataclass(frozen=True)
class Entry:
    """One stream of the catalogue."""

    summary: str
    family: str
    n_concepts: int
    pattern: str | None  # the paper's; R stands for R0 to R4, turn by turn with the seed; None: it has its own drift
    make: Callable[..., Stream]  # of name, concepts (unless it has its own drift), data directory, data seed


STREAMS: dict[str, Entry] = {
    "sine-2": Entry("above or below a sine curve; the labels swap", "sine", 2, "Y", synthetic.sine),
    "circle-2": Entry("inside or outside a circle; the circle moves and grows", "circle", 2, "Y", synthetic.circle),
    "sea-2": Entry("a plane that shifts, 10 % noise; 2 concepts", "sea", 4, "Y", synthetic.sea),
    "sea-4": Entry("a plane that shifts, 10 % noise; 4 concepts, B and D alike", "sea", 4, "F", synthetic.sea),
    "sea-2-text": Entry("sea-2 with the paper's printed planes", "sea", 4, "Y", synthetic.sea_text),
    "sea-4-text": Entry("sea-4 with the paper's printed planes, all distinct", "sea", 4, "F", synthetic.sea_text),
    "mnist-2": Entry("digits; the labels of 1 and 2 swap", "mnist", 4, "Y", mnist.swapped),
    "mnist-4": Entry("digits; the labels of 1 and 2, 3 and 4, or 5 and 6 swap", "mnist", 4, "F", mnist.swapped),
    "mnist-r": Entry("mnist-4 with random drifts every 2 steps, by seed", "mnist", 4, "R", mnist.swapped),
    "mnist-l-4": Entry("digits; each concept shows only 2 of them", "mnist", 4, "F", mnist.label_shift),
    "fmow": Entry(
        "satellite images of five regions, 2002 to 2017; the paper's partition", "fmow", 0, None, fmow.images
    ),
    "fmow-rule": Entry("the same by its rule, from what the folder has", "fmow", 0, None, fmow.images),
    "fmow-labels": Entry(
        "FMoW's real shares of classes over time, with images of Fashion-MNIST", "fmow", 0, None, fmow.labels
    ),
    "air-quality": Entry("dust in five Chinese cities by the quarter: real drift", "air", 0, None, air.five_cities),
    "elec2-hours": Entry("electricity by the hours of the day: real drift, one way", "elec", 0, None, elec.hours),
    "air-beijing": Entry("dust at 12 stations that drift together: nothing to cluster", "air", 0, None, air.beijing),
}


FORMS = ("FILE.csv", "FILE.toml", "folder:DIR", "package.module:make")  # of what is not in the catalogue


def stream(
    name: str,
    *,
    seed: int = 0,
    data_seed: int = 0,
    pattern: str | None = None,
    data_dir: str | Path | None = None,
    label: str = "label",
    client: str | None = None,
    time: str | None = None,
    every: str | float | None = None,
    missing: str | None = None,
    categories: str | None = None,
    scale: bool = True,
) -> Stream:
    """The stream called `name`, a table ``FILE.csv``, the files of ``folder:DIR``, or that of ``package.module:make``.

    Parameters:
        name: As `feddrift list` has it, a table ``FILE.csv``, a recipe ``FILE.toml``, ``folder:DIR``, or
            ``package.module:make``; composed streams take options, ``digits-turn:components=32``.
        seed: Of random patterns, and which of R0 to R4 is the pattern of mnist-r.
        data_seed: Any but 0 draws other rows, in another order, and other random patterns, for streams that are made.
        pattern: Who has which concept when: a name (Y, F, R0..R4), a file, or ``random:every=2,concepts=4``.
        data_dir: Where data files lie; else $FEDDRIFT_DATA, else a cache.
        label: The label column of a table or of ``folder:DIR``.
        client: The column of a table that has the clients.
        time: That of times. This and what follows is told at `Stream.from_frame`.
        every: How long a time step is.
        missing: What becomes of rows without a value.
        categories: What becomes of words.
        scale: Whether numbers are scaled.

    >>> s = stream("sine-2")
    >>> s.n_steps, s.n_clients, s.cell(0, 0)[0].shape
    (10, 10, (500, 2))
    """
    for what, value in (("name", name), ("label", label)):
        if not isinstance(value, str):
            raise ConfigError(f"a stream's {what} must be text, got {safe_repr(value)}")
    if pattern is not None and not isinstance(pattern, str):
        raise ConfigError(f"pattern must be a name, a file or random:..., got a {type(pattern).__name__}")
    for what, number, end in (("seed", seed, 2**63), ("data_seed", data_seed, 2**32)):
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or not 0 <= number < end:
            raise ConfigError(f"{what} must be a whole number from 0 to {end - 1}, got {safe_repr(number)}")
    if is_table(name):
        _refuse_pattern(name, pattern)
        _refuse_data_seed(name, data_seed)
        return table.load(name, Plan(client, time, label, every, missing, categories, scale))
    of_tables = {"client": client, "time": time, "every": every, "missing": missing, "categories": categories}
    for option, setting in (of_tables | {"scale": None if scale else False}).items():
        if setting is not None:
            check(name)
            raise ConfigError(f"{option} is for tables, FILE.csv, so it must be left out for {name}, got {setting!r}")
    kind, _, directory = name.partition(":")
    if kind == "folder":
        _refuse_pattern(name, pattern)
        _refuse_data_seed(name, data_seed)
        return folder.load(directory, label=label)
    if label != "label" and (listed(name) or is_recipe(name)):
        raise ConfigError(f"label names a column of your own files, so it must be left out for {name}, got {label!r}")
    if (own := _recipe(name, data_seed)) is not None:
        ids = own.concept_ids(seed, data_seed, pattern)
        return compose(own, Path(name).name, ids, data_dir, data_seed)
    if name not in STREAMS and (make := plugins.find("stream", name)) is not None:
        _refuse_pattern(name, pattern)
        return _made(name, make, data_dir, data_seed)
    entry = _entry(name)
    if entry.pattern is None:
        if pattern is not None:
            raise ConfigError(f"{name} has its own drift: pattern must be left out, got {pattern!r}")
        return entry.make(name, data_dir, **_drawn(name, entry.make, data_seed))
    spec = pattern
    if spec is None:  # with other data mnist-r's drifts are others, too, drawn as its five patterns were
        spec = "random:every=2,concepts=4" if entry.pattern == "R" and data_seed else default_pattern(name, seed)
    concepts = patterns.pattern(spec, seed, data_seed)
    if concepts.max() >= entry.n_concepts:
        legal = "0 and 1" if entry.n_concepts == 2 else f"0 to {entry.n_concepts - 1}"
        raise ConfigError(f"pattern {spec} uses concept {concepts.max()}, but {entry.family} has concepts {legal}")
    return entry.make(name, concepts, data_dir, **_drawn(name, entry.make, data_seed))


def is_table(name: str) -> bool:
    """Whether a name is that of a file with a table; a file that is meant as one but has another name is refused."""
    answer = name not in STREAMS and table.is_table(name)
    if not answer and not listed(name) and not is_recipe(name) and os.path.isfile(name):
        raise ConfigError(f"unknown stream '{name}'; it is a file: did you mean 'table:{name}'?")
    return answer


def is_recipe(name: str) -> bool:
    """Whether a name is that of a file with a recipe."""
    return name.lower().endswith(".toml") and not name.startswith(("table:", "folder:"))


def listed(name: str) -> bool:
    """Whether a name is one of `feddrift list`, perhaps with options behind it."""
    return name in STREAMS or name.partition(":")[0] in COMPOSED


def summaries() -> dict[str, str]:
    """What there is by name, a line each."""
    entries = {name: entry.summary for name, entry in STREAMS.items()}
    return entries | {name: entry.summary for name, entry in COMPOSED.items()}


def own_pattern(name: str) -> str | None:
    """The name of the pattern that a stream has where none is given, if it has one."""
    if name in STREAMS:
        return STREAMS[name].pattern
    pattern = own.pattern if (own := _recipe(name)) is not None else None
    return pattern if isinstance(pattern, str) else None


def recipe_digest(name: str) -> str | None:
    """Which recipe a file holds; None: the name is of no such file."""
    return (
        hashlib.sha256(recipe.read(name).model_dump_json(exclude_defaults=True).encode()).hexdigest()[:8]
        if is_recipe(name)
        else None
    )


def _recipe(name: str, data_seed: int = 0) -> Recipe | None:
    """What a name of the catalogue, perhaps with options, or a file is composed of; None: it is not composed."""
    if is_recipe(name):
        return recipe.read(name)
    first, colon, options = name.partition(":")
    if first not in COMPOSED:
        return None
    named = COMPOSED[first].recipe(data_seed)
    return recipe.with_options(first, named, options) if colon else named


def _refuse_pattern(name: str, pattern: str | None) -> None:
    if pattern is not None:
        raise ConfigError(f"{name} brings its own drift: pattern must be left out, got {pattern!r}")


def _refuse_data_seed(name: str, data_seed: int) -> None:
    if data_seed:
        raise ConfigError(f"the data of {name} are what they are: data_seed must be left out, got {data_seed}")


def is_made(name: str) -> bool:
    """Whether a data seed draws other data of this stream."""
    if name.startswith("folder:") or is_table(name):
        return False
    if is_recipe(name) or name.partition(":")[0] in COMPOSED:
        return True
    make = _entry(name).make if name in STREAMS else plugins.find("stream", name)
    return callable(make) and _takes(make, "data_seed")


def _drawn(name: str, make: Callable[..., Stream], data_seed: int) -> dict[str, int]:
    """The data seed, for who takes one; others take none but 0."""
    if _takes(make, "data_seed"):
        return {"data_seed": int(data_seed)}
    _refuse_data_seed(name, data_seed)
    return {}


def _made(name: str, make: object, data_dir: str | Path | None, data_seed: int) -> Stream:
    """The stream that a function makes, told the data directory and the data seed if it wants to know."""
    if callable(make):
        drawn = _drawn(name, make, data_seed)
        make = plugins.called("stream", name, partial(_told_where, make, data_dir), drawn)
    if not isinstance(make, Stream):
        raise ConfigError(f"'{name}' must be a Stream or a function that makes one, got a {type(make).__name__}")
    return make


def _told_where(make: Callable[..., Any], data_dir: str | Path | None, drawn: dict[str, int]) -> Any:
    return make(data_dir=data_dir, **drawn) if _takes(make, "data_dir") else make(**drawn)


def _takes(make: Callable[..., Any], parameter: str) -> bool:
    try:
        return parameter in inspect.signature(make).parameters
    except (TypeError, ValueError):  # what is not written in Python may not tell
        return False


def check(name: str) -> None:
    """Refuse a name that no stream has; a folder or a table is looked at when it is read."""
    if name.startswith("folder:") or is_table(name) or _recipe(name) is not None:
        return
    if name in STREAMS or plugins.find("stream", name) is None:
        _entry(name)


def default_pattern(name: str, seed: int = 0) -> str:
    """The pattern the paper runs this stream with.

    >>> default_pattern("sine-2"), default_pattern("mnist-r", seed=7)
    ('Y', 'R2')
    """
    spec = _entry(name).pattern
    if spec is None:
        raise ConfigError(f"{name} has its own drift, no pattern")
    return f"R{seed % 5}" if spec == "R" else spec


def _entry(name: str) -> Entry:
    if name not in STREAMS:
        if os.path.isdir(name):
            raise ConfigError(f"unknown stream '{name}'; it is a folder: did you mean 'folder:{name}'?")
        raise unknown("stream", name, [*summaries(), *plugins.installed("stream"), *FORMS])
    return STREAMS[name]


__all__ = [
    "COMPOSED", "STREAMS", "Entry", "check", "default_pattern", "is_made", "is_recipe", "is_table", "listed",
    "own_pattern", "recipe_digest", "stream", "summaries",
]  # fmt: skip
