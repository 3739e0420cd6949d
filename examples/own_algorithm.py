"""Your own algorithm in 20 lines: FedAvg that starts again if the mean error of all clients is high.

On the command line: feddrift run --stream sine-2 --algorithm own_algorithm:Restart --set limit=0.2
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

import feddrift as fd
from feddrift.types import Federation


@dataclass(frozen=True)
class Restart:
    """One model of the newest data, replaced by an untrained one if its mean error on them is above `limit`."""

    limit: float = 0.1  # a plain field is a setting

    def init(self, fed: Federation) -> fd.State:
        return fd.State(fed.fresh(), w=np.zeros((0, fed.n_clients, 1)), votes=np.ones((fed.n_clients, 1)))

    def step(self, state: fd.State, fed: Federation) -> fd.State:
        error = fed.evaluate(state.models)
        known = error[~np.isnan(error)]  # of reachable clients with new data
        models = fed.fresh() if fed.tau and known.size and known.mean() > self.limit else state.models
        w = np.zeros((fed.tau + 1, fed.n_clients, 1))
        w[-1] = 1
        return replace(state, models=fed.train(models, w), w=w)


if __name__ == "__main__":
    stream = fd.stream("sine-2")
    for name, algorithm in {"Restart": Restart(), "FedDrift": fd.algorithm("FedDrift", stream)}.items():
        steps = fd.run(stream, algorithm, local=fd.Local(rounds=10))
        print(name, f"{100 * np.mean([step.accuracy for step in steps]):.2f} %")
