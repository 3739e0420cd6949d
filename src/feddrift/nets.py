"""Nets as pairs of functions, and the loss they train on."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.nn import logsumexp, relu

from feddrift import plugins, rng
from feddrift.errors import ConfigError, unknown
from feddrift.types import Ballot, Floats, Net, Params, Stream


@cache  # one net, one compiled program, however many runs a process makes
def mlp(features: int, hidden: int, classes: int) -> Net:
    """A perceptron with one hidden layer, initialised as PyTorch's nn.Linear: U(-1/sqrt(fan_in), 1/sqrt(fan_in)).

    The hidden layer is its trunk.

    >>> net = mlp(2, 4, 2)
    >>> {k: v.shape for k, v in net.init(rng.derive(0, "init")).items()}
    {'W1': (2, 4), 'b1': (4,), 'W2': (4, 2), 'b2': (2,)}
    """

    shapes = {
        "W1": (features, (features, hidden)), "b1": (features, (hidden,)),
        "W2": (hidden, (hidden, classes)), "b2": (hidden, (classes,)),
    }  # fmt: skip

    def init(key: rng.Words) -> Params:
        params = {}
        for i, (name, (fan_in, shape)) in enumerate(shapes.items()):
            leaf_key = rng.threefry2x32(key, (np.uint32(i), np.uint32(1)))
            params[name] = rng.uniform(leaf_key, shape, -(fan_in**-0.5), fan_in**-0.5)
        return params

    return Net(init, perceptron, trunk=("W1", "b1"))


def perceptron(params: Params, x: Any) -> Any:
    """The logits of a net with one hidden layer."""
    x = x.reshape(len(x), -1)
    return relu(x @ params["W1"] + params["b1"]) @ params["W2"] + params["b2"]


def default_net(stream: Stream, weights: str | Path | None = None) -> Net:
    """The paper's net for this stream: a ResNet-18 for pictures, from these weights, else a d-2d-C perceptron."""
    if stream.family == "fmow" and stream.x.ndim == 4:
        from feddrift.resnet import resnet18  # here: few need it

        return resnet18(stream.n_classes, weights)
    if weights is not None:
        raise ConfigError(f"weights are for streams of pictures, {stream.name} has none")
    d = int(np.prod(stream.x.shape[1:]))
    return mlp(d, 2 * d, stream.n_classes)


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


def cross_entropy(logits: Any, y: Any) -> Any:
    """The loss of each example."""
    return logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, y[:, None], axis=-1)[:, 0]


def masked(net: Net, params: Params, mask: Any, x: Any) -> Any:
    """Logits from what the model sees of its inputs."""
    return net.apply(params, x if mask is None else x * mask)


def poll(net: Net, voters: Iterable[tuple[float, Params, Any]], ballot: Ballot, x: Any) -> Floats:
    """The votes [n, class] that models, each with its weight, parameters and mask, cast on inputs x[n, ...]."""
    total: Any = 0.0
    for weight, params, mask in voters:
        logits = np.asarray(masked(net, params, mask, x), dtype=np.float64)
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        total = total + weight * (np.eye(logits.shape[1])[logits.argmax(axis=1)] if ballot == "hard" else shares)
    return np.asarray(total)


def batch_loss(net: Net, params: Params, mask: Any, x: Any, y: Any, n: Any) -> Any:
    """Mean loss over a minibatch drawn from a cell of n rows: where n < B, its last B - n rows are repeats."""
    losses = cross_entropy(masked(net, params, mask, x), y)
    real = jnp.minimum(n, len(losses))
    return jnp.where(jnp.arange(len(losses)) < real, losses, 0.0).sum() / real
