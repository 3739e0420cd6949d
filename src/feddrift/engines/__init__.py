"""Where clients live and work: the same algorithm runs on each engine."""

from __future__ import annotations

from collections.abc import Callable

from feddrift._internal import plugins
from feddrift.engines.external_model import simulated
from feddrift.engines.local.reference import Reference
from feddrift.engines.server.engine import Engine
from feddrift.errors import ConfigError, unknown

ENGINES: dict[str, tuple[Callable[..., Engine], str]] = {
    "simulator": (simulated, "vectorised over clients and models with JAX, CPU or GPU (the default)"),
    "reference": (Reference, "plain loops, one client at a time: slow, the executable specification"),
}


def engine(name: str) -> Callable[..., Engine]:
    """The engine of this name, of an installed package, or at ``package.module:Name``."""
    if name in ENGINES:
        return ENGINES[name][0]
    candidate = plugins.find("engine", name)
    if candidate is None:
        raise unknown("engine", name, [*ENGINES, *plugins.installed("engine"), "package.module:Name"])
    if not (isinstance(candidate, type) and issubclass(candidate, Engine)):
        raise ConfigError(f"'{name}' must be an Engine, got {candidate!r}")
    return candidate
