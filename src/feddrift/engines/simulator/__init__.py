"""The default engine: trains many models of many clients at once, with JAX or with compiled loops on a CPU."""

from feddrift._renamed import forward_names

_MOVED = ("Simulator",)  # names that version 0.3 imported from here
__getattr__ = forward_names(__name__, "feddrift.engines.simulator.simulator", _MOVED)
