"""Conditions of a run that are off by default: dropout, Byzantine clients, robust aggregation, idle models, routing."""

from feddrift._renamed import forward_names

_MOVED = ("IDEAL", "Conditions")  # names that version 0.3 imported from here
__getattr__ = forward_names(__name__, "feddrift.engines.conditions.conditions", _MOVED)
