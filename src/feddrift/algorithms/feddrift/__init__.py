"""FedDrift and its variants: detect drift, create new models, merge similar models."""

from feddrift._renamed import forward_names

__getattr__ = forward_names(__name__, "feddrift.algorithms.feddrift.method")  # the path of FedDrift in version 0.3
