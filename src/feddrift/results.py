"""What clients answer where it is more than an array: see the verbs of `Federation`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from feddrift import numerics, rng

if TYPE_CHECKING:
    from feddrift.types import Floats, Ints, Params


@dataclass(frozen=True)
class Updates:
    """What the clients trained in one round, before averaging: one entry per pair of a client and a model.

    The models of one family that a client trains share a lane: each local step trains the trunk and one of the heads.
    """

    params: Params  # every array has a leading axis of pairs, the trunk's arrays one of lanes
    client: Ints  # [pair]
    model: Ints  # [pair], a position in the stack
    size: Floats  # [pair], the data behind it: sum over t of w[t, c, m] N[t, c]
    lane: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # [pair], from 0; by default each its own

    def __post_init__(self) -> None:
        if not len(self.lane):
            object.__setattr__(self, "lane", np.arange(len(self.client)))


@dataclass(frozen=True)
class Tournament:
    """How contestants (starts of a new model, or teams of models) did at each client on the same rows.

    >>> found = Tournament(rows=np.array([50, 0]), wrong=np.array([[[9, 4], [4, 6]], [[0, 0], [0, 0]]]))
    >>> only_first = found.wrong[0, 0, 0] - found.wrong[0, 0, 1]  # rows of client 0 that contestant 1 alone gets right
    >>> int(only_first), int(found.wrong[0, 1, 1] - found.wrong[0, 0, 1])
    (5, 2)
    """

    rows: Ints  # [c], how many rows; 0: took no part
    wrong: Ints  # [c, a, b], how many of them both a and b get wrong; on the diagonal a's own mistakes

    @classmethod
    def nobody(cls, n_clients: int, n_contestants: int) -> Tournament:
        """No client took part."""
        shape = n_clients, n_contestants, n_contestants
        return cls(np.zeros(n_clients, dtype=np.int64), np.zeros(shape, dtype=np.int64))


@dataclass(frozen=True)
class Moments:
    """What a layer of each model makes of the new rows of each client, of all or by class: see `Federation.moments`.

    >>> nobody = Moments.nobody(n_clients=3, n_models=1, n_parts=2, width=4)
    >>> nobody.count.shape, nobody.mean.shape, bool(np.isnan(nobody.std).all())
    ((3, 1, 2), (3, 1, 2, 4), True)
    """

    count: Ints  # [c, m, k], how many rows; 0: the client was not asked, or has none of this class
    mean: Floats  # [c, m, k, d], NaN without rows
    std: Floats  # [c, m, k, d], the root of the mean square of what rows differ from their mean by; NaN as the mean

    @classmethod
    def nobody(cls, n_clients: int, n_models: int, n_parts: int, width: int) -> Moments:
        """No client has any rows."""
        shape = n_clients, n_models, n_parts
        return cls(np.zeros(shape, dtype=np.int64), *np.full((2, *shape, width), np.nan))


@dataclass(frozen=True)
class Projection:
    """A random map onto `size` numbers, with orthonormal columns, that server and clients draw from one key.

    >>> columns = Projection(key=(1, 2), size=2).matrix(5)
    >>> columns.shape, bool(np.allclose(columns.T @ columns, np.eye(2)))
    ((5, 2), True)
    """

    key: tuple[int, int]  # the two words of a key, such as `Federation.key` gives
    size: int

    def matrix(self, width: int) -> Floats:
        """[width, size] for a layer of this width; one of fewer numbers than `size` keeps as many as it has."""
        words = np.uint32(self.key[0]), np.uint32(self.key[1])
        drawn = rng.normal(words, (width, min(self.size, width))).astype(np.float64)
        return numerics.orthonormalize(drawn)
