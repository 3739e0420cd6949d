"""Moving code moves no bit: the records and models of many short runs are those of the list."""

from __future__ import annotations

import pytest

from tests.golden import hashes


def same_machine() -> bool:
    """Whether bits can be compared here."""
    return bool(hashes.machine() == hashes.expected()["machine"])


def test_the_list_has_every_case() -> None:
    assert list(hashes.expected()["cases"]) == hashes.CASES


@pytest.mark.parametrize("case", hashes.CASES)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what is killed closes no files
def test_nothing_has_moved(case: str) -> None:
    if not same_machine():
        pytest.skip("the list was made with another processor or other libraries: python -m tests.golden.hashes")
    if case.startswith("flower"):
        pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    assert hashes.outcome(case) == hashes.expected()["cases"][case]
