"""FedDrift-Auto, the default method: shared models for conflicting data, and private models for each client."""

from feddrift._renamed import forward_names

__getattr__ = forward_names(__name__, "feddrift.algorithms.auto.method")  # the path of FedDriftAuto in version 0.3
