"""FedDrift and its variants: detect drift, create new models, merge similar models."""

from feddrift._renamed import forward_names

_MOVED = ("DriftState", "FedDrift", "FedDriftEager")  # names that version 0.3 imported from here
__getattr__ = forward_names(__name__, "feddrift.algorithms.feddrift.method", _MOVED)
