"""One model for everybody: FedAvg that remembers all, a window, or less and less of the past."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from feddrift.memory import ALL, Memory
from feddrift.types import Federation, State


@dataclass(frozen=True)
class Single:
    """FedAvg over the data its memory keeps; the model itself is carried over (section 2.1)."""

    memory: Memory = ALL

    def init(self, fed: Federation) -> State:
        return State(fed.fresh(), w=np.zeros((0, fed.n_clients, 1)), votes=np.ones((fed.n_clients, 1)))

    def step(self, state: State, fed: Federation) -> State:
        w = np.repeat(self.memory(fed.tau)[:, None, None], fed.n_clients, axis=1)
        return replace(state, models=fed.train(state.models, w), w=w)
