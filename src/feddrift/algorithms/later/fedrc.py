"""FedRC of Guo et al., ICML 2024, and FedEM of Marfoq et al., NeurIPS 2021, over time: every client mixes all models.

Let CE[c, m, y] be the cross-entropy of model m on the N[c, y] rows of class y at client c. In every round

    gamma[c, m, y] ~ omega[c, m] exp(-CE[c, m, y]) / C[m, y],   summed to 1 over m;
    omega[c, m] = sum over y of N[c, y] gamma[c, m, y] / N[c];
    C[m, y] = the share of class y in the sums over c of N[c, y] gamma[c, m, y], at least 1e-8;

then each client trains each model, and models are averaged with the weights omega[c, m] N[c]. Clients predict with the
mixture omega of the models' probabilities. FedEM has C = 1. A time step starts from the last mixture.

Both publications have a gamma for each row; here all rows of a class at a client have the same (docs/deviations.md).
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

MIN_SHARE = 1e-8  # of C and omega: a share that became 0 could never grow again


@dataclass(frozen=True, repr=False)
class MixtureState(State):
    """State of FedRC and FedEM after a time step."""

    shares: Floats = field(default_factory=lambda: np.zeros((0, 0)))  # C[m, y]
    # omega[m, c]; NaN for newcomers, whose mixture starts with equal shares
    mixture: Floats = field(default_factory=lambda: np.zeros((0, 0)), metadata={"newcomer": np.nan})


@dataclass(frozen=True)
class FedRC:
    """FedRC: a given number of models, which all clients train, weighted by how well they explain the clients' data."""

    n_models: int = option(3, "how many models are mixed")
    memory: Memory = window(1)
    by_class: bool = True  # False: FedEM, with C = 1

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
        models = state.models
        shares = state.shares
        omega = np.where(np.isnan(state.mixture), 1 / self.n_models, state.mixture).T
        created = () if fed.tau else tuple(Event("created", i, {"reason": "an initial model"}) for i in models.ids[1:])
        counts = fed.confusion(take(models, [0], [models.ids[0]])).sum(axis=(1, 3)).astype(np.float64)  # N[c, y]
        for _ in range(fed.local.rounds):
            gamma = compute_responsibilities(omega, fed.evaluate(models, "loss", by="class"), shares)
            omega, new_shares = update_mixtures(gamma, counts, omega, shares)
            shares = new_shares if self.by_class else shares
            models = fed.train(models, self._append_mixture(state.w, omega, fed.tau), rounds=1)
        w = self._append_mixture(state.w, omega, fed.tau)
        return MixtureState(models, w, omega, "soft", created, shares=shares, mixture=omega.T)

    def _append_mixture(self, w: Weights, omega: Floats, tau: int) -> Floats:
        """Return w[t, c, m], the mixtures of all time steps, weighted by the memory."""
        return np.concatenate([np.asarray(w), omega[None]]) * self.memory(tau)[:, None, None]


def compute_responsibilities(omega: Floats, loss: Floats, shares: Floats) -> Floats:
    """Return gamma[c, m, y]; NaN where a client has no rows of a class.

    Args:
        omega: [c, m], the mixtures.
        loss: [c, m, y], the cross-entropy.
        shares: C[m, y].

    >>> gamma = compute_responsibilities(np.array([[0.5, 0.5]]), np.array([[[0.0], [np.log(3)]]]), np.ones((2, 1)))
    >>> gamma.round(3).tolist()
    [[[0.75], [0.25]]]
    """
    log = numerics.log(np.maximum(omega, MIN_SHARE))[..., None] - loss - numerics.log(np.maximum(shares, MIN_SHARE))
    likelihood = numerics.exp(log - log.max(axis=1, keepdims=True))
    return np.asarray(likelihood / likelihood.sum(axis=1, keepdims=True))


def update_mixtures(gamma: Floats, counts: Floats, omega: Floats, shares: Floats) -> tuple[Floats, Floats]:
    """Return the next omega[c, m] and C[m, y].

    Args:
        gamma: [c, m, y], the responsibilities.
        counts: N[c, y].
        omega: [c, m], the mixtures that clients without new data keep.
        shares: C[m, y] that models without data keep.
    """
    weighted = np.nan_to_num(gamma) * counts[:, None]  # [c, m, y]
    per_client = weighted.sum(axis=(1, 2))
    per_model = weighted.sum(axis=(0, 2))
    new_omega = weighted.sum(axis=2) / np.maximum(per_client, MIN_SHARE)[:, None]
    new_shares = weighted.sum(axis=0) / np.maximum(per_model, MIN_SHARE)[:, None]
    return np.where(per_client[:, None] > 0, new_omega, omega), np.where(per_model[:, None] > 0, new_shares, shares)
