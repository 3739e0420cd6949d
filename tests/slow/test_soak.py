"""Short versions of both soak tests: a few kills that change no bit, and each kind of fault once.

Together at most four minutes on two cores that do nothing else.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from tests.soak.faults import soak_b
from tests.soak.kills import soak_a

pytestmark = pytest.mark.slow


def test_a_federation_whose_processes_are_killed_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    # With this seed the server's side dies, and what runs apps at two clients: a client that is killed as a whole is
    # missed by the server after a minute.
    assert soak_a(tmp_path / "fed", kills=6, steps=2, seed=4).kills >= 6


def test_a_federation_with_faults_of_every_kind_decides_as_the_simulator(tmp_path: Path) -> None:
    soak_b(tmp_path / "fed", waits=20)
