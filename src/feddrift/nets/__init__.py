"""Nets as pairs of functions: the one that suits a stream, or your own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from feddrift import plugins, rng
from feddrift.data import Stream
from feddrift.errors import ConfigError, unknown
from feddrift.nets.perceptron import mlp, perceptron, usual
from feddrift.types import Net


def default_net(stream: Stream, weights: str | Path | None = None) -> Net:
    """The paper's net for this stream: a ResNet-18 for pictures, from these weights, else a d-2d-C perceptron."""
    if stream.family == "fmow" and stream.x.ndim == 4:
        from feddrift.nets.resnet import resnet18  # here: few need it

        return resnet18(stream.n_classes, weights)
    if weights is not None:
        raise ConfigError(f"weights are for streams of pictures, {stream.name} has none")
    return usual(stream.x.shape[1:], stream.n_classes)


def check_fits(net: Net, features: Sequence[int], n_classes: int) -> None:
    """Whether a net takes such inputs and has a logit for each class: native code would read beyond its arrays."""
    if not isinstance(net, Net):
        raise ConfigError(f"a net must be a Net(init, apply), got {type(net).__name__}")
    params = net.init(rng.derive(0, "init", 0))
    if net.apply is perceptron:
        takes, gives = np.shape(params["W1"])[0], np.shape(params["W2"])[1]
        if takes != math.prod(features):
            raise ConfigError(f"the net takes {takes} features, the stream has {math.prod(features)}")
    else:
        import jax  # here, since it takes a while

        inputs = jax.ShapeDtypeStruct((2, *features), np.float32)  # type: ignore[no-untyped-call]
        try:
            shape = np.shape(jax.eval_shape(net.apply, params, inputs))
        except Exception as error:  # whatever the net's own code says
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"the net does not take inputs of shape {tuple(features)}: {first}") from error
        if len(shape) != 2 or shape[0] != 2:
            raise ConfigError(f"the net must give a row of logits for each input, for 2 inputs it gives {shape}")
        gives = shape[1]
    if gives != n_classes:
        raise ConfigError(f"the net gives {gives} logits for an input, the stream has {n_classes} classes")


def own_net(name: str, stream: Stream) -> Net:
    """The net at ``package.module:make``, or of an installed package: a Net, or a function of the stream."""
    maker = plugins.find("net", name)
    if maker is None:
        raise unknown("net", name, [*plugins.installed("net"), "package.module:make"])
    net = plugins.called("net", name, maker, stream) if callable(maker) else maker
    if not isinstance(net, Net):
        raise ConfigError(
            f"'{name}' must be a Net or a function of the stream that makes one, got {type(net).__name__}"
        )
    return net


__all__ = ["check_fits", "default_net", "mlp", "own_net"]
