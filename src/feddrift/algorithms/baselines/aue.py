"""AUE, the accuracy updated ensemble (AUE2) of Brzezinski and Stefanowski, IEEE TNNLS 25(1), 2014.

Each time step adds a model, which from then on trains on all data since its creation; the newest `n_models` are kept.
They vote with the weights of AUE2,

    weight_k = 1 / (MSE_r + MSE_k + epsilon),   MSE_k = mean of (1 - p_k(true class))^2 on the newest data,

MSE_r being the same of guessing; the newest model is taken for perfect, MSE_k = 0. AUE pools the data of all clients;
AUE-PC (per client) weighs for each client by its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from feddrift.algorithms.options import option
from feddrift.errors import ConfigError
from feddrift.memory import pooled
from feddrift.models import join, take
from feddrift.types import Event, Federation, Floats, State


@dataclass(frozen=True)
class AUE:
    """A weighted vote of models of different age, each trained by all clients."""

    n_models: int = option(5, "size of the ensemble")
    as_released: bool = option(False, "weights as in the FedDrift authors' code: each model has that of the next older")
    per_client: bool = False  # AUE-PC

    def __post_init__(self) -> None:
        if self.n_models < 1:
            raise ConfigError(f"AUE.n_models must be at least 1, got {self.n_models}")

    def init(self, fed: Federation) -> State:
        votes = np.ones((fed.n_clients, 1))
        return State(fed.fresh(), np.zeros((0, *votes.shape)), votes)

    def step(self, state: State, fed: Federation) -> State:
        models, w = state.models, state.w
        events: tuple[Event, ...] = ()
        if fed.tau and not fed.counts[-1].any():  # nobody has news: no new model, the votes stand
            w = np.concatenate([w, np.ones((1, *w.shape[1:]))])
            return replace(state, models=fed.train(models, w), w=w, events=())
        if fed.tau:
            kept = np.arange(max(0, len(models) + 1 - self.n_models), len(models))  # the oldest comes first
            newest = take(fed.fresh(), [0], [fed.tau])
            models = join(take(models, kept, [models.ids[m] for m in kept]), newest)
            w = np.concatenate([w[:, :, kept], np.zeros((*w.shape[:2], 1))], axis=2)
            events = (Event("created", fed.tau, {"reason": "one model per time step"}),)
        w = np.concatenate([w, np.ones((1, *w.shape[1:]))])
        models = fed.train(models, w)
        mse = fed.evaluate(models, "brier")
        everybody = np.tile(pooled(mse, fed.counts[-1]), (fed.n_clients, 1))
        if self.per_client:  # a client without new data follows the others
            everybody = np.where(np.isnan(mse), everybody, mse)
        weights = ensemble_weights(np.nan_to_num(everybody), fed.n_classes, self.as_released)
        return State(models, w, votes=weights, events=events)


def ensemble_weights(mse: Floats, n_classes: int, as_released: bool = False) -> Floats:
    """Normalised weights [c, m] from the errors of models in the order of their age, the newest last.

    >>> ensemble_weights(np.array([[0.5, 0.25, 0.1]]), n_classes=2).round(3).tolist()
    [[0.182, 0.273, 0.545]]
    >>> ensemble_weights(np.array([[0.5, 0.25, 0.1]]), n_classes=2, as_released=True).round(3).tolist()
    [[0.0, 0.25, 0.75]]
    """
    guessing = (1 - 1 / n_classes) ** 2
    weights = 1 / (guessing + mse + 1e-20)
    weights[:, -1] = 1 / (guessing + 1e-20)
    if as_released:  # all but the newest votes with the weight of the next older model, the oldest has none
        older = np.concatenate([np.zeros((len(mse), 1)), weights[:, :-1]], axis=1)
        weights = np.concatenate([older[:, :-1], weights[:, -1:]], axis=1)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))
