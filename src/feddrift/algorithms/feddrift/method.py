"""FedDrift-Eager (Algorithm 3) and FedDrift (Algorithm 4) of Jothimurugesan et al., AISTATS 2023.

Defaults follow the authors' code, which made the published tables, where it differs from the paper's text; each
difference is numbered in docs/algorithms.md. Equation and algorithm numbers are the paper's. What the paper leaves to
others stands beside: `detection` (who drifted), `newborn` (how a model starts), `quarantine`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from feddrift import clustering
from feddrift.algorithms.feddrift.detection import Detecting, DriftState, detect, held_told, remembered
from feddrift.algorithms.feddrift.new_models import Newborn, alone, create, home, make_room, together
from feddrift.algorithms.feddrift.quarantine import review, waiting
from feddrift.algorithms.options import option
from feddrift.clustering import Clustering
from feddrift.errors import ConfigError
from feddrift.models import take
from feddrift.types import Event, Federation, Floats, State

MANY_CLIENTS = 20_000  # from here on a model for every drifted client is worth a word
AT_ONCE = 0.1  # the share of clients that such an estimate has drift at one time

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FedDriftEager(Detecting):
    """All clients that meet a new concept at one time get one new model together (Algorithm 3)."""

    def step(self, state: State, fed: Federation) -> DriftState:
        assert isinstance(state, DriftState)
        now, state = review(self, state, fed)  # before the paper begins: quarantines end
        seen = detect(self, state, fed)  # l[c, m], argmin, eq. 4
        now, seen, groups = make_room(self, now, seen, together(seen.drifted))
        born = create(self, now, seen, groups, state, fed)  # M <- M + 1, for all drifted clients
        now = now.assign(home(seen, groups))  # w[tau] = 1{m = argmin l}
        now = now.add(born.models, groups).tell(held_told(seen, now.models)).tell(born.events)  # w[tau] = 0 but for M
        now = now.forget(self.memory)  # the -W variant
        models = fed.train(now.models, now.w)  # Algorithm 1
        return DriftState(
            models,
            now.w,
            votes=now.w[-1],
            events=now.events,
            born=state.born + len(groups),
            waiting=waiting(self, state, born),
            **remembered(state, seen, fed.tau),
        )


@dataclass(frozen=True)
class FedDrift(Detecting):
    """Every client that meets a new concept gets its own new model; models that are alike merge (Algorithm 4)."""

    merge_delta: float | None = option(None, "models no further apart than this merge; none: delta")
    first: Literal["one", "each"] = option("one", "clients start with one model, or each with its own")
    redetect: bool = option(False, "FedDrift-C only: clients whose new model was dropped may raise the alarm again")
    one_global: ClassVar[bool] = False  # of FedDrift-C; `redetect` is here since it is in every FedDrift's record

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.merge_delta is not None:
            self._check_threshold("merge_delta", self.merge_delta)
        if self.redetect and not self.one_global:
            raise ConfigError("FedDrift.redetect is a setting of FedDrift-C only, got true")

    def init(self, fed: Federation) -> DriftState:
        state, n = super().init(fed), fed.n_clients
        if self.max_models is None and n >= MANY_CLIENTS:
            log.warning("%s", unbounded(type(self).__name__, n))
        if self.first == "one":
            return state
        if self.max_models is not None and self.max_models < n:
            raise ConfigError(f"first=each makes {n} models, one per client, but max_models is {self.max_models}")
        models = take(state.models, [0] * n, range(n))
        return replace(state, models=models, w=clustering.nobody(n, n), votes=np.eye(n), born=n)

    def step(self, state: State, fed: Federation) -> DriftState:
        assert isinstance(state, DriftState)
        if self.first == "each" and not fed.tau:
            return start_apart(self, state, fed)  # nothing to choose between yet
        now, state = self.settle(state, fed)  # before the paper begins: what the last step left open
        seen = detect(self, state, fed)  # l[c, m], argmin, eq. 4
        now, seen, groups = make_room(self, now, seen, alone(seen.drifted))
        born = create(self, now, seen, groups, state, fed)  # a local model at each drifted client
        now = now.assign(home(seen, groups))  # the others: w[tau] = 1{m = argmin l}
        now = now.tell(held_told(seen, now.models))
        D = self.distances(now, born, state.waiting, fed)  # max(L_ij - L_ii, L_ji - L_jj, 0)
        now = self.merge(now.add(born.models, groups), D, fed).tell(born.events)  # while min D <= delta: Merge(i, j, D)
        now = now.forget(self.memory)  # the -W variant
        models = fed.train(now.models, now.w)  # Algorithm 1
        return DriftState(
            models,
            now.w,
            votes=now.w[-1],
            events=now.events,
            born=state.born + len(groups),
            newborn=born.models.ids,
            previous=state.reference,
            waiting=waiting(self, state, born),
            **remembered(state, seen, fed.tau),
        )

    def settle(self, state: DriftState, fed: Federation) -> tuple[Clustering, DriftState]:
        """What the last step left open: the clusters to begin with, and the state that goes with them."""
        return review(self, state, fed)

    def distances(self, now: Clustering, born: Newborn, waiting: Sequence[int], fed: Federation) -> Floats:
        """D of the old models, then the new; new ones and those in quarantine are far from all and do not merge yet."""
        n = len(now.models)
        D = np.full((n + len(born.models),) * 2, np.inf)
        if n > 1:
            D[:n, :n] = clustering.distances(fed.cross_evaluate(now.models, now.w, self.metric))
            apart = np.flatnonzero(np.isin(now.models.ids, waiting))
            D[apart] = D[:, apart] = np.inf
        return D

    def merge(self, now: Clustering, D: Floats, fed: Federation) -> Clustering:
        """While two models are within the limit, the closest two become one."""
        models, w, merged = clustering.merge_closest(now.models, now.w, D, fed.counts, self.limit)
        return Clustering(models, w, now.events + merged)

    @property
    def limit(self) -> float:
        """How far apart models may be that merge."""
        return self.delta if self.merge_delta is None else self.merge_delta


def unbounded(name: str, n_clients: int) -> str:
    """What it may cost to have no limit of models.

    >>> unbounded("FedDrift", 100_000)  # doctest: +ELLIPSIS
    'FedDrift has no max_models: should 10,000 of 100,000 clients ... take 18 GB; max_models=50 bounds it'
    """
    models = round(AT_ONCE * n_clients)
    size = 16 * models * (n_clients + models) / 1e9  # loss and votes [c, m], L and D [m, m], 8 bytes each
    return (
        f"{name} has no max_models: should {models:,} of {n_clients:,} clients drift at once, each founds a model that "
        f"all clients score, and these scores, votes and distances take {size:.2g} GB; max_models=50 bounds it"
    )


def start_apart(method: FedDrift, state: DriftState, fed: Federation) -> DriftState:
    """The first time step with first=each: every client trains its own model, all of which are alike so far."""
    lowest = fed.evaluate(take(state.models, [0], [0]), method.metric)[:, 0]
    created = tuple(Event("created", c, {"clients": [c], "reason": "given"}) for c in range(1, fed.n_clients))
    w = clustering.assign(state.w, np.arange(fed.n_clients))
    models, observed = fed.train(state.models, w), np.concatenate([state.observed, lowest[None]])
    return replace(state, models=models, w=w, events=created, reference=lowest, observed=observed)
