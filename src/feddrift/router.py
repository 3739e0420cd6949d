"""Whose vote counts for inputs without labels: what a client needs to find out by itself, from its inputs alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from feddrift import numerics
from feddrift.errors import ConfigError
from feddrift.results import Projection

if TYPE_CHECKING:
    from feddrift.types import Bools, Floats, Ints, Models

Per = Literal["row", "running", "batch"]
Route = Literal["none", "row", "running", "batch"]
ROOM = 1 << 22  # numbers that are projected at a time
OWN = -1  # the client's own votes
PAYS = 1.645  # standard errors by which cells must have shown that choosing by inputs saves mistakes: 5 %, one-sided
COST = 0.002  # the most that it may cost clients that kept their model, as a share of their rows


@dataclass(frozen=True, eq=False)
class Router:
    """Which votes count for an input at a test: those of the centre that what is described lies nearest to.

    What is described are the inputs, or a layer of one model, projected and scaled: `(z - low) * scale`. Rows are
    described one by one (`of="rows"`), or by their means and then their standard deviations (`of="moments"`).
    Centres with the same votes belong together, and the nearest of them counts. `per` says what a row's choice rests
    on: on that `row` alone, on the rows before it and itself (`running`), or on all rows at once (`batch`).

    With a `margin` a client keeps its own votes unless others are nearer by so many standard errors of half the squared
    distance; where the choice rests on one row alone, unless that is less by so much.

    >>> router = Router("row", centre=np.array([[0.0], [4.0]]), votes=np.eye(2))
    >>> router.choose(np.array([[1.0], [3.0]])).tolist()
    [0, 1]
    """

    per: Per
    centre: Floats  # [j, f]
    votes: Floats  # [j, m]
    of: Literal["rows", "moments"] = "rows"
    project: Floats | Projection | None = None
    low: Floats | float = 0.0
    scale: Floats | float = 1.0
    margin: float | None = None
    model: Models | None = None  # a stack of one, whose layer is described; None: the inputs are
    layer: Literal["input", "trunk", "logits"] = "input"

    def __post_init__(self) -> None:
        if self.per not in get_args(Per):
            raise ConfigError(f"a router's per must be row, running or batch, got {self.per!r}")
        if self.of not in ("rows", "moments"):
            raise ConfigError(f"a router describes rows or moments, got {self.of!r}")
        if self.of == "moments" and self.per != "batch":
            raise ConfigError(f"moments are those of all rows at once: a router of them is per batch, got {self.per!r}")
        if self.centre.ndim != 2 or self.votes.ndim != 2 or not 0 < len(self.centre) == len(self.votes):
            shapes = f"{self.centre.shape} and {self.votes.shape}"
            raise ConfigError(f"a router needs centres [j, f] and as many votes [j, m], got shapes {shapes}")
        if not np.isfinite(self.centre).all() or not (np.isfinite(self.votes) & (self.votes >= 0)).all():
            raise ConfigError("a router's centres must be finite numbers, and its votes at least 0")
        if (self.model is None) != (self.layer == "input"):
            raise ConfigError("a router of a layer needs the model whose layer it is, one of inputs needs none")

    @property
    def size(self) -> int:
        """How many numbers are sent with it, besides its model."""
        parts = (self.centre, self.votes, self.low, self.scale, self.project)
        return sum(int(np.size(part)) for part in parts if part is not None and not isinstance(part, Projection))

    def described(self, layer: npt.NDArray[Any]) -> Floats:
        """[row, f], what a client compares with the centres; of moments a single row."""
        flat = layer.reshape(len(layer), -1)
        matrix = _matrix(self.project, flat.shape[1]) if isinstance(self.project, Projection) else self.project
        parts = np.array_split(flat, max(1, flat.size // ROOM))  # in float64 all at once may not fit
        z = np.concatenate(
            [part.astype(np.float64) if matrix is None else numerics.matmul(part, matrix) for part in parts]
        )
        if self.of == "moments":
            z = np.concatenate([z.mean(axis=0), z.std(axis=0)])[None]
        return np.asarray((z - self.low) * self.scale)

    def choose(self, layer: npt.NDArray[Any], own: Floats | None = None) -> Ints:
        """[row], the centre whose votes count, the first of those that have the same; OWN: the client's own.

        With a margin, `own` [m] are the client's votes; without centres of the heaviest of them it keeps them.
        """
        if not len(layer):
            return np.zeros(0, dtype=np.int64)
        rows = self.described(layer)
        first, group = _groups(self.votes)
        near = _nearness(rows, self.centre, group, len(first))
        if self.margin is None:
            return self._spread(first[self._summed(near).argmax(axis=1)], len(layer))
        at = np.flatnonzero(self.votes[first].argmax(axis=1) == (-1 if own is None else int(own.argmax())))
        if not len(at):
            return np.full(len(layer), OWN)
        ahead = near - near[:, at[:1]]
        total, noise = self._summed(ahead), self._summed(ahead**2)
        clear = total > self.margin * (np.sqrt(noise) if self.per != "row" else 1.0)
        best = np.where(clear, total, -np.inf).argmax(axis=1)
        return self._spread(np.where(clear.any(axis=1), first[best], OWN), len(layer))

    def _summed(self, values: Floats) -> Floats:
        """What a choice rests on: one row of it, those up to each, or all."""
        if self.per == "row":
            return values
        return np.asarray(values.cumsum(axis=0) if self.per == "running" else values.sum(axis=0, keepdims=True))

    @staticmethod
    def _spread(choice: npt.NDArray[Any], n: int) -> Ints:
        return np.asarray(np.broadcast_to(choice, (n,)) if len(choice) == 1 else choice, dtype=np.int64)


@lru_cache(maxsize=8)
def _matrix(project: Projection, width: int) -> Floats:
    return project.matrix(width)


def _groups(votes: Floats) -> tuple[Ints, Ints]:
    """The first centre of each group with the same votes, in the order of centres, and [j], the group of each."""
    _, first, group = np.unique(votes, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return first[order], np.argsort(order)[group.reshape(-1)]


def _nearness(rows: Floats, centre: Floats, group: Ints, n_groups: int) -> Floats:
    """[row, group], minus half the squared distance to the nearest centre of the group."""
    square = (rows**2).sum(axis=1)[:, None] + (centre**2).sum(axis=1) - 2 * numerics.matmul(rows, centre.T)
    return np.stack([-0.5 * square[:, group == g].min(axis=1) for g in range(n_groups)], axis=1)


Sums = tuple["Ints", "Floats", "Floats"]  # [k], rows of each class; [k, d], sums of described rows; of their squares


@dataclass(frozen=True, eq=False)
class Routing:
    """What a run under the condition `route` remembers: how the data of each model look, and whether it has paid."""

    project: Projection
    data: Mapping[int, Sums] = field(default_factory=dict)  # by the id of a model: of the cells after which it was used
    saved: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # [cell], mistakes that it would save
    rows: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # [cell], of how many rows
    stayed: Bools = field(default_factory=lambda: np.zeros(0, dtype=bool))  # [cell], whether its client kept its model

    @property
    def pays(self) -> bool:
        """Whether labels have shown that choosing by inputs saves mistakes, and costs those who stay next to none.

        >>> cells = {"rows": np.full(5, 100), "stayed": np.array([False] * 4 + [True])}
        >>> way = Projection((0, 0), 2)
        >>> [Routing(way, {}, np.array([9, 9, 9, 9, stay]), **cells).pays for stay in (0, -1)]
        [True, False]
        """
        cheap = -int(self.saved[self.stayed].sum()) <= COST * int(self.rows[self.stayed].sum())
        return bool(cheap and self.saved.sum() >= PAYS * np.sqrt((self.saved**2).sum()) > 0)
