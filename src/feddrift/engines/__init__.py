"""Engines: they run the work of the clients, in this process or on other machines.

The same algorithm runs on each engine.
"""

from __future__ import annotations

from collections.abc import Callable

from feddrift._internal import plugins
from feddrift.engines.external_model import make_simulator
from feddrift.engines.local.reference import Reference
from feddrift.engines.server.engine import Engine
from feddrift.errors import ConfigError, unknown_name_error

ENGINES: dict[str, tuple[Callable[..., Engine], str]] = {
    "simulator": (make_simulator, "vectorised over clients and models with JAX, CPU or GPU (the default)"),
    "reference": (Reference, "plain loops, one client at a time: slow, the executable specification"),
}


def engine(name: str) -> Callable[..., Engine]:
    """Return the class or function that makes an engine.

    Args:
        name: A name in `ENGINES`, the name of an engine of an installed package, or ``package.module:Name``.

    Raises:
        ConfigError: If the engine does not exist, or the object is not an Engine.
    """
    if name in ENGINES:
        return ENGINES[name][0]
    candidate = plugins.find_object("engine", name)
    if candidate is None:
        raise unknown_name_error("engine", name, [*ENGINES, *plugins.list_plugins("engine")], ["package.module:Name"])
    if not (isinstance(candidate, type) and issubclass(candidate, Engine)):
        raise ConfigError(f"'{name}' must be an Engine, got {candidate!r}")
    return candidate
