"""The one sampler: a local step draws a cell t in proportion to w[t, c, m] N[t, c], then B rows of it.

Where a lane trains several heads, its cells are pairs of a time t and a head, heads innermost.

Each cell is shuffled once per time step under its own key, and a minibatch is a window of B rows of that order
at a random start, wrapping round: B distinct rows, every set equally likely, for one pair of random words per step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift import rng
from feddrift.types import Floats, Holds, Ints


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
    below = np.cumsum(np.exp(-1.0) / np.array([1, 1, 2, 6, 24, 120, 720, 5040], dtype=np.float64))
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


def held_rows(n: int, hold_out: float, holds: Holds) -> slice:
    """Which of the n rows of a cell, in its order, are held out."""
    trained = int(trained_rows(np.array(n), hold_out))
    return slice(trained, n) if holds == "last" else slice(0, n - trained)


def chances(w: Floats, counts: Ints) -> npt.NDArray[np.float32]:
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
