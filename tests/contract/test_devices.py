"""Lanes distributed over several devices give the same numbers.

The test starts a process, since JAX counts devices only once.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import jax
from feddrift.engines.simulator.lanes import Devices
from feddrift.engines.simulator.simulator import Simulator
from feddrift.nets import default_net
from tests.support.engines import LOCAL, make_model_families, assert_same, draw_weights, make_uneven_stream

assert len(jax.devices()) == 4
stream = make_uneven_stream(n_clients=7)
results = []
for devices in (jax.devices()[:1], jax.devices()[1:], jax.devices()):
    engine = Simulator(stream, default_net(stream), LOCAL, 3)
    engine.native, engine.devices = False, Devices(tuple(devices))
    fed = engine.at(2)
    models = make_model_families(fed)
    w = draw_weights(2, stream, len(models))
    trained = fed.train(fed.train(models, w, rounds=1), w, rounds=2)
    updates = fed.local_updates(trained, w)
    results.append((trained.params, updates.params, fed.evaluate(trained), fed.cross_evaluate(trained, w, "loss")))
for other in results[1:]:
    assert_same(results[0], other, atol=1e-6)
"""


@pytest.mark.slow
def test_the_number_of_devices_changes_nothing() -> None:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | {"XLA_FLAGS": flags}, capture_output=True)
    assert run.returncode == 0, run.stderr.decode()[-2000:]
