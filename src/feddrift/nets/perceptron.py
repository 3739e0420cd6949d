"""The paper's net: a perceptron with one hidden layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from feddrift import rng
from feddrift.types import Net, Params


@cache  # one net, one compiled program, however many runs a process makes
def mlp(features: int, hidden: int, classes: int) -> Net:
    """A perceptron with one hidden layer, initialised as PyTorch's nn.Linear: U(-1/sqrt(fan_in), 1/sqrt(fan_in)).

    The hidden layer is its trunk.

    Parameters:
        features: How many numbers an input has.
        hidden: How many units the hidden layer has.
        classes: How many classes there are.

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
    from jax.nn import relu  # here, since JAX takes a while to import

    x = x.reshape(len(x), -1)
    return relu(x @ params["W1"] + params["b1"]) @ params["W2"] + params["b2"]


def usual(features: Sequence[int], classes: int) -> Net:
    """The paper's perceptron for inputs of this shape: twice as many hidden units as features."""
    d = math.prod(features)
    return mlp(d, 2 * d, classes)
