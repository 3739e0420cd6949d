"""Import paths of version 0.1: for one release they lead on to where things are now, with a DeprecationWarning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

MODULES = {
    "feddrift.conditions": ("feddrift.engines.conditions", "feddrift.run", "feddrift.runs.config"),
    "feddrift.config": ("feddrift.runs.config",),
    "feddrift.detect": ("feddrift.algorithms.drift_tests",),
    "feddrift.engines.flower.own": ("feddrift.nets.own", "feddrift.engines.own"),
    "feddrift.engines.flower.server": ("feddrift.deploy.server",),
    "feddrift.export": ("feddrift.exported", "feddrift.runs.export"),
    "feddrift.metrics": ("feddrift.reports.metrics",),
    "feddrift.record": ("feddrift.runs.record", "feddrift.runs.writer"),
    "feddrift.recorded": ("feddrift.runs.recorded",),
    "feddrift.report": ("feddrift.reports.summary", "feddrift.reports.words"),
    "feddrift.weights": ("feddrift.memory",),
}
NAMES = {  # of modules that are still there
    "feddrift.models": ("feddrift.averaging", "feddrift.trees"),
    "feddrift.nets": ("feddrift.nets.losses", "feddrift.nets.perceptron", "feddrift.nets.voting"),
    "feddrift.types": ("feddrift.data",),
}


def names_of(old: str, places: Sequence[str]) -> Callable[[str], Any]:
    """A module's `__getattr__` for names that are in one of these places now."""

    def find(name: str) -> Any:
        for place in places if not name.startswith("_") else ():
            module = importlib.import_module(place)
            value = getattr(module, name, None)
            made_in = str(getattr(value, "__module__", place))
            if hasattr(module, name) and (
                made_in == place or not made_in.startswith("feddrift.")
            ):  # else imported there
                warnings.warn(f"{old}.{name} is now {place}.{name}", DeprecationWarning, stacklevel=2)
                return value
        raise AttributeError(f"module '{old}' has no attribute '{name}'")

    return find


class Finder(MetaPathFinder, Loader):
    """Makes a stand-in module when somebody imports a module by its old name."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        return spec_from_loader(name, self) if name in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = f"Now {' and '.join(MODULES[module.__name__])}."
        module.__dict__["__getattr__"] = names_of(module.__name__, MODULES[module.__name__])


def install() -> None:
    """Add the finder behind all others, so that it is asked only for modules that are not there."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())


def lead_on(module: ModuleType) -> None:
    """Give a module that has just been imported a `__getattr__` for the names that have moved out of it."""
    if module.__name__ in NAMES:
        module.__dict__.setdefault("__getattr__", names_of(module.__name__, NAMES[module.__name__]))
