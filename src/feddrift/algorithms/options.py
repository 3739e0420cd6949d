"""Settings of algorithms: dataclass fields with a help text, which the command line and the documentation show."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any


def option(default: Any, help: str, quiet: bool = False) -> Any:
    """Declare a dataclass field that users may set, with ``--set`` or from Python.

    Values given as text are converted to the annotated type of the field.

    Args:
        default: The value if the user sets none.
        help: One line that describes the setting.
        quiet: True to leave the setting out of records while it has its default, so that records from before the
            setting existed still match.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Mine:
    ...     limit: float = option(0.2, "how bad is too bad")
    >>> Mine().limit, list(get_options(Mine))
    (0.2, ['limit'])
    """
    return dataclasses.field(default=default, metadata={"help": help, "quiet": quiet})


def get_options(algorithm: Any) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of an algorithm, a class or an object, that users may set, by the name of the setting.

    These are the fields with a help text. A class outside this package needs no help texts: its own fields without a
    default, or with a number, a text or None as default, are settings, too. A trailing underscore is dropped: `init_`
    is the setting init.
    """
    if not dataclasses.is_dataclass(algorithm):
        return {}
    fields = dataclasses.fields(algorithm)
    return {
        field.name.rstrip("_"): field
        for field in fields
        if "help" in field.metadata or _is_external_setting(algorithm, field)
    }


def _is_external_setting(algorithm: Any, field: dataclasses.Field[Any]) -> bool:
    """Return True for a plain field that a class outside this package declares."""
    cls = algorithm if isinstance(algorithm, type) else type(algorithm)
    owner = next(base for base in cls.__mro__ if field.name in inspect.get_annotations(base))
    is_plain = field.default is dataclasses.MISSING or isinstance(field.default, str | int | float | None)
    return field.init and is_plain and owner.__module__.partition(".")[0] != "feddrift"


def get_settings(algorithm: Any) -> dict[str, Any]:
    """Return the values of an algorithm's settings for a record; quiet settings with their default are left out."""
    settings = {}
    for name, field in get_options(algorithm).items():
        value = getattr(algorithm, field.name)
        if not field.metadata.get("quiet") or value != field.default:
            settings[name] = value
    return settings
