"""Nets as pairs of functions: the one that suits a stream, or your own."""

from __future__ import annotations

from pathlib import Path

from feddrift import plugins
from feddrift.data import Stream
from feddrift.errors import ConfigError, unknown
from feddrift.nets.perceptron import mlp, usual
from feddrift.types import Net


def default_net(stream: Stream, weights: str | Path | None = None) -> Net:
    """The paper's net for this stream: a ResNet-18 for pictures, from these weights, else a d-2d-C perceptron."""
    if stream.family == "fmow" and stream.x.ndim == 4:
        from feddrift.nets.resnet import resnet18  # here: few need it

        return resnet18(stream.n_classes, weights)
    if weights is not None:
        raise ConfigError(f"weights are for streams of pictures, {stream.name} has none")
    return usual(stream.x.shape[1:], stream.n_classes)


def own_net(name: str, stream: Stream) -> Net:
    """The net at ``package.module:make``, or of an installed package: a Net, or a function of the stream."""
    found = plugins.find("net", name)
    if found is None:
        raise unknown("net", name, [*plugins.installed("net"), "package.module:make"])
    made = plugins.called("net", name, found, stream) if callable(found) else found
    if not isinstance(made, Net):
        raise ConfigError(
            f"'{name}' must be a Net or a function of the stream that makes one, got {type(made).__name__}"
        )
    return made


__all__ = ["default_net", "mlp", "own_net"]
