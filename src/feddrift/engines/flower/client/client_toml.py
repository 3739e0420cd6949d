"""What a client is told: the file client.toml in its folder, checked. Nothing here needs Flower."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from feddrift.errors import ConfigError, safe_repr

_KINDS = {
    "name": "text",
    "server": "text",
    "data": "text",
    "label": "text",
    "load": "text",
    "model": "text",
    "max_rows": "number",
    "max_age": "number",
    "explain": "truth",
    "describe": "truth",
    "warm": "truth",
    "look": "seconds",
}
_LEGAL: dict[str, tuple[Callable[[Any], bool], str]] = {
    "text": (lambda value: isinstance(value, str) and value != "", "text in quotes"),
    "number": (lambda value: type(value) is int and value >= 1, "a whole number from 1 on"),
    "seconds": (lambda value: type(value) in (int, float) and 0.1 <= value <= 60, "a number of seconds from 0.1 to 60"),
    "truth": (lambda value: isinstance(value, bool), "true or false"),
}


def settings_of(folder: Path) -> dict[str, Any]:
    """What client.toml in this folder says, or an error that says in one sentence what is wrong with it."""
    path = folder / "client.toml"
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if set(settings) - set(_KINDS) or "name" not in settings:
        legal = ", ".join(sorted(_KINDS))
        raise ConfigError(f"{path} must name the client; legal are {legal}, got {sorted(settings)}")
    for name, value in settings.items():
        is_legal, legal = _LEGAL[_KINDS[name]]
        if not is_legal(value):
            raise ConfigError(f"{path}: {name} must be {legal}, got {safe_repr(value)}")
    return settings
