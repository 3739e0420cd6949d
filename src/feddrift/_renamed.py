"""Import paths of version 0.3: they still work in version 0.4, with a DeprecationWarning that names the new path."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Collection
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

MODULES = {  # documented modules of version 0.3 whose paths no longer exist
    "feddrift.algorithms.drift_tests": "feddrift.algorithms.feddrift.drift_tests",
    "feddrift.algorithms.ifca": "feddrift.algorithms.baselines.ifca",
    "feddrift.algorithms.private": "feddrift.algorithms.baselines.local",
    "feddrift.algorithms.single": "feddrift.algorithms.baselines.single",
    "feddrift.cluster": "feddrift.clustering",
    "feddrift.engines.base": "feddrift.engines.server.engine",
    "feddrift.engines.entries": "feddrift.engines.sparse_weights",
    "feddrift.engines.federation": "feddrift.engines.server.federation",
    "feddrift.engines.flower.asking": "feddrift.engines.flower.server.connection",
    "feddrift.engines.flower.exchange": "feddrift.engines.flower.server.exchange",
    "feddrift.engines.flower.federation": "feddrift.engines.flower.server.federation",
    "feddrift.engines.flower.serve": "feddrift.engines.flower.client.serve",
    "feddrift.engines.in_process": "feddrift.engines.local.engine",
    "feddrift.engines.reference": "feddrift.engines.local.reference",
    "feddrift.exported": "feddrift.exported_models",
    "feddrift.local": "feddrift.training",
    "feddrift.nets.own": "feddrift.nets.external",
    "feddrift.run": "feddrift.simulation",
    "feddrift.runs.recorded": "feddrift.runs.recorded_run",
}
NAMES: dict[str, str] = {}  # public names of version 0.3: "module.Old" -> "New", in the module's new place


def forward_names(package: str, module: str, only: Collection[str] | None = None) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that looks names up in another module, with a warning.

    Args:
        package: The path that old code imports from.
        module: The module that has the names now.
        only: The names to look up; None: all public ones.
    """

    def find(name: str) -> Any:
        if only is not None and name not in only:  # also each submodule: Python asks for it before it imports it
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        target = importlib.import_module(module)
        current = NAMES.get(f"{module}.{name}", name)
        if current.startswith("_") or not hasattr(target, current):
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        warnings.warn(f"{package}.{name} is now {module}.{current}", DeprecationWarning, stacklevel=2)
        return getattr(target, current)

    return find


class RenamedModuleFinder(MetaPathFinder, Loader):
    """Creates a stand-in for a module that is imported by its old path."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        return spec_from_loader(name, self) if name in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = f"Now {MODULES[module.__name__]}."
        module.__dict__["__getattr__"] = forward_names(module.__name__, MODULES[module.__name__])


def install() -> None:
    """Add the finder behind all others: Python asks it only for modules that do not exist."""
    if not any(isinstance(finder, RenamedModuleFinder) for finder in sys.meta_path):
        sys.meta_path.append(RenamedModuleFinder())
