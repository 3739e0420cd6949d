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

_PLACES = {  # where the public names are: `import feddrift` loads none of these before they are asked for
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
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names}


class _Package(ModuleType):
    """A package whose public names win over modules of the same name: `feddrift.run` is the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _PLACE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


if not TYPE_CHECKING:  # else a type checker would take any name for a public one

    def __getattr__(name: str) -> Any:
        if name not in _PLACE_OF:
            raise AttributeError(f"module 'feddrift' has no attribute '{name}'")
        value = getattr(importlib.import_module(_PLACE_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


sys.modules[__name__].__class__ = _Package
_renamed.install()
