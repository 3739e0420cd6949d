"""Structured results of the methods of `Federation`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from feddrift import numerics, rng

if TYPE_CHECKING:
    from feddrift.types import Floats, Ints, Params


@dataclass(frozen=True)
class Updates:
    """Parameters that clients trained in one round, before averaging: one entry per pair of a client and a model.

    The models of one family that a client trains share a lane: each local step trains the trunk and one of the heads.
    """

    params: Params  # every array has a leading axis of pairs, the trunk's arrays one of lanes
    client: Ints  # [pair]
    model: Ints  # [pair], a position in the stack
    size: Floats  # [pair], the weighted number of training examples: sum over t of w[t, c, m] N[t, c]
    lane: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # [pair], from 0; by default one per pair

    def __post_init__(self) -> None:
        if not len(self.lane):
            object.__setattr__(self, "lane", np.arange(len(self.client)))


@dataclass(frozen=True)
class Tournament:
    """Mistakes of contestants (starts of a new model, or ensembles of models) at each client, on the same rows.

    >>> result = Tournament(rows=np.array([50, 0]), wrong=np.array([[[9, 4], [4, 6]], [[0, 0], [0, 0]]]))
    >>> only_first_wrong = result.wrong[0, 0, 0] - result.wrong[0, 0, 1]  # rows of client 0
    >>> only_second_wrong = result.wrong[0, 1, 1] - result.wrong[0, 0, 1]
    >>> int(only_first_wrong), int(only_second_wrong)
    (5, 2)
    """

    rows: Ints  # [c], number of rows; 0: the client did not take part
    wrong: Ints  # [c, a, b], number of rows that both a and b get wrong; on the diagonal a's own mistakes

    @classmethod
    def empty(cls, n_clients: int, n_contestants: int) -> Tournament:
        """Return the result of a tournament in which no client took part."""
        shape = n_clients, n_contestants, n_contestants
        return cls(np.zeros(n_clients, dtype=np.int64), np.zeros(shape, dtype=np.int64))


@dataclass(frozen=True)
class Moments:
    """Statistics of a layer's output on the new rows of each client, over all rows or by class.

    `Federation.moments` returns them.

    >>> moments = Moments.empty(n_clients=3, n_models=1, n_parts=2, width=4)
    >>> moments.count.shape, moments.mean.shape, bool(np.isnan(moments.std).all())
    ((3, 1, 2), (3, 1, 2, 4), True)
    """

    count: Ints  # [c, m, k], number of rows; 0: the client sent no statistics, or has no rows of this class
    mean: Floats  # [c, m, k, d], NaN without rows
    std: Floats  # [c, m, k, d], standard deviation (divisor n); NaN without rows, or if only means were sent

    @classmethod
    def empty(cls, n_clients: int, n_models: int, n_parts: int, width: int) -> Moments:
        """Return statistics without rows.

        Args:
            n_clients: The size of axis c.
            n_models: The size of axis m.
            n_parts: The size of axis k: the number of classes, or 1 for all rows.
            width: The size of axis d.
        """
        shape = n_clients, n_models, n_parts
        missing = np.full((*shape, width), np.nan)
        return cls(count=np.zeros(shape, dtype=np.int64), mean=missing, std=missing.copy())


@dataclass(frozen=True)
class Projection:
    """Random linear map to `size` numbers, with orthonormal columns, that server and clients draw from the same key.

    >>> columns = Projection(key=(1, 2), size=2).matrix(5)
    >>> columns.shape, bool(np.allclose(columns.T @ columns, np.eye(2)))
    ((5, 2), True)
    """

    key: tuple[int, int]  # two 32-bit words, such as those of `Federation.key`
    size: int

    def matrix(self, width: int) -> Floats:
        """Return the matrix [width, min(size, width)] for a layer of this width."""
        words = np.uint32(self.key[0]), np.uint32(self.key[1])
        drawn = rng.normal(words, (width, min(self.size, width))).astype(np.float64)
        return numerics.orthonormalize(drawn)
