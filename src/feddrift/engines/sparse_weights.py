"""w as the list of its entries above zero: what engines compute with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from feddrift.errors import ConfigError
from feddrift.types import (
    Bools,
    Clusters,
    Floats,
    Ints,
    Votes,
    Weights,
)


def begins_of(sizes: Ints) -> Ints:
    begins: Ints = np.cumsum(sizes) - sizes
    return begins


def wrong_weights(w: Weights | Votes, name: str = "w", axes: str = "t, c, m") -> str:
    """What is wrong with the numbers of a w, or of what has other axes; nothing where all is well.

    >>> wrong_weights(np.array([[[1.0], [-2.0]]]))
    'w must be finite and not negative, got -2.0 at (t, c, m) = (0, 1, 0)'
    """
    if isinstance(w, Clusters):
        if len(w) and not (w.model.min() >= -1 and w.model.max() < w.n_models):
            return f"w must name positions of {w.n_models} models"
        return wrong_weights(w.weight, "w", "t")
    if isinstance(w, Votes):
        if w.model.size and not (w.model.min() >= -1 and w.model.max() < w.n_models):
            return f"{name} must name positions of {w.n_models} models"
        before, after = w.model[:, :-1], w.model[:, 1:]
        if not ((after < 0) | ((before >= 0) & (before < after))).all():
            return f"{name} must name the models of a client in ascending order, each once, empty places last"
        if (w.weight[w.model < 0] != 0).any():
            return f"{name} must have the weight 0 in empty places"
        return wrong_weights(w.weight, name, "c, k")
    if w.dtype.kind not in "biuf":
        return f"{name} must be numbers, got {w.dtype}"
    if np.isfinite(w).all() and (w >= 0).all():
        return ""
    at = tuple(np.argwhere(~(np.isfinite(w) & (w >= 0)))[0].tolist())
    return f"{name} must be finite and not negative, got {w[at]} at ({axes}) = ({', '.join(map(str, at))})"


@dataclass(frozen=True)
class Entries:
    """w as the list of its entries above zero: what the engines compute with, however it is written down."""

    t: Ints
    c: Ints
    m: Ints
    value: Floats
    shape: tuple[int, ...]  # (t, c, m)

    @classmethod
    def of(cls, w: Weights | Entries, shape: tuple[int, ...]) -> Entries:
        """The entries of a w that must have this shape."""
        got = getattr(w, "shape", type(w).__name__)
        if got != shape:
            raise ConfigError(f"w must have shape (t, c, m) = {shape}, got {got}")
        if isinstance(w, Entries):
            return w
        if problem := wrong_weights(w):
            raise ConfigError(problem)
        if isinstance(w, Clusters):
            t, c = np.nonzero((w.model >= 0) & (w.weight[:, None] > 0))
            return cls(t, c, w.model[t, c], w.weight[t], shape)
        t, c, m = np.nonzero(w)
        return cls(t, c, m, w[t, c, m], shape)

    def select(self, which: Bools) -> Entries:
        """The entries where `which` is true."""
        return Entries(self.t[which], self.c[which], self.m[which], self.value[which], self.shape)


def by_group(of_row: Ints) -> Iterator[tuple[int, Ints]]:
    """Each group with its rows, ascending; sorted once, however many groups there are.

    >>> [(group, rows.tolist()) for group, rows in by_group(np.array([2, 0, 2]))], list(by_group(np.zeros(0, int)))
    ([(0, [1]), (2, [0, 2])], [])
    """
    order = np.argsort(of_row, kind="stable")
    begins = np.flatnonzero(np.diff(of_row[order], prepend=-1))
    for rows in np.split(order, begins)[1:]:
        yield int(of_row[rows[0]]), rows
