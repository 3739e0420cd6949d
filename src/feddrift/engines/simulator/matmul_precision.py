"""Precision of matrix products in the compiled program."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np

from feddrift.nets.perceptron import apply_deep, apply_linear, apply_perceptron
from feddrift.types import Local, Net

PERCEPTRONS = (apply_linear, apply_perceptron, apply_deep)
SIX_PASSES = "BF16_BF16_F32_X6"


def set_matmul_precision(net: Net, local: Local) -> Any:
    """Return a context manager that sets the precision of matrix products: float32 or, if `local` has it, TF32.

    On GPUs with bfloat16, float32 matrices of perceptrons are multiplied in six passes of bfloat16 products. This is
    faster and as exact.
    """
    if local.precision == "tf32":
        return jax.default_matmul_precision("tensorfloat32")
    six_passes = net.apply in PERCEPTRONS and is_six_pass_exact()  # convolutions do not support this precision
    return jax.default_matmul_precision(SIX_PASSES if six_passes else "float32")


@cache
def is_six_pass_exact() -> bool:
    """Return whether the device is a GPU whose matrix products in six passes are as exact as in float32.

    The error is measured once, with random matrices.
    """
    if jax.default_backend() != "gpu":
        return False
    generator = np.random.default_rng(0)
    shapes = ((2, 50, 784), (2, 784, 256), (2, 50, 256))
    x, w, dy = (generator.normal(size=shape).astype(np.float32) for shape in shapes)

    def multiply(x: Any, w: Any, dy: Any) -> list[Any]:  # the products of a forward and a backward pass
        return [x @ w, x.swapaxes(1, 2) @ dy]

    try:
        with jax.default_matmul_precision(SIX_PASSES):
            products = jax.jit(multiply)(x, w, dy)
    except (RuntimeError, ValueError):  # a GPU without bfloat16
        return False
    exact = multiply(*(array.astype(np.float64) for array in (x, w, dy)))
    errors = [float(np.abs(np.asarray(a) - b).max() / b.std()) for a, b in zip(products, exact, strict=True)]
    return max(errors) < 4e-6  # the error of float32 is at most 2e-6, that of three passes 2e-5, that of TF32 1e-3
