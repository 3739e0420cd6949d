"""Errors that a user can correct: the message has the value and what is allowed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

MAX_MESSAGE_LENGTH = 1000  # characters of a message


class FeddriftError(Exception):
    """Error that the user can correct; the command line prints its message and exits with code 2.

    >>> issubclass(ConfigError, FeddriftError) and issubclass(DataError, FeddriftError)
    True
    """

    def __str__(self) -> str:
        return to_one_line(super().__str__())


class ConfigError(FeddriftError):
    """Invalid name, option or setting.

    >>> from feddrift import Local
    >>> Local(rounds=0)
    Traceback (most recent call last):
        ...
    feddrift.errors.ConfigError: rounds must be at least 1, got 0
    """


class DataError(FeddriftError):
    """File or array that cannot be used; the message names it and the problem.

    >>> from feddrift import read
    >>> read("no-such-folder")
    Traceback (most recent call last):
        ...
    feddrift.errors.DataError: no-such-folder is neither a folder of records nor a record
    """


class BusyError(DataError):
    """Folder or record that another process uses at the moment."""


def to_one_line(text: str) -> str:
    r"""Convert a message to one line: escape characters that are not printable, and shorten long words and messages.

    >>> to_one_line("unknown stream 'a\nb'")
    "unknown stream 'a\\nb'"
    """
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    line = re.sub(r"(\S{100})\S{100,}(\S{100})", r"\1...\2", line)  # its end lists what is legal
    if len(line) <= MAX_MESSAGE_LENGTH:
        return line
    return f"{line[: MAX_MESSAGE_LENGTH // 2]} ... {line[5 - MAX_MESSAGE_LENGTH // 2 :]}"


def safe_repr(value: object) -> str:
    """Return the repr of a value for a message, or a description of a number with more digits than Python converts."""
    try:
        return repr(value)
    except ValueError:
        return "a number of thousands of digits"


def describe_validation_error(error: ValidationError) -> str:
    """Describe the first problem that pydantic found: its place, its reason and the value.

    Unknown names come before other problems: a required name may be missing because the user misspelt it.
    """
    first = min(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
    where = ".".join(str(part) for part in first["loc"])
    why = first["msg"].removeprefix("Value error, ")
    got = "" if first["type"] in ("missing", "value_error", "json_invalid") else f", got {safe_repr(first['input'])}"
    return f"{where + ': ' if where else ''}{why[0].lower()}{why[1:]}{got}"


def suggest_name(name: str, legal: Iterable[str]) -> str:
    """Return a question with the most similar legal name, or an empty text if none is similar.

    >>> suggest_name("staton", ["date", "station"])
    ", did you mean 'station'?"
    """
    by_lower_case = {candidate.lower(): candidate for candidate in legal}
    similar = difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=0.6)
    return f", did you mean '{by_lower_case[similar[0]]}'?" if similar else ""


def unknown_name_error(noun: str, name: object, legal: Iterable[object]) -> ConfigError:
    """Create an error that lists the legal names and suggests the most similar one.

    >>> unknown_name_error("algorithm", "FedDrif", ["FedDrift", "Oracle"])
    ConfigError("unknown algorithm 'FedDrif', did you mean 'FedDrift'? (one of: FedDrift, Oracle)")
    """
    names = [str(n) for n in legal]
    return ConfigError(f"unknown {noun} '{name}'{suggest_name(str(name), names)} (one of: {', '.join(names)})")
