"""Errors that a user can correct: the message has the value and what is allowed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

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


def format_count(n: int, noun: str) -> str:
    """Format a number of things.

    >>> format_count(1, "time step"), format_count(3, "client")
    ('1 time step', '3 clients')
    """
    return f"{n} {noun}{'' if n == 1 else 's'}"


def describe_validation_error(error: ValidationError) -> str:
    """Describe the first problem that pydantic found: its place, its reason and the value.

    Unknown names come before other problems: a required name may be missing because the user misspelt it.
    """
    first = min(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
    where = ".".join(str(part) for part in first["loc"])
    return describe_problem(first, where, safe_repr(first.get("input")))


def describe_problem(problem: ErrorDetails, where: str, got: str) -> str:
    """Describe a problem that pydantic found, in the words of our own messages.

    Args:
        problem: The problem.
        where: The name of the value; empty: the whole input.
        got: The value as text.

    >>> describe_problem({"type": "missing", "loc": ("rows",), "msg": "Field required", "input": {}}, "rows", "{}")
    'rows is missing'
    """
    kind = problem["type"]
    limits = problem.get("ctx", {})
    subject = where or "it"
    if kind == "missing":
        return f"{subject} is missing"
    if kind in ("too_short", "too_long"):
        is_short = kind == "too_short"
        limit = format_count(limits["min_length" if is_short else "max_length"], "value")
        return f"{subject} must have at {'least' if is_short else 'most'} {limit}, got {limits['actual_length']}"
    if kind in _LIMIT_WORDS:
        words, limit_name = _LIMIT_WORDS[kind]
        return f"{subject} must be {words} {_format_limit(limits[limit_name])}, got {got}"
    if kind in _TYPE_WORDS:
        return f"{subject} must be {_TYPE_WORDS[kind]}, got {got}"
    reason = problem["msg"].removeprefix("Value error, ")
    reason = re.sub("^Input should be", "must be", reason)
    reason = reason[0].lower() + reason[1:]
    if reason.startswith("must "):
        reason = f"{subject} {reason}"
    elif where:
        reason = f"{where}: {reason}"
    return reason if kind in ("value_error", "json_invalid") else f"{reason}, got {got}"


def _format_limit(limit: float) -> str:
    """Format a limit: 1000000, 0.5, 1e+100."""
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


_LIMIT_WORDS = {  # by pydantic's name of the problem: our words, and pydantic's name of the limit
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
}
_TYPE_WORDS = {  # by pydantic's name of the problem
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "int_from_float": "a whole number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a table of names and values",
}


def suggest_name(name: str, legal: Iterable[str]) -> str:
    """Return a question with the most similar legal name, or an empty text if none is similar.

    >>> suggest_name("staton", ["date", "station"])
    ", did you mean 'station'?"
    """
    similar = find_similar_name(name, legal)
    return "" if similar is None else f", did you mean '{similar}'?"


def find_similar_name(name: str, legal: Iterable[str]) -> str | None:
    """Return the most similar legal name: the only one that begins with the name, or one with a few other letters.

    >>> find_similar_name("simu", ["simulator", "reference"]), find_similar_name("x", ["simulator", "reference"])
    ('simulator', None)
    """
    by_lower_case = {candidate.lower(): candidate for candidate in legal}
    longer = [candidate for candidate in by_lower_case if candidate.startswith(name.lower())]
    if len(name) > 1 and len(longer) == 1:
        return by_lower_case[longer[0]]
    similar = difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=0.6)
    return by_lower_case[similar[0]] if similar else None


def unknown_name_error(noun: str, name: object, legal: Iterable[object], forms: Iterable[str] = ()) -> ConfigError:
    """Create an error that lists the legal names and suggests the most similar one.

    Args:
        noun: The kind of the name.
        name: The unknown name.
        legal: The legal names.
        forms: Forms of further legal names, such as FILE.csv. They are listed, but never suggested.

    >>> unknown_name_error("algorithm", "FedDrif", ["FedDrift", "Oracle"])
    ConfigError("unknown algorithm 'FedDrif', did you mean 'FedDrift'? (one of: FedDrift, Oracle)")
    """
    names = [str(n) for n in legal]
    listed = ", ".join([*names, *forms])
    return ConfigError(f"unknown {noun} '{name}'{suggest_name(str(name), names)} (one of: {listed})")
