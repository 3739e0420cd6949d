"""FedRC of Guo et al., ICML 2024, and FedEM of Marfoq et al., NeurIPS 2021, over time: every client mixes all models.

With CE[c, m, y] the cross-entropy of model m on the rows of class y at client c, N[c, y] their number, in every round

    gamma[c, m, y] ~ omega[c, m] exp(-CE[c, m, y]) / C[m, y],   summed to 1 over m;
    omega[c, m] = sum over y of N[c, y] gamma[c, m, y] / N[c];
    C[m, y] = the share of class y in the sums over c of N[c, y] gamma[c, m, y], at least 1e-8;

then each client trains each model, and models are averaged by omega[c, m] N[c]. Clients predict with the mixture omega
of the models' probabilities. FedEM is C = 1. The mixture of a time step begins with that of the one before.

Both publications have a gamma for each row; here rows of a class at a client share one (docs/algorithms.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from feddrift import numerics
from feddrift.algorithms.options import option
from feddrift.errors import ConfigError
from feddrift.memory import Memory, window
from feddrift.models import take
from feddrift.types import Event, Federation, Floats, State, Weights

LEAST = 1e-8  # of C, and of a share of omega: what has come to nothing may come back


@dataclass(frozen=True, repr=False)
class MixtureState(State):
    """`shares` is C, `mixture` is omega."""

    shares: Floats = field(default_factory=lambda: np.zeros((0, 0)))  # [m, y]
    # omega[m, c]; NaN: a newcomer's, which begins even
    mixture: Floats = field(default_factory=lambda: np.zeros((0, 0)), metadata={"newcomer": np.nan})


@dataclass(frozen=True)
class FedRC:
    """A given number of models, all trained by all clients, each by how well it explains their data."""

    n_models: int = option(3, "how many models are mixed")
    memory: Memory = window(1)
    by_class: bool = True  # False: FedEM

    def __post_init__(self) -> None:
        if self.n_models < 1:
            raise ConfigError(f"FedRC.n_models must be at least 1, got {self.n_models}")

    def init(self, fed: Federation) -> MixtureState:
        omega = np.full((fed.n_clients, self.n_models), 1 / self.n_models)
        shares = np.full((self.n_models, fed.n_classes), 1 / fed.n_classes)
        w = np.zeros((0, *omega.shape))
        models = fed.fresh(self.n_models, distinct=True)
        return MixtureState(models, w, omega, ballot="soft", shares=shares, mixture=omega.T)

    def step(self, state: State, fed: Federation) -> MixtureState:
        assert isinstance(state, MixtureState)
        models, shares = state.models, state.shares
        omega = np.where(np.isnan(state.mixture), 1 / self.n_models, state.mixture).T
        created = () if fed.tau else tuple(Event("created", i, {"reason": "given"}) for i in models.ids[1:])
        counts = fed.confusion(take(models, [0], [models.ids[0]])).sum(axis=(1, 3)).astype(np.float64)  # N[c, y]
        for _ in range(fed.local.rounds):
            gamma = responsibilities(omega, fed.evaluate(models, "loss", by="class"), shares)
            omega, by_model = mixtures(gamma, counts, omega, shares)
            shares = by_model if self.by_class else shares
            models = fed.train(models, self._weights(state.w, omega, fed.tau), rounds=1)
        w = self._weights(state.w, omega, fed.tau)
        return MixtureState(models, w, omega, "soft", created, shares=shares, mixture=omega.T)

    def _weights(self, before: Weights, omega: Floats, tau: int) -> Floats:
        """w[t, c, m]: the mixtures of all time steps, as far as they are remembered."""
        return np.concatenate([np.asarray(before), omega[None]]) * self.memory(tau)[:, None, None]


def responsibilities(omega: Floats, loss: Floats, shares: Floats) -> Floats:
    """gamma[c, m, y] from omega[c, m], losses [c, m, y] and C[m, y]; NaN where a client has no rows of a class.

    >>> gamma = responsibilities(np.array([[0.5, 0.5]]), np.array([[[0.0], [np.log(3)]]]), np.ones((2, 1)))
    >>> gamma.round(3).tolist()
    [[[0.75], [0.25]]]
    """
    log = numerics.log(np.maximum(omega, LEAST))[..., None] - loss - numerics.log(np.maximum(shares, LEAST))
    likely = numerics.exp(log - log.max(axis=1, keepdims=True))
    return np.asarray(likely / likely.sum(axis=1, keepdims=True))


def mixtures(gamma: Floats, counts: Floats, omega: Floats, shares: Floats) -> tuple[Floats, Floats]:
    """omega[c, m] and C[m, y] from gamma[c, m, y] of N[c, y] rows; clients without new data, or models without any,
    keep those that they have."""
    weighed = np.nan_to_num(gamma) * counts[:, None]  # [c, m, y]
    rows, mass = weighed.sum(axis=(1, 2)), weighed.sum(axis=(0, 2))
    new_omega = weighed.sum(axis=2) / np.maximum(rows, LEAST)[:, None]
    new_shares = weighed.sum(axis=0) / np.maximum(mass, LEAST)[:, None]
    return np.where(rows[:, None] > 0, new_omega, omega), np.where(mass[:, None] > 0, new_shares, shares)
