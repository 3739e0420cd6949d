"""Where clients live and work: the same algorithm runs on each engine."""

from __future__ import annotations

from feddrift.engines.in_process import InProcess
from feddrift.engines.reference import Reference
from feddrift.engines.simulator import Simulator
from feddrift.errors import unknown

ENGINES: dict[str, tuple[type[InProcess], str]] = {
    "simulator": (Simulator, "vectorised over clients and models with JAX, CPU or GPU (the default)"),
    "reference": (Reference, "plain loops, one client at a time: slow, the executable specification"),
}


def engine(name: str) -> type[InProcess]:
    """The engine of this name."""
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    return ENGINES[name][0]
