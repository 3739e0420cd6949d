"""Drift tests: small frozen values that say at which clients the newest data are no longer what they were.

A test sees scores only, which the server has anyway. By name, perhaps with parameters: ``proportional:ratio=0.3``.
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
from feddrift.clustering import TOLERANCE, rises
from feddrift.errors import ConfigError, unknown
from feddrift.types import Bools, Floats, Ints


@dataclass(frozen=True)
class Evidence:
    """The best model's score at each client over time, the newest last; NaN where a client was not scored.

    A drift test is a function of it; this one alarms where the newest score is more than twice the lowest since the
    client's last alarm:

    >>> def doubled(evidence):
    ...     t = np.arange(len(evidence.observed))[:, None]
    ...     lowest = np.where(t >= evidence.since, evidence.observed, np.inf).min(axis=0)
    ...     return evidence.newest > 2 * lowest
    >>> observed = np.array([[0.5, 0.5], [0.1, 0.1], [0.1, 0.3]])
    >>> doubled(Evidence(observed, counts=np.full((3, 2), 100), since=np.array([1, 1]), reference=observed[1])).tolist()
    [False, True]
    """

    observed: Floats  # [t, c]; those of time 0 are an untrained model's
    counts: Ints  # [t, c], on how many examples
    since: Ints  # [c], the first time after the client's last alarm (1 if there was none, 0 for one that joined later)
    reference: Floats  # [c], the score to compare with: the last one before the newest

    @property
    def newest(self) -> Floats:
        """[c], the newest score."""
        newest: Floats = self.observed[-1]
        return newest


DriftTest = Callable[[Evidence], Bools]  # drifted[c]


def checked_answer(answer: Any, n_clients: int, name: str) -> Bools:
    """What a drift test has said: one truth value for each client."""
    if isinstance(answer, np.ndarray) and answer.shape == (n_clients,) and answer.dtype == bool:
        return answer
    got = f"{answer.dtype} {answer.shape}" if isinstance(answer, np.ndarray) else type(answer).__name__
    raise ConfigError(f"a drift test answers with an array of {n_clients} truth values, '{name}' gave {got}")


@dataclass(frozen=True)
class Threshold:
    """The paper's eq. 4: the best model's score rose by more than delta."""

    delta: float

    def __call__(self, seen: Evidence) -> Bools:
        return rises(seen.newest, seen.reference, self.delta)


@dataclass(frozen=True)
class Proportional:
    """The score rose by more than a share of the one before."""

    ratio: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < math.inf:
            raise ConfigError(f"proportional: ratio must be at least 0 and finite, got {self.ratio}")

    def __call__(self, seen: Evidence) -> Bools:
        return rises(seen.newest, seen.reference * (1 + self.ratio), 0.0)


@dataclass(frozen=True)
class TwoSample:
    """Fisher's exact test, one-sided: more mistakes than the batch before lets one expect."""

    confidence: float = 0.99

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise ConfigError(f"two-sample: confidence must be between 0 and 1, got {self.confidence}")

    def __call__(self, seen: Evidence) -> Bools:
        drifted = rises(seen.newest, seen.reference, 0.0)
        for c in np.flatnonzero(drifted):
            before = np.flatnonzero(~np.isnan(seen.observed[:-1, c]))[-1]
            n, m = int(seen.counts[before, c]), int(seen.counts[-1, c])
            wrong = round(seen.reference[c] * n), round(seen.newest[c] * m)
            drifted[c] = exceeds(*wrong, n, m) <= 1 - self.confidence
        return drifted


def exceeds(before: int, now: int, n: int, m: int) -> float:
    """The chance of at least `now` mistakes among m, if all before + now mistakes fell evenly on n + m examples.

    >>> round(exceeds(3, 1, 4, 4), 4), round(exceeds(1, 3, 4, 4), 4)
    (0.9857, 0.2429)
    """
    total = before + now
    k = np.arange(now, min(m, total) + 1)
    return float(numerics.exp(_choose(m, k) + _choose(n, total - k) - _choose(n + m, np.array(total))).sum())


def _choose(n: int, k: Any) -> Any:
    """The logarithm of n over k."""
    from scipy.special import betaln  # here, since SciPy takes a while to import

    return -numerics.log1p(n) - betaln(n - k + 1, k + 1)


@dataclass(frozen=True)
class Sequential:
    """A detector of the river package, fed the client's mistakes since its last alarm, one example after the other.

    It is made anew at each time step and reads the whole sequence again: nothing but the scores has to be kept. A
    score is so many mistakes, spread evenly over its examples, since nobody but the client knows which they were.
    """

    name: Literal["adwin", "page-hinkley", "kswin", "hddm-a", "hddm-w"]
    parameters: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        self._made()

    def __call__(self, seen: Evidence) -> Bools:
        drifted = np.zeros(seen.observed.shape[1], dtype=bool)
        for c in np.flatnonzero(~np.isnan(seen.newest)):
            times = [t for t in range(int(seen.since[c]), len(seen.observed)) if not np.isnan(seen.observed[t, c])]
            if len(times) < 2:
                continue
            n, score = seen.counts[times[:-1], c], seen.observed[times[:-1], c]
            if seen.newest[c] > (n * score).sum() / n.sum() + TOLERANCE:  # some detectors see a fall, too
                drifted[c] = self._fires([(int(seen.counts[t, c]), float(seen.observed[t, c])) for t in times])
        return drifted

    def _fires(self, batches: list[tuple[int, float]]) -> bool:
        """Whether the last batch raises the alarm."""
        detector = self._made()
        past = [bit for n, score in batches[:-1] for bit in _mistakes(n, score)]
        for bit in past[-getattr(detector, "window_size", len(past)) :]:  # KSWIN looks no further back, and is slow
            detector.update(bit)
        for bit in _mistakes(*batches[-1]):
            detector.update(bit)
            if detector.drift_detected:
                return True
        return False

    def _made(self) -> Any:
        cls, fixed = _river()[self.name]
        try:
            return cls(**fixed | dict(self.parameters))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.name}: {error}") from None


def _mistakes(n: int, score: float) -> Iterator[int]:
    """So many mistakes as 0s and 1s, evenly spread.

    >>> list(_mistakes(6, 0.5))
    [0, 1, 0, 1, 0, 1]
    """
    wrong = round(n * score)
    return ((i + 1) * wrong // n - i * wrong // n for i in range(n))


def _river() -> Mapping[str, tuple[Any, dict[str, Any]]]:
    try:
        from river import drift
    except ImportError:
        raise ConfigError("this test needs the package river: pip install 'feddrift[river]'") from None
    return {
        "adwin": (drift.ADWIN, {}),
        "page-hinkley": (drift.PageHinkley, {"mode": "up"}),
        "kswin": (drift.KSWIN, {"seed": 0}),  # it draws
        "hddm-a": (drift.binary.HDDMA, {}),
        "hddm-w": (drift.binary.HDDMW, {}),
    }


TESTS: dict[str, str] = {
    "threshold": "a rise by more than delta, as the paper has it",
    "proportional": "a rise by more than a share of the score before (ratio=0.5)",
    "two-sample": "more mistakes than the last batch lets one expect, by Fisher's exact test (confidence=0.99)",
    "adwin": "river's ADWIN on the sequence of mistakes",
    "page-hinkley": "river's Page-Hinkley test on it",
    "kswin": "river's KSWIN on it; slow",
    "hddm-a": "river's HDDM_A on it",
    "hddm-w": "river's HDDM_W on it",
}


@cache
def drift_test(spec: str, delta: float, metric: str = "error") -> DriftTest:
    """The test that a name stands for, or what ``package.module:name`` names: a function of Evidence.

    >>> drift_test("proportional:ratio=0.25", delta=0.1)
    Proportional(ratio=0.25)
    """
    name, _, text = spec.partition(":")
    if name not in TESTS and plugins.is_path(spec):
        test = plugins.load("test", spec)
        test = plugins.called("test", spec, test) if isinstance(test, type) else test
        if not callable(test):
            raise ConfigError(f"test '{spec}' must be a function of Evidence, got {test!r}")
        return test  # type: ignore[no-any-return]
    if name not in TESTS:
        raise unknown("test", name, [*TESTS, "package.module:name"])
    if metric != "error" and name not in ("threshold", "proportional"):
        raise ConfigError(f"test={name} counts mistakes: metric must be error, got '{metric}'")
    parameters = _parameters(name, text)
    if name == "threshold":
        if parameters:
            raise ConfigError(f"the parameter of threshold is the setting delta, got '{text}'")
        return Threshold(delta)
    own: dict[str, type[Proportional] | type[TwoSample]] = {"proportional": Proportional, "two-sample": TwoSample}
    if name not in own:
        return Sequential(name, tuple(sorted(parameters.items())))  # type: ignore[arg-type]  # one of TESTS
    cls = own[name]
    for key in parameters:
        if key not in (legal := [field.name for field in fields(cls)]):
            raise unknown(f"parameter of {name}", key, legal)
    return cls(**parameters)


def _parameters(name: str, text: str) -> dict[str, float]:
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
