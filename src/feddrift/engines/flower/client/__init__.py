"""The client's side of a federation over Flower: its data, its models and its answers to requests."""

from feddrift._renamed import forward_names

__getattr__ = forward_names(__name__, "feddrift.engines.flower.client.client")  # the path of Client in version 0.3
