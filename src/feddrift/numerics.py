"""Elementary functions and matrix products with the same bits on every processor.

NumPy computes exponentials, logarithms, sines and matrix products with the instructions and libraries that it finds on
a machine, and their last bits differ from one processor to the next. The functions of this module use additions,
multiplications, divisions and square roots alone, each of which IEEE 754 defines to the last bit, in a fixed order. The
elementary functions work in float64; their errors are about one unit in the last place.

Use them wherever a value can enter a decision, a model, a data set or a record. `np.sum`, `np.mean`, `np.cumsum`,
`np.sqrt` and element-wise arithmetic are safe as they are; `np.einsum`, `np.dot`, `@` and unstable sorts are not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_LOG2_E = 1.4426950408889634
# ln 2 and pi/2 in parts: the high ones end in zeros, so that their products with small integers are exact.
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
_HALF_PI_PARTS = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624871116645580e-21)
_SQRT_HALF = 0.7071067811865476

# Taylor coefficients of (e^r - 1 - r) / r^2, enough for |r| <= ln(2) / 2: the next term is below 1e-17.
_EXP = tuple(1.0 / math.factorial(k) for k in range(2, 15))
# Minimax coefficients of fdlibm for log(1 + f), with s = f / (2 + f), in powers of s^2.
_LOG = (
    6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01, 2.222219843214978396e-01,
    1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01,
)  # fmt: skip
# Minimax coefficients of fdlibm for sine and cosine on |r| <= pi/4, in powers of r^2.
_SIN = (
    -1.66666666666666324348e-01, 8.33333333332248946124e-03, -1.98412698298579493134e-04, 2.75573137070700676789e-06,
    -2.50507602534068634195e-08, 1.58969099521155010221e-10,
)  # fmt: skip
_COS = (
    4.16666666666666019037e-02, -1.38888888888741095749e-03, 2.48015872894767294178e-05, -2.75573143513906633035e-07,
    2.08757232129817482790e-09, -1.13596475577881948265e-11,
)  # fmt: skip

MAX_ANGLE = 1e5  # radians; beyond, the reduction of an angle to a quarter turn loses digits
# Numbers that are computed at a time: intermediate results stay in the processor's cache.
_FUNCTION_BLOCK_SIZE = 1 << 12
_PRODUCT_BLOCK_SIZE = 1 << 15  # of the matrix product


def _apply_in_blocks(function: Callable[[Array], Array]) -> Callable[[npt.ArrayLike], Array]:
    """Extend a function of float64 arrays to numbers and lists, and apply it to large arrays in blocks."""

    @functools.wraps(function)
    def apply(x: npt.ArrayLike) -> Array:
        x = np.asarray(x, dtype=np.float64)
        if x.size <= _FUNCTION_BLOCK_SIZE:
            return np.asarray(function(x))
        flat = x.reshape(-1)
        out = np.empty_like(flat)
        for start in range(0, len(flat), _FUNCTION_BLOCK_SIZE):
            block = slice(start, start + _FUNCTION_BLOCK_SIZE)
            out[block] = function(flat[block])
        return out.reshape(x.shape)

    return apply


@_apply_in_blocks
def exp(x: Array) -> Array:
    """Return e to the power of each number.

    >>> exp([0.0, 1.0, -1000.0, np.inf]).tolist()
    [1.0, 2.718281828459045, 0.0, inf]
    """
    exponent, fraction = _split_power(x)
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(np.ldexp(1.0 + fraction, exponent))


@_apply_in_blocks
def expm1(x: Array) -> Array:
    """Return e to the power of each number, minus one, exact also near zero.

    >>> expm1([1e-20, -0.001]).tolist()
    [1e-20, -0.0009995001666250085]
    """
    exponent, fraction = _split_power(x)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        small = np.ldexp(fraction, exponent) + (np.ldexp(1.0, exponent) - 1.0)
        return np.asarray(np.where(exponent > 60, np.ldexp(1.0 + fraction, exponent), small))


def _split_power(x: Array) -> tuple[npt.NDArray[np.int64], Array]:
    """Return n and f with e^x = 2^n (1 + f), where f is at most sqrt(2) - 1."""
    bounded = np.clip(x, -746.0, 710.0)
    n = np.rint(bounded * _LOG2_E)
    high = bounded - n * _LN2_HIGH
    low = n * _LN2_LOW
    rest = high - low
    lost = (high - rest) - low  # rounding error of the subtraction
    fraction = rest + (rest * rest * _evaluate_polynomial(_EXP, rest) + lost * (1.0 + rest))
    return np.where(np.isnan(x), 0, n).astype(np.int64), np.asarray(fraction)


@_apply_in_blocks
def log(x: Array) -> Array:
    """Return the natural logarithm of each number; -inf of zero and NaN of negative numbers.

    >>> log([1.0, 10.0, 0.0]).tolist()
    [0.0, 2.302585092994046, -inf]
    """
    is_regular = (x > 0) & (x < np.inf)
    mantissa, exponent = np.frexp(np.where(is_regular, x, 1.0))
    is_low = mantissa < _SQRT_HALF
    f = np.where(is_low, mantissa * 2, mantissa) - 1.0
    k = (exponent - is_low).astype(np.float64)
    s = f / (2.0 + f)
    square = s * s
    tail = square * _evaluate_polynomial(_LOG, square)
    half = 0.5 * f * f
    value = k * _LN2_HIGH - ((half - (s * (half + tail) + k * _LN2_LOW)) - f)
    special_value = np.where(x == 0, -np.inf, np.where(x == np.inf, np.inf, np.nan))
    return np.asarray(np.where(is_regular, value, special_value))


@_apply_in_blocks
def log1p(x: Array) -> Array:
    """Return the natural logarithm of one plus each number, exact also near zero.

    >>> log1p([1e-20, 1.0]).tolist()
    [1e-20, 0.6931471805599453]
    """
    total = 1.0 + x
    is_regular = (total > 0) & (total < np.inf)
    divisor = np.where(is_regular, total, 1.0)
    lost = np.where(is_regular, x, 0.0) - (divisor - 1.0)  # rounding error of the addition
    return np.asarray(log(total) + lost / divisor)


@_apply_in_blocks
def sin(x: Array) -> Array:
    """Return the sine of each angle in radians, up to MAX_ANGLE.

    >>> sin([0.0, 1.0]).tolist()
    [0.0, 0.8414709848078965]
    """
    return _compute_sine(x, 0)


@_apply_in_blocks
def cos(x: Array) -> Array:
    """Return the cosine of each angle in radians, up to MAX_ANGLE.

    >>> cos([0.0, 1.0]).tolist()
    [1.0, 0.5403023058681398]
    """
    return _compute_sine(x, 1)


def _compute_sine(x: Array, quarters: int) -> Array:
    """Return the sine of each angle plus this number of quarter turns."""
    if (np.abs(x) > MAX_ANGLE).any():
        raise ValueError(f"angles must be at most {MAX_ANGLE:g} radians, got {np.nanmax(np.abs(x)):g}")
    turns = np.rint(x / (_HALF_PI_PARTS[0] + _HALF_PI_PARTS[1]))  # quarter turns
    r = x
    for part in _HALF_PI_PARTS:
        r = r - turns * part
    square = r * r
    sine = r + r * square * _evaluate_polynomial(_SIN, square)
    cosine = 1.0 - (0.5 * square - square * square * _evaluate_polynomial(_COS, square))
    quadrant = (np.where(np.isnan(turns), 0, turns).astype(np.int64) + quarters) % 4
    value = np.where(quadrant % 2 == 1, cosine, sine)
    return np.asarray(np.where(quadrant >= 2, -value, value))


def _evaluate_polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    """Return the sum of coefficients[k] * x**k."""
    value = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value *= x
        value += coefficient
    return value


def matmul(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the product of matrices a[..., i, k] and b[k, j], summed in the order of k.

    Args:
        a: One matrix, or a stack of them.
        b: One matrix.

    >>> matmul(np.array([[1.0, 2.0]]), np.array([[3.0], [4.0]])).tolist()
    [[11.0]]
    """
    n_inner, width = b.shape
    rows = a.reshape(-1, n_inner)
    out = np.zeros((len(rows), width), dtype=np.result_type(a, b))
    size = max(1, _PRODUCT_BLOCK_SIZE // max(1, width))
    for start in range(0, len(rows), size):
        block = np.ascontiguousarray(rows[start : start + size].T, dtype=out.dtype)
        total = out[start : start + size]
        for column, row in zip(block, b, strict=True):
            total += column[:, None] * row
    return out.reshape(*a.shape[:-1], width)


def inner_products(a: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the inner products [i, j] of the rows of a matrix.

    >>> inner_products(np.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[5.0, 11.0], [11.0, 25.0]]
    """
    out = np.empty((len(a), len(a)), dtype=a.dtype)
    for i, row in enumerate(a):
        out[i, i:] = out[i:, i] = (a[i:] * row).sum(axis=1)
    return out


def orthonormalize(a: Array) -> Array:
    """Return the columns of a matrix with full column rank, made orthonormal one after the other (Gram-Schmidt).

    >>> orthonormalize(np.array([[3.0, 1.0], [4.0, 0.0]])).round(6).tolist()
    [[0.6, 0.8], [0.8, -0.6]]
    """
    rows = np.array(a.T, dtype=np.float64, order="C")
    for k, row in enumerate(rows):
        for _ in range(2):  # the second pass removes the rounding errors of the first
            for other in rows[:k]:
                row -= (row * other).sum() * other
        row /= np.sqrt((row * row).sum())
    return np.ascontiguousarray(rows.T)
