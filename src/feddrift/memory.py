"""Memories: weights of past data by their age."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from feddrift._renamed import forward_renamed_names
from feddrift.errors import ConfigError
from feddrift.types import Floats, Ints


@dataclass(frozen=True)
class Memory:
    """Rule that gives each past time step its weight.

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
        """Return the weight of each time step 0..tau at time tau."""
        t = np.arange(tau + 1, dtype=np.float64)
        if self.kind == "window":
            return (t > tau - self.length).astype(np.float64)
        if self.kind == "linear":
            return t + 1
        if self.kind == "exponential":
            return np.ldexp(1.0, np.arange(-tau, 1))  # proportional to 2^t, scaled so that it cannot overflow
        return np.ones(tau + 1)


def average_over_clients(values: Floats, counts: Ints) -> Floats:
    """Average values[c, m] over clients, weighted by their examples; clients with a NaN are left out.

    >>> average_over_clients(np.array([[0.2], [np.nan], [0.5]]), np.array([10, 0, 20])).tolist()
    [0.4]
    """
    is_known = ~np.isnan(values).any(axis=1)
    if not is_known.any():
        return np.full(values.shape[1], np.nan)
    return np.average(values[is_known], axis=0, weights=counts[is_known])


def window(length: int) -> Memory:
    """Return a memory of the last `length` time steps."""
    return Memory("window", length)


ALL = Memory("all")
LINEAR = Memory("linear")  # weights proportional to t + 1
EXPONENTIAL = Memory("exponential")  # weights proportional to 2^t

__getattr__ = forward_renamed_names(__name__)
