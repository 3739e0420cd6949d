"""How exactly the compiled program multiplies matrices."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np

from feddrift.nets.perceptron import deep, linear, perceptron
from feddrift.types import Local, Net

PERCEPTRONS = (linear, perceptron, deep)
SIX_PASSES = "BF16_BF16_F32_X6"


def products(net: Net, local: Local) -> Any:
    """How a device multiplies matrices meanwhile: float32, or TF32 on GPUs where that is wanted.

    GPUs with bfloat16 multiply the float32 matrices of perceptrons in six passes of it: quicker, and no less exact.
    """
    if local.precision == "tf32":
        return jax.default_matmul_precision("tensorfloat32")
    six = net.apply in PERCEPTRONS and six_passes_are_exact()  # convolutions know no such thing
    return jax.default_matmul_precision(SIX_PASSES if six else "float32")


@cache
def six_passes_are_exact() -> bool:
    """Whether this GPU, if it is one, multiplies in six passes as exactly as in float32: tried, once."""
    if jax.default_backend() != "gpu":
        return False
    numbers = np.random.default_rng(0)
    shapes = ((2, 50, 784), (2, 784, 256), (2, 50, 256))
    x, w, dy = (numbers.normal(size=shape).astype(np.float32) for shape in shapes)

    def both(x: Any, w: Any, dy: Any) -> list[Any]:  # there and back, as in training
        return [x @ w, x.swapaxes(1, 2) @ dy]

    try:
        with jax.default_matmul_precision(SIX_PASSES):
            found = jax.jit(both)(x, w, dy)
    except (RuntimeError, ValueError):  # a GPU without bfloat16
        return False
    exact = both(*(array.astype(np.float64) for array in (x, w, dy)))
    errors = [float(np.abs(np.asarray(a) - b).max() / b.std()) for a, b in zip(found, exact, strict=True)]
    return max(errors) < 4e-6  # float32 is off by 2e-6 or less, three passes by 2e-5, TF32 by 1e-3
