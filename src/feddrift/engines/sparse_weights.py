"""Sparse form of w: the list of its entries above zero, which engines use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from feddrift.errors import ConfigError
from feddrift.types import Bools, Clusters, Floats, Ints, Votes, Weights


def compute_offsets(sizes: Ints) -> Ints:
    """Return the first position of each part if parts of these sizes follow each other."""
    begins: Ints = np.cumsum(sizes) - sizes
    return begins


def find_weight_problem(w: Weights | Votes, name: str = "w", axes: str = "t, c, m") -> str:
    """Return what is wrong with the numbers of w or of another array of weights, "" if they are valid.

    Args:
        w: The weights.
        name: The name of the array in the sentence.
        axes: The names of its axes.

    >>> find_weight_problem(np.array([[[1.0], [-2.0]]]))
    'w must be finite and not negative, got -2.0 at (t, c, m) = (0, 1, 0)'
    """
    if isinstance(w, Clusters):
        if len(w) and not (w.model.min() >= -1 and w.model.max() < w.n_models):
            return f"w must name positions of {w.n_models} models"
        return find_weight_problem(w.weight, "w", "t")
    if isinstance(w, Votes):
        if w.model.size and not (w.model.min() >= -1 and w.model.max() < w.n_models):
            return f"{name} must name positions of {w.n_models} models"
        left = w.model[:, :-1]
        right = w.model[:, 1:]
        if not ((right < 0) | ((left >= 0) & (left < right))).all():
            return f"{name} must name the models of a client in ascending order, each once, empty places last"
        if (w.weight[w.model < 0] != 0).any():
            return f"{name} must have the weight 0 in empty places"
        return find_weight_problem(w.weight, name, "c, k")
    if w.dtype.kind not in "biuf":
        return f"{name} must be numbers, got {w.dtype}"
    if np.isfinite(w).all() and (w >= 0).all():
        return ""
    index = tuple(np.argwhere(~(np.isfinite(w) & (w >= 0)))[0].tolist())
    return f"{name} must be finite and not negative, got {w[index]} at ({axes}) = ({', '.join(map(str, index))})"


@dataclass(frozen=True)
class Entries:
    """w as a list of its entries above zero."""

    t: Ints
    c: Ints
    m: Ints
    value: Floats
    shape: tuple[int, ...]  # (t, c, m)

    @classmethod
    def of(cls, w: Weights | Entries, shape: tuple[int, ...]) -> Entries:
        """Return the entries of w.

        Args:
            w: An array, clusters or entries.
            shape: The shape (t, c, m) that it must have.

        Raises:
            ConfigError: If w has another shape, or weights that are negative or not finite.
        """
        found_shape = getattr(w, "shape", type(w).__name__)
        if found_shape != shape:
            raise ConfigError(f"w must have shape (t, c, m) = {shape}, got {found_shape}")
        if isinstance(w, Entries):
            return w
        problem = find_weight_problem(w)
        if problem:
            raise ConfigError(problem)
        if isinstance(w, Clusters):
            t, c = np.nonzero((w.model >= 0) & (w.weight[:, None] > 0))
            return cls(t, c, w.model[t, c], w.weight[t], shape)
        t, c, m = np.nonzero(w)
        return cls(t, c, m, w[t, c, m], shape)

    def select(self, selected: Bools) -> Entries:
        """Return the entries for which `selected` is true."""
        return Entries(self.t[selected], self.c[selected], self.m[selected], self.value[selected], self.shape)


def iterate_groups(group_of_row: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield each group and the positions of its rows, both ascending.

    Args:
        group_of_row: [row], the group of each row, at least 0.

    >>> [(group, rows.tolist()) for group, rows in iterate_groups(np.array([2, 0, 2]))]
    [(0, [1]), (2, [0, 2])]
    >>> list(iterate_groups(np.zeros(0, int)))
    []
    """
    order = np.argsort(group_of_row, kind="stable")
    begins = np.flatnonzero(np.diff(group_of_row[order], prepend=-1))
    for rows in np.split(order, begins)[1:]:
        yield int(group_of_row[rows[0]]), rows
