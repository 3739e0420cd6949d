"""Your own net: any (init, apply) pair that JAX can trace, here a flax module (pip install flax).

On the command line: feddrift run --stream sea-4 --algorithm FedDrift-Trunk --net own_net:deep --rounds 10
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import numpy as np

import feddrift as fd
from feddrift.rng import Words


class Deep(nn.Module):
    """Any flax module; feddrift uses two functions of it."""

    classes: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.tanh(nn.Dense(16)(x))
        x = nn.tanh(nn.Dense(16)(x))
        return nn.Dense(self.classes)(x)


def deep(stream: fd.Stream) -> fd.Net:
    """Return the net for a stream; FedDrift-Trunk may share its first two layers between concepts."""
    module = Deep(stream.n_classes)

    def init(key: Words) -> Any:
        return module.init(jax.random.wrap_key_data(jax.numpy.stack(key)), stream.x[:1])

    return fd.Net(init, module.apply, trunk=("params/Dense_0", "params/Dense_1"))


if __name__ == "__main__":
    stream = fd.stream("sine-2")
    algorithm = fd.algorithm("FedDrift", stream)
    for step in fd.run(stream, algorithm, net=deep(stream), local=fd.Local(rounds=5)):
        events = [f"{e.kind} model {e.model}" for e in step.events]
        print(f"time {step.tau}: accuracy {np.mean(step.accuracy):.2f}", *events)
