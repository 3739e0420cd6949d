"""Federated learning when the data of different clients drift at different times."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from feddrift import _renamed
from feddrift._version import __version__ as __version__

if TYPE_CHECKING:
    from feddrift.algorithms import algorithm
    from feddrift.algorithms.options import option
    from feddrift.api import alarms, events, export, plot, read, record, report, rows, summary, update
    from feddrift.data import Stream
    from feddrift.engines.conditions.conditions import Conditions
    from feddrift.engines.worker import Worker
    from feddrift.errors import ConfigError, DataError, FeddriftError
    from feddrift.exported_models import load_models
    from feddrift.nets.perceptron import mlp
    from feddrift.runs.record import Record
    from feddrift.simulation import Step, run
    from feddrift.streams import stream
    from feddrift.types import Algorithm, Event, Federation, Local, Models, Net, Pull, State

__all__ = [
    "Algorithm", "Conditions", "ConfigError", "DataError", "Event", "FeddriftError", "Federation", "Local", "Models",
    "Net", "Pull", "Record", "State", "Step", "Stream", "Worker", "alarms", "algorithm", "events", "export",
    "load_models", "mlp", "option", "plot", "read", "record", "report", "rows", "run", "stream", "summary", "update",
]  # fmt: skip

_PUBLIC_NAMES = {  # public names by module; `import feddrift` imports a module when one of its names is first used
    "feddrift.algorithms": ("algorithm",),
    "feddrift.algorithms.options": ("option",),
    "feddrift.api": ("alarms", "events", "export", "plot", "read", "record", "report", "rows", "summary", "update"),
    "feddrift.data": ("Stream",),
    "feddrift.engines.conditions.conditions": ("Conditions",),
    "feddrift.engines.worker": ("Worker",),
    "feddrift.errors": ("ConfigError", "DataError", "FeddriftError"),
    "feddrift.exported_models": ("load_models",),
    "feddrift.nets.perceptron": ("mlp",),
    "feddrift.simulation": ("Step", "run"),
    "feddrift.runs.record": ("Record",),
    "feddrift.streams": ("stream",),
    "feddrift.types": ("Algorithm", "Event", "Federation", "Local", "Models", "Net", "Pull", "State"),
}
_MODULE_OF_NAME = {name: module for module, names in _PUBLIC_NAMES.items() for name in names}


class _Package(ModuleType):
    """Package in which a public name is not replaced by a module of the same name: `feddrift.run` is the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULE_OF_NAME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


if not TYPE_CHECKING:  # a type checker must report names that do not exist

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF_NAME:
            raise AttributeError(f"module 'feddrift' has no attribute '{name}'")
        value = getattr(importlib.import_module(_MODULE_OF_NAME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


sys.modules[__name__].__class__ = _Package
_renamed.install()
