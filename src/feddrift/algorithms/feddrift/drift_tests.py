"""Drift tests: functions of the clients' scores that decide at which clients the newest data drifted.

A test needs only scores, which the server already has. It is chosen by its name, followed by its parameters if it has
any: ``proportional:ratio=0.3``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal

import numpy as np

from feddrift import numerics
from feddrift._internal import plugins
from feddrift.clustering import TOLERANCE, detect_rise
from feddrift.errors import ConfigError, unknown_name_error
from feddrift.types import Bools, Floats, Ints


@dataclass(frozen=True)
class Evidence:
    """Scores of the best model at each client over time, the newest last; NaN where a client was not scored.

    A drift test is a function of them. This one raises an alarm where the newest score is more than twice the lowest
    since the client's last alarm:

    >>> def detect_doubling(evidence):
    ...     t = np.arange(len(evidence.observed))[:, None]
    ...     lowest = np.where(t >= evidence.since, evidence.observed, np.inf).min(axis=0)
    ...     return evidence.newest > 2 * lowest
    >>> observed = np.array([[0.5, 0.5], [0.1, 0.1], [0.1, 0.3]])
    >>> counts = np.full((3, 2), 100)
    >>> detect_doubling(Evidence(observed, counts, since=np.array([1, 1]), reference=observed[1])).tolist()
    [False, True]
    """

    observed: Floats  # [t, c], scores; those of time 0 are of an untrained model
    counts: Ints  # [t, c], numbers of examples that the scores were measured on
    # [c], first time step after the client's last alarm; without an alarm 1, or 0 for a client that joined later
    since: Ints
    reference: Floats  # [c], the score to compare with: the last one before the newest

    @property
    def newest(self) -> Floats:
        """The newest scores [c]."""
        newest: Floats = self.observed[-1]
        return newest


DriftTest = Callable[[Evidence], Bools]  # drifted[c]


def check_answer(answer: Any, n_clients: int, name: str) -> Bools:
    """Return the result of a drift test if it is valid: one truth value for each client.

    Args:
        answer: The result of the test.
        n_clients: Number of clients.
        name: Name of the test, for the message.

    Raises:
        ConfigError: The result is not a Boolean array [c].
    """
    if isinstance(answer, np.ndarray) and answer.shape == (n_clients,) and answer.dtype == bool:
        return answer
    got = f"{answer.dtype} {answer.shape}" if isinstance(answer, np.ndarray) else type(answer).__name__
    raise ConfigError(f"a drift test must return an array of {n_clients} truth values, '{name}' gave {got}")


@dataclass(frozen=True)
class Threshold:
    """Drift test of the paper (eq. 4): the best model's score rose by more than delta."""

    delta: float

    def __call__(self, evidence: Evidence) -> Bools:
        """Return [c], whether each client drifted."""
        return detect_rise(evidence.newest, evidence.reference, self.delta)


@dataclass(frozen=True)
class Proportional:
    """Drift test: the score rose by more than a share of the previous score."""

    ratio: float = 0.5  # the share

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < math.inf:
            raise ConfigError(f"proportional: ratio must be at least 0 and finite, got {self.ratio}")

    def __call__(self, evidence: Evidence) -> Bools:
        """Return [c], whether each client drifted."""
        return detect_rise(evidence.newest, evidence.reference * (1 + self.ratio), 0.0)


@dataclass(frozen=True)
class TwoSample:
    """Drift test by Fisher's exact test, one-sided: significantly more mistakes than in the previous batch."""

    confidence: float = 0.99  # an alarm needs a p-value of at most 1 - confidence

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise ConfigError(f"two-sample: confidence must be between 0 and 1, got {self.confidence}")

    def __call__(self, evidence: Evidence) -> Bools:
        """Return [c], whether each client drifted."""
        drifted = detect_rise(evidence.newest, evidence.reference, 0.0)
        for c in np.flatnonzero(drifted):
            last = np.flatnonzero(~np.isnan(evidence.observed[:-1, c]))[-1]  # the previous score's time step
            n = int(evidence.counts[last, c])
            m = int(evidence.counts[-1, c])
            old_mistakes = round(evidence.reference[c] * n)
            new_mistakes = round(evidence.newest[c] * m)
            drifted[c] = compute_fisher_p(old_mistakes, new_mistakes, n, m) <= 1 - self.confidence
        return drifted


def compute_fisher_p(old_mistakes: int, new_mistakes: int, n: int, m: int) -> float:
    """Return the one-sided p-value of Fisher's exact test for a higher share of mistakes in the new examples.

    This is the probability of at least `new_mistakes` among the m new examples, if all mistakes were distributed at
    random over all n + m examples.

    Args:
        old_mistakes: Number of mistakes on the old examples.
        new_mistakes: Number of mistakes on the new examples.
        n: Number of old examples.
        m: Number of new examples.

    >>> round(compute_fisher_p(3, 1, 4, 4), 4), round(compute_fisher_p(1, 3, 4, 4), 4)
    (0.9857, 0.2429)
    """
    total = old_mistakes + new_mistakes
    k = np.arange(new_mistakes, min(m, total) + 1)
    return float(
        numerics.exp(_log_binomial(m, k) + _log_binomial(n, total - k) - _log_binomial(n + m, np.array(total))).sum()
    )


def _log_binomial(n: int, k: Any) -> Any:
    """Return the logarithm of the binomial coefficient n over k."""
    from scipy.special import betaln  # imported here, because importing SciPy is slow

    return -numerics.log1p(n) - betaln(n - k + 1, k + 1)


@dataclass(frozen=True)
class Sequential:
    """Drift test by a detector of the river package, which reads a client's mistakes since its last alarm one by one.

    A new detector reads the whole sequence at each time step, so that only scores have to be stored. A score determines
    the number of mistakes, but not the examples with mistakes: these are spread evenly over all examples.
    """

    name: Literal["adwin", "page-hinkley", "kswin", "hddm-a", "hddm-w"]
    parameters: tuple[tuple[str, float], ...] = ()  # names and values of arguments of the detector's class

    def __post_init__(self) -> None:
        self._create_detector()

    def __call__(self, evidence: Evidence) -> Bools:
        """Return [c], whether each client drifted."""
        observed = evidence.observed
        counts = evidence.counts
        drifted = np.zeros(observed.shape[1], dtype=bool)
        for c in np.flatnonzero(~np.isnan(evidence.newest)):
            times = [t for t in range(int(evidence.since[c]), len(observed)) if not np.isnan(observed[t, c])]
            if len(times) < 2:
                continue
            n = counts[times[:-1], c]
            score = observed[times[:-1], c]
            if evidence.newest[c] > (n * score).sum() / n.sum() + TOLERANCE:  # some detectors also detect a decrease
                drifted[c] = self._raises_alarm([(int(counts[t, c]), float(observed[t, c])) for t in times])
        return drifted

    def _raises_alarm(self, batches: list[tuple[int, float]]) -> bool:
        """Return True if the last batch raises an alarm; a batch is its number of examples and its score."""
        detector = self._create_detector()
        past = [mistake for n, score in batches[:-1] for mistake in _spread_mistakes(n, score)]
        window_size = getattr(detector, "window_size", len(past))  # KSWIN ignores older mistakes, and is slow
        for mistake in past[-window_size:]:
            detector.update(mistake)
        for mistake in _spread_mistakes(*batches[-1]):
            detector.update(mistake)
            if detector.drift_detected:
                return True
        return False

    def _create_detector(self) -> Any:
        cls, fixed = _load_river_detectors()[self.name]
        try:
            return cls(**fixed | dict(self.parameters))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.name}: {error}") from None


def _spread_mistakes(n: int, score: float) -> Iterator[int]:
    """Yield 1 for each mistake and 0 for each other example, the mistakes spread evenly.

    >>> list(_spread_mistakes(6, 0.5))
    [0, 1, 0, 1, 0, 1]
    """
    wrong = round(n * score)
    return ((i + 1) * wrong // n - i * wrong // n for i in range(n))


def _load_river_detectors() -> Mapping[str, tuple[Any, dict[str, Any]]]:
    """Return the class and the fixed parameters of each detector, by the name of its test."""
    try:
        from river import drift
    except ImportError:
        raise ConfigError("this test needs the package river: pip install 'feddrift[river]'") from None
    return {
        "adwin": (drift.ADWIN, {}),
        "page-hinkley": (drift.PageHinkley, {"mode": "up"}),
        "kswin": (drift.KSWIN, {"seed": 0}),  # it draws random numbers
        "hddm-a": (drift.binary.HDDMA, {}),
        "hddm-w": (drift.binary.HDDMW, {}),
    }


TESTS: dict[str, str] = {
    "threshold": "a rise by more than delta, the test of the paper",
    "proportional": "a rise by more than a share of the previous score (ratio=0.5)",
    "two-sample": "significantly more mistakes than in the previous batch, by Fisher's exact test (confidence=0.99)",
    "adwin": "river's ADWIN on the sequence of mistakes",
    "page-hinkley": "river's Page-Hinkley test on the sequence of mistakes",
    "kswin": "river's KSWIN on the sequence of mistakes; slow",
    "hddm-a": "river's HDDM_A on the sequence of mistakes",
    "hddm-w": "river's HDDM_W on the sequence of mistakes",
}


@cache
def drift_test(spec: str, delta: float, metric: str = "error") -> DriftTest:
    """Return a drift test by its name: a function of Evidence.

    Args:
        spec: A name in `TESTS`, with parameters after a colon if there are any, or ``package.module:name``.
        delta: Threshold of the test named threshold.
        metric: Kind of the scores. Only threshold and proportional work with scores that are not errors.

    Raises:
        ConfigError: The name or a parameter is unknown, or the test does not work with the metric.

    >>> drift_test("proportional:ratio=0.25", delta=0.1)
    Proportional(ratio=0.25)
    """
    name, _, text = spec.partition(":")
    if name not in TESTS and plugins.is_import_path(spec):
        test = plugins.load_object("test", spec)
        if isinstance(test, type):
            test = plugins.call_function("test", spec, test)
        if not callable(test):
            raise ConfigError(f"test '{spec}' must be a function of Evidence, got {test!r}")
        return test  # type: ignore[no-any-return]
    if name not in TESTS:
        raise unknown_name_error("test", name, TESTS, ["package.module:name"])
    if metric != "error" and name not in ("threshold", "proportional"):
        raise ConfigError(f"test={name} counts mistakes: metric must be error, got '{metric}'")
    parameters = _parse_parameters(name, text)
    if name == "threshold":
        if parameters:
            raise ConfigError(f"the parameter of threshold is the setting delta, got '{text}'")
        return Threshold(delta)
    classes: dict[str, type[Proportional] | type[TwoSample]] = {"proportional": Proportional, "two-sample": TwoSample}
    if name not in classes:
        return Sequential(name, tuple(sorted(parameters.items())))  # type: ignore[arg-type]  # one of TESTS
    cls = classes[name]
    legal = [field.name for field in fields(cls)]
    for key in parameters:
        if key not in legal:
            raise unknown_name_error(f"parameter of {name}", key, legal)
    return cls(**parameters)


def _parse_parameters(name: str, text: str) -> dict[str, float]:
    """Parse `key=number` pairs, separated by commas; whole numbers become integers."""
    parsed: dict[str, float] = {}
    for pair in text.split(",") if text else ():
        key, equals, value = (part.strip() for part in pair.partition("="))
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not equals or not key or math.isnan(number):
            raise ConfigError(f"test={name} takes numbers such as {name}:key=0.5, got '{pair}'")
        parsed[key] = int(number) if number.is_integer() and "." not in value and "e" not in value.lower() else number
    return parsed
