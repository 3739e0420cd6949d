"""Drift tests, on scores written by hand and in the algorithms that use them."""

from __future__ import annotations

import sys
from dataclasses import FrozenInstanceError
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift import algorithms
from feddrift.algorithms.feddrift.drift_tests import (
    TESTS,
    Evidence,
    Proportional,
    Sequential,
    TwoSample,
    compute_fisher_p,
    drift_test,
)
from feddrift.algorithms.feddrift.method import FedDrift, FedDriftEager
from feddrift.algorithms.feddrift.variant_c import FedDriftC
from feddrift.errors import ConfigError
from feddrift.runs import record
from tests.support.cli import QUICK_OPTIONS, run_feddrift
from tests.support.fake_federation import NO_DRIFT, make_loss_table, run_algorithm

RIVER = [name for name in TESTS if name not in ("threshold", "proportional", "two-sample")]


def needs_river() -> None:
    pytest.importorskip("river", reason="river is not installed")


def evidence(rows: list[list[float]], n: int = 500, since: int = 1) -> Evidence:
    """Scores [t][c] on n examples each."""
    observed = np.array(rows)
    last = [[v for v in column[:-1] if not np.isnan(v)] for column in observed.T]
    reference = np.array([column[-1] if column else np.nan for column in last])
    return Evidence(observed, np.full(observed.shape, n), np.full(observed.shape[1], since), reference)


def test_a_proportional_rise() -> None:
    seen = evidence([[0.10, 0.10, 0.02, np.nan], [0.15, 0.1501, 0.04, 0.9]])
    assert Proportional(0.5)(seen).tolist() == [False, True, True, False]
    assert drift_test("proportional:ratio=1", 0.1)(seen).tolist() == [False, False, False, False]


def test_two_samples_by_fishers_exact_test() -> None:
    seen = evidence([[0.10, 0.10, 0.10, np.nan], [0.13, 0.20, 0.02, 0.9]])
    assert TwoSample()(seen).tolist() == [False, True, False, False]
    assert TwoSample(0.9)(seen).tolist() == [True, True, False, False]
    assert not TwoSample(0.999)(evidence([[0.10], [0.20]], n=50)).any()  # as large a rise, too few examples
    for before, now, n, m in [(0, 3, 7, 5), (2, 2, 4, 6), (1, 5, 9, 5), (0, 0, 3, 3)]:
        total = before + now
        ways = [comb(m, k) * comb(n, total - k) for k in range(now, min(m, total) + 1)]
        assert compute_fisher_p(before, now, n, m) == pytest.approx(sum(ways) / comb(n + m, total))


def test_two_samples_go_back_to_the_last_time_a_client_was_scored() -> None:
    seen = evidence([[0.10], [np.nan], [0.20]])
    counts = np.array([[500], [0], [500]])
    assert TwoSample()(Evidence(seen.observed, counts, seen.since, seen.reference)).all()
    counts[0] = 10  # one mistake in ten says little
    assert not TwoSample()(Evidence(seen.observed, counts, seen.since, seen.reference)).any()


@pytest.mark.parametrize("name", RIVER)
def test_rivers_detectors_see_a_jump_and_only_a_rise(name: str) -> None:
    needs_river()
    rows = [[0.5, 0.9, 0.5, 0.1], [0.05, 0.9, 0.05, np.nan], [0.05, 0.9, 0.05, np.nan], [0.9, 0.05, 0.05, 0.9]]
    test = drift_test(name, 0.1)
    assert test(evidence(rows)).tolist() == [True, False, False, False]  # the last has nothing to compare with
    assert not test(evidence(rows, since=3)).any()  # an alarm at time 2 made the past void
    assert test(evidence(rows)).tolist() == test(evidence(rows)).tolist()  # also the one that draws


@pytest.mark.parametrize("name", RIVER)
def test_rivers_detectors_read_the_same_values_as_live(name: str) -> None:
    """Fed batch by batch, as it comes, the same detector fires in the same batch."""
    needs_river()
    scores = [0.1, 0.1, 0.12, 0.1, 0.6]
    live = Sequential(name)._create_detector()  # type: ignore[arg-type]
    expected = []
    for score in scores:
        fired = False
        for i in range(500):
            live.update((i + 1) * round(500 * score) // 500 - i * round(500 * score) // 500)
            fired = fired or bool(live.drift_detected)
        expected.append(fired)
    got = [drift_test(name, 0.1)(evidence([[0.5]] + [[s] for s in scores[:t]])).any() for t in range(1, 6)]
    assert got == expected and expected[-1] and not any(expected[:-1])


@pytest.mark.parametrize(
    ("test", "sentence"),
    [
        ("two-samples", "unknown test 'two-samples', did you mean 'two-sample'"),
        ("proportional:share=1", "unknown parameter of proportional 'share'.*ratio"),
        ("proportional:ratio", "takes numbers such as proportional:key=0.5, got 'ratio'"),
        ("proportional:ratio=-1", "ratio must be at least 0 and finite, got -1"),
        ("two-sample:confidence=1", "confidence must be between 0 and 1, got 1"),
        ("threshold:delta=0.1", "the setting delta"),
        ("no.such.module:test", "test 'no.such.module:test': there is no module 'no'"),
        ("feddrift.errors:none", "feddrift.errors has no 'none'"),
        ("feddrift.algorithms.feddrift.drift_tests:TESTS", "must be a function of Evidence"),
    ],
)
def test_invalid_drift_tests_are_refused_in_one_sentence(test: str, sentence: str) -> None:
    for name in ("FedDrift", "FedDrift-Eager", "FedDrift-Trunk"):
        with pytest.raises(ConfigError, match=sentence):
            fd.algorithm(name, test=test)


def test_counting_tests_need_counts() -> None:
    with pytest.raises(ConfigError, match="metric must be error, got 'loss'"):
        FedDrift(metric="loss", test="two-sample")
    FedDrift(metric="loss", test="proportional")


def test_a_parameter_that_river_does_not_know() -> None:
    needs_river()
    with pytest.raises(ConfigError, match="adwin: .*'detla'"):
        FedDrift(test="adwin:detla=0.1")
    with pytest.raises(ConfigError, match="redetect needs a test that compares two scores, got test=adwin"):
        FedDriftC(redetect=True, test="adwin")
    with pytest.raises(FrozenInstanceError):
        Sequential("adwin").name = "kswin"  # type: ignore[misc]


def test_without_river_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "river", None)
    with pytest.raises(ConfigError, match=r"pip install 'feddrift\[river\]'"):
        fd.algorithm("FedDrift", test="adwin:clock=7")


@pytest.mark.parametrize("algorithm", [FedDrift, FedDriftEager])
def test_the_algorithms_ask_their_test(algorithm: Any) -> None:
    """Errors of 10 % that double: the threshold of 0.2 sees nothing, a share of a half does."""
    worlds = [
        NO_DRIFT,
        NO_DRIFT,
        {"loss": make_loss_table({0: [0.1, 0.2, 0.1]})},
        {"loss": make_loss_table({0: [0.1, 0.9, 0.1], 1: [0.9, 0.05, 0.9]})},
    ]
    assert not run_algorithm(algorithm(delta=0.2), worlds)[2].drifted.any()  # type: ignore[union-attr]
    states = run_algorithm(algorithm(delta=0.2, test="proportional"), worlds)
    assert states[2].drifted.tolist() == [False, True, False]  # type: ignore[union-attr]
    (created,) = states[2].events
    assert created.cause["test"] == "proportional" and "delta" not in created.cause
    assert states[2].since.tolist() == [1, 3, 1] and states[3].since.tolist() == [1, 3, 1]
    assert states[3].observed.tolist() == [[0.1] * 3, [0.1] * 3, [0.1, 0.2, 0.1], [0.1, 0.05, 0.1]]


def test_a_client_that_may_raise_the_alarm_again_compares_with_the_score_before() -> None:
    """FedDrift-C drops one of two new models; with redetect its client is as if it had not been scored."""
    worst = {"loss": make_loss_table({0: [0.1, 0.5, 0.5]})}
    method = FedDriftC(delta=0.1, redetect=True, test="two-sample")
    states = run_algorithm(method, [NO_DRIFT, NO_DRIFT, worst, worst])
    assert states[2].drifted.sum() == 2 and states[3].drifted.sum() == 1  # type: ignore[union-attr]
    assert np.isnan(states[3].observed[2]).sum() == 1


def test_only_a_test_that_is_not_the_default_is_recorded() -> None:
    assert "test" not in algorithms.get_settings(FedDrift())
    assert algorithms.get_settings(FedDrift(test="proportional"))["test"] == "proportional"


def test_the_command_line_takes_it_and_the_record_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ("run", "--stream", "sine-2", "--algorithm", "FedDrift", "--out", str(tmp_path), *QUICK_OPTIONS)
    assert run_feddrift(capsys, *base, "--set", "test=two-sample:confidence=0.9")[0] == 0
    (run,) = record.read_all(tmp_path)
    assert run.header["settings"]["test"] == "two-sample:confidence=0.9"
    code, _, err = run_feddrift(capsys, *base, "--set", "test=two-sided")
    assert code == 2 and "unknown test 'two-sided', did you mean 'two-sample'?" in err.replace("\n", " ")


def every(seen: Evidence) -> Any:
    """A drift test of one's own: nobody is trusted after time 1."""
    return np.full(len(seen.newest), len(seen.observed) > 2)


def test_your_own_test() -> None:
    states = run_algorithm(FedDriftEager(test="tests.unit.algorithms.test_drift_tests:every"), [NO_DRIFT] * 3)
    assert [s.drifted.all() for s in states] == [False, False, True]  # type: ignore[union-attr]
    assert [e.kind for e in states[2].events] == ["created"]
