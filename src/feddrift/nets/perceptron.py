"""Perceptrons: the paper's net with one hidden layer, and nets with none or several.

JAX compiles them. On NumPy arrays small layers are multiplied in a fixed order, so that outputs and gradients have the
same bits on every processor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from feddrift import numerics, rng
from feddrift.errors import ConfigError
from feddrift.types import Net, Params

MAX_SMALL_LAYER = 2048  # weights; for larger layers a fixed order of sums takes too long


def mlp(features: int, hidden: int | Sequence[int], classes: int) -> Net:
    """Build a perceptron, initialised as PyTorch's nn.Linear: U(-1/sqrt(fan_in), 1/sqrt(fan_in)).

    All layers but the last are its trunk.

    Args:
        features: The number of features of an input.
        hidden: The number of units of the hidden layer, or of each of several; ``()``: the net is linear.
        classes: The number of classes.

    >>> net = mlp(2, 4, 2)
    >>> {k: v.shape for k, v in net.init(rng.derive_key(0, "init")).items()}
    {'W1': (2, 4), 'b1': (4,), 'W2': (4, 2), 'b2': (2,)}
    >>> list(mlp(2, (), 2).init(rng.derive_key(0, "init")))
    ['W1', 'b1']
    """
    sizes = features, *(hidden if isinstance(hidden, Sequence) else (hidden,)), classes
    if not all(isinstance(size, int | np.integer) and size > 0 for size in sizes):
        raise ConfigError(f"features, hidden units and classes must be whole numbers above 0, got {sizes}")
    return _build_mlp(tuple(map(int, sizes)))


@cache  # all runs of a process share a net, so that it is compiled once
def _build_mlp(sizes: tuple[int, ...]) -> Net:
    shapes: dict[str, tuple[int, tuple[int, ...]]] = {}
    for k, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
        shapes |= {f"W{k}": (fan_in, (fan_in, fan_out)), f"b{k}": (fan_in, (fan_out,))}

    def init(key: rng.Words) -> Params:
        params = {}
        for i, (name, (fan_in, shape)) in enumerate(shapes.items()):
            leaf_key = rng.threefry2x32(key, (np.uint32(i), np.uint32(1)))
            bound = 1 / math.sqrt(fan_in)
            params[name] = rng.uniform(leaf_key, shape, -bound, bound)
        return params

    apply = {2: apply_linear, 3: apply_perceptron}.get(len(sizes), apply_deep)
    weight, bias = tuple(shapes)[-2:]
    return Net(init, apply, tuple(shapes)[:-2], classes={weight: 1, bias: 0}, hidden=compute_last_inputs)


def apply_linear(params: Params, x: Any) -> Any:
    """Return the logits of a net without hidden layers."""
    return _apply_layer(params, 1, x.reshape(len(x), -1))


def apply_perceptron(params: Params, x: Any) -> Any:
    """Return the logits of a net with one hidden layer."""
    x = x.reshape(len(x), -1)
    return _apply_layer(params, 2, _relu(_apply_layer(params, 1, x)))


def apply_deep(params: Params, x: Any) -> Any:
    """Return the logits of a net with several hidden layers."""
    return _apply_layer(params, len(params) // 2, compute_last_inputs(params, x))


def compute_last_inputs(params: Params, x: Any) -> Any:
    """Return the inputs of the last layer; for a net without hidden layers the inputs of the net."""
    x = x.reshape(len(x), -1)
    for k in range(1, len(params) // 2):
        x = _relu(_apply_layer(params, k, x))
    return x


def compute_gradient(params: Params, mask: Any, x: Any, y: Any, n: int) -> Params:
    """Return the gradient of `losses.batch_loss` in NumPy, for any net of this module.

    Args:
        params: The parameters of one model.
        mask: The features that the model sees, or None.
        x: The inputs of a minibatch.
        y: Their classes.
        n: The number of rows of the cell that the minibatch was drawn from.

    Returns:
        The gradient, in the form of the parameters.
    """
    inputs = [(x if mask is None else x * mask).reshape(len(x), -1)]
    n_layers = len(params) // 2
    for k in range(1, n_layers):
        inputs.append(_relu(_apply_layer(params, k, inputs[-1])))
    logits = _apply_layer(params, n_layers, inputs[-1]).astype(np.float64)
    exponentials = numerics.exp(logits - logits.max(axis=1, keepdims=True))
    error = exponentials / exponentials.sum(axis=1, keepdims=True) - np.eye(logits.shape[1])[y]
    n_distinct = min(n, len(x))
    error[n_distinct:] = 0  # repeated rows
    error = (error / n_distinct).astype(np.float32)
    gradient: Params = {}
    for k in range(n_layers, 0, -1):
        weights = params[f"W{k}"]
        gradient |= {f"W{k}": _multiply_matrices(inputs[k - 1].T, error), f"b{k}": error.sum(axis=0)}
        error = _multiply_matrices(error, weights.T) * (inputs[k - 1] > 0)
    return {name: gradient[name] for name in params}


def _apply_layer(params: Params, k: int, x: Any) -> Any:
    return _multiply_matrices(x, params[f"W{k}"]) + params[f"b{k}"]


def _multiply_matrices(x: Any, weights: Any) -> Any:
    in_numpy = isinstance(x, np.ndarray) and isinstance(weights, np.ndarray)
    return numerics.matmul(x, weights) if in_numpy and weights.size <= MAX_SMALL_LAYER else x @ weights


def _relu(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return np.maximum(x, 0)
    from jax.nn import relu  # here, since JAX takes a while to import

    return relu(x)


def get_layer_sizes(net: Net, params: Params) -> tuple[int, ...] | None:
    """Return the numbers of features, hidden units of each layer and classes of a perceptron; None for other nets."""
    if net.apply not in (apply_linear, apply_perceptron, apply_deep):
        return None
    weights = [np.shape(params[f"W{k}"]) for k in range(1, len(params) // 2 + 1)]
    return (weights[0][0], *(shape[1] for shape in weights))


def build_default_perceptron(features: Sequence[int], classes: int) -> Net:
    """Build the paper's perceptron for inputs of this shape: twice as many hidden units as features."""
    d = math.prod(features)
    return mlp(d, 2 * d, classes)
