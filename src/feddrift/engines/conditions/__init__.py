"""Conditions of a run, off by default: dropout, Byzantine clients, defence, models that few clients score, routing."""

from feddrift._renamed import forward_names

_MOVED = ("IDEAL", "Conditions")  # names that version 0.3 imported from here
__getattr__ = forward_names(__name__, "feddrift.engines.conditions.conditions", _MOVED)
