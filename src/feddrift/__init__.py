"""Federated learning when the data of different clients drift at different times."""

from __future__ import annotations

from feddrift import _moved
from feddrift._version import __version__ as __version__
from feddrift.algorithms import algorithm
from feddrift.data import Stream
from feddrift.errors import ConfigError, DataError, FeddriftError
from feddrift.exported import load
from feddrift.nets.perceptron import mlp
from feddrift.run import Step, run
from feddrift.streams import stream
from feddrift.types import Event, Local, Models, Net, State

__all__ = [
    "ConfigError", "DataError", "Event", "FeddriftError", "Local", "Models", "Net", "State", "Step", "Stream",
    "algorithm", "load", "mlp", "run", "stream",
]  # fmt: skip

_moved.install()
