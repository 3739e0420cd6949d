"""The client's side of a federation over Flower: its data, its models and its replies to requests."""

from feddrift._renamed import forward_names

_MOVED = ("Client",)  # names that version 0.3 imported from here
__getattr__ = forward_names(__name__, "feddrift.engines.flower.client.client", _MOVED)
