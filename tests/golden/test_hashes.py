"""Moving code moves no bit: the records and models of many short runs are those of the list."""

from __future__ import annotations

import pytest

from tests.golden import hashes


def same_machine() -> bool:
    """Whether bits can be compared here."""
    return bool(hashes.machine() == hashes.expected()["machine"])


def test_the_list_has_every_case() -> None:
    assert list(hashes.expected()["cases"]) == hashes.CASES


def in_the_long_checks(case: str) -> bool:
    """XLA compiles for long, and Flower's grid is slow: a few of them show what is wrong with all."""
    kind, _, name = case.partition("/")
    quick = {
        "compiled": {"FedDrift"},
        "flower": {"FedDrift", "FedDrift-Trunk", "FedDrift-Auto", "Local", "FedRep", "FLUX"},
    }
    return kind in quick and name not in quick[kind]


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow) if in_the_long_checks(c) else c for c in hashes.CASES]
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what is killed closes no files
def test_nothing_has_moved(case: str) -> None:
    if not same_machine():
        pytest.skip("the list was made with another processor or other libraries: python -m tests.golden.hashes")
    if case.startswith("flower"):
        pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    assert hashes.outcome(case) == hashes.expected()["cases"][case]
