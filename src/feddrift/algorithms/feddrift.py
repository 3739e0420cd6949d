"""FedDrift-Eager (Algorithm 3) and FedDrift (Algorithm 4) of Jothimurugesan et al., AISTATS 2023.

Defaults follow the authors' code, which made the published tables, where it differs from the paper's text; each
difference is numbered in docs/algorithms.md. Equation and algorithm numbers are the paper's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np

from feddrift import cluster, rng
from feddrift.algorithms.drift_tests import Evidence, Sequential, drift_test
from feddrift.algorithms.options import option
from feddrift.errors import ConfigError
from feddrift.memory import ALL, Memory
from feddrift.models import join, put, take
from feddrift.types import Bools, Clusters, Event, Federation, Floats, Ints, Models, Start, State

log = logging.getLogger(__name__)

SHARED: tuple[Start, ...] = ("head", "joint")  # a new model that starts so stands on its parent's trunk


UNSCORED = {"newcomer": np.nan}  # what a client that has never been scored has


def _nobody() -> Floats:
    return np.zeros(0)


def _never() -> Floats:
    return np.zeros((0, 0))


def _at_once() -> Ints:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class DriftState(State):
    """What detection remembers besides the clusters."""

    w: Clusters
    reference: Floats = field(default_factory=_nobody, metadata=UNSCORED)  # [c], best loss when last scored
    previous: Floats = field(default_factory=_nobody, metadata=UNSCORED)  # [c], the reference before this step
    observed: Floats = field(default_factory=_never, metadata=UNSCORED)  # [t, c], the best loss at each time
    since: Ints = field(default_factory=_at_once, metadata={"newcomer": 0})  # [c], the first time after an alarm
    newborn: tuple[int, ...] = ()  # ids created in this step
    born: int = 1  # how many ids have been given so far
    waiting: tuple[int, ...] = ()  # ids of models in quarantine


@dataclass(frozen=True)
class _Options:
    """What both algorithms can be told."""

    delta: float = option(0.05, "a drift is a rise of the best model's loss by more than this")
    init_: Literal["warm", "fresh", "best"] = option(
        "warm", "a new model is a copy of the client's best (warm), starts anew (fresh), or what a trial finds better"
    )
    metric: Literal["error", "loss"] = option(
        "error", "what choice, detection and distances compare: error, or cross-entropy (loss)"
    )
    test: str = option(
        "threshold",
        "what a drift is: threshold (delta), proportional, two-sample, river's adwin, page-hinkley, kswin, hddm-a, "
        "hddm-w, or your own package.module:name; with parameters: proportional:ratio=0.3",
        quiet=True,
    )
    max_models: int | None = option(None, "at most so many models, the longest unused makes room; none: no limit")
    ties: Literal["lowest", "random"] = option("lowest", "which of equally good models a client joins")
    quarantine: bool = option(
        False,
        "a model that one client alone founded serves no other until that client's next data confirm it",
        quiet=True,
    )
    memory: Memory = ALL
    candidates: ClassVar[tuple[Start, ...]] = ("warm", "fresh")  # of init=best

    def __post_init__(self) -> None:
        self._check_threshold("delta", self.delta)
        drift_test(self.test, self.delta, self.metric)
        if self.max_models is not None and self.max_models < 1:
            raise ConfigError(f"{type(self).__name__}.max_models must be at least 1 or none, got {self.max_models}")

    def _check_threshold(self, name: str, value: float) -> None:
        top = 1.0 if self.metric == "error" else np.finfo(np.float64).max
        if not 0 <= value <= top:
            legal = "in [0, 1]" if self.metric == "error" else "at least 0 and finite"
            raise ConfigError(f"{type(self).__name__}.{name} must be {legal} for metric='{self.metric}', got {value}")

    def _winner(self, rows: int, wrong: Ints) -> int:
        """Which candidate a trial on so many rows found best: the first, unless another beats it."""
        best = 0
        for other in range(1, len(self.candidates)):
            if cluster.beats(wrong, other, best):
                best = other
        return best

    def init(self, fed: Federation) -> DriftState:
        never, votes = np.full(fed.n_clients, np.nan), np.ones((fed.n_clients, 1))
        return DriftState(
            fed.fresh(), cluster.nobody(fed.n_clients), votes, reference=never, previous=never,
            observed=np.zeros((0, fed.n_clients)), since=np.ones(fed.n_clients, dtype=np.int64),
        )  # fmt: skip


@dataclass(frozen=True)
class FedDriftEager(_Options):
    """All clients that meet a new concept at one time get one new model together (Algorithm 3)."""

    def step(self, state: State, fed: Federation) -> DriftState:
        assert isinstance(state, DriftState)
        state, dismissed = review(self, state, fed)
        best, lowest, drifted = detect(self, state, fed)
        together = [np.flatnonzero(drifted).tolist()] if drifted.any() else []
        models, w, best, groups, retired = make_room(self, state.models, state.w, best, together)
        newborn, created = create(self, models, w, best, lowest, state, groups, fed)
        w = cluster.widen(cluster.assign(w, _unless(groups, best)), groups)
        models, w, forgotten = forget(self, join(models, newborn), w)
        return DriftState(
            fed.train(models, w), w, votes=w[-1], events=dismissed + retired + created + forgotten, drifted=drifted,
            reference=_latest(lowest, state.reference), born=state.born + len(newborn),
            waiting=waiting(self, state, groups, newborn),
            observed=_more(state.observed, lowest), since=np.where(drifted, fed.tau + 1, state.since),
        )  # fmt: skip


@dataclass(frozen=True)
class FedDrift(_Options):
    """Every client that meets a new concept gets its own new model; models that are alike merge (Algorithm 4)."""

    merge_delta: float | None = option(None, "models closer than this merge; none: delta")
    first: Literal["one", "each"] = option("one", "clients start with one model, or each with its own")
    redetect: bool = option(False, "FedDrift-C only: clients whose new model was dropped may raise the alarm again")
    one_global: bool = False  # FedDrift-C: of the models created at one time, one becomes global

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.merge_delta is not None:
            self._check_threshold("merge_delta", self.merge_delta)
        if self.first == "each" and self.one_global:
            raise ConfigError("FedDrift-C starts with one model, got first=each")
        if self.redetect and not self.one_global:
            raise ConfigError("FedDrift.redetect is a setting of FedDrift-C only, got true")
        if self.redetect and isinstance(drift_test(self.test, self.delta), Sequential):
            raise ConfigError(f"FedDrift.redetect needs a test that compares two scores, got test={self.test}")

    def init(self, fed: Federation) -> DriftState:
        state, n = super().init(fed), fed.n_clients
        if self.first == "one":
            return state
        if self.max_models is not None and self.max_models < n:
            raise ConfigError(f"first=each makes {n} models, one per client, but max_models is {self.max_models}")
        models = take(state.models, [0] * n, range(n))
        return replace(state, models=models, w=cluster.nobody(n, n), votes=np.eye(n), born=n)

    def step(self, state: State, fed: Federation) -> DriftState:
        assert isinstance(state, DriftState)
        if self.first == "each" and not fed.tau:  # nothing to choose between yet
            w = cluster.assign(state.w, np.arange(fed.n_clients))
            created = tuple(Event("created", c, {"clients": [c], "reason": "given"}) for c in range(1, fed.n_clients))
            lowest = fed.evaluate(take(state.models, [0], [0]), self.metric)[:, 0]  # all alike
            return replace(
                state, models=fed.train(state.models, w), w=w, reference=lowest, events=created,
                observed=_more(state.observed, lowest),
            )  # fmt: skip
        state, dropped = review(self, state, fed)
        if self.one_global:
            state, others = self._drop_newborn(state, fed)
            dropped += others
        best, lowest, drifted = detect(self, state, fed)
        alone = [[int(c)] for c in np.flatnonzero(drifted)]
        models, w, best, groups, retired = make_room(self, state.models, state.w, best, alone)
        newborn, created = create(self, models, w, best, lowest, state, groups, fed)  # before anything merges
        w = cluster.assign(w, _unless(groups, best))
        D = np.full((len(models) + len(newborn),) * 2, np.inf)  # nobody sees a new model before the next step
        if len(models) > 1:
            seen = np.arange(len(models))
            D[np.ix_(seen, seen)] = cluster.distances(fed.cross_evaluate(models, w, self.metric))
            apart = np.isin(models.ids, state.waiting)
            D[: len(models)][apart] = D[:, : len(models)][:, apart] = np.inf
        limit = self.delta if self.merge_delta is None else self.merge_delta
        models, w, merged = self._merge(join(models, newborn), cluster.widen(w, groups), D, limit, fed)
        models, w, forgotten = forget(self, models, w)
        return DriftState(
            fed.train(models, w), w, votes=w[-1], events=dropped + retired + merged + created + forgotten,
            drifted=drifted, reference=_latest(lowest, state.reference), previous=state.reference,
            newborn=newborn.ids, born=state.born + len(newborn), observed=_more(state.observed, lowest),
            since=np.where(drifted, fed.tau + 1, state.since), waiting=waiting(self, state, groups, newborn),
        )  # fmt: skip

    def _merge(
        self, models: Models, w: Clusters, D: Floats, limit: float, fed: Federation
    ) -> tuple[Models, Clusters, tuple[Event, ...]]:
        return cluster.merge_closest(models, w, D, fed.counts, limit)

    def _drop_newborn(self, state: DriftState, fed: Federation) -> tuple[DriftState, tuple[Event, ...]]:
        """FedDrift-C: of the models created in the last step one, drawn at random, stays; the others' data go too."""
        if len(state.newborn) < 2:
            return state, ()
        survivor = state.newborn[rng.choice(fed.key("survivor"), len(state.newborn))]
        kept = np.array([i not in state.newborn or i == survivor for i in state.models.ids])
        orphans = state.votes[:, ~kept].any(axis=1)
        models, w = cluster.keep(state.models, state.w, kept)
        votes = state.votes[:, kept]
        votes[orphans, 0] = 1  # should one bring no new data now, it falls back on the oldest model
        again = orphans & self.redetect
        reference = np.where(again, state.previous, state.reference)
        observed = state.observed.copy()
        observed[-1, again] = np.nan  # as if they had not been scored
        events = tuple(
            Event("retired", i, {"reason": "another new model was drawn", "kept": survivor})
            for i in state.newborn if i != survivor
        )  # fmt: skip
        return replace(state, models=models, w=w, votes=votes, reference=reference, observed=observed), events


def review(self: _Options, state: DriftState, fed: Federation) -> tuple[DriftState, tuple[Event, ...]]:
    """End quarantines: a model that its client's new data choose is there for all, any other goes with its data.

    A client without new data lets its model wait.
    """
    if not state.waiting:
        return state, ()
    loss, ids = fed.evaluate(state.models, self.metric), state.models.ids
    chosen, lowest = cluster.best_models(loss, state.votes.argmax(axis=1))
    owner = {i: int(np.flatnonzero((state.w.model == ids.index(i)).any(axis=0))[0]) for i in state.waiting if i in ids}
    still = tuple(i for i, c in owner.items() if np.isnan(lowest[c]))
    gone = [i for i, c in owner.items() if i not in still and ids[chosen[c]] != i]
    kept = ~np.isin(ids, gone)
    models, w = cluster.keep(state.models, state.w, kept)
    votes = state.votes[:, kept]
    for i in gone:  # it comes back to the best of the others
        others = np.where(kept, loss[owner[i]], np.inf)
        votes[owner[i]] = np.arange(len(ids))[kept] == np.nanargmin(others)
    events = tuple(Event("retired", i, {"reason": "not confirmed", "client": owner[i]}) for i in gone)
    newborn = tuple(i for i in state.newborn if i not in gone)
    return replace(state, models=models, w=w, votes=votes, waiting=still, newborn=newborn), events


def waiting(self: _Options, state: DriftState, groups: Sequence[Sequence[int]], newborn: Models) -> tuple[int, ...]:
    """The models in quarantine after this step."""
    alone = (i for i, clients in zip(newborn.ids, groups, strict=True) if len(clients) == 1)
    return (*state.waiting, *alone) if self.quarantine else ()


def detect(self: _Options, state: DriftState, fed: Federation) -> tuple[Ints, Floats, Bools]:
    """Score all models on the new data: each client's best (eq. 2), its loss, and whether that is a drift (eq. 4)."""
    loss = fed.evaluate(state.models, self.metric)
    loss[:, np.isin(state.models.ids, state.waiting)] = np.nan
    keys = [fed.key("ties", c) for c in range(fed.n_clients)] if self.ties == "random" else None
    best, lowest = cluster.best_models(loss, state.votes.argmax(axis=1), keys)
    first = fed.tau and not fed.counts[1:-1].any()  # the first scores of a trained model
    if first and self.test == "threshold" and self.metric == "error":
        _warn_if_noisy(self.delta, lowest, fed.counts[-1])
    seen = Evidence(_more(state.observed, lowest), fed.counts, state.since, state.reference)
    return best, lowest, drift_test(self.test, self.delta, self.metric)(seen)


def make_room(
    self: _Options, models: Models, w: Clusters, best: Ints, groups: list[list[int]]
) -> tuple[Models, Clusters, Ints, list[list[int]], tuple[Event, ...]]:
    """Retire long unused models until all groups can have a new one; groups beyond that go without."""
    if self.max_models is None or len(models) + len(groups) <= self.max_models:
        return models, w, best, groups, ()
    in_use = np.isin(np.arange(len(models)), best)
    leaving = cluster.least_used(w, in_use, len(models) + len(groups) - self.max_models)
    kept = ~np.isin(np.arange(len(models)), leaving)
    events = tuple(Event("retired", models.ids[m], {"reason": "made room, longest unused"}) for m in leaving)
    models, w = cluster.keep(models, w, kept)
    room = max(0, self.max_models - len(models))
    return models, w, (np.cumsum(kept) - 1)[best], groups[:room], events


def create(
    self: _Options, models: Models, w: Clusters, best: Ints, lowest: Floats, state: DriftState,
    groups: Sequence[Sequence[int]], fed: Federation,
) -> tuple[Models, tuple[Event, ...]]:  # fmt: skip
    """One new model per group of clients, each with the event that says why and how it starts."""
    ids = list(range(state.born, state.born + len(groups)))
    parents = [int(best[clients[0]]) for clients in groups]
    starts, trials = choose_starts(self, models, w, parents, groups, fed)
    family = [models.family[m] if s in SHARED else i for i, m, s in zip(ids, parents, starts, strict=True)]
    newborn = take(models, parents, ids, family)
    events = []
    for k, (i, clients) in enumerate(zip(ids, groups, strict=True)):
        if starts[k] == "fresh":
            newborn = put(newborn, k, fed.fresh())
        cause = {
            "clients": list(clients), self.metric: float(lowest[clients[0]]),
            "reference": float(state.reference[clients[0]]),
            **({"delta": self.delta} if self.test == "threshold" else {"test": self.test}),
            "from": None if starts[k] == "fresh" else models.ids[parents[k]],
        }  # fmt: skip
        if starts[k] in SHARED:
            cause["family"] = family[k]
        events.append(Event("created", i, cause | trials[k]))
    return newborn, tuple(events)


def choose_starts(
    self: _Options, models: Models, w: Clusters, parents: Sequence[int], groups: Sequence[Sequence[int]],
    fed: Federation,
) -> tuple[list[Start], list[dict[str, Any]]]:  # fmt: skip
    """How each group's new model starts, and what the clients' trials found where they held any."""
    if self.init_ != "best":
        return [self.init_ for _ in groups], [{} for _ in groups]
    if not groups:
        return [], []
    parent = np.full(fed.n_clients, -1)
    for m, clients in zip(parents, groups, strict=True):
        parent[list(clients)] = m
    found = fed.tournament(models, cluster.fade(w, self.memory(fed.tau)[:-1]), parent, self.candidates)
    starts, trials = [], []
    for clients in groups:
        rows, wrong = int(found.rows[list(clients)].sum()), found.wrong[list(clients)].sum(axis=0)
        starts.append(self.candidates[self._winner(rows, wrong)])
        trials.append({"start": starts[-1], "starts": list(self.candidates), "rows": rows, "wrong": wrong.tolist()})
    return starts, trials


def forget(self: _Options, models: Models, w: Clusters) -> tuple[Models, Clusters, tuple[Event, ...]]:
    """Let the memory fade; a model without any remembered data is gone."""
    w = cluster.fade(w, self.memory(len(w) - 1))
    known = np.isin(np.arange(w.n_models), w.model[w.weight > 0])
    events = tuple(
        Event("retired", models.ids[m], {"reason": "its data left the window"}) for m in np.flatnonzero(~known)
    )
    return *cluster.keep(models, w, known), events


def _unless(groups: Sequence[Sequence[int]], best: Ints) -> Ints:
    """Each client's best model, or -1 for those that get a new one."""
    chosen = best.copy()
    for clients in groups:
        chosen[list(clients)] = -1
    return chosen


def _more(observed: Floats, lowest: Floats) -> Floats:
    """What was observed, with the newest."""
    return np.concatenate([observed, lowest[None]])


def _latest(lowest: Floats, reference: Floats) -> Floats:
    """The reference for the next step; a client that was not scored keeps its own."""
    return np.where(np.isnan(lowest), reference, lowest)


def _warn_if_noisy(delta: float, error: Floats, counts: Ints) -> None:
    """Say that delta is within the noise of a cell."""
    seen = ~np.isnan(error) & (counts > 0)
    if not seen.any():
        return
    noise = float(np.median(2 * np.sqrt(error[seen] * (1 - error[seen]) / counts[seen])))
    if delta < noise:
        log.warning(
            "delta=%g is below two standard errors (%.4f) of an error measured on %d examples: expect false alarms",
            delta, noise, int(np.median(counts[seen])),
        )  # fmt: skip
