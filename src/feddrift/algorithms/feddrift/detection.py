"""The first lines of Algorithms 3 and 4: each client's best model, and whether its newest data are a drift (eq. 4)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from feddrift import clustering
from feddrift.algorithms.feddrift.drift_tests import Evidence, checked_answer, drift_test
from feddrift.algorithms.options import option
from feddrift.errors import ConfigError
from feddrift.memory import ALL, Memory
from feddrift.types import Bools, Clusters, Event, Federation, Floats, Ints, Models, Start, State

log = logging.getLogger(__name__)

TOO_SOON = "the last alarm of this client that was, is not long ago"
UNSCORED = {"newcomer": np.nan}  # what a client that has never been scored has


@dataclass(frozen=True, repr=False)
class DriftState(State):
    """What detection remembers besides the clusters."""

    w: Clusters
    reference: Floats = field(default_factory=lambda: np.zeros(0), metadata=UNSCORED)  # [c], best loss when last scored
    previous: Floats = field(default_factory=lambda: np.zeros(0), metadata=UNSCORED)  # [c], the reference before that
    observed: Floats = field(  # [t, c], best loss each time
        default_factory=lambda: np.zeros((0, 0)), metadata=UNSCORED | {"passed_over": np.nan}
    )
    since: Ints = field(  # [c], the first time after the last alarm
        default_factory=lambda: np.zeros(0, dtype=np.int64), metadata={"newcomer": 0}
    )
    newborn: tuple[int, ...] = ()  # ids created in this step
    born: int = 1  # how many ids have been given so far
    waiting: tuple[int, ...] = ()  # ids of models in quarantine


@dataclass(frozen=True)
class Detecting:
    """What FedDrift and FedDrift-Eager can be told, and the state they start with."""

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
    has_own_test: ClassVar[bool] = False  # what a drift is, is not for `test` to say

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

    def init(self, fed: Federation) -> DriftState:
        never, n = np.full(fed.n_clients, np.nan), fed.n_clients
        nothing, since = np.zeros((0, n)), np.ones(n, dtype=np.int64)
        w, votes = clustering.nobody(n), np.ones((n, 1))
        return DriftState(fed.fresh(), w, votes, reference=never, previous=never, observed=nothing, since=since)

    def winner(self, rows: int, wrong: Ints) -> int:
        """Which candidate a trial on so many rows found best: the first, unless another beats it."""
        best = 0
        for rival in range(1, len(self.candidates)):
            if clustering.beats(wrong, rival, best):
                best = rival
        return best


@dataclass(frozen=True)
class Seen:
    """What the newest data said: each client's best model, its loss, and who drifted."""

    best: Ints  # [c], a position; a client that was not scored keeps the one it has
    lowest: Floats  # [c], NaN where not scored
    drifted: Bools  # [c], whose alarm is acted on
    held: Bools | None = None  # [c], whose alarm is not


def detect(method: Detecting, state: DriftState, fed: Federation) -> Seen:
    """l[c, m] of all models on the new data; the best of them (Algorithm 2), and whether that is a drift (eq. 4)."""
    loss = fed.evaluate(state.models, method.metric)
    loss = np.where(np.isin(state.models.ids, state.waiting), np.nan, loss)
    keys = [fed.key("ties", c) for c in range(fed.n_clients)] if method.ties == "random" else None
    best, lowest = clustering.best_models(loss, state.votes.argmax(axis=1), keys)
    first = fed.tau and not fed.counts[1:-1].any()  # the first scores of a trained model
    if first and method.test == "threshold" and method.metric == "error":
        _warn_if_noisy(method.delta, lowest, fed.counts[-1])
    evidence = Evidence(_with(state.observed, lowest), fed.counts, state.since, state.reference)
    answer = drift_test(method.test, method.delta, method.metric)(evidence)
    alarms = checked_answer(answer, len(best), str(method.test))
    drifted = fed.allowed(alarms)
    return Seen(best, lowest, drifted, alarms & ~drifted)


def held_told(seen: Seen, models: Models) -> list[Event]:
    """The events of alarms that are not acted on."""
    held = [] if seen.held is None else np.flatnonzero(seen.held).tolist()
    reason = f"its error rose; not acted on: {TOO_SOON}"
    return [Event("decided", models.ids[seen.best[c]], {"clients": [c], "reason": reason}) for c in held]


def remembered(state: DriftState, seen: Seen, tau: int) -> dict[str, Any]:
    """The fields of the next DriftState that detection needs; a client that was not scored keeps its reference,
    and so does one whose alarm was held back: if it was right, it comes again."""
    kept = np.isnan(seen.lowest) if seen.held is None else np.isnan(seen.lowest) | seen.held
    return {
        "drifted": seen.drifted,
        "reference": np.where(kept, state.reference, seen.lowest),
        "observed": _with(state.observed, seen.lowest),
        "since": np.where(seen.drifted, tau + 1, state.since),
    }


def _with(observed: Floats, lowest: Floats) -> Floats:
    return np.concatenate([observed, lowest[None]])


def _warn_if_noisy(delta: float, error: Floats, counts: Ints) -> None:
    """Warn where delta is below the noise of an error measured on so few examples."""
    seen = ~np.isnan(error) & (counts > 0)
    if not seen.any():
        return
    noise = float(np.median(2 * np.sqrt(error[seen] * (1 - error[seen]) / counts[seen])))
    if delta < noise:
        what = "delta=%g is below two standard errors (%.4f) of an error measured on %d examples: expect false alarms"
        log.warning(what, delta, noise, int(np.median(counts[seen])))
