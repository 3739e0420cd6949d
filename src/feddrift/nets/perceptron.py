"""The paper's net, a perceptron with one hidden layer, and its kin with none or several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from feddrift import rng
from feddrift.errors import ConfigError
from feddrift.types import Net, Params


def mlp(features: int, hidden: int | Sequence[int], classes: int) -> Net:
    """A perceptron, initialised as PyTorch's nn.Linear: U(-1/sqrt(fan_in), 1/sqrt(fan_in)).

    All layers but the last are its trunk.

    Parameters:
        features: How many numbers an input has.
        hidden: How many units the hidden layer has, or each of several; with none, ``()``, the net is linear.
        classes: How many classes there are.

    >>> net = mlp(2, 4, 2)
    >>> {k: v.shape for k, v in net.init(rng.derive(0, "init")).items()}
    {'W1': (2, 4), 'b1': (4,), 'W2': (4, 2), 'b2': (2,)}
    >>> list(mlp(2, (), 2).init(rng.derive(0, "init")))
    ['W1', 'b1']
    """
    sizes = features, *(hidden if isinstance(hidden, Sequence) else (hidden,)), classes
    if not all(isinstance(size, int | np.integer) and size > 0 for size in sizes):
        raise ConfigError(f"features, hidden units and classes must be whole numbers above 0, got {sizes}")
    return _mlp(tuple(map(int, sizes)))


@cache  # one net, one compiled program, however many runs a process makes
def _mlp(sizes: tuple[int, ...]) -> Net:
    shapes: dict[str, tuple[int, tuple[int, ...]]] = {}
    for k, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
        shapes |= {f"W{k}": (fan_in, (fan_in, fan_out)), f"b{k}": (fan_in, (fan_out,))}

    def init(key: rng.Words) -> Params:
        params = {}
        for i, (name, (fan_in, shape)) in enumerate(shapes.items()):
            leaf_key = rng.threefry2x32(key, (np.uint32(i), np.uint32(1)))
            params[name] = rng.uniform(leaf_key, shape, -(fan_in**-0.5), fan_in**-0.5)
        return params

    apply = {2: linear, 3: perceptron}.get(len(sizes), deep)
    weight, bias = tuple(shapes)[-2:]
    return Net(init, apply, tuple(shapes)[:-2], classes={weight: 1, bias: 0}, hidden=below_the_last)


def linear(params: Params, x: Any) -> Any:
    """The logits of a net without hidden layers."""
    return x.reshape(len(x), -1) @ params["W1"] + params["b1"]


def perceptron(params: Params, x: Any) -> Any:
    """The logits of a net with one hidden layer."""
    from jax.nn import relu  # here, since JAX takes a while to import

    x = x.reshape(len(x), -1)
    return relu(x @ params["W1"] + params["b1"]) @ params["W2"] + params["b2"]


def deep(params: Params, x: Any) -> Any:
    """The logits of a net with several hidden layers."""
    from jax.nn import relu

    x, last = x.reshape(len(x), -1), len(params) // 2
    for k in range(1, last):
        x = relu(x @ params[f"W{k}"] + params[f"b{k}"])
    return x @ params[f"W{last}"] + params[f"b{last}"]


def below_the_last(params: Params, x: Any) -> Any:
    """What the last layer sees; of a net without hidden layers the inputs."""
    from jax.nn import relu

    x = x.reshape(len(x), -1)
    for k in range(1, len(params) // 2):
        x = relu(x @ params[f"W{k}"] + params[f"b{k}"])
    return x


def layer_sizes(net: Net, params: Params) -> tuple[int, ...] | None:
    """How many features, units of each hidden layer, and classes a net of this module has; None for others."""
    if net.apply not in (linear, perceptron, deep):
        return None
    weights = [np.shape(params[f"W{k}"]) for k in range(1, len(params) // 2 + 1)]
    return (weights[0][0], *(shape[1] for shape in weights))


def usual(features: Sequence[int], classes: int) -> Net:
    """The paper's perceptron for inputs of this shape: twice as many hidden units as features."""
    d = math.prod(features)
    return mlp(d, 2 * d, classes)
