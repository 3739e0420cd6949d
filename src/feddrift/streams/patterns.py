"""Drift patterns: which concept each client sees at each time step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import numpy as np

from feddrift import rng
from feddrift.errors import ConfigError, DataError, unknown
from feddrift.types import Ints

SHIPPED = ("Y", "F", "R0", "R1", "R2", "R3", "R4")  # the paper's
MAX_CELLS = 1_000_000  # of a random pattern: more are no stream that fits into memory


def pattern(spec: str, seed: int = 0, data_seed: int = 0, clients: int = 10, steps: int = 10) -> Ints:
    """Concept ids [T + 1, c] of a shipped NAME, a FILE, or random:every=N,concepts=N; the last row only tests.

    A random one that does not say so has so many clients and steps.

    >>> pattern("Y").shape
    (11, 10)
    >>> pattern("random:every=2,concepts=3,clients=4,steps=5").tolist()
    [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 2, 1], [0, 0, 2, 1], [0, 0, 2, 0], [0, 0, 2, 0]]
    """
    if spec in SHIPPED:
        return _parse(resources.files("feddrift.streams").joinpath("patterns", f"{spec}.txt").read_text(), spec)
    kind, _, options = spec.partition(":")
    if kind == "random":
        return _random(spec, options, {"clients": clients, "steps": steps, "seed": seed}, data_seed)
    if not os.path.isfile(spec):  # unlike Path's, it takes any string
        if os.sep in spec or "." in spec:
            raise DataError(f"there is no pattern file {spec}")
        raise unknown("pattern", spec, [*SHIPPED, "the path of a file", "random:every=2,concepts=4"])
    try:
        return _parse(Path(spec).read_text(encoding="utf-8-sig"), spec)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"pattern file {spec} cannot be read as text: {error}") from error


def _parse(text: str, file: str) -> Ints:
    rows = table(text, f"pattern file {file}", "concepts are whole numbers from 0")
    if len(rows) < 2:
        raise DataError(f"pattern file {file}: needs at least 2 rows, one to train and one to test, got {len(rows)}")
    return rows


def table(text: str, where: str, legal: str) -> Ints:
    """Whole numbers [t, c]: a line per time step, a column per client, `#` begins a comment."""
    rows: list[list[int]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        tokens = line.partition("#")[0].replace(",", " ").split()
        for token in tokens:
            if not (token.isdecimal() and len(token) < 10):  # ten digits may not fit an array
                raise DataError(f"{where}, line {number}: {legal}, got {token!r}")
        if tokens and rows and len(tokens) != len(rows[0]):
            raise DataError(
                f"{where}, line {number}: expected {len(rows[0])} clients as in the first row, got {len(tokens)}"
            )
        if tokens:
            rows.append([int(token) for token in tokens])
    return np.array(rows, dtype=np.int64)


def _random(spec: str, options: str, usual: Mapping[str, int], data_seed: int) -> Ints:
    values = dict(usual)
    least = {"every": 1, "concepts": 1, "clients": 1, "steps": 1, "seed": 0}
    keys_seen: set[str] = set()
    for option in filter(None, options.split(",")):
        key, _, text = (part.strip() for part in option.partition("="))
        if key not in least:
            raise unknown("option of a random pattern", key, least)
        if key in keys_seen:
            raise ConfigError(f"pattern {spec}: {key} is given twice")
        if not (text.isdecimal() and len(text) < 19) or int(text) < least[key]:  # more digits may not fit an array
            raise ConfigError(f"pattern {spec}: {key} must be a whole number from {least[key]}, got {text!r}")
        keys_seen.add(key)
        values[key] = int(text)
    for key in ("every", "concepts"):
        if key not in keys_seen:
            raise ConfigError(f"pattern {spec}: {key} is missing, as in random:every=2,concepts=4")
    if values["clients"] * values["steps"] > MAX_CELLS:
        got = f"{values['clients']} clients in {values['steps']} steps"
        raise ConfigError(f"pattern {spec}: clients times steps must be at most {MAX_CELLS}, got {got}")
    block = np.arange(values["steps"]) // values["every"]
    redrawn = (data_seed,) if data_seed else ()
    blocks, clients = np.arange(block[-1] + 1)[:, None], np.arange(values["clients"])
    words, _ = rng.derive(values["seed"], "pattern", blocks, clients, *redrawn)
    drawn = (rng.unit(words) * values["concepts"]).astype(np.int64)
    drawn[0] = 0  # everybody starts with concept 0
    rows = drawn[block]
    return np.vstack([rows, rows[-1:]])
