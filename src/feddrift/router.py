"""Routers: they choose the models that vote on a client's inputs, from the inputs alone, without labels."""

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
MAX_PROJECTED_VALUES = 1 << 22  # numbers that are projected at a time
OWN_VOTES = -1  # in place of the position of a centre: the client's own votes
MIN_SAVINGS_Z = 1.645  # standard errors by which the saved mistakes must exceed 0: one-sided test at 5 %
MAX_COST_SHARE = 0.002  # additional mistakes of clients that kept their model, as a share of their rows


@dataclass(frozen=True, eq=False)
class Router:
    """Rule that chooses the votes for test inputs: those of the nearest centre.

    The inputs of a client, or the outputs of a layer of one model, are projected (z) and scaled: `(z - low) * scale`.
    The results of the rows (`of="rows"`), or their means followed by their standard deviations (`of="moments"`), are
    compared with the centres. Centres with the same votes form a group; the distance of a group is that of its nearest
    centre. `per` selects the rows that a choice depends on: the `row` itself, all rows up to it (`running`), or all
    rows (`batch`).

    With a `margin` a client keeps its own votes unless another group is nearer: the sum over rows of the differences of
    half the squared distance must exceed `margin` standard errors, or for a single row `margin` itself.

    >>> router = Router("row", centre=np.array([[0.0], [4.0]]), votes=np.eye(2))
    >>> router.choose_centres(np.array([[1.0], [3.0]])).tolist()
    [0, 1]
    """

    per: Per
    centre: Floats  # [j, f]
    votes: Floats  # [j, m], of each centre
    of: Literal["rows", "moments"] = "rows"
    project: Floats | Projection | None = None
    low: Floats | float = 0.0
    scale: Floats | float = 1.0
    margin: float | None = None
    model: Models | None = None  # a stack of one: its layer is compared with the centres; None: the inputs are
    layer: Literal["input", "trunk", "logits"] = "input"

    def __post_init__(self) -> None:
        if self.per not in get_args(Per):
            raise ConfigError(f"a router's per must be row, running or batch, got {self.per!r}")
        if self.of not in ("rows", "moments"):
            raise ConfigError(f"a router describes rows or moments, got {self.of!r}")
        if self.of == "moments" and self.per != "batch":
            raise ConfigError(f"a router of moments, which need all rows, must be per batch, got {self.per!r}")
        if self.centre.ndim != 2 or self.votes.ndim != 2 or not 0 < len(self.centre) == len(self.votes):
            shapes = f"{self.centre.shape} and {self.votes.shape}"
            raise ConfigError(f"a router needs centres [j, f] and as many votes [j, m], got shapes {shapes}")
        if not np.isfinite(self.centre).all() or not (np.isfinite(self.votes) & (self.votes >= 0)).all():
            raise ConfigError("a router's centres must be finite numbers, and its votes at least 0")
        if (self.model is None) != (self.layer == "input"):
            raise ConfigError("a router of a layer (trunk or logits) needs a model, a router of inputs must have none")

    @property
    def size(self) -> int:
        """The number of values that are sent with the router, without those of its model."""
        parts = (self.centre, self.votes, self.low, self.scale, self.project)
        return sum(int(np.size(part)) for part in parts if part is not None and not isinstance(part, Projection))

    def describe_rows(self, layer: npt.NDArray[Any]) -> Floats:
        """Return [row, f], the values that are compared with the centres; of moments a single row.

        Args:
            layer: [row, ...], the inputs, or the outputs of the router's layer.
        """
        flat = layer.reshape(len(layer), -1)
        matrix = _build_matrix(self.project, flat.shape[1]) if isinstance(self.project, Projection) else self.project
        parts = np.array_split(flat, max(1, flat.size // MAX_PROJECTED_VALUES))  # all rows in float64 need much memory
        z = np.concatenate(
            [part.astype(np.float64) if matrix is None else numerics.matmul(part, matrix) for part in parts]
        )
        if self.of == "moments":
            z = np.concatenate([z.mean(axis=0), z.std(axis=0)])[None]
        return np.asarray((z - self.low) * self.scale)

    def choose_centres(self, layer: npt.NDArray[Any], own: Floats | None = None) -> Ints:
        """Choose the centre whose votes count for each row.

        Args:
            layer: [row, ...], the inputs, or the outputs of the router's layer.
            own: [m], the client's own votes, which a router with a margin needs.

        Returns:
            [row], the position of the first centre with the chosen votes; OWN_VOTES if the client keeps its own votes.
            With a margin it also keeps them if no centre has its largest vote for the same model as the client.
        """
        if not len(layer):
            return np.zeros(0, dtype=np.int64)
        rows = self.describe_rows(layer)
        first, group = _group_centres(self.votes)
        nearness = _compute_nearness(rows, self.centre, group, len(first))
        if self.margin is None:
            choice = first[self._sum_rows(nearness).argmax(axis=1)]
            return np.broadcast_to(choice, len(layer)).astype(np.int64)
        own_groups = np.flatnonzero(self.votes[first].argmax(axis=1) == (-1 if own is None else int(own.argmax())))
        if not len(own_groups):
            return np.full(len(layer), OWN_VOTES)
        advantage = nearness - nearness[:, own_groups[:1]]
        total = self._sum_rows(advantage)
        variance = self._sum_rows(advantage**2)
        is_clear = total > self.margin * (np.sqrt(variance) if self.per != "row" else 1.0)
        best = np.where(is_clear, total, -np.inf).argmax(axis=1)
        choice = np.where(is_clear.any(axis=1), first[best], OWN_VOTES)
        return np.broadcast_to(choice, len(layer)).astype(np.int64)

    def _sum_rows(self, values: Floats) -> Floats:
        """Return the sums over the rows that each choice depends on: see `Router`."""
        if self.per == "row":
            return values
        return np.asarray(values.cumsum(axis=0) if self.per == "running" else values.sum(axis=0, keepdims=True))


@lru_cache(maxsize=8)
def _build_matrix(project: Projection, width: int) -> Floats:
    return project.matrix(width)


def _group_centres(votes: Floats) -> tuple[Ints, Ints]:
    """Group centres with the same votes; return the first centre of each group, and [j], the group of each centre."""
    _, first, group = np.unique(votes, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return first[order], np.argsort(order)[group.reshape(-1)]


def _compute_nearness(rows: Floats, centre: Floats, group: Ints, n_groups: int) -> Floats:
    """Return [row, group], minus half the squared distance to the nearest centre of the group."""
    distance2 = (rows**2).sum(axis=1)[:, None] + (centre**2).sum(axis=1) - 2 * numerics.matmul(rows, centre.T)
    return np.stack([-0.5 * distance2[:, group == g].min(axis=1) for g in range(n_groups)], axis=1)


# [k], the number of rows of class k; [k, d], the sums of their projected inputs; [k, d], the sums of the squares.
ClassSums = tuple["Ints", "Floats", "Floats"]


@dataclass(frozen=True, eq=False)
class Routing:
    """Data of the condition `route` in a run: sums of the inputs of each model, and the mistakes that routing saves."""

    project: Projection
    data: Mapping[int, ClassSums] = field(default_factory=dict)  # by model id: sums over the cells assigned to it
    saved: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # [cell], mistakes that routing saves
    rows: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # [cell], number of rows
    stayed: Bools = field(default_factory=lambda: np.zeros(0, dtype=bool))  # [cell], True if the client kept its model

    @property
    def pays(self) -> bool:
        """True if routing saves significantly many mistakes, and costs clients that kept their model almost none.

        >>> cells = {"rows": np.full(5, 100), "stayed": np.array([False] * 4 + [True])}
        >>> project = Projection((0, 0), 2)
        >>> [Routing(project, {}, np.array([9, 9, 9, 9, stay]), **cells).pays for stay in (0, -1)]
        [True, False]
        """
        is_cheap = -int(self.saved[self.stayed].sum()) <= MAX_COST_SHARE * int(self.rows[self.stayed].sum())
        return bool(is_cheap and self.saved.sum() >= MIN_SAVINGS_Z * np.sqrt((self.saved**2).sum()) > 0)
