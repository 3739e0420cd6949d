"""Drift patterns: the concept of each client at each time step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import numpy as np

from feddrift import rng
from feddrift.errors import ConfigError, DataError, unknown_name_error
from feddrift.types import Ints

SHIPPED = ("Y", "F", "R0", "R1", "R2", "R3", "R4")  # the paper's
MAX_CELLS = 1_000_000  # cells of a random pattern; the data of more would not fit into memory


def build_pattern(spec: str, seed: int = 0, data_seed: int = 0, clients: int = 10, steps: int = 10) -> Ints:
    """Return [T + 1, c], the concept of each client at each time step; the last row only tests.

    Args:
        spec: A name of `SHIPPED`, a file, or ``random:every=N,concepts=N``.
        seed: The seed of a random pattern that does not set its own.
        data_seed: The data seed; values other than 0 draw other random patterns.
        clients: The number of clients of a random pattern that does not set its own.
        steps: The number of time steps T of a random pattern that does not set its own.

    Raises:
        ConfigError: The name or an option is not legal.
        DataError: The file is missing, or is not a pattern.

    >>> build_pattern("Y").shape
    (11, 10)
    >>> build_pattern("random:every=2,concepts=3,clients=4,steps=5").tolist()
    [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 2, 1], [0, 0, 2, 1], [0, 0, 2, 0], [0, 0, 2, 0]]
    """
    if spec in SHIPPED:
        return _parse_pattern(resources.files("feddrift.streams").joinpath("patterns", f"{spec}.txt").read_text(), spec)
    kind, _, options = spec.partition(":")
    if kind == "random":
        return _draw_pattern(spec, options, {"clients": clients, "steps": steps, "seed": seed}, data_seed)
    if not os.path.isfile(spec):  # Path.is_file raises errors for some strings
        if os.sep in spec or "." in spec:
            raise DataError(f"pattern file {spec} does not exist")
        raise unknown_name_error("pattern", spec, SHIPPED, ["the path of a file", "random:every=2,concepts=4"])
    try:
        return _parse_pattern(Path(spec).read_text(encoding="utf-8-sig"), spec)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"pattern file {spec} cannot be read as text: {error}") from error


def _parse_pattern(text: str, file: str) -> Ints:
    rows = parse_table(text, f"pattern file {file}", "concepts are whole numbers from 0")
    if len(rows) < 2:
        raise DataError(f"pattern file {file}: needs at least 2 rows, one to train and one to test, got {len(rows)}")
    return rows


def parse_table(text: str, where: str, legal: str) -> Ints:
    """Parse whole numbers [t, c]: a line for each time step, a column for each client; `#` begins a comment.

    Args:
        text: The lines.
        where: The name of the source, for messages.
        legal: The legal numbers, for messages.

    Raises:
        DataError: A value is not a whole number, or lines have different lengths.
    """
    rows: list[list[int]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        tokens = line.partition("#")[0].replace(",", " ").split()
        for token in tokens:
            if not (token.isdecimal() and len(token) < 10):  # ten digits may not fit into an array
                raise DataError(f"{where}, line {number}: {legal}, got {token!r}")
        if tokens and rows and len(tokens) != len(rows[0]):
            raise DataError(
                f"{where}, line {number}: expected {len(rows[0])} clients as in the first row, got {len(tokens)}"
            )
        if tokens:
            rows.append([int(token) for token in tokens])
    return np.array(rows, dtype=np.int64)


def _draw_pattern(spec: str, options: str, defaults: Mapping[str, int], data_seed: int) -> Ints:
    values = dict(defaults)
    minimum = {"every": 1, "concepts": 1, "clients": 1, "steps": 1, "seed": 0}
    keys_seen: set[str] = set()
    for option in filter(None, options.split(",")):
        key, _, text = (part.strip() for part in option.partition("="))
        if key not in minimum:
            raise unknown_name_error("option of a random pattern", key, minimum)
        if key in keys_seen:
            raise ConfigError(f"pattern {spec}: {key} is given twice")
        # more digits may not fit into an array
        if not (text.isdecimal() and len(text) < 19) or int(text) < minimum[key]:
            raise ConfigError(f"pattern {spec}: {key} must be a whole number from {minimum[key]}, got {text!r}")
        keys_seen.add(key)
        values[key] = int(text)
    for key in ("every", "concepts"):
        if key not in keys_seen:
            raise ConfigError(f"pattern {spec}: {key} is missing, as in random:every=2,concepts=4")
    if values["clients"] * values["steps"] > MAX_CELLS:
        got = f"{values['clients']} clients in {values['steps']} steps"
        raise ConfigError(f"pattern {spec}: clients times steps must be at most {MAX_CELLS}, got {got}")
    block = np.arange(values["steps"]) // values["every"]
    blocks = np.arange(block[-1] + 1)[:, None]
    clients = np.arange(values["clients"])
    data_key = (data_seed,) if data_seed else ()
    words, _ = rng.derive_key(values["seed"], "pattern", blocks, clients, *data_key)
    drawn = (rng.to_unit_interval(words) * values["concepts"]).astype(np.int64)
    drawn[0] = 0  # all clients start with concept 0
    rows = drawn[block]
    return np.vstack([rows, rows[-1:]])
