"""FedDrift-Auto, the default method: shared models for conflicting data, and private models for each client."""

from feddrift._renamed import forward_names

_MOVED = ("AutoState", "FedDriftAuto")  # names that version 0.3 imported from here
__getattr__ = forward_names(__name__, "feddrift.algorithms.auto.method", _MOVED)
