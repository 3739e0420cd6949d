"""Federated learning when the data of different clients drift at different times."""

from __future__ import annotations

from feddrift.algorithms import algorithm
from feddrift.errors import ConfigError, DataError, FeddriftError
from feddrift.nets import mlp
from feddrift.run import Step, run
from feddrift.streams import stream
from feddrift.types import Event, Local, Models, Net, State, Stream

__version__ = "0.1.0"

__all__ = [
    "ConfigError", "DataError", "Event", "FeddriftError", "Local", "Models", "Net", "State", "Step", "Stream",
    "algorithm", "mlp", "run", "stream",
]  # fmt: skip
