"""The one sampler: a local step draws a cell t in proportion to w[t, c, m] N[t, c], then B rows of it.

Where a lane trains several heads, its cells are pairs of a time t and a head, heads innermost.

Each cell is shuffled once per time step under its own key, and a minibatch is a window of B rows of that order
at a random start, wrapping round: B distinct rows, every set equally likely, for one pair of random words per step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from feddrift import rng
from feddrift.types import Floats, Holds, Ints

MOST_PLACES = 100  # of a balanced table, for each row of its cell


def shuffled(seed: int, tau: int, t: int, c: int, n: int) -> Ints:
    """The order in which time step tau walks through the n rows of cell (t, c)."""
    return rng.permutation(rng.derive(seed, "shuffle", tau, t, c), n)


def bag(seed: int, tau: int, t: int, c: int, model_id: int, n: int) -> Ints:
    """A bootstrap of cell (t, c) for one lane: n rows drawn by Poisson(1) weights, themselves drawn per row.

    Which rows count and how often is a multinomial draw over weights that are independent Poisson(1).
    """
    key = rng.derive(seed, "bag", tau, t, c, model_id)
    words = rng.bits(key, 2 * n)
    # Poisson(1) by inversion: the chance of at most k is the sum of e^-1 / i!
    below = np.cumsum(0.36787944117144233 / np.array([1, 1, 2, 6, 24, 120, 720, 5040], dtype=np.float64))
    weight = np.searchsorted(below, rng.unit(words[:n]).astype(np.float64), side="right").astype(np.float64)
    if not weight.any():
        weight[:] = 1
    share = np.cumsum(weight) / weight.sum()
    drawn: Ints = np.searchsorted(share, rng.unit(words[n:]).astype(np.float64), side="right")
    return np.minimum(drawn, n - 1)


def trained_rows(counts: Ints, hold_out: float) -> Ints:
    """How many rows of a cell are trained on, the rest is held out; of two rows or more both parts get some."""
    held_out = np.minimum(np.maximum(np.rint(counts * hold_out), 1), counts - 1) if hold_out else 0
    return np.asarray(counts - np.maximum(held_out, 0), dtype=np.int64)


class Tables(NamedTuple):
    """What a lane draws from in place of its cells: see `balanced` and `even`."""

    rows: Ints  # the tables of its cells, one after the other: positions in the rows that it has
    sizes: Ints  # [cell], how many places each table has
    mass: Floats  # [cell], by which a cell is drawn in place of its number of rows


def balanced(classes: Ints | npt.NDArray[np.int32], sizes: Ints, w: Floats) -> Tables:
    """The tables of a lane whose rows have these classes; they lie one cell after the other, w is that of the cells.

    A row of class y weighs n / (k n_y): n_y counts the rows of the class by their w, k is the number of classes, n the
    sum of n_y. A cell weighs what its rows do, and in its table they have places by their weight. Each class is spread
    evenly over the table, so that every minibatch has its share of all.

    >>> balanced(np.array([0, 0, 0, 1, 0]), np.array([4, 1]), np.ones(2))
    Tables(rows=array([3, 0, 3, 1, 3, 2, 3, 4]), sizes=array([7, 1]), mass=array([4.375, 0.625]))
    """
    n_classes, cell = int(classes.max()) + 1, np.repeat(np.arange(len(sizes)), sizes)
    n = np.bincount(classes, w[cell])
    weight = np.divide(n.sum(), np.count_nonzero(n) * n, out=np.zeros_like(n), where=n > 0)
    group = cell * n_classes + classes
    counts = np.bincount(group, minlength=len(sizes) * n_classes).reshape(len(sizes), n_classes)
    mass: Floats = (counts * weight).sum(axis=1)
    least = np.where(counts > 0, weight, np.inf).min(axis=1)  # rows of this weight have a place each
    room = np.minimum(1 / least, MOST_PLACES * sizes / mass)
    places = np.where(counts > 0, np.maximum(np.rint(counts * weight * room[:, None]), 1), 0).astype(np.int64)
    of_group = np.repeat(np.arange(places.size), places.reshape(-1))  # [place]
    nth = np.arange(len(of_group)) - np.repeat(np.cumsum(places) - places.reshape(-1), places.reshape(-1))
    first = np.cumsum(counts) - counts.reshape(-1)
    rows = np.argsort(group, kind="stable")[first[of_group] + nth % counts.reshape(-1)[of_group]]
    at = (nth + 0.5) / places.reshape(-1)[of_group]  # of the whole table
    order = np.lexsort((at, of_group // n_classes))
    return Tables(rows[order], places.sum(axis=1), mass)


def even(classes: Ints | npt.NDArray[np.int32], sizes: Ints, most: int) -> Tables:
    """The tables of a lane that trains on `most` rows of each of its classes, or on as many as the rarest has.

    The newest cells give theirs first, in their order. In a table classes take turns, so minibatches are even, too.

    >>> even(np.array([0, 0, 1, 0, 1, 1, 1]), np.array([4, 3]), 3)
    Tables(rows=array([0, 1, 3, 4, 5, 6]), sizes=array([3, 3]), mass=array([3., 3.]))
    """
    cell = np.repeat(np.arange(len(sizes)), sizes)
    newest = np.lexsort((np.arange(len(cell)), -cell, classes))  # by class
    counts = np.bincount(classes)
    nth = np.empty_like(newest)
    nth[newest] = np.arange(len(newest)) - np.repeat(np.cumsum(counts) - counts, counts)
    taken = np.flatnonzero(nth < min(most, int(counts[counts > 0].min())))
    rows = taken[np.lexsort((classes[taken], nth[taken], cell[taken]))]
    n: Ints = np.bincount(cell[taken], minlength=len(sizes))
    return Tables(rows, n, n.astype(np.float64))


def held_rows(n: int, hold_out: float, holds: Holds) -> slice:
    """Which of the n rows of a cell, in its order, are held out."""
    trained = int(trained_rows(np.array(n), hold_out))
    return slice(trained, n) if holds == "last" else slice(0, n - trained)


def enough(before: Any, now: Any, patience: float, look: Any) -> Any:
    """Whether a lane stops at this look, counted from 1: its held-out loss still falls, but by too little.

    >>> [bool(enough(np.float32(before), np.float32(0.5), 0.2, 2)) for before in (0.55, 0.65, 0.45, np.nan)]
    [True, False, False, False]
    """
    return (before - now > 0) & (before - now < patience / look)


def chances(w: Floats, counts: Ints | Floats) -> npt.NDArray[np.float32]:
    """Cumulative probability of each cell, for draws by `pick`: w and counts end in the axis of a lane's cells."""
    mass = w * counts
    cumulative = np.cumsum(mass, axis=-1) / mass.sum(axis=-1, keepdims=True)
    # Rounding must not leave a chance to the cells after the last one with mass.
    remaining = np.flip(np.cumsum(np.flip(mass, axis=-1), axis=-1), axis=-1) - mass
    cumulative = np.where(remaining > 0, cumulative, 1.0).astype(np.float32)
    # Draws are multiples of 2^-24; so are the limits, since a compiler may take a smaller number for zero.
    return (np.ceil(cumulative * np.float64(2**24)) * 2.0**-24).astype(np.float32)


def step_words(key: rng.Words, round: Any, steps: Any) -> rng.Words:
    """Two random words per local step, from a lane's key (NumPy or JAX)."""
    return rng.threefry2x32(key, (round, steps))


def pick(words: rng.Words, cumulative: Any, counts: Any, xp: Any) -> tuple[Any, Any]:
    """The cell and the start row in it, from two words per step; cumulative and counts end in the axis of cells."""
    cell = (rng.unit(words[0])[..., None] >= cumulative).sum(axis=-1)
    n = xp.take_along_axis(xp.broadcast_to(counts, (*cell.shape, counts.shape[-1])), cell[..., None], axis=-1)[..., 0]
    return cell, (words[1] % n.astype(np.uint32)).astype(np.int32)
