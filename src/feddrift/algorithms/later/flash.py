"""Flash of Panchal, Choudhary, Mitra, Mukherjee, Sarkhel, Mitra and Guan, ICML 2023.

There is one model for all clients. They train it by SGD with momentum, and stop a round early if their held-out loss
falls by little (`Local.patience`). The server's step is that of Adam with a correction for drift, element by element.
With Delta, the mean change of the parameters in a round, weighted by data:

    m <- b1 m + (1 - b1) Delta,   v' = v,   v <- b2 v + (1 - b2) Delta^2
    b3 = |v'| / (|Delta^2 - v| + |v'|),   d <- b3 d + (1 - b3) (Delta^2 - v)
    theta <- theta + eta m / max(sqrt(v) - d + tau, tau),   initially m = d = 0, v = tau^2

If squared changes grow, so do d and the step. The publication has no lower bound of the denominator.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from feddrift.algorithms.baselines.adaptive import flatten_parameters
from feddrift.algorithms.options import option
from feddrift.averaging import average_updates
from feddrift.errors import ConfigError
from feddrift.memory import Memory, window
from feddrift.trees import fill_tree, tree_leaves
from feddrift.types import Federation, Floats, Models, State

MEAN_DECAY = 0.9  # b1
VARIANCE_DECAY = 0.99  # b2

# Settings of local training.
HOLD_OUT_SHARE = 0.2
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-5


@dataclass(frozen=True, repr=False)
class FlashState(State):
    """State of Flash after a time step, with the moving averages of the server's step, one number per parameter."""

    m: Floats = field(default_factory=lambda: np.zeros(0))
    v: Floats = field(default_factory=lambda: np.zeros(0))
    d: Floats = field(default_factory=lambda: np.zeros(0))

    def compute_step(self, change: Floats, eta: float, tau: float) -> tuple[Floats, FlashState]:
        """Return the server's step, and the state with the next moving averages.

        Args:
            change: The mean change of the parameters, Delta.
            eta: The step size.
            tau: The lower bound of the denominator.
        """
        square = change**2
        m = MEAN_DECAY * self.m + (1 - MEAN_DECAY) * change
        v = VARIANCE_DECAY * self.v + (1 - VARIANCE_DECAY) * square
        b3 = np.abs(self.v) / (np.abs(square - v) + np.abs(self.v))
        d = b3 * self.d + (1 - b3) * (square - v)
        return eta * m / np.maximum(np.sqrt(v) - d + tau, tau), replace(self, m=m, v=v, d=d)


@dataclass(frozen=True)
class Flash:
    """Flash: one model; the server takes larger steps when changes grow, and clients stop training early."""

    eta: float = option(0.01, "the step size of the server")
    tau: float = option(1e-3, "the lower bound of the denominator of the server's step")
    patience: float = option(0.004, "a client stops at its e-th check if its held-out loss falls by less than this / e")
    lr: float = option(0.01, "the learning rate of the clients' SGD")
    memory: Memory = window(1)
    needs_consent = ("sgd",)

    def __post_init__(self) -> None:
        for name in ("eta", "tau", "lr"):
            if not 0 < getattr(self, name) <= 1e6:
                raise ConfigError(f"Flash.{name} must be above 0 and at most 1e6, got {getattr(self, name)}")
        if not 0 <= self.patience <= 1e6:
            raise ConfigError(f"Flash.patience must be at least 0 and at most 1e6, got {self.patience}")

    def init(self, fed: Federation) -> FlashState:
        models = fed.fresh()
        votes = np.ones((fed.n_clients, 1))
        zeros = np.zeros(len(flatten_parameters(models)))
        v = np.full_like(zeros, self.tau**2)
        return FlashState(models, np.zeros((0, *votes.shape)), votes, m=zeros, v=v, d=zeros)

    def step(self, state: State, fed: Federation) -> FlashState:
        assert isinstance(state, FlashState)
        w = np.repeat(self.memory(fed.tau)[:, None, None], fed.n_clients, axis=1)
        local = replace(
            fed.local, optimizer="sgd", momentum=MOMENTUM, lr=self.lr, weight_decay=WEIGHT_DECAY,
            hold_out=HOLD_OUT_SHARE, patience=self.patience,
        )  # fmt: skip
        models = state.models
        for _ in range(fed.local.rounds):
            updates = fed.local_updates(models, w, local)
            if len(updates.client):
                old = flatten_parameters(models)
                average = flatten_parameters(average_updates(models, updates, fed.local.average))
                server_step, state = state.compute_step(average - old, self.eta, self.tau)
                models = _replace_parameters(models, old + server_step)
        return replace(state, models=models, w=w, votes=np.ones((fed.n_clients, 1)))


def _replace_parameters(models: Models, flat: Floats) -> Models:
    """Replace the parameters of a single model by those of a vector."""
    leaves = tree_leaves(models.params)
    parts = np.split(flat, np.cumsum([leaf.size for leaf in leaves])[:-1])
    new = [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
    return replace(models, params=fill_tree(models.params, iter(new)))
