"""Short runs with all their decisions: used models, alarms and merges of every time step."""

from __future__ import annotations

import numpy as np
import pytest

import feddrift as fd

# sine-2 with 10 rounds per time step. The labels swap, so no decision hangs by a hair.
MODELS = {
    1: """0 0 0 0 0 0 0 0 0 0
          0 0 0 0 0 0 0 0 0 0
          0 0 0 0 0 0 0 0 0 0
          0 1 0 0 0 0 0 2 0 0
          0 1 3 4 0 5 0 1 0 0
          0 1 1 1 0 1 0 1 6 0
          1 1 1 1 0 1 1 1 1 0
          1 1 1 1 0 1 1 1 1 0
          1 1 1 1 1 1 1 1 1 1
          1 1 1 1 1 1 1 1 1 1""",  # a warm start on swapped labels stalls: some clients alarm again
    2: """0 0 0 0 0 0 0 0 0 0
          0 0 0 0 0 0 0 0 0 0
          0 0 0 0 0 0 0 0 0 0
          0 1 0 0 0 0 0 2 0 0
          0 1 1 1 0 1 0 1 0 0
          0 1 1 1 0 1 0 1 1 0
          1 1 1 1 0 1 1 1 1 0
          1 1 1 1 0 1 1 1 1 0
          1 1 1 1 1 1 1 1 1 1
          1 1 1 1 1 1 1 1 1 1""",
}
ALARMS = {1: [(3, 1), (3, 7), (4, 2), (4, 3), (4, 5), (5, 8)], 2: [(3, 1), (3, 7)]}
MERGED = {1: [(4, 2, 1), (5, 3, 1), (5, 4, 3), (5, 5, 1), (6, 6, 1)], 2: [(4, 2, 1)]}


@pytest.mark.parametrize("seed", MODELS)
def test_feddrift_on_sine_2(seed: int) -> None:
    stream = fd.stream("sine-2")
    steps = list(fd.run(stream, fd.algorithm("FedDrift", stream), local=fd.Local(rounds=10), seed=seed))
    expected = [[int(i) for i in row.split()] for row in MODELS[seed].splitlines()]
    assert [s.model.tolist() for s in steps] == expected
    assert [(s.tau, int(c)) for s in steps for c in np.flatnonzero(s.drifted)] == ALARMS[seed]
    merged = [(s.tau, e.model, e.cause["into"]) for s in steps for e in s.events if e.kind == "merged"]
    assert sorted(merged) == MERGED[seed]
    assert [(s.tau, e.model) for s in steps for e in s.events if e.kind == "retired"] == [(8, 0)]
