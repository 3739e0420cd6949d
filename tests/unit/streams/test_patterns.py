"""Drift patterns: shipped, random and from files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddrift.errors import ConfigError, DataError
from feddrift.streams.patterns import SHIPPED, build_pattern

# Of the published files: drift cells per training step, and training cells of each concept.
DRIFTS = {
    "Y": ([0, 0, 2, 3, 1, 2, 0, 2, 0, 0], [51, 49, 0, 0]),
    "F": ([0, 6, 1, 5, 2, 4, 4, 4, 3, 0], [32, 19, 24, 25]),
    "R0": ([0, 8, 0, 8, 0, 8, 0, 8, 0, 0], [38, 22, 24, 16]),
    "R1": ([0, 9, 0, 8, 0, 6, 0, 5, 0, 0], [38, 26, 22, 14]),
    "R2": ([0, 9, 0, 8, 0, 8, 0, 7, 0, 0], [46, 16, 22, 16]),
    "R3": ([0, 7, 0, 10, 0, 9, 0, 6, 0, 0], [44, 20, 22, 14]),
    "R4": ([0, 6, 0, 10, 0, 6, 0, 9, 0, 0], [50, 6, 16, 28]),
}
# The drifting cells as (time, client), both from 1.
CELLS = {
    "Y": [(3, 2), (3, 8), (4, 3), (4, 4), (4, 6), (5, 9), (6, 1), (6, 7), (8, 5), (8, 10)],
    "F": [
        (2, 1), (2, 2), (2, 3), (2, 4), (2, 5), (2, 6), (3, 9), (4, 1), (4, 2), (4, 4), (4, 7), (4, 8), (5, 3), (5, 6),
        (6, 2), (6, 5), (6, 7), (6, 10), (7, 1), (7, 4), (7, 8), (7, 9), (8, 2), (8, 3), (8, 5), (8, 6), (9, 1), (9, 7),
        (9, 9),
    ],
}  # fmt: skip


def test_every_shipped_pattern_is_described() -> None:
    assert set(SHIPPED) == set(DRIFTS)


@pytest.mark.parametrize("name", DRIFTS)
def test_shipped_pattern_has_the_published_drifts(name: str) -> None:
    concepts = build_pattern(name)
    assert concepts.shape == (11, 10)
    assert concepts.dtype == np.int64
    drifts, cells = DRIFTS[name]
    assert (concepts[:-1] != concepts[1:]).sum(axis=1).tolist() == drifts
    assert np.bincount(concepts[:-1].reshape(-1), minlength=4).tolist() == cells


@pytest.mark.parametrize("name", CELLS)
def test_shipped_pattern_drifts_in_the_published_cells(name: str) -> None:
    concepts = build_pattern(name)
    assert [(t + 1, c + 1) for t, c in np.argwhere(concepts[:-1] != concepts[1:]).tolist()] == CELLS[name]


def test_file_with_spaces_commas_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("# two clients\n0 0\n\n0, 1  # a drift\n2,1\n")
    assert build_pattern(str(file)).tolist() == [[0, 0], [0, 1], [2, 1]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 0\n0 1 1\n", "mine.txt, line 2: expected 2 clients as in the first row, got 3"),
        ("0 0\n# note\n0 A\n", "mine.txt, line 3: concepts are whole numbers from 0, got 'A'"),
        ("0 -1\n0 0\n", "mine.txt, line 1: concepts are whole numbers from 0, got '-1'"),
        ("0 1.5\n0 0\n", "mine.txt, line 1: concepts are whole numbers from 0, got '1.5'"),
        ("0 99999999999999999999\n0 0\n", "mine.txt, line 1: concepts are whole numbers"),
        ("0 0\n", "mine.txt: needs at least 2 rows, .*got 1"),
        ("# nothing\n", "mine.txt: needs at least 2 rows, .*got 0"),
    ],
)
def test_file_errors_name_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(text)
    with pytest.raises(DataError, match=message):
        build_pattern(str(file))


def test_file_that_is_not_text(tmp_path: Path) -> None:
    file = tmp_path / "image.png"
    file.write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(DataError, match=r"image\.png cannot be read as text"):
        build_pattern(str(file))


@given(
    every=st.integers(1, 12),
    concepts=st.integers(1, 6),
    clients=st.integers(1, 8),
    steps=st.integers(1, 12),
    seed=st.integers(0, 2**40),
)
def test_random_pattern_keeps_its_rules(every: int, concepts: int, clients: int, steps: int, seed: int) -> None:
    options = f"random:every={every},concepts={concepts},clients={clients},steps={steps}"
    drawn = build_pattern(options, seed)
    assert drawn.shape == (steps + 1, clients)
    assert drawn.dtype == np.int64
    assert not drawn[: min(every, steps)].any()
    assert drawn.min() >= 0
    assert drawn.max() < concepts
    assert (drawn[-1] == drawn[-2]).all()
    for t in range(1, steps):
        assert t % every == 0 or (drawn[t] == drawn[t - 1]).all()
    np.testing.assert_array_equal(drawn, build_pattern(f"{options},seed={seed}", seed + 1))


def test_random_pattern_draws_every_concept_equally_often() -> None:
    drawn = build_pattern("random:every=1,concepts=4,clients=100,steps=101")[1:-1]
    share = np.bincount(drawn.reshape(-1)) / drawn.size
    assert np.abs(share - 0.25).max() < 0.02


def test_random_pattern_differs_between_seeds_clients_and_times() -> None:
    drawn = build_pattern("random:every=2,concepts=4", seed=1)
    assert (drawn != build_pattern("random:every=2,concepts=4", seed=2)).any()
    assert len(np.unique(drawn, axis=1).T) > 5
    assert len(np.unique(drawn, axis=0)) == 5


def test_random_pattern_of_more_clients_extends_that_of_fewer() -> None:
    few = build_pattern("random:every=2,concepts=4,clients=3")
    np.testing.assert_array_equal(few, build_pattern("random:every=2,concepts=4,clients=9")[:, :3])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("random", "every is missing"),
        ("random:every=2", "concepts is missing"),
        ("random:evry=2,concepts=4", "unknown option of a random pattern 'evry', did you mean 'every'"),
        ("random:every=two,concepts=4", "every must be a whole number from 1, got 'two'"),
        ("random:every=2.5,concepts=4", "every must be a whole number from 1, got '2.5'"),
        ("random:every=0,concepts=4", "every must be a whole number from 1, got '0'"),
        ("random:every=2,concepts=-1", "concepts must be a whole number from 1, got '-1'"),
        ("random:every=2,concepts=4,clients=0", "clients must be a whole number from 1, got '0'"),
        ("random:every=2,concepts=4,steps", "steps must be a whole number from 1, got ''"),
        ("random:every=2,concepts=4,every=3", "every is given twice"),
        ("random:every=2,concepts=" + "9" * 5000, "concepts must be a whole number from 1, got '9"),
        ("random:every=2,concepts=" + "9" * 25, "concepts must be a whole number from 1, got '9"),
        ("random:every=2,concepts=2,clients=1001,steps=1000", "at most 1000000, got 1001 clients in 1000 steps"),
        ("r3", "unknown pattern 'r3', did you mean 'R3'"),
        ("y", "unknown pattern 'y', did you mean 'Y'"),
        ("Z", "one of: Y, F, R0, R1, R2, R3, R4, the path of a file, random:every=2,concepts=4"),
        ("", "unknown pattern ''"),
        ("\0", "unknown pattern"),
    ],
)
def test_wrong_specs(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_pattern(spec)
