"""FairFedDrift of Salazar et al., IEEE TNNLS 2025: FedDrift that looks at a loss for each group of rows.

With l[c, m, g] the loss of model m on the rows of group g at client c, model m suits client c if

    l[c, m, g] <= reference[c, g] + delta   for every g;

of those that do, the one with the smallest sum over g is the client's. Where none does, there is a drift. Two models
merge only if no group of any client is worse off by more than delta with the other (`distances`). Groups are those of
the stream (`Stream.group`); where rows belong to none, classes are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np

from feddrift import clustering
from feddrift.algorithms.feddrift.detection import UNSCORED, DriftState, Seen, held_told, remembered
from feddrift.algorithms.feddrift.method import FedDrift
from feddrift.algorithms.feddrift.new_models import Newborn, alone, create, home, make_room
from feddrift.algorithms.options import option
from feddrift.clustering import TOLERANCE, Clustering
from feddrift.errors import ConfigError
from feddrift.types import Bools, Clusters, Federation, Floats, Ints, Parting, State


@dataclass(frozen=True, repr=False)
class FairState(DriftState):
    """`levels` are the losses that a drift is measured against."""

    levels: Floats = field(default_factory=lambda: np.zeros((0, 0)), metadata=UNSCORED)  # [g, c], when last scored


@dataclass(frozen=True)
class FairFedDrift(FedDrift):
    """A drift is one that any group of rows feels, and models merge where no group loses by it."""

    delta: float = option(0.25, "a drift is a rise of any group's loss by more than this, whichever model is taken")
    metric: Literal["error", "loss"] = option("loss", "what is compared: cross-entropy (loss), or error")
    max_models: int | None = option(30, "at most so many models, the longest unused makes room; none: no limit")
    has_own_test: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, only in {"test": "threshold", "quarantine": False, "first": "one"}.items():
            if getattr(self, name) != only:
                raise ConfigError(f"FairFedDrift.{name} can only be {only}, got {getattr(self, name)}")
        super().__post_init__()

    def init(self, fed: Federation) -> FairState:
        never = np.full((fed.n_groups or fed.n_classes, fed.n_clients), np.nan)
        return FairState(**vars(super().init(fed)), levels=never)

    def step(self, state: State, fed: Federation) -> FairState:
        assert isinstance(state, FairState)
        loss = fed.evaluate(state.models, self.metric, by=parting(fed))  # l[c, m, g]
        seen, levels = choose(loss, state.levels, state.votes.argmax(axis=1), self.delta)
        drifted = fed.allowed(seen.drifted)
        held = seen.drifted & ~drifted
        seen, levels = replace(seen, drifted=drifted, held=held), np.where(held, state.levels, levels)
        now, seen, groups = make_room(self, Clustering(state.models, state.w), seen, alone(seen.drifted))
        first = replace(seen, best=np.where(seen.drifted, 0, seen.best))
        born = create(self, now, first, groups, state, fed)  # a copy of model 0 for each drifted client
        now = now.assign(home(seen, groups))
        now = now.tell(held_told(seen, now.models))
        D = self.distances(now, born, (), fed)
        now = self.merge(now.add(born.models, groups), D, fed).tell(born.events)
        now = now.forget(self.memory)
        return FairState(
            fed.train(now.models, now.w),
            now.w,
            votes=now.w[-1],
            events=now.events,
            born=state.born + len(groups),
            newborn=born.models.ids,
            previous=state.reference,
            levels=levels,
            **remembered(state, seen, fed.tau),
        )

    def distances(self, now: Clustering, born: Newborn, waiting: Sequence[int], fed: Federation) -> Floats:
        """D of the old models, then the new, which merge with nobody yet; data of this time step do not count."""
        n = len(now.models)
        D = np.full((n + len(born.models),) * 2, np.inf)
        if n > 1:
            older = Clusters(np.where(np.arange(len(now.w))[:, None] < fed.tau, now.w.model, -1), n, now.w.weight)
            L = fed.cross_evaluate(now.models, older, self.metric, by=parting(fed), per_client=True)
            D[:n, :n] = distances(L, self.delta)
        return D

    @property
    def limit(self) -> float:
        """How far apart models may be that merge: whatever is not forbidden, merges."""
        return float(np.finfo(np.float64).max) if self.merge_delta is None else self.merge_delta


def parting(fed: Federation) -> Parting:
    """What rows are told apart by."""
    return "group" if fed.n_groups else "class"


def choose(loss: Floats, levels: Floats, current: Ints, delta: float) -> tuple[Seen, Floats]:
    """Each client's model, and whether it drifted, from l[c, m, g]; and the levels [g, c] to compare with next time.

    A group of which a client has no rows, or never had any, forbids nothing.
    """
    scored: Bools = np.isfinite(loss).sum(axis=2) > 0  # [c, m]
    total = np.where(scored, np.nansum(loss, axis=2), np.nan)
    worse = loss - levels.T[:, None] > delta + TOLERANCE  # NaN is not
    suits: Bools = scored & (worse.sum(axis=2) == 0)
    drifted: Bools = (scored.sum(axis=1) > 0) & (suits.sum(axis=1) == 0)
    best, lowest = clustering.best_models(np.where(suits | drifted[:, None], total, np.nan), current)
    now = loss[np.arange(len(loss)), best].T  # [g, c]
    return Seen(best, lowest, drifted), np.where(np.isnan(now), levels, now)


def distances(L: Floats, delta: float) -> Floats:
    """D(i, j) from L[i, j, c, g], model i on what client c has for model j; infinite on the diagonal.

    Over all pairs of a client's data in j and a client's data in i: infinite if L_ij - L_ii exceeds delta in any group,
    else its largest sum over the groups that both have; the larger of both directions.

    >>> L = np.zeros((2, 2, 1, 2))  # one client, two groups
    >>> L[0, 1, 0] = [0.2, 0.1]
    >>> float(distances(L, delta=0.25)[0, 1].round(9)), float(distances(L, delta=0.15)[0, 1])
    (0.3, inf)
    """
    D = np.full(L.shape[:2], np.inf)
    for i, j in np.argwhere(~np.eye(len(L), dtype=bool)):
        worse = L[i, j][:, None] - L[i, i]  # [client in j, client in i, g]
        comparable = ~np.isnan(worse).all(axis=2)
        if comparable.any() and np.nanmax(worse) <= delta + TOLERANCE:
            D[i, j] = max(0.0, float(np.nansum(worse, axis=2)[comparable].max()))
    return np.asarray(np.maximum(D, D.T))
