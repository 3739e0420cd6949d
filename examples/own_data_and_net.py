"""Your own arrays and your own net: three shops, one of which changes, and a flax module (pip install flax)."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import numpy as np

import feddrift as fd
from feddrift.rng import Words

draw = np.random.default_rng(0)


def batch(swapped: bool) -> tuple[Any, Any]:
    """200 customers with 5 features; whether they buy depends on two of them, one way or the other."""
    x = draw.normal(size=(200, 5))
    return x, (x[:, 0] + x[:, 1] > 0) ^ swapped


# cells[t][c]: six time steps, three shops; the last shop drifts at time 3; None would mean no data.
cells = [[batch(False), batch(False), batch(t >= 3)] for t in range(6)]
stream = fd.Stream.from_arrays(cells, name="shops", clients=["north", "south", "east"])


class Net(nn.Module):
    """Any module will do: feddrift sees two functions."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(2)(nn.tanh(nn.Dense(16)(x)))


def init(key: Words) -> Any:
    return Net().init(jax.random.wrap_key_data(jax.numpy.stack(key)), stream.x[:1])


net = fd.Net(init, Net().apply, trunk=("params/Dense_0",))  # what FedDrift-Trunk may share between concepts

if __name__ == "__main__":
    for step in fd.run(stream, fd.algorithm("FedDrift-Trunk", delta=0.1), net=net, local=fd.Local(rounds=10)):
        events = [f"{e.kind} model {e.model}" for e in step.events]
        print(f"time {step.tau}: accuracy {np.round(step.accuracy, 2)}, models in use {step.model}", *events)
