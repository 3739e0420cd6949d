"""KUE, the Kappa updated ensemble of Cano and Krawczyk, Machine Learning 109, 2020.

Every model sees a random subspace of the features and trains on its own Poisson(1) bootstrap of the newest data. Models
vote with Cohen's kappa, (agreement - chance) / (1 - chance), as weight, and abstain where it is not positive. Each time
step a candidate with a new subspace is trained beside them and takes the place of the worst if its kappa is higher.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from feddrift import rng
from feddrift.algorithms.options import option
from feddrift.errors import ConfigError
from feddrift.memory import window
from feddrift.models import join, put, take
from feddrift.types import Event, Federation, Floats, Ints, Models, State


@dataclass(frozen=True, repr=False)
class KueState(State):
    """Masks stay with the state, so that models can be tested without them."""

    masks: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    worst: int = 0  # position of the model that is replaced next (as released)
    born: int = 0


@dataclass(frozen=True)
class KUE:
    """A vote of models on random features, weighted by how much better than chance they are."""

    n_models: int = option(10, "how many models vote")
    as_released: bool = option(
        False,
        "as in the FedDrift authors' code: the worst model is left out and always replaced, under a mask that "
        "only grows, and tests are not masked",
    )

    def __post_init__(self) -> None:
        if self.n_models < 1:
            raise ConfigError(f"KUE.n_models must be at least 1, got {self.n_models}")

    def init(self, fed: Federation) -> KueState:
        n = self.n_models + self.as_released
        masks = np.stack([new_mask(fed, k) for k in range(n)])
        votes = np.ones((fed.n_clients, n))
        return KueState(_shared_start(fed, range(n)), np.zeros((0, *votes.shape)), votes, "soft", masks=masks, born=n)

    def step(self, state: State, fed: Federation) -> KueState:
        assert isinstance(state, KueState)
        models, masks, born = replace(state.models, mask=None), state.masks, state.born
        events: tuple[Event, ...] = ()
        if fed.tau and not fed.counts[-1].any():  # nobody has news: nothing to learn or to judge by
            return replace(state, w=self._newest(len(models), fed), events=())
        if fed.tau and self.as_released:
            models = put(models, state.worst, fed.fresh())
            masks = masks.copy()  # old features are never cleared
            masks[state.worst] = np.maximum(masks[state.worst], new_mask(fed, state.worst))
        elif fed.tau:
            models = join(models, _shared_start(fed, [born]))
            masks = np.concatenate([masks, new_mask(fed, born)[None]])
        bags = replace(fed.local, bags=True)
        w = self._newest(len(models), fed)
        trained = fed.train(replace(models, mask=masks), w, local=bags)
        kappa = cohens_kappa(fed.confusion(trained).sum(axis=0))
        worst = int(kappa.argmin()) if fed.tau else state.worst
        voting = np.maximum(kappa, 0)
        if not voting.any():
            voting[:] = 1  # nobody is better than chance: all alike
        if self.as_released:
            voting[worst] = 0
        elif fed.tau:  # the candidate, last, takes the place of the worst only if it is better
            candidate, worst = len(kappa) - 1, int(kappa[:-1].argmin())
            if kappa[candidate] > kappa[worst]:
                events = (
                    Event("retired", trained.ids[worst], {"reason": "lowest kappa", "kappa": float(kappa[worst])}),
                    Event("created", born, {"reason": "candidate", "kappa": float(kappa[candidate])}),
                )
            else:
                worst = candidate
            left = np.delete(np.arange(len(trained)), worst)
            trained, masks, w = take(trained, left, [trained.ids[m] for m in left]), masks[left], w[:, :, left]
            voting, born = voting[left], born + 1
        votes = np.tile(voting if voting.any() else np.ones(len(voting)), (fed.n_clients, 1))
        tested = replace(trained, mask=None) if self.as_released else trained
        return KueState(tested, w, votes, "soft", events=events, masks=masks, worst=worst, born=born)

    def _newest(self, n_models: int, fed: Federation) -> Floats:
        """Every model trains on the newest data of every client."""
        return np.tile(window(1)(fed.tau)[:, None, None], (1, fed.n_clients, n_models))


def cohens_kappa(confusion: Ints) -> Floats:
    """Kappa [m] from counts [m, true, predicted]: agreement beyond chance; 0 where it says nothing.

    >>> cohens_kappa(np.array([[[45, 15], [25, 15]]])).round(4).tolist()
    [0.1304]
    """
    n = np.maximum(confusion.sum(axis=(1, 2)), 1)
    agreed = np.trace(confusion, axis1=1, axis2=2) / n
    chance = (confusion.sum(axis=1) * confusion.sum(axis=2)).sum(axis=1) / n**2
    kappa: Floats = np.divide(agreed - chance, 1 - chance, out=np.zeros(len(n)), where=chance < 1)
    return kappa


def new_mask(fed: Federation, k: int) -> Floats:
    """A random subspace: r features, r itself uniform in 1..d."""
    d = int(np.prod(fed.features))
    words = rng.bits(fed.key("mask", k), d + 1)
    r = 1 + int(rng.unit(words[:1])[0] * d)
    mask = np.zeros(d)
    mask[np.argsort(words[1:], kind="stable")[:r]] = 1
    return mask.reshape(fed.features)


def _shared_start(fed: Federation, ids: Ints | list[int] | range) -> Models:
    return take(fed.fresh(), [0] * len(ids), [int(i) for i in ids])
