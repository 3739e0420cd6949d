"""Memories: how strongly data of age 0, 1, 2, ... still count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from feddrift.errors import ConfigError
from feddrift.types import Floats, Ints


@dataclass(frozen=True)
class Memory:
    """A rule that gives each past time step its weight.

    >>> Memory("window", 2)(3).tolist(), Memory("linear")(3).tolist()
    ([0.0, 0.0, 1.0, 1.0], [1.0, 2.0, 3.0, 4.0])
    """

    kind: Literal["all", "window", "linear", "exponential"] = "all"
    length: int = 1  # of a window, in time steps

    def __post_init__(self) -> None:
        if self.kind not in ("all", "window", "linear", "exponential"):
            raise ConfigError(f"memory must be all, window, linear or exponential, got {self.kind!r}")
        if self.length < 1:
            raise ConfigError(f"a window's length must be at least 1, got {self.length}")

    def __call__(self, tau: int) -> Floats:
        """The weight of each t = 0..tau at time tau."""
        t = np.arange(tau + 1, dtype=np.float64)
        if self.kind == "window":
            return (t > tau - self.length).astype(np.float64)
        if self.kind == "linear":
            return t + 1
        if self.kind == "exponential":
            return np.ldexp(1.0, np.arange(-tau, 1))  # in proportion to 2^t, without its overflow
        return np.ones(tau + 1)


def pooled(values: Floats, counts: Ints) -> Floats:
    """The mean of values[c, m] over all clients' examples; clients without a value are left out.

    >>> pooled(np.array([[0.2], [np.nan], [0.5]]), np.array([10, 0, 20])).tolist()
    [0.4]
    """
    seen = ~np.isnan(values).any(axis=1)
    if not seen.any():
        return np.full(values.shape[1], np.nan)
    return np.average(values[seen], axis=0, weights=counts[seen])


def window(length: int) -> Memory:
    """Only the last `length` time steps."""
    return Memory("window", length)


ALL = Memory("all")
LINEAR = Memory("linear")  # in proportion to t + 1
EXPONENTIAL = Memory("exponential")  # in proportion to 2^t
