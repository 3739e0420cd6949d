"""The replay of a recorded participation in the simulator, which the soak tests use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from feddrift import algorithms
from feddrift.data import Cell
from feddrift.deploy.server.loop import federate
from feddrift.deploy.settings import Settings
from feddrift.engines.conditions.conditions import Conditions
from feddrift.engines.flower.client.client import Client
from feddrift.engines.flower.local_grid import LocalGrid
from feddrift.engines.flower.server.connection import Roster
from feddrift.engines.flower.server.federation import Flower
from feddrift.runs.record import read_latest
from feddrift.simulation import Step
from feddrift.trees import tree_leaves
from tests.soak.replay import assert_all_batches_used, assert_same_decisions, read_participation, replay
from tests.support.flower import SHORT_WAITING

SETTINGS = Settings(
    experiment="replay", clients=("a", "b", "c"), features=(2,), classes=(0, 1), rounds=2, steps=20, lr=0.05,
    settings={"delta": 0.2}, time_steps=5, defend=True,
)  # fmt: skip


def batch(name: str, n: int) -> Cell:
    x = np.random.default_rng([ord(name), n]).random((60 + n, 2)).astype(np.float32)
    return x, ((x[:, 0] > 0.5) != (name == "c" and n >= 1)).astype(np.int32)


def test_a_deployment_with_faults_decides_as_the_simulator_with_its_participation(tmp_path: Path) -> None:
    """One client has another rhythm and goes away for a time step, one misses an evaluation and a round."""
    now = [0]

    def load(name: str) -> Any:
        return lambda n: batch(name, n) if n * (2 if name == "c" else 1) <= now[0] else None

    net = SETTINGS.create_net(tmp_path)
    grid = LocalGrid({name: Client(name, tmp_path / name, load(name), net) for name in SETTINGS.clients})
    roster = Roster("replay", SETTINGS.clients, {name.encode(): name for name in SETTINGS.clients}, (2,), 2)
    engine = Flower(grid, roster, net, SETTINGS.local, 0, SHORT_WAITING, Conditions(defend=True), SETTINGS.time_steps)
    greet = engine.send_hello
    b: Any = grid._apps[101]

    def hello(tau: int, *words: Any, **more: Any) -> None:
        now[0], missing, rounds = tau, lambda _: None, [0]
        grid.offline = {"c"} if tau == 2 else set()

        def late(message: Any) -> Any:
            rounds[0] += 1
            return b(message, None) if rounds[0] == 1 else None

        grid.faults = {("b", "evaluate"): missing} if tau == 1 else {("b", "train"): late} if tau == 3 else {}
        greet(tau, *words, **more)

    engine.send_hello = hello  # type: ignore[method-assign]
    algorithm = algorithms.algorithm(SETTINGS.algorithm, **SETTINGS.settings)
    there = list(federate(engine, algorithm, tmp_path / "state"))
    record = read_latest(tmp_path / "state" / "replay.jsonl")
    assert record is not None
    took_part = read_participation(record)
    assert [present for present, _ in took_part[:-1]] == [{0, 1, 2}, {0, 1, 2}, {0, 1}, {0, 1, 2}, {0, 1, 2}]
    assert took_part[1][1][-1] == {1} and took_part[3][1] == {-1: set(), 0: set(), 1: {1}}
    assert record.rows.drift.any() and (record.rows.received == 0).any()
    delivered = {"a": [60, 61, 62, 63, 64, 65], "b": [60, 61, 62, 63, 64, 65], "c": [60, 61, 62]}
    assert_all_batches_used(record, there[-1].state, delivered)
    for wrong in ([60, 61], [60, 62, 61], [60, 61, 62, 63]):
        with pytest.raises(AssertionError, match="c had"):
            assert_all_batches_used(record, there[-1].state, delivered | {"c": wrong})
    here = list(replay(record, SETTINGS, net, batch))
    for step in here:
        assert_same_decisions(record, step)
    assert len(here) == len(there) == 5
    answered = tuple(line | {"trouble": [None] * len(line["c"])} for line in record.exchanges)
    other = list(replay(replace(record, exchanges=answered), SETTINGS, net, batch))  # as if all had answered
    assert [is_close(a, b) for a, b in zip(here, there, strict=True)] == [True] * 5
    assert not all(is_close(a, b) for a, b in zip(here, other, strict=True))


def is_close(a: Step, b: Step) -> bool:
    pairs = zip(tree_leaves(a.state.models.params), tree_leaves(b.state.models.params), strict=True)
    return all(x.shape == y.shape and np.allclose(x, y, atol=1e-4) for x, y in pairs)
