"""Settings of a client: the file client.toml in its folder. This module does not need Flower."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from feddrift.engines.flower.client.policy import Policy
from feddrift.errors import ConfigError, safe_repr

_SETTING_KINDS = {
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
    "policy": "table",
}
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "text": (lambda value: isinstance(value, str) and value != "", "text in quotes"),
    "number": (lambda value: type(value) is int and value >= 1, "a whole number, at least 1"),
    "seconds": (lambda value: type(value) in (int, float) and 0.1 <= value <= 60, "a number of seconds from 0.1 to 60"),
    "truth": (lambda value: isinstance(value, bool), "true or false"),
    "table": (lambda value: isinstance(value, dict), "a table [policy]"),
}


def read_client_toml(folder: Path) -> dict[str, Any]:
    """Read and check client.toml in a client's folder.

    Returns:
        The settings by name, without those that the file leaves out. `policy` is always present, as a Policy.

    Raises:
        ConfigError: The file cannot be read or is not valid; the message is one sentence.
    """
    path = folder / "client.toml"
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    unknown = sorted(set(settings) - set(_SETTING_KINDS))
    if unknown or "name" not in settings:
        problem = f"has unknown settings: {', '.join(unknown)}" if unknown else "must contain the client's name"
        raise ConfigError(f"{path} {problem}; legal are {', '.join(sorted(_SETTING_KINDS))}, got {sorted(settings)}")
    for name, value in settings.items():
        is_legal, expected = _CHECKS[_SETTING_KINDS[name]]
        if not is_legal(value):
            raise ConfigError(f"{path}: {name} must be {expected}, got {safe_repr(value)}")
    return settings | {"policy": Policy.from_table(settings.get("policy", {}), str(path))}


def has_policy(folder: Path) -> bool:
    """Return whether client.toml has a table [policy]."""
    return "policy" in tomllib.loads((folder / "client.toml").read_text(encoding="utf-8"))


def describe_policy(folder: Path) -> str:
    """Describe the policy of a client, and say whether its values are those of client.toml or the defaults."""
    policy = read_client_toml(folder)["policy"]
    source = "policy" if has_policy(folder) else "client.toml has no [policy], so the defaults apply"
    return f"{source}: {', '.join(f'{name} = {json.dumps(value)}' for name, value in policy.to_dict().items())}"
