"""One model for all clients: FedAvg on all data, on a window, or with less weight for older data."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from feddrift.memory import ALL, Memory
from feddrift.types import Federation, State


@dataclass(frozen=True)
class Single:
    """FedAvg on the data that its memory keeps. Training continues from the last model (section 2.1)."""

    memory: Memory = ALL

    def init(self, fed: Federation) -> State:
        return State(fed.fresh(), w=np.zeros((0, fed.n_clients, 1)), votes=np.ones((fed.n_clients, 1)))

    def step(self, state: State, fed: Federation) -> State:
        w = np.repeat(self.memory(fed.tau)[:, None, None], fed.n_clients, axis=1)
        return replace(state, models=fed.train(state.models, w), w=w)
