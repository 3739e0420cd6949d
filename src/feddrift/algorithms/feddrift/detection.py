"""Drift detection, the first lines of Algorithms 3 and 4: each client's best model, and whether it drifted (eq. 4)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from feddrift import clustering
from feddrift.algorithms.feddrift.drift_tests import Evidence, check_answer, drift_test
from feddrift.algorithms.options import option
from feddrift.errors import ConfigError
from feddrift.memory import ALL, Memory
from feddrift.types import Bools, Clusters, Event, Federation, Floats, Ints, Models, Start, State

log = logging.getLogger(__name__)

NOT_ACTED_ON = "not acted on"  # in the reasons of events; reports count these alarms
SUPPRESSION_REASON = "a recent alarm of this client was acted on"
UNSCORED = {"newcomer": np.nan}  # the value of a client that was never scored


@dataclass(frozen=True, repr=False)
class DriftState(State):
    """State of FedDrift and its variants after a time step: the clusters, and the scores that detection compares."""

    w: Clusters
    reference: Floats = field(default_factory=lambda: np.zeros(0), metadata=UNSCORED)  # [c], best loss when last scored
    previous: Floats = field(default_factory=lambda: np.zeros(0), metadata=UNSCORED)  # [c], the reference before that
    observed: Floats = field(  # [t, c], best loss at each time step
        default_factory=lambda: np.zeros((0, 0)), metadata=UNSCORED | {"passed_over": np.nan}
    )
    since: Ints = field(  # [c], the first time step after the last alarm
        default_factory=lambda: np.zeros(0, dtype=np.int64), metadata={"newcomer": 0}
    )
    newborn: tuple[int, ...] = ()  # ids of the models created in this step
    next_id: int = field(default=1, metadata={"former_name": "born"})
    waiting: tuple[int, ...] = ()  # ids of the models in quarantine


@dataclass(frozen=True)
class DriftDetectionOptions:
    """Settings that FedDrift and FedDrift-Eager share, and the state before the first time step.

    Attributes:
        delta: Threshold of the drift test (eq. 4).
        init_: Start of a new model: a copy of the client's best model, a fresh model, or the better in a trial.
        metric: Quantity that the choice of models, detection and distances compare.
        test: Drift test, by name; see `drift_tests`.
        max_models: Largest number of models; None: no limit.
        ties: Choice among equally good models.
        quarantine: Whether a model with one founder serves no other client until the founder's next data confirm it.
        memory: Weights of past data.
        candidates: Starts that a trial compares if `init_` is best.
        has_own_test: Whether the class defines drifts itself and ignores `test`.
    """

    delta: float = option(0.05, "a drift is a rise of the best model's loss by more than this")
    init_: Literal["warm", "fresh", "best"] = option(
        "warm",
        "a new model is a copy of the client's best (warm), untrained (fresh), or the better in a trial (best)",
    )
    metric: Literal["error", "loss"] = option(
        "error", "what the choice of models, drift detection and distances compare: error, or cross-entropy (loss)"
    )
    test: str = option(
        "threshold",
        "the drift test: threshold (delta), proportional, two-sample, river's adwin, page-hinkley, kswin, hddm-a, "
        "hddm-w, or your own package.module:name; with parameters: proportional:ratio=0.3",
        quiet=True,
    )
    max_models: int | None = option(None, "largest number of models, above it unused ones are retired; none: no limit")
    ties: Literal["lowest", "random"] = option("lowest", "which of equally good models a client chooses")
    quarantine: bool = option(
        False,
        "a model with one founder serves no other client until the founder's next data confirm it",
        quiet=True,
    )
    memory: Memory = ALL
    candidates: ClassVar[tuple[Start, ...]] = ("warm", "fresh")
    has_own_test: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check_threshold("delta", self.delta)
        drift_test(self.test, self.delta, self.metric)
        if self.max_models is not None and self.max_models < 1:
            raise ConfigError(f"{type(self).__name__}.max_models must be at least 1 or none, got {self.max_models}")

    def _check_threshold(self, name: str, value: float) -> None:
        largest = 1.0 if self.metric == "error" else np.finfo(np.float64).max
        if not 0 <= value <= largest:
            legal = "in [0, 1]" if self.metric == "error" else "at least 0 and finite"
            raise ConfigError(f"{type(self).__name__}.{name} must be {legal} for metric='{self.metric}', got {value}")

    def init(self, fed: Federation) -> DriftState:
        """Return the state before the first time step: one untrained model, and no scores."""
        n = fed.n_clients
        unscored = np.full(n, np.nan)
        return DriftState(
            fed.fresh(),
            clustering.create_empty_clusters(n),
            np.ones((n, 1)),
            reference=unscored,
            previous=unscored,
            observed=np.zeros((0, n)),
            since=np.ones(n, dtype=np.int64),
        )

    def choose_start(self, rows: int, wrong: Ints) -> int:
        """Return the position in `candidates` of the start that won a trial.

        The first candidate wins, unless a later one beats it in a sign test; that one must be beaten in turn.

        Args:
            rows: Number of rows that the candidates were evaluated on.
            wrong: [candidate, candidate], the number of rows that both get wrong.
        """
        best = 0
        for rival in range(1, len(self.candidates)):
            if clustering.wins_sign_test(wrong, rival, best):
                best = rival
        return best


@dataclass(frozen=True)
class DetectionResult:
    """Result of drift detection on the newest data: each client's best model, its loss, and the alarms."""

    best: Ints  # [c], position of the best model; a client that was not scored keeps its model
    lowest: Floats  # [c], loss of the best model; NaN where the client was not scored
    drifted: Bools  # [c], alarms that are acted on
    suppressed: Bools | None = None  # [c], alarms that are not acted on


def detect_drift(method: DriftDetectionOptions, state: DriftState, fed: Federation) -> DetectionResult:
    """Evaluate all models on the new data, choose each client's best (Algorithm 2), and test it for drift (eq. 4)."""
    loss = fed.evaluate(state.models, method.metric)  # l[c, m]
    loss = np.where(np.isin(state.models.ids, state.waiting), np.nan, loss)  # models in quarantine are not chosen
    tie_keys = [fed.key("ties", c) for c in range(fed.n_clients)] if method.ties == "random" else None
    best, lowest = clustering.find_best_models(loss, state.votes.argmax(axis=1), tie_keys)
    is_first_score = fed.tau and not fed.counts[1:-1].any()  # the first scores of a trained model
    if is_first_score and method.test == "threshold" and method.metric == "error":
        _warn_if_noisy(method.delta, lowest, fed.counts[-1])
    evidence = Evidence(_append_scores(state.observed, lowest), fed.counts, state.since, state.reference)
    result = drift_test(method.test, method.delta, method.metric)(evidence)
    alarms = check_answer(result, len(best), method.test)
    drifted = fed.allowed(alarms)
    return DetectionResult(best, lowest, drifted, alarms & ~drifted)


def create_suppressed_alarm_events(detected: DetectionResult, models: Models) -> list[Event]:
    """Return an event for each alarm that is not acted on."""
    suppressed = [] if detected.suppressed is None else np.flatnonzero(detected.suppressed).tolist()
    reason = f"its error rose; {NOT_ACTED_ON}: {SUPPRESSION_REASON}"
    return [Event("decided", models.ids[detected.best[c]], {"clients": [c], "reason": reason}) for c in suppressed]


def update_detection_fields(state: DriftState, detected: DetectionResult, tau: int) -> dict[str, Any]:
    """Return the fields of the next DriftState that depend on detection.

    The reference of a client stays if the client was not scored, or if its alarm was suppressed: a right alarm is then
    raised again.
    """
    kept = np.isnan(detected.lowest)
    if detected.suppressed is not None:
        kept = kept | detected.suppressed
    return {
        "drifted": detected.drifted,
        "reference": np.where(kept, state.reference, detected.lowest),
        "observed": _append_scores(state.observed, detected.lowest),
        "since": np.where(detected.drifted, tau + 1, state.since),
    }


def _append_scores(observed: Floats, lowest: Floats) -> Floats:
    return np.concatenate([observed, lowest[None]])


def _warn_if_noisy(delta: float, error: Floats, counts: Ints) -> None:
    """Log a warning if delta is below two standard errors of the error at the median client.

    Args:
        delta: Threshold of the drift test.
        error: [c], error of each client's best model; NaN where the client was not scored.
        counts: [c], number of examples that the error was measured on.
    """
    scored = ~np.isnan(error) & (counts > 0)
    if not scored.any():
        return
    noise = float(np.median(2 * np.sqrt(error[scored] * (1 - error[scored]) / counts[scored])))
    if delta < noise:
        warning = (
            "delta=%g is below two standard errors (%.4f) of an error measured on %d examples: expect false alarms"
        )
        log.warning(warning, delta, noise, int(np.median(counts[scored])))
