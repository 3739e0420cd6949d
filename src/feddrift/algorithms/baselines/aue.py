"""AUE, the accuracy updated ensemble (AUE2) of Brzezinski and Stefanowski, IEEE TNNLS 25(1), 2014.

Each time step adds a model, which is trained on all data since its creation. The newest `n_models` are kept and vote
with the weights of AUE2,

    weight_k = 1 / (MSE_r + MSE_k + epsilon),   MSE_k = mean of (1 - p_k(true class))^2 on the newest data,

where MSE_r is the value for guessing. The newest model is assumed to be perfect, MSE_k = 0. AUE computes MSE_k on the
data of all clients; AUE-PC (per client) computes weights for each client on its own data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from feddrift.algorithms.options import option
from feddrift.errors import ConfigError
from feddrift.memory import average_over_clients
from feddrift.models import join, take
from feddrift.types import Event, Federation, Floats, State


@dataclass(frozen=True)
class AUE:
    """AUE: a weighted vote of models of different ages, each trained by all clients."""

    n_models: int = option(5, "size of the ensemble")
    as_released: bool = option(False, "as in the FedDrift authors' code: weights are shifted by one model")
    per_client: bool = False  # True: AUE-PC

    def __post_init__(self) -> None:
        if self.n_models < 1:
            raise ConfigError(f"AUE.n_models must be at least 1, got {self.n_models}")

    def init(self, fed: Federation) -> State:
        votes = np.ones((fed.n_clients, 1))
        return State(fed.fresh(), np.zeros((0, *votes.shape)), votes)

    def step(self, state: State, fed: Federation) -> State:
        models = state.models
        w = state.w
        events: tuple[Event, ...] = ()
        if fed.tau and not fed.counts[-1].any():  # no client has new data: no new model, and the same votes
            w = np.concatenate([w, np.ones((1, *w.shape[1:]))])
            return replace(state, models=fed.train(models, w), w=w, events=())
        if fed.tau:
            kept = np.arange(max(0, len(models) + 1 - self.n_models), len(models))  # the oldest comes first
            newest = take(fed.fresh(), [0], [fed.tau])
            models = join(take(models, kept, [models.ids[m] for m in kept]), newest)
            w = np.concatenate([w[:, :, kept], np.zeros((*w.shape[:2], 1))], axis=2)
            events = (Event("created", fed.tau, {"reason": "a new model in every time step"}),)
        w = np.concatenate([w, np.ones((1, *w.shape[1:]))])
        models = fed.train(models, w)
        mse = fed.evaluate(models, "brier")
        average = np.tile(average_over_clients(mse, fed.counts[-1]), (fed.n_clients, 1))
        if self.per_client:  # a client without new data uses the average of the others
            average = np.where(np.isnan(mse), average, mse)
        votes = weigh_ensemble(np.nan_to_num(average), fed.n_classes, self.as_released)
        return State(models, w, votes=votes, events=events)


def weigh_ensemble(mse: Floats, n_classes: int, as_released: bool = False) -> Floats:
    """Return the weights [c, m] of models in votes, which sum to 1 at each client.

    Args:
        mse: [c, m], MSE_k of each model, the newest last.
        n_classes: The number of classes.
        as_released: True for the weights of the FedDrift authors' code.

    >>> weigh_ensemble(np.array([[0.5, 0.25, 0.1]]), n_classes=2).round(3).tolist()
    [[0.182, 0.273, 0.545]]
    >>> weigh_ensemble(np.array([[0.5, 0.25, 0.1]]), n_classes=2, as_released=True).round(3).tolist()
    [[0.0, 0.25, 0.75]]
    """
    guessing = (1 - 1 / n_classes) ** 2
    weights = 1 / (guessing + mse + 1e-20)
    weights[:, -1] = 1 / (guessing + 1e-20)
    if as_released:  # each model except the newest has the weight of the next older one; the oldest has weight 0
        older = np.concatenate([np.zeros((len(mse), 1)), weights[:, :-1]], axis=1)
        weights = np.concatenate([older[:, :-1], weights[:, -1:]], axis=1)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))
