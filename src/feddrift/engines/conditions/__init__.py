"""Conditions of a run that are off by default: dropout, Byzantine clients, robust aggregation, idle models, routing."""

from feddrift._renamed import forward_names

__getattr__ = forward_names(__name__, "feddrift.engines.conditions.conditions")  # the path of Conditions in version 0.3
