"""Optimisers of local training, for arrays of NumPy and of JAX.

They are defined as in PyTorch. Adam with amsgrad adds L2 to the gradient, and takes the maximum before bias correction.
The momentum of SGD is stored in the moment "mean".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from feddrift import numerics
from feddrift.trees import tree_map
from feddrift.types import Local, Params

BETA1 = 0.9
BETA2 = 0.999
EPS = 1e-8

OptimizerMoments = dict[str, Params]
MOMENT_NAMES = ("mean", "square", "largest")  # the moments: mean, mean square, and the largest mean square so far


def init_moments(params: Params) -> OptimizerMoments:
    """Return the moments before the first step."""

    def zeros(p: Any) -> Any:
        return p.__array_namespace__().zeros_like(p)

    return {name: tree_map(zeros, params) for name in MOMENT_NAMES}


def init_moment_rows(xp: Any, n: int, params: Sequence[Any]) -> OptimizerMoments:
    """Return the moments before the first step of n trunks or heads.

    Args:
        xp: The array library, NumPy or JAX's.
        n: The number of rows.
        params: Stacks of any number of trunks or heads with the same shapes.
    """
    shapes = [((n, *leaf.shape[1:]), leaf.dtype) for leaf in params]
    return {name: [xp.zeros(shape, dtype=dtype) for shape, dtype in shapes] for name in MOMENT_NAMES}


def add_pull(grads: list[Any], params: list[Any], anchor: list[Any], weight: Any) -> list[Any]:
    """Return the gradients plus those of weight / 2 * |params - anchor|^2."""
    return [g + weight * (p - a) for g, p, a in zip(grads, params, anchor, strict=True)]


def apply_gradients(
    local: Local, params: Params, grads: Params, moments: OptimizerMoments, step: Any, lr: Any = None
) -> tuple[Params, OptimizerMoments]:
    """Take one step of the optimiser.

    Args:
        local: The settings of local training.
        params: The parameters.
        grads: The gradients.
        moments: The moments before the step.
        step: The number of the step, from 1, as a float32 array with 0 dimensions.
        lr: The step size, a number or an array; None: that of `local`.

    Returns:
        The parameters and the moments after the step.
    """
    lr = local.lr if lr is None else lr
    grads = tree_map(lambda g, p: g + local.weight_decay * p, grads, params)
    if local.optimizer == "sgd" and local.momentum:
        mean = tree_map(lambda m, g: local.momentum * m + g, moments["mean"], grads)
        return tree_map(lambda p, m: p - lr * m, params, mean), moments | {"mean": mean}
    if local.optimizer == "sgd":
        return tree_map(lambda p, g: p - lr * g, params, grads), moments
    xp = step.__array_namespace__()
    bias1 = _compute_bias_correction(step, BETA1)
    bias2 = xp.sqrt(_compute_bias_correction(step, BETA2))
    mean = tree_map(lambda m, g: BETA1 * m + (1 - BETA1) * g, moments["mean"], grads)
    square = tree_map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, moments["square"], grads)
    largest = tree_map(xp.maximum, moments["largest"], square)
    params = tree_map(lambda p, m, v: p - lr / bias1 * m / (xp.sqrt(v) / bias2 + EPS), params, mean, largest)
    return params, {"mean": mean, "square": square, "largest": largest}


def _compute_bias_correction(step: Any, beta: float) -> Any:
    """Return 1 - beta^step in float32, exact also for the first steps; for NumPy with the same bits on all machines."""
    if isinstance(step, np.ndarray | np.generic):
        return np.asarray(-numerics.expm1(np.asarray(step) * numerics.log(beta)), dtype=np.float32)
    return -step.__array_namespace__().expm1(step * math.log(beta))
