"""Federated learning when the data of different clients drift at different times."""

from __future__ import annotations

__version__ = "0.1.0"  # first: what is imported below records it

from feddrift.algorithms import algorithm
from feddrift.errors import ConfigError, DataError, FeddriftError
from feddrift.export import load
from feddrift.nets import mlp
from feddrift.run import Step, run
from feddrift.streams import stream
from feddrift.types import Event, Local, Models, Net, State, Stream

__all__ = [
    "ConfigError", "DataError", "Event", "FeddriftError", "Local", "Models", "Net", "State", "Step", "Stream",
    "algorithm", "load", "mlp", "run", "stream",
]  # fmt: skip
