"""Estimates of the cost of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

import feddrift as fd
from feddrift.engines import engine
from feddrift.nets import default_net
from feddrift.runs.estimate import estimate_cost
from feddrift.simulation import run_steps


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Oblivious", "Window", "Oracle", "Oracle-Trunk", "KUE", "AUE", "FedDrift", "IFCA"])
def test_the_estimated_work_equals_that_of_a_run(name: str) -> None:
    """Where clusters are found by learning, they are those of a stream on which nobody errs."""
    stream = fd.stream("sine-2", pattern="random:every=3,concepts=2,clients=5,steps=6,seed=1")
    local = replace(stream.local, rounds=6, steps=50)
    algorithm = fd.algorithm(name, stream)
    told = estimate_cost(stream, algorithm, engine="simulator", local=local)
    clients = engine("simulator")(stream, default_net(stream), local, 0)
    for _ in run_steps(clients, algorithm):
        pass
    assert told.local_steps == pytest.approx(clients.lane_rounds * local.steps, rel=0.25)
    assert told.local_steps == round(told.lanes * stream.n_steps * local.rounds * local.steps)
    assert told.seconds > 0 and told.bytes > 1e8


def test_without_the_truth_a_rehearsal_must_do() -> None:
    stream = replace(fd.stream("sine-2", pattern="random:every=2,concepts=2,clients=4,steps=4"), concepts=None)
    told = estimate_cost(
        stream, fd.algorithm("FedDrift", stream), engine="reference", local=replace(stream.local, rounds=1, steps=1)
    )
    assert told.lanes >= stream.n_clients


def test_a_long_rehearsal_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("feddrift.runs.estimate.REHEARSAL_SECONDS", 0.0)
    stream = fd.stream("sine-2")
    assert estimate_cost(stream, fd.algorithm("Oblivious"), engine="simulator", local=stream.local).lanes == 10
