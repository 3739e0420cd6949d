"""Elementary functions and products with the same bits on every processor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from feddrift import numerics

DRAW = np.random.default_rng(0)
AROUND_ZERO = np.concatenate([DRAW.normal(size=20000), DRAW.normal(size=20000) * 1e-6, [0.0]])
CASES: dict[str, Any] = {
    "exp": np.concatenate([AROUND_ZERO, DRAW.uniform(-708, 709, 20000)]),
    "expm1": np.concatenate([AROUND_ZERO, DRAW.uniform(-40, 709, 20000)]),
    "log": np.concatenate([DRAW.uniform(0.5, 2, 20000), np.logspace(-300, 300, 20000)]),
    "log1p": np.concatenate([np.clip(AROUND_ZERO, -0.999, None), np.logspace(-20, 20, 20000)]),
    "sin": np.concatenate([AROUND_ZERO, DRAW.uniform(-100, 100, 20000)]),
    "cos": np.concatenate([AROUND_ZERO, DRAW.uniform(-100, 100, 20000)]),
}


@pytest.mark.parametrize("name", CASES)
def test_functions_are_exact_to_about_a_unit_in_the_last_place(name: str) -> None:
    x = CASES[name]
    exact = getattr(np, name)(x.astype(np.longdouble))
    found = getattr(numerics, name)(x)
    assert found.dtype == np.float64
    atol = 1e-17 if name in ("sin", "cos") else 0  # near multiples of pi the angle itself is rounded
    np.testing.assert_allclose(found.astype(np.longdouble), exact, rtol=2 * 2.0**-52, atol=atol)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns about infinities
@pytest.mark.parametrize("function", [numerics.exp, numerics.expm1, numerics.log, numerics.log1p])
def test_special_values_are_those_of_numpy(function: Callable[..., Any]) -> None:
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -1.0, -2.0, 800.0, -800.0, 5e-324])
    expected = getattr(np, function.__name__)(x)
    np.testing.assert_allclose(function(x), expected, rtol=1e-15)


def test_numbers_and_lists_are_taken_too() -> None:
    assert float(numerics.exp(0)) == 1
    assert numerics.log([1, 1]).tolist() == [0, 0]
    assert np.isnan(numerics.sin(np.nan))
    with pytest.raises(ValueError, match="angles must be at most 100000 radians, got 1e\\+06"):
        numerics.cos(1e6)


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (40_000, 2), (2, 5, 4)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products_are_added_in_the_order_of_the_inner_axis(shape: tuple[int, ...], dtype: Any) -> None:
    a = DRAW.normal(size=shape).astype(dtype)
    b = DRAW.normal(size=(shape[-1], 6)).astype(dtype)
    expected = np.zeros((*shape[:-1], 6), dtype=dtype)
    for k in range(shape[-1]):
        expected = expected + a[..., k, None] * b[k]
    np.testing.assert_array_equal(numerics.matmul(a, b), expected)
    np.testing.assert_allclose(numerics.matmul(a, b), a @ b, rtol=1e-5, atol=1e-5)


def test_inner_products_are_those_of_all_pairs_of_rows() -> None:
    a = DRAW.normal(size=(9, 50))
    np.testing.assert_allclose(numerics.inner_products(a), a @ a.T)


def test_columns_are_those_of_a_qr_decomposition_with_a_positive_diagonal() -> None:
    a = DRAW.normal(size=(30, 8))
    columns, upper = np.linalg.qr(a)
    np.testing.assert_allclose(numerics.orthonormalize(a), columns * np.sign(np.diag(upper)), atol=1e-12)


def test_pictures_are_projected_exactly_so_that_the_order_of_sums_does_not_matter() -> None:
    from feddrift.streams.components import project_pictures

    pictures = DRAW.random((5000, 28, 28)).astype(np.float32)
    mean = DRAW.random(784).astype(np.float32)
    axes = (DRAW.normal(size=(784, 7)) * 3).astype(np.float32)
    found = project_pictures(pictures, mean, axes)
    order = DRAW.permutation(784)
    again = project_pictures(pictures.reshape(-1, 784)[:, order], mean[order], axes[order])
    np.testing.assert_array_equal(found, again)
    np.testing.assert_allclose(found, (pictures.reshape(-1, 784) - mean) @ axes, atol=2e-2)
