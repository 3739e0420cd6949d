"""What clients answer where it is more than an array: see `Federation.local_updates`, `tournament` and `contest`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

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
