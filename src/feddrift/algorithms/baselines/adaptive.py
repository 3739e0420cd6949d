"""Adaptive-FedAvg of Canonaco, Bergamasco, Mongelluzzo and Roveri, IJCNN 2021.

One model is trained on the newest data by plain SGD. The server tunes its learning rate by how much the global
parameters vary. With exponential averages, beta = 0.5, at the n-th observation theta_n:

    mu_n  = beta mu_{n-1} + (1 - beta) theta_n                       mean,      corrected: mu / (1 - beta^n)
    s_n   = beta s_{n-1} + (1 - beta) mean((theta_n - mu^_{n-1})^2)  variance,  corrected likewise
    gamma = average of the ratios s^_n / s^_{n-1},                   eta = min(eta_0, eta_0 gamma^_n / n)

As in the FedDrift paper the rate changes once per time step: it is computed four rounds before the end of a step and
used from then on.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from feddrift.algorithms.options import option
from feddrift.errors import ConfigError
from feddrift.memory import window
from feddrift.trees import tree_leaves
from feddrift.types import Federation, Floats, Models, State

BETA = 0.5  # decay of the exponential averages
ROUNDS_AT_NEW_RATE = 4  # rounds of a time step that already use the new rate


@dataclass(frozen=True, repr=False)
class AdaptiveState(State):
    """State of Adaptive-FedAvg after a time step: the exponential averages, not corrected, and the learning rate."""

    n: int = 0  # number of observations
    mean: Floats = field(default_factory=lambda: np.zeros(()))
    variance: float = 0.0
    ratio: float = 0.0
    rate: float = 0.0

    def update_rate(self, theta: Floats, start: float) -> AdaptiveState:
        """Return the averages after one more observation of the global parameters, and the new learning rate.

        Args:
            theta: The parameters, flattened.
            start: The initial learning rate.
        """
        n = self.n + 1
        old_correction = 1 - BETA**self.n if self.n else 1.0
        old_variance = self.variance / old_correction
        variance = BETA * self.variance + (1 - BETA) * float(np.mean((theta - self.mean / old_correction) ** 2))
        new_variance = variance / (1 - BETA**n)
        ratio = BETA * self.ratio + (1 - BETA) * (new_variance / old_variance if old_variance else 1.0)
        return replace(
            self,
            n=n,
            mean=BETA * self.mean + (1 - BETA) * theta,
            variance=variance,
            ratio=ratio,
            rate=min(start, start * ratio / (1 - BETA**n) / n),
        )


@dataclass(frozen=True)
class AdaptiveFedAvg:
    """Adaptive-FedAvg: FedAvg with SGD on the newest time step, whose learning rate the server tunes."""

    lr: float = option(0.01, "the initial learning rate of SGD, and its upper bound")
    needs_consent = ("sgd",)

    def __post_init__(self) -> None:
        if not 0 < self.lr <= 1e6:
            raise ConfigError(f"AdaptiveFedAvg.lr must be above 0 and at most 1e6, got {self.lr}")

    def init(self, fed: Federation) -> AdaptiveState:
        votes = np.ones((fed.n_clients, 1))
        return AdaptiveState(fed.fresh(), np.zeros((0, *votes.shape)), votes, rate=self.lr)

    def step(self, state: State, fed: Federation) -> AdaptiveState:
        assert isinstance(state, AdaptiveState)
        w = np.repeat(window(1)(fed.tau)[:, None, None], fed.n_clients, axis=1)
        sgd = replace(fed.local, optimizer="sgd", weight_decay=0.0)
        n_last = min(ROUNDS_AT_NEW_RATE, fed.local.rounds - 1)
        models = fed.train(state.models, w, rounds=fed.local.rounds - n_last, local=replace(sgd, lr=state.rate))
        state = state.update_rate(flatten_parameters(models), self.lr)
        models = fed.train(models, w, rounds=n_last, local=replace(sgd, lr=state.rate))
        return replace(state, models=models, w=w)


def flatten_parameters(models: Models) -> Floats:
    """Return all parameters of a single model as one vector."""
    return np.concatenate([np.asarray(leaf[0], dtype=np.float64).reshape(-1) for leaf in tree_leaves(models.params)])
