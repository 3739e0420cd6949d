"""Sampling of minibatches, the same in all engines.

A local step draws a cell t in proportion to w[t, c, m] N[t, c], then B rows of it. If a lane trains several heads, its
cells are pairs of a time t and a head; the index of the head changes fastest.

Each cell is shuffled once in each time step with its own key. A minibatch is a window of B rows of that order, which
begins at a random row and wraps around. It has B distinct rows, every set is equally likely, and a step needs only two
random words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from feddrift import rng
from feddrift.types import Floats, Holds, Ints

MAX_PLACES_PER_ROW = 100  # mean number of places in a balanced table for each row of its cell


def draw_row_order(seed: int, tau: int, t: int, c: int, n: int) -> Ints:
    """Return the order of the n rows of cell (t, c) in time step tau, a permutation."""
    return rng.permutation(rng.derive_key(seed, "shuffle", tau, t, c), n)


def draw_bootstrap(seed: int, tau: int, t: int, c: int, model_id: int, n: int) -> Ints:
    """Draw a bootstrap of cell (t, c) for one model.

    Each row gets an independent Poisson(1) weight; then n rows are drawn, with replacement, in proportion to them.

    Args:
        seed: The seed of the run.
        tau: The time step of the training.
        t: The time of the cell.
        c: The client of the cell.
        model_id: The id of the model that trains on it.
        n: The number of rows of the cell.

    Returns:
        [n], positions of rows in the cell.
    """
    key = rng.derive_key(seed, "bag", tau, t, c, model_id)
    words = rng.draw_words(key, 2 * n)
    # Poisson(1) by inversion of its cumulative distribution function: the sum of e^-1 / i! over i <= k.
    poisson_cdf = np.cumsum(0.36787944117144233 / np.array([1, 1, 2, 6, 24, 120, 720, 5040], dtype=np.float64))
    uniform = rng.to_unit_interval(words[:n]).astype(np.float64)
    weight = np.searchsorted(poisson_cdf, uniform, side="right").astype(np.float64)
    if not weight.any():
        weight[:] = 1
    cumulative = np.cumsum(weight) / weight.sum()
    drawn: Ints = np.searchsorted(cumulative, rng.to_unit_interval(words[n:]).astype(np.float64), side="right")
    return np.minimum(drawn, n - 1)


def count_training_rows(counts: Ints, hold_out: float) -> Ints:
    """Return the number of rows of each cell for training; the rest is held out.

    If there are at least two rows, both parts get at least one; a single row is for training.

    Args:
        counts: The numbers of rows of cells.
        hold_out: The share of rows to hold out; 0: none.
    """
    n_held_out = np.minimum(np.maximum(np.rint(counts * hold_out), 1), counts - 1) if hold_out else 0
    return np.asarray(counts - np.maximum(n_held_out, 0), dtype=np.int64)


class SamplingTables(NamedTuple):
    """Tables of rows, one for each cell of a model, from which minibatches are drawn instead of from the cells.

    See `build_balanced_tables` and `build_even_tables`.
    """

    rows: Ints  # the tables of all cells, one after the other: positions in the rows of all cells
    sizes: Ints  # [cell], number of places in each table
    mass: Floats  # [cell], a cell is drawn in proportion to it instead of to its number of rows


def build_balanced_tables(classes: Ints | npt.NDArray[np.int32], sizes: Ints, w: Floats) -> SamplingTables:
    """Return tables by which all classes of a model's data are drawn equally often.

    A row of class y has the weight n / (k n_y): n_y is the sum of w over the rows of the class, k the number of
    classes, n the sum of all n_y. The mass of a cell is the sum of the weights of its rows. In the table of a cell,
    rows have places in proportion to their weight. The places of a class are spread evenly over the table, so that
    every minibatch contains its share of each class.

    Args:
        classes: [row], the class of each row; the rows of a cell follow each other.
        sizes: [cell], the number of rows of each cell.
        w: [cell], the weight of the data of each cell.

    >>> build_balanced_tables(np.array([0, 0, 0, 1, 0]), np.array([4, 1]), np.ones(2))
    SamplingTables(rows=array([3, 0, 3, 1, 3, 2, 3, 4]), sizes=array([7, 1]), mass=array([4.375, 0.625]))
    """
    n_classes = int(classes.max()) + 1
    cell = np.repeat(np.arange(len(sizes)), sizes)
    n = np.bincount(classes, w[cell])
    weight = np.divide(n.sum(), np.count_nonzero(n) * n, out=np.zeros_like(n), where=n > 0)
    group = cell * n_classes + classes
    counts = np.bincount(group, minlength=len(sizes) * n_classes).reshape(len(sizes), n_classes)
    mass: Floats = (counts * weight).sum(axis=1)
    min_weight = np.where(counts > 0, weight, np.inf).min(axis=1)  # a row of this weight has one place
    places_per_weight = np.minimum(1 / min_weight, MAX_PLACES_PER_ROW * sizes / mass)
    places = np.maximum(np.rint(counts * weight * places_per_weight[:, None]), 1)
    places = np.where(counts > 0, places, 0).astype(np.int64)  # [cell, class]
    place_group = np.repeat(np.arange(places.size), places.reshape(-1))  # [place]
    rank = np.arange(len(place_group)) - np.repeat(np.cumsum(places) - places.reshape(-1), places.reshape(-1))
    first_row = np.cumsum(counts) - counts.reshape(-1)
    rows = np.argsort(group, kind="stable")[first_row[place_group] + rank % counts.reshape(-1)[place_group]]
    fraction = (rank + 0.5) / places.reshape(-1)[place_group]  # of the table, at which the place is
    order = np.lexsort((fraction, place_group // n_classes))
    return SamplingTables(rows[order], places.sum(axis=1), mass)


def build_even_tables(classes: Ints | npt.NDArray[np.int32], sizes: Ints, max_rows: int) -> SamplingTables:
    """Return tables with the same number of rows of each class.

    The rows of a class are taken from the newest cells first, and within a cell in their order. In a table the classes
    alternate, so that minibatches have about equally many rows of each.

    Args:
        classes: [row], the class of each row; the rows of a cell follow each other.
        sizes: [cell], the number of rows of each cell.
        max_rows: The number of rows of each class; fewer if the rarest class has fewer.

    >>> build_even_tables(np.array([0, 0, 1, 0, 1, 1, 1]), np.array([4, 3]), 3)
    SamplingTables(rows=array([0, 1, 3, 4, 5, 6]), sizes=array([3, 3]), mass=array([3., 3.]))
    """
    cell = np.repeat(np.arange(len(sizes)), sizes)
    newest_first = np.lexsort((np.arange(len(cell)), -cell, classes))  # by class
    counts = np.bincount(classes)
    rank = np.empty_like(newest_first)
    rank[newest_first] = np.arange(len(newest_first)) - np.repeat(np.cumsum(counts) - counts, counts)
    selected = np.flatnonzero(rank < min(max_rows, int(counts[counts > 0].min())))
    rows = selected[np.lexsort((classes[selected], rank[selected], cell[selected]))]
    n: Ints = np.bincount(cell[selected], minlength=len(sizes))
    return SamplingTables(rows, n, n.astype(np.float64))


def get_held_out_slice(n: int, hold_out: float, holds: Holds) -> slice:
    """Return the positions of the rows of a cell that are held out.

    Args:
        n: The number of rows of the cell.
        hold_out: The share of rows to hold out.
        holds: The end of the cell's order that is held out.
    """
    n_training = int(count_training_rows(np.array(n), hold_out))
    return slice(n_training, n) if holds == "last" else slice(0, n - n_training)


def should_stop_early(previous_loss: Any, loss: Any, patience: float, check: Any) -> Any:
    """Return whether a lane stops its round: its loss on held-out rows decreases, but by less than the limit.

    Args:
        previous_loss: The loss at the check before, NaN at the first one.
        loss: The loss now.
        patience: The limit at the first check of a round; at the k-th check it is patience / k.
        check: The number of the check in this round, from 1.

    >>> [bool(should_stop_early(np.float32(loss), np.float32(0.5), 0.2, 2)) for loss in (0.55, 0.65, 0.45, np.nan)]
    [True, False, False, False]
    """
    return (previous_loss - loss > 0) & (previous_loss - loss < patience / check)


def compute_cumulative_chances(w: Floats, counts: Ints | Floats) -> npt.NDArray[np.float32]:
    """Return the cumulative probability of each cell, for draws by `pick_cells`.

    Args:
        w: [..., cell], the weights of the cells.
        counts: [..., cell], the numbers of their rows, or their masses.
    """
    mass = w * counts
    cumulative = np.cumsum(mass, axis=-1) / mass.sum(axis=-1, keepdims=True)
    # Cells after the last one with mass must have probability 0 despite rounding.
    remaining = np.flip(np.cumsum(np.flip(mass, axis=-1), axis=-1), axis=-1) - mass
    cumulative = np.where(remaining > 0, cumulative, 1.0).astype(np.float32)
    # The limits are multiples of 2^-24, as draws are: compiled code may treat smaller numbers as zero.
    return (np.ceil(cumulative * np.float64(2**24)) * 2.0**-24).astype(np.float32)


def derive_step_words(key: rng.Words, round: Any, steps: Any) -> rng.Words:
    """Return two random words for each local step.

    Args:
        key: The key of a lane, or of several lanes.
        round: The number of the round.
        steps: The numbers of the local steps, in an array of NumPy or JAX.
    """
    return rng.threefry2x32(key, (round, steps))


def pick_cells(words: rng.Words, cumulative: Any, counts: Any, xp: Any) -> tuple[Any, Any]:
    """Return the cell and the first row in it for each local step.

    Args:
        words: Two random words for each step.
        cumulative: [..., cell], see `compute_cumulative_chances`.
        counts: [..., cell], the numbers of rows to draw from.
        xp: The array library, NumPy or JAX's.
    """
    cell = (rng.to_unit_interval(words[0])[..., None] >= cumulative).sum(axis=-1)
    n = xp.take_along_axis(xp.broadcast_to(counts, (*cell.shape, counts.shape[-1])), cell[..., None], axis=-1)[..., 0]
    return cell, (words[1] % n.astype(np.uint32)).astype(np.int32)
