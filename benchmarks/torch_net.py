"""A PyTorch net beside the same net in JAX, from the same start: `python benchmarks/torch_net.py [--rounds 20]`.

It needs the extra torch, and MNIST in $FEDDRIFT_DATA. CPU seconds include compiling.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import jax
import torch
from jax import lax
from torch import nn

import feddrift as fd
from feddrift.nets import named_net
from feddrift.nets.torch import call_with_seed


class CNN(nn.Module):
    trunk = ("conv1", "conv2")

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 5, stride=2)
        self.conv2 = nn.Conv2d(4, 8, 3, stride=2)
        self.out = nn.Linear(8 * 5 * 5, 10)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.conv1(x.reshape(-1, 1, 28, 28)))
        return self.out(torch.relu(self.conv2(x)).flatten(1))


def init(key: Any) -> Any:
    state = call_with_seed(CNN, int(key[0]) << 32 | int(key[1])).state_dict()
    return {name: values.detach().numpy().copy() for name, values in state.items()}


def apply(params: Any, x: Any) -> Any:
    x = x.reshape(-1, 1, 28, 28)
    for name in ("conv1", "conv2"):
        kernel = params[f"{name}.weight"]
        bias = params[f"{name}.bias"]
        x = lax.conv_general_dilated(x, kernel, (2, 2), "VALID", dimension_numbers=("NCHW", "OIHW", "NCHW"))
        x = jax.nn.relu(x + bias[:, None, None])
    return x.reshape(len(x), -1) @ params["out.weight"].T + params["out.bias"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50)
    asked = parser.parse_args()
    stream = fd.stream("mnist-2")
    local = replace(stream.local, rounds=asked.rounds, steps=asked.steps)
    for name, net in (("PyTorch", named_net("torch_net:CNN", stream)), ("JAX", fd.Net(init, apply))):
        begun = time.process_time()
        steps = list(fd.run(stream, "FedDrift", net=net, local=local))
        accuracy = 100 * sum(float(step.accuracy.mean()) for step in steps) / len(steps)
        seconds = time.process_time() - begun
        used = steps[-1].model.tolist()
        print(f"{name:8} {accuracy:6.2f} %  {seconds:6.1f} CPU s  models at the end {used}", flush=True)


if __name__ == "__main__":
    main()
