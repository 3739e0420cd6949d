"""Errors a user can act on: one sentence with the value and the legal set."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

LONGEST = 1000  # characters of a message


class FeddriftError(Exception):
    """Anything the user can mend; the command line prints it and exits with code 2.

    >>> issubclass(ConfigError, FeddriftError) and issubclass(DataError, FeddriftError)
    True
    """

    def __str__(self) -> str:
        return one_line(super().__str__())


class ConfigError(FeddriftError):
    """A name, option or setting that is not legal.

    >>> from feddrift import Local
    >>> Local(rounds=0)
    Traceback (most recent call last):
        ...
    feddrift.errors.ConfigError: rounds must be at least 1, got 0
    """


class DataError(FeddriftError):
    """A file or array that cannot be used; the message names it and says what is wrong.

    >>> from feddrift import read
    >>> read("no-such-folder")
    Traceback (most recent call last):
        ...
    feddrift.errors.DataError: no-such-folder is neither a folder of records nor a record
    """


class BusyError(DataError):
    """A record that another run is writing just now."""


def one_line(text: str) -> str:
    """A message as one line, whatever names and values are in it: what cannot be printed is escaped, what is long cut.

    >>> one_line("unknown stream 'a\\nb'")
    "unknown stream 'a\\\\nb'"
    """
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    line = re.sub(r"(\S{100})\S{100,}(\S{100})", r"\1...\2", line)  # a word first: the rest says what is legal
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} ... {line[5 - LONGEST // 2 :]}"


def safe_repr(value: object) -> str:
    """A value for a message, also a number of more digits than Python writes."""
    try:
        return repr(value)
    except ValueError:
        return "a number of thousands of digits"


def problem(error: ValidationError) -> str:
    """The first thing that pydantic found wrong: where, why, and the value; a misspelt name before a missing one."""
    first = min(error.errors(include_url=False), key=lambda detail: detail["type"] != "extra_forbidden")
    where, why = ".".join(str(part) for part in first["loc"]), first["msg"].removeprefix("Value error, ")
    got = "" if first["type"] in ("missing", "value_error", "json_invalid") else f", got {safe_repr(first['input'])}"
    return f"{where + ': ' if where else ''}{why[0].lower()}{why[1:]}{got}"


def nearest(name: str, legal: Iterable[str]) -> str:
    """A question that suggests the name that was perhaps meant, or nothing.

    >>> nearest("staton", ["date", "station"])
    ", did you mean 'station'?"
    """
    lower = {candidate.lower(): candidate for candidate in legal}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    return f", did you mean '{lower[near[0]]}'?" if near else ""


def unknown(what: str, name: object, legal: Iterable[object]) -> ConfigError:
    """An error that names the legal set and suggests the nearest name.

    >>> unknown("algorithm", "FedDrif", ["FedDrift", "Oracle"])
    ConfigError("unknown algorithm 'FedDrif', did you mean 'FedDrift'? (one of: FedDrift, Oracle)")
    """
    names = [str(n) for n in legal]
    return ConfigError(f"unknown {what} '{name}'{nearest(str(name), names)} (one of: {', '.join(names)})")
