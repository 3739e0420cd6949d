"""Data from your own function: three shops, one of which changes.

On the command line: feddrift run --stream own_stream:shops --algorithm FedDrift --rounds 10
"""

from __future__ import annotations

from typing import Any

import numpy as np

import feddrift as fd


def shops() -> fd.Stream:
    """Return six time steps, in which the last shop drifts at time 3; the same data in every call."""
    random = np.random.default_rng(0)

    def make_cell(swapped: bool) -> tuple[Any, Any]:
        """Return 200 customers with 5 features; whether they buy depends on two features, and on `swapped`."""
        x = random.normal(size=(200, 5))
        return x, (x[:, 0] + x[:, 1] > 0) ^ swapped

    cells = [
        [make_cell(False), make_cell(False), make_cell(t >= 3)] for t in range(6)
    ]  # cells[t][c]; None would mean no data
    concepts = [[0, 0, int(t >= 3)] for t in range(6)]  # leave it out if it is unknown
    return fd.Stream.from_arrays(cells, name="shops", clients=["north", "south", "east"], concepts=concepts)


if __name__ == "__main__":
    stream = shops()
    for step in fd.run(stream, fd.algorithm("FedDrift", delta=0.1), local=fd.Local(rounds=10)):
        events = [f"{e.kind} model {e.model}" for e in step.events]
        print(f"time {step.tau}: accuracy {np.round(step.accuracy, 2)}, models in use {step.model}", *events)
