"""Streams by name: a catalogue, recipes, and the tables, folders and functions of the user.

Each module reads or makes one kind of stream; `stream` selects the module for a name.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from feddrift._internal import plugins
from feddrift.data import Stream
from feddrift.errors import ConfigError, DataError, safe_repr, unknown_name_error
from feddrift.streams import air, elec, fmow, folder, mnist, patterns, recipe, synthetic, table
from feddrift.streams.compose import compose_stream
from feddrift.streams.composed import COMPOSED
from feddrift.streams.csv_table import decode_file
from feddrift.streams.files import check_format, read_magic_bytes
from feddrift.streams.recipe import Recipe
from feddrift.tables.arrange import TableOptions


@dataclass(frozen=True)
class StreamEntry:
    """A stream of the catalogue."""

    summary: str
    family: str
    n_concepts: int
    pattern: str | None  # the paper's; R: one of R0 to R4, chosen by the seed; None: the stream has its own drift
    make: Callable[..., Stream]  # arguments: name, concepts (unless it has its own drift), data_dir, data_seed


STREAMS: dict[str, StreamEntry] = {
    "sine-2": StreamEntry("above or below a sine curve; the labels swap", "sine", 2, "Y", synthetic.make_sine),
    "circle-2": StreamEntry(
        "inside or outside a circle; the circle moves and grows", "circle", 2, "Y", synthetic.make_circle
    ),
    "sea-2": StreamEntry("a plane that shifts, 10 % noise; 2 concepts", "sea", 4, "Y", synthetic.make_sea),
    "sea-4": StreamEntry(
        "a plane that shifts, 10 % noise; 4 concepts, B and D alike", "sea", 4, "F", synthetic.make_sea
    ),
    "sea-2-text": StreamEntry("sea-2 with the paper's printed planes", "sea", 4, "Y", synthetic.make_sea_text),
    "sea-4-text": StreamEntry(
        "sea-4 with the paper's printed planes, all distinct", "sea", 4, "F", synthetic.make_sea_text
    ),
    "mnist-2": StreamEntry("digits; the labels of 1 and 2 swap", "mnist", 4, "Y", mnist.load_label_swap),
    "mnist-4": StreamEntry(
        "digits; the labels of 1 and 2, 3 and 4, or 5 and 6 swap", "mnist", 4, "F", mnist.load_label_swap
    ),
    "mnist-r": StreamEntry("mnist-4 with random drifts every 2 steps, by seed", "mnist", 4, "R", mnist.load_label_swap),
    "mnist-l-4": StreamEntry("digits; each concept shows only 2 of them", "mnist", 4, "F", mnist.load_label_shift),
    "fmow": StreamEntry(
        "satellite images of five regions, 2002 to 2017; the paper's partition", "fmow", 0, None, fmow.load_images
    ),
    "fmow-rule": StreamEntry("the same by its rule, from what the folder has", "fmow", 0, None, fmow.load_images),
    "fmow-labels": StreamEntry(
        "FMoW's real shares of classes over time, with images of Fashion-MNIST", "fmow", 0, None, fmow.load_labels
    ),
    "air-quality": StreamEntry(
        "dust in five Chinese cities by the quarter: real drift", "air", 0, None, air.load_five_cities
    ),
    "elec2-hours": StreamEntry(
        "electricity by the hours of the day: real drift, one way", "elec", 0, None, elec.load_hours
    ),
    "air-beijing": StreamEntry(
        "dust at 12 stations that drift together: nothing to cluster", "air", 0, None, air.load_beijing
    ),
}


OTHER_NAME_FORMS = (
    "FILE.csv",
    "FILE.parquet",
    "FILE.toml",
    "folder:DIR",
    "package.module:make",
)  # names outside the catalogue


def stream(  # noqa: C901, PLR0913  # one check for each option
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
    drop: str | Sequence[str] = (),
    features: str | Sequence[str] | None = None,
) -> Stream:
    """Load or make the stream with this name.

    Args:
        name: A name from `feddrift list`, a table ``FILE.csv`` or ``FILE.parquet``, a recipe ``FILE.toml``,
            ``folder:DIR``, or ``package.module:make``; composed streams take options, ``digits-turn:components=32``.
        seed: Seed of random patterns; for mnist-r, it chooses one of R0 to R4.
        data_seed: Seed of synthetic data: 0 for the published data; other seeds draw other rows, in another order, and
            other random patterns.
        pattern: The concept of each client at each time step: a name (Y, F, R0..R4), a file, or
            ``random:every=2,concepts=4``.
        data_dir: The folder of data files; by default $FEDDRIFT_DATA or a cache.
        label: The label column of a table or of ``folder:DIR``.
        client: The client column of a table. `Stream.from_frame` explains this option and those that follow.
        time: The column of times of a table.
        every: The length of a time step.
        missing: The treatment of rows without a value.
        categories: The treatment of words.
        scale: True to standardise numbers.
        drop: Columns that are not features.
        features: The columns that are features, in place of all others.

    Raises:
        ConfigError: The name is unknown, or an option is not legal for this stream.
        DataError: A file of the stream cannot be used.

    >>> s = stream("sine-2")
    >>> s.n_steps, s.n_clients, s.cell(0, 0)[0].shape
    (10, 10, (500, 2))
    """
    for option, text in (("name", name), ("label", label)):
        if not isinstance(text, str):
            raise ConfigError(f"a stream's {option} must be text, got {safe_repr(text)}")
    if pattern is not None and not isinstance(pattern, str):
        raise ConfigError(f"pattern must be a name, a file or random:..., got a {type(pattern).__name__}")
    for option, number, end in (("seed", seed, 2**63), ("data_seed", data_seed, 2**32)):
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or not 0 <= number < end:
            raise ConfigError(f"{option} must be a whole number from 0 to {end - 1}, got {safe_repr(number)}")
    if is_table(name):
        _refuse_pattern(name, pattern)
        _refuse_data_seed(name, data_seed)
        options = TableOptions(client, time, label, every, missing, categories, scale, drop, features)
        return table.load_table(name, options)
    table_settings: dict[str, object] = {"client": client, "time": time, "every": every, "missing": missing}
    table_settings |= {
        "categories": categories,
        "scale": None if scale else False,
        "drop": drop or None,
        "features": features,
    }
    for option, setting in table_settings.items():
        if setting is not None:
            check_name(name)
            raise ConfigError(f"{option} is for tables, FILE.csv, so it must be left out for {name}, got {setting!r}")
    kind, _, directory = name.partition(":")
    if kind == "folder":
        _refuse_pattern(name, pattern)
        _refuse_data_seed(name, data_seed)
        return folder.load_folder(directory, label=label)
    if label != "label" and (is_in_catalogue(name) or is_recipe(name)):
        raise ConfigError(f"label names a column of your own files, so it must be left out for {name}, got {label!r}")
    composed = _find_recipe(name, data_seed)
    if composed is not None:
        ids = composed.build_concept_ids(seed, data_seed, pattern)
        return compose_stream(composed, Path(name).name, ids, data_dir, data_seed)
    external = None if name in STREAMS else plugins.find_object("stream", name)
    if external is not None:
        _refuse_pattern(name, pattern)
        return _make_external(name, external, data_dir, data_seed)
    entry = _find_entry(name)
    if entry.pattern is None:
        _refuse_pattern(name, pattern)
        return entry.make(name, data_dir, **_build_data_seed_argument(name, entry.make, data_seed))
    spec = pattern
    if spec is None:  # another data seed also draws other drifts for mnist-r, by the rule of its five patterns
        spec = "random:every=2,concepts=4" if entry.pattern == "R" and data_seed else default_pattern(name, seed)
    concepts = patterns.build_pattern(spec, seed, data_seed)
    if concepts.max() >= entry.n_concepts:
        legal = "0 and 1" if entry.n_concepts == 2 else f"0 to {entry.n_concepts - 1}"
        raise ConfigError(f"pattern {spec} uses concept {concepts.max()}, but {entry.family} has concepts {legal}")
    return entry.make(name, concepts, data_dir, **_build_data_seed_argument(name, entry.make, data_seed))


def is_table(name: str) -> bool:
    """Return True for the name of a table.

    Raises:
        ConfigError: The name is that of a file that can only be read as ``table:FILE``.
        DataError: The name is that of a file that is not text, or of a table that does not exist.
    """
    if name in STREAMS or table.is_table(name):
        return name not in STREAMS
    if is_in_catalogue(name) or is_recipe(name):
        return False
    if os.path.isfile(name):
        if check_format(Path(name), read_magic_bytes(Path(name))) == "csv":  # explains which formats cannot be read
            decode_file(Path(name))
        raise ConfigError(f"unknown stream '{name}'; it is a file: did you mean 'table:{name}'?")
    if name.lower().endswith(table.OTHER_TABLE_SUFFIXES):
        raise DataError(f"'{name}' is not a file, expected a table such as weather.csv")
    return False


def is_recipe(name: str) -> bool:
    """Return True for the name of a recipe, ``FILE.toml``."""
    return name.lower().endswith(".toml") and not name.startswith(("table:", "folder:"))


def is_in_catalogue(name: str) -> bool:
    """Return True for a name of `feddrift list`, with or without options."""
    return name in STREAMS or name.partition(":")[0] in COMPOSED


def list_summaries() -> dict[str, str]:
    """Return the summary of each stream of the catalogue, by name."""
    entries = {name: entry.summary for name, entry in STREAMS.items()}
    return entries | {name: entry.summary for name, entry in COMPOSED.items()}


def find_own_pattern(name: str) -> str | None:
    """Return the name of the default pattern of a stream; None if it has none, or one without a name."""
    if name in STREAMS:
        return STREAMS[name].pattern
    composed = _find_recipe(name)
    return composed.pattern if composed is not None and isinstance(composed.pattern, str) else None


def hash_recipe(name: str) -> str | None:
    """Return a hash of the recipe in a file; None for other names."""
    if not is_recipe(name):
        return None
    content = recipe.read_recipe(name).model_dump_json(exclude_defaults=True)
    return hashlib.sha256(content.encode()).hexdigest()[:8]


def _find_recipe(name: str, data_seed: int = 0) -> Recipe | None:
    """Return the recipe of a composed stream of the catalogue or of a file; None for other streams."""
    if is_recipe(name):
        return recipe.read_recipe(name)
    first, colon, options = name.partition(":")
    if first not in COMPOSED:
        return None
    composed = COMPOSED[first].recipe(data_seed)
    return recipe.apply_options(first, composed, options) if colon else composed


def _refuse_pattern(name: str, pattern: str | None) -> None:
    if pattern is not None:
        raise ConfigError(f"{name} has its own drift: pattern must be left out, got {pattern!r}")


def _refuse_data_seed(name: str, data_seed: int) -> None:
    if data_seed:
        raise ConfigError(f"{name} is not synthetic: data_seed must be left out, got {data_seed}")


def is_synthetic(name: str) -> bool:
    """Return True if this stream takes a data seed, which draws other data."""
    if name.startswith("folder:") or is_table(name):
        return False
    if is_recipe(name) or name.partition(":")[0] in COMPOSED:
        return True
    make = _find_entry(name).make if name in STREAMS else plugins.find_object("stream", name)
    return callable(make) and _takes_parameter(make, "data_seed")


def _build_data_seed_argument(name: str, make: Callable[..., Stream], data_seed: int) -> dict[str, int]:
    """Return the data seed as an argument if `make` takes one; otherwise raise ConfigError unless it is 0."""
    if _takes_parameter(make, "data_seed"):
        return {"data_seed": int(data_seed)}
    _refuse_data_seed(name, data_seed)
    return {}


def _make_external(name: str, value: object, data_dir: str | Path | None, data_seed: int) -> Stream:
    """Return a user's stream, or make it with the user's function, which may have parameters data_dir and data_seed."""
    if callable(value):
        seed_argument = _build_data_seed_argument(name, value, data_seed)
        value = plugins.call_function("stream", name, partial(_call_maker, value, data_dir), seed_argument)
    if not isinstance(value, Stream):
        raise ConfigError(f"'{name}' must be a Stream or a function that makes one, got a {type(value).__name__}")
    return value


def _call_maker(make: Callable[..., Any], data_dir: str | Path | None, seed_argument: dict[str, int]) -> Any:
    return make(data_dir=data_dir, **seed_argument) if _takes_parameter(make, "data_dir") else make(**seed_argument)


def _takes_parameter(make: Callable[..., Any], parameter: str) -> bool:
    try:
        return parameter in inspect.signature(make).parameters
    except (TypeError, ValueError):  # callables not written in Python may have no signature
        return False


def check_name(name: str) -> None:
    """Raise ConfigError for an unknown name; folders and tables are checked when they are read."""
    if name.startswith("folder:") or is_table(name) or _find_recipe(name) is not None:
        return
    if name in STREAMS or plugins.find_object("stream", name) is None:
        _find_entry(name)


def default_pattern(name: str, seed: int = 0) -> str:
    """Return the pattern that the paper uses for this stream.

    >>> default_pattern("sine-2"), default_pattern("mnist-r", seed=7)
    ('Y', 'R2')
    """
    spec = _find_entry(name).pattern
    if spec is None:
        raise ConfigError(f"{name} has its own drift and therefore no pattern")
    return f"R{seed % 5}" if spec == "R" else spec


def _find_entry(name: str) -> StreamEntry:
    if name not in STREAMS:
        if os.path.isdir(name):
            has_clients = any(Path(name).glob("client_?*"))
            kind = "table" if not has_clients and any(map(table.has_table_suffix, Path(name).iterdir())) else "folder"
            raise ConfigError(f"unknown stream '{name}'; it is a folder: did you mean '{kind}:{name}'?")
        raise unknown_name_error("stream", name, [*list_summaries(), *plugins.list_plugins("stream")], OTHER_NAME_FORMS)
    return STREAMS[name]


__all__ = [
    "COMPOSED",
    "STREAMS",
    "StreamEntry",
    "check_name",
    "default_pattern",
    "find_own_pattern",
    "hash_recipe",
    "is_in_catalogue",
    "is_recipe",
    "is_synthetic",
    "is_table",
    "list_summaries",
    "stream",
]  # fmt: skip
