"""The default engine: trains many models of many clients at once, with JAX or with compiled loops on a CPU."""

from feddrift._renamed import forward_names

__getattr__ = forward_names(__name__, "feddrift.engines.simulator.simulator")  # the path of Simulator in version 0.3
