"""KUE, the Kappa updated ensemble of Cano and Krawczyk, Machine Learning 109, 2020.

Every model uses a random subset of the features and is trained on its own Poisson(1) bootstrap of the newest data. The
weight of its vote is Cohen's kappa, (agreement - chance) / (1 - chance), or 0 if kappa is not positive. At each time
step a candidate with a new subset is also trained, and replaces the worst model if its kappa is higher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from feddrift import rng
from feddrift.algorithms.options import option
from feddrift.errors import ConfigError
from feddrift.memory import window
from feddrift.models import join, replace_model, take
from feddrift.types import Event, Federation, Floats, Ints, Models, State


@dataclass(frozen=True, repr=False)
class KueState(State):
    """State of KUE after a time step. It contains the masks because with `as_released` models are tested without."""

    masks: Floats = field(default_factory=lambda: np.zeros((0, 0)))  # [m, *features], 1 for the features that m uses
    worst: int = 0  # position of the model that is replaced next, with `as_released`
    next_id: int = field(default=0, metadata={"former_name": "born"})


@dataclass(frozen=True)
class KUE:
    """KUE: a vote of models on random features, weighted by Cohen's kappa."""

    n_models: int = option(10, "how many models vote")
    as_released: bool = option(
        False,
        "as in the FedDrift authors' code: the worst model does not vote and is always replaced, its mask only gains "
        "features, and tests use no masks",
    )

    def __post_init__(self) -> None:
        if self.n_models < 1:
            raise ConfigError(f"KUE.n_models must be at least 1, got {self.n_models}")

    def init(self, fed: Federation) -> KueState:
        n = self.n_models + self.as_released
        masks = np.stack([draw_mask(fed, k) for k in range(n)])
        votes = np.ones((fed.n_clients, n))
        return KueState(
            _copy_initial_model(fed, range(n)), np.zeros((0, *votes.shape)), votes, "soft", masks=masks, next_id=n
        )

    def step(self, state: State, fed: Federation) -> KueState:
        assert isinstance(state, KueState)
        models = replace(state.models, mask=None)
        masks = state.masks
        next_id = state.next_id
        events: tuple[Event, ...] = ()
        if fed.tau and not fed.counts[-1].any():  # no client has new data: there is nothing to train or compare on
            return replace(state, w=self._weigh_newest_data(len(models), fed), events=())
        if fed.tau and self.as_released:
            models = replace_model(models, state.worst, fed.fresh())
            masks = masks.copy()  # the mask only gains features
            masks[state.worst] = np.maximum(masks[state.worst], draw_mask(fed, state.worst))
        elif fed.tau:
            models = join(models, _copy_initial_model(fed, [next_id]))
            masks = np.concatenate([masks, draw_mask(fed, next_id)[None]])
        bootstrap = replace(fed.local, bags=True)
        w = self._weigh_newest_data(len(models), fed)
        trained = fed.train(replace(models, mask=masks), w, local=bootstrap)
        kappa = compute_kappa(fed.confusion(trained).sum(axis=0))
        worst = int(kappa.argmin()) if fed.tau else state.worst
        weights = np.maximum(kappa, 0)
        if not weights.any():
            weights[:] = 1  # no model is better than chance: equal votes
        if self.as_released:
            weights[worst] = 0
        elif fed.tau:  # the candidate, which is the last, replaces the worst only if it is better
            candidate = len(kappa) - 1
            worst = int(kappa[:-1].argmin())
            if kappa[candidate] > kappa[worst]:
                events = (
                    Event(
                        "retired",
                        trained.ids[worst],
                        {"reason": "it had the lowest kappa", "kappa": float(kappa[worst])},
                    ),
                    Event(
                        "created",
                        next_id,
                        {"reason": "the candidate had a higher kappa", "kappa": float(kappa[candidate])},
                    ),
                )
            else:
                worst = candidate
            kept = np.delete(np.arange(len(trained)), worst)
            trained = take(trained, kept, [trained.ids[m] for m in kept])
            masks = masks[kept]
            w = w[:, :, kept]
            weights = weights[kept]
            next_id += 1
        votes = np.tile(weights if weights.any() else np.ones(len(weights)), (fed.n_clients, 1))
        tested = replace(trained, mask=None) if self.as_released else trained
        return KueState(tested, w, votes, "soft", events=events, masks=masks, worst=worst, next_id=next_id)

    def _weigh_newest_data(self, n_models: int, fed: Federation) -> Floats:
        """Return w, with which the newest data of every client train every model."""
        return np.tile(window(1)(fed.tau)[:, None, None], (1, fed.n_clients, n_models))


def compute_kappa(confusion: Ints) -> Floats:
    """Return Cohen's kappa [m], the agreement beyond chance; 0 where it is not defined.

    Args:
        confusion: [m, true class, predicted class], numbers of rows.

    >>> compute_kappa(np.array([[[45, 15], [25, 15]]])).round(4).tolist()
    [0.1304]
    """
    n = np.maximum(confusion.sum(axis=(1, 2)), 1)
    agreement = np.trace(confusion, axis1=1, axis2=2) / n
    chance = (confusion.sum(axis=1) * confusion.sum(axis=2)).sum(axis=1) / n**2
    kappa: Floats = np.divide(agreement - chance, 1 - chance, out=np.zeros(len(n)), where=chance < 1)
    return kappa


def draw_mask(fed: Federation, k: int) -> Floats:
    """Return the k-th mask: 1 for r random features of d, where r is uniform in 1..d, and 0 for the others."""
    d = int(np.prod(fed.features))
    words = rng.draw_words(fed.key("mask", k), d + 1)
    r = 1 + int(rng.to_unit_interval(words[:1])[0] * d)
    mask = np.zeros(d)
    mask[np.argsort(words[1:], kind="stable")[:r]] = 1
    return mask.reshape(fed.features)


def _copy_initial_model(fed: Federation, ids: Sequence[int]) -> Models:
    """Return copies of the initial model with these ids."""
    return take(fed.fresh(), [0] * len(ids), ids)
