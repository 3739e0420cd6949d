"""A hyper-parameter is a dataclass field with a help text; that text is the command line's and the docs'."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any


def option(default: Any, help: str, quiet: bool = False) -> Any:
    """A dataclass field that users may set, with ``--set`` or from Python.

    Parameters:
        default: Its value where nobody sets it; the type of settings given as text is taken from it.
        help: One line for people.
        quiet: Records name it only where it is not the default, so that older records keep their names.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Mine:
    ...     limit: float = option(0.2, "how bad is too bad")
    >>> Mine().limit, list(options(Mine))
    (0.2, ['limit'])
    """
    return dataclasses.field(default=default, metadata={"help": help, "quiet": quiet})


def options(algorithm: Any) -> dict[str, dataclasses.Field[Any]]:
    """The settable fields of an algorithm class or object; the field `init_` is called init.

    Those are the fields with a help text; of a class from elsewhere also its own plain ones.
    """
    if not dataclasses.is_dataclass(algorithm):
        return {}
    return {f.name.rstrip("_"): f for f in dataclasses.fields(algorithm) if "help" in f.metadata or _own(algorithm, f)}


def _own(algorithm: Any, f: dataclasses.Field[Any]) -> bool:
    cls = algorithm if isinstance(algorithm, type) else type(algorithm)
    declared = next(base for base in cls.__mro__ if f.name in inspect.get_annotations(base))
    plain = f.default is dataclasses.MISSING or isinstance(f.default, str | int | float | None)
    return f.init and plain and declared.__module__.partition(".")[0] != "feddrift"


def settings(algorithm: Any) -> dict[str, Any]:
    """The resolved hyper-parameters of an algorithm, for the record."""
    found = {name: (f, getattr(algorithm, f.name)) for name, f in options(algorithm).items()}
    return {name: value for name, (f, value) in found.items() if not f.metadata.get("quiet") or value != f.default}
