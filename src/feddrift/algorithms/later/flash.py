"""Flash of Panchal, Choudhary, Mitra, Mukherjee, Sarkhel, Mitra and Guan, ICML 2023.

One model for everybody. Clients train with SGD and momentum, and stop a round once their held-out loss falls by little
(`Local.patience`). The server's step is Adam's with a correction for drift, element by element. With the mean change
Delta of a round, weighed by data:

    m <- b1 m + (1 - b1) Delta,   v' = v,   v <- b2 v + (1 - b2) Delta^2
    b3 = |v'| / (|Delta^2 - v| + |v'|),   d <- b3 d + (1 - b3) (Delta^2 - v)
    theta <- theta + eta m / max(sqrt(v) - d + tau, tau),   at first m = d = 0, v = tau^2

Where squared changes grow, d does, and the step with it. The publication has no lower bound of the denominator.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from feddrift.algorithms.options import option
from feddrift.averaging import averaged
from feddrift.errors import ConfigError
from feddrift.memory import Memory, window
from feddrift.trees import leaves, refill
from feddrift.types import Federation, Floats, Models, State

B1, B2 = 0.9, 0.99
HOLD_OUT, MOMENTUM, L2 = 0.2, 0.9, 1e-5  # of clients


@dataclass(frozen=True, repr=False)
class FlashState(State):
    """What the server's step remembers, element by element of all parameters."""

    m: Floats = field(default_factory=lambda: np.zeros(0))
    v: Floats = field(default_factory=lambda: np.zeros(0))
    d: Floats = field(default_factory=lambda: np.zeros(0))

    def moved(self, change: Floats, eta: float, tau: float) -> tuple[Floats, FlashState]:
        """The step of the parameters after this mean change, and what is remembered of it."""
        square = change**2
        m = B1 * self.m + (1 - B1) * change
        v = B2 * self.v + (1 - B2) * square
        b3 = np.abs(self.v) / (np.abs(square - v) + np.abs(self.v))
        d = b3 * self.d + (1 - b3) * (square - v)
        return eta * m / np.maximum(np.sqrt(v) - d + tau, tau), replace(self, m=m, v=v, d=d)


@dataclass(frozen=True)
class Flash:
    """One model whose server steps by how the clients' changes vary, and whose clients stop early."""

    eta: float = option(0.01, "the step size of the server")
    tau: float = option(1e-3, "the least denominator of the server's step")
    patience: float = option(0.004, "a client stops at its e-th look if its held-out loss falls by less than this / e")
    lr: float = option(0.01, "the learning rate of the clients' SGD")
    memory: Memory = window(1)

    def __post_init__(self) -> None:
        for name in ("eta", "tau", "lr"):
            if not 0 < getattr(self, name) <= 1e6:
                raise ConfigError(f"Flash.{name} must be above 0 and at most 1e6, got {getattr(self, name)}")
        if not 0 <= self.patience <= 1e6:
            raise ConfigError(f"Flash.patience must be at least 0 and at most 1e6, got {self.patience}")

    def init(self, fed: Federation) -> FlashState:
        models, votes = fed.fresh(), np.ones((fed.n_clients, 1))
        zero = np.zeros(len(_flat(models)))
        v = np.full_like(zero, self.tau**2)
        return FlashState(models, np.zeros((0, *votes.shape)), votes, m=zero, v=v, d=zero)

    def step(self, state: State, fed: Federation) -> FlashState:
        assert isinstance(state, FlashState)
        w = np.repeat(self.memory(fed.tau)[:, None, None], fed.n_clients, axis=1)
        local = replace(
            fed.local, optimizer="sgd", momentum=MOMENTUM, lr=self.lr, weight_decay=L2, hold_out=HOLD_OUT,
            patience=self.patience,
        )  # fmt: skip
        models = state.models
        for _ in range(fed.local.rounds):
            updates = fed.local_updates(models, w, local)
            if len(updates.client):
                now = _flat(models)
                move, state = state.moved(_flat(averaged(models, updates, fed.local.average)) - now, self.eta, self.tau)
                models = _filled(models, now + move)
        return replace(state, models=models, w=w, votes=np.ones((fed.n_clients, 1)))


def _flat(models: Models) -> Floats:
    """All parameters of a single model in one row."""
    return np.concatenate([np.asarray(leaf[0], dtype=np.float64).reshape(-1) for leaf in leaves(models.params)])


def _filled(models: Models, flat: Floats) -> Models:
    """The same model with these parameters."""
    arrays = leaves(models.params)
    parts = np.split(flat, np.cumsum([leaf.size for leaf in arrays])[:-1])
    new = [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in zip(parts, arrays, strict=True)]
    return replace(models, params=refill(models.params, iter(new)))
