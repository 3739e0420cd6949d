"""The optimisers of local training, for NumPy and JAX arrays alike.

Adam with amsgrad is PyTorch's: L2 is added to the gradient and the maximum is taken before bias correction. So is the
momentum of SGD, which lies where Adam has its mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from feddrift import numerics
from feddrift.trees import tree_map
from feddrift.types import Local, Params

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8

Moments = dict[str, Params]
NAMES = ("mean", "square", "largest")  # the moments: mean, mean square, and the largest mean square so far


def start(params: Params) -> Moments:
    """The moments before the first step."""

    def zeros(p: Any) -> Any:
        return p.__array_namespace__().zeros_like(p)

    return {name: tree_map(zeros, params) for name in NAMES}


def start_rows(arrays: Any, n: int, params: Sequence[Any]) -> Moments:
    """The moments of n copies of these parameters before the first step, made by this array library."""
    shapes = [((n, *leaf.shape[1:]), leaf.dtype) for leaf in params]
    return {name: [arrays.zeros(shape, dtype=dtype) for shape, dtype in shapes] for name in NAMES}


def pulled(grads: list[Any], params: list[Any], to: list[Any], weight: Any) -> list[Any]:
    """The gradients with those of weight / 2 * |params - to|^2."""
    return [g + weight * (p - a) for g, p, a in zip(grads, params, to, strict=True)]


def update(
    local: Local, params: Params, grads: Params, moments: Moments, step: Any, lr: Any = None
) -> tuple[Params, Moments]:
    """One step; `step` counts from 1 and is an array (0-d float32), and so may be the step size."""
    lr = local.lr if lr is None else lr
    grads = tree_map(lambda g, p: g + local.weight_decay * p, grads, params)
    if local.optimizer == "sgd" and local.momentum:
        mean = tree_map(lambda m, g: local.momentum * m + g, moments["mean"], grads)
        return tree_map(lambda p, m: p - lr * m, params, mean), moments | {"mean": mean}
    if local.optimizer == "sgd":
        return tree_map(lambda p, g: p - lr * g, params, grads), moments
    xp = step.__array_namespace__()
    bias1 = _bias_correction(step, BETA1)
    bias2 = xp.sqrt(_bias_correction(step, BETA2))
    mean = tree_map(lambda m, g: BETA1 * m + (1 - BETA1) * g, moments["mean"], grads)
    square = tree_map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, moments["square"], grads)
    largest = tree_map(xp.maximum, moments["largest"], square)
    params = tree_map(lambda p, m, v: p - lr / bias1 * m / (xp.sqrt(v) / bias2 + EPS), params, mean, largest)
    return params, {"mean": mean, "square": square, "largest": largest}


def _bias_correction(step: Any, beta: float) -> Any:
    """Return 1 - beta^step in float32, exact also for the first steps; of NumPy arrays with equal bits everywhere."""
    if isinstance(step, np.ndarray | np.generic):
        return np.asarray(-numerics.expm1(np.asarray(step) * numerics.log(beta)), dtype=np.float32)
    return -step.__array_namespace__().expm1(step * math.log(beta))
