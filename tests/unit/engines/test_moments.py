"""Storage of optimiser moments between calls, on the host or on the device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import feddrift as fd
from feddrift.engines.server.federation import TimeStep
from feddrift.engines.simulator import moments, simulator
from feddrift.engines.simulator.lanes import Devices
from feddrift.nets import default_net
from feddrift.types import Federation, Local


@pytest.mark.parametrize("large", [0, 1 << 40])
@pytest.mark.parametrize("room", [6, 1000])
def test_stored_moments_are_restored(monkeypatch: pytest.MonkeyPatch, large: int, room: int) -> None:
    monkeypatch.setattr(moments, "MIN_DEVICE_BYTES", large)
    shelf, known, draw = (
        moments.OptimizerStateStore(Devices(tuple(jax.local_devices()))),
        dict[Any, float](),
        np.random.default_rng(0),
    )
    on_device = 0
    for k in range(30):
        size = int(draw.integers(1, 6))
        names: list[Any] = [(int(c), 0) for c in draw.choice(12, size, replace=False)]
        names += [None] * int(draw.integers(0, 2))  # padding
        stacks_of, taken = shelf.get_moments(names, [np.zeros((1, 3), dtype=np.float32)], room)
        expected = [known.get(name, 0.0) for name in names]
        assert np.asarray(taken).tolist() == expected
        assert all(np.asarray(leaf)[:, 1].tolist() == expected for stacks in stacks_of.values() for leaf in stacks)
        values = np.arange(len(names), dtype=np.float32) + 100 * k + 1
        stack = {key: [jnp.asarray(np.repeat(values[:, None], 3, axis=1))] for key in stacks_of}
        shelf.store_moments(names, (stack, jnp.asarray(values)), room)
        known |= {name: float(value) for name, value in zip(names, values, strict=True) if name}
        on_device += all(isinstance(stack[1], jax.Array) for stack in shelf.stacks.values())
    assert (on_device > 20) == (large == 0 and room == 1000)  # a few calls leave nothing to rest


def test_lanes_that_sit_out_keep_their_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled program overwrites the moments that it is given."""
    monkeypatch.setattr(simulator.Simulator, "find_kernel", lambda *_: None)
    stream = fd.stream("sine-2", pattern="random:every=1,concepts=2,clients=8,steps=2")
    engine = simulator.Simulator(stream, default_net(stream), Local(rounds=1, steps=3), 0)
    together, apart = engine.at(0), engine.at(0)

    def train(fed: Federation, clients: list[int]) -> None:
        w = np.zeros((1, 8, 1))
        w[:, clients] = 1
        fed.train(fed.fresh(), w)

    def steps(fed: TimeStep) -> dict[int, float]:
        """How many local steps each client has taken."""
        names, (_, taken) = fed.progress()["moments"][1]
        return {c: float(np.asarray(taken)[row]) for (c, _), row in names}

    for clients in (list(range(8)), list(range(6)), [6, 7]):
        train(together, clients)
    assert steps(together) == dict.fromkeys(range(8), 6.0)
    train(apart, list(range(8)))
    assert steps(apart) == dict.fromkeys(range(8), 3.0)


@pytest.mark.slow
def test_where_moments_wait_moves_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = fd.stream("sine-2", pattern="random:every=1,concepts=2,clients=6,steps=3")
    local = Local(rounds=4, steps=3)
    found = []
    for large in (0, 1 << 40):
        monkeypatch.setattr(moments, "MIN_DEVICE_BYTES", large)
        monkeypatch.setattr(simulator.Simulator, "find_kernel", lambda *_: None)
        steps = list(fd.run(stream, fd.algorithm("IFCA", first="choose"), local=local))
        found.append([np.asarray(step.state.models.params["W1"]) for step in steps])
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
