"""DriftSurf of Tahmasbi, Jothimurugesan, Tirthapura and Gibbons, ICML 2021, on the pooled new data of all clients.

A predictive and a stable model train side by side. When the predictive one falls delta below its best, or delta / 2
below the stable one, a reactive phase of `reactive_steps` begins: a fresh reactive model trains beside it, each step is
predicted with the better of the two, and the better on average stays (Algorithm 1 there).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from feddrift.algorithms.options import option
from feddrift.errors import ConfigError
from feddrift.memory import pooled, window
from feddrift.models import join, take
from feddrift.types import Event, Federation, Floats, State

PREDICTIVE, OTHER = 0, 1  # positions: the other model is stable or reactive, by the phase


@dataclass(frozen=True, repr=False)
class SurfState(State):
    """`compared[i]`: accuracies of the predictive and the reactive model at each comparison of a reactive phase."""

    w: Floats
    best: float = 0.0  # the highest accuracy of the predictive model on new data
    reactive: bool = False
    elapsed: int = 0  # training steps of the reactive phase
    compared: Floats = field(default_factory=lambda: np.zeros((0, 2)))
    born: int = 1


@dataclass(frozen=True)
class DriftSurf:
    """One model for all, replaced when a central drift test and a trial of a new one agree."""

    delta: float = option(0.05, "a drop of accuracy by more than this below the best starts a reactive phase")
    reactive_steps: int = option(3, "length of a reactive phase, in time steps")
    window: int = option(10, "no model remembers more than so many time steps")

    def __post_init__(self) -> None:
        if not 0 <= self.delta <= 1:
            raise ConfigError(f"DriftSurf.delta must be in [0, 1], got {self.delta}")
        if self.reactive_steps < 2 or self.window < 1:
            raise ConfigError(
                "DriftSurf.reactive_steps must be at least 2 and DriftSurf.window at least 1, "
                f"got {self.reactive_steps} and {self.window}"
            )

    def init(self, fed: Federation) -> SurfState:
        votes = np.ones((fed.n_clients, 1))
        return SurfState(fed.fresh(), np.zeros((0, *votes.shape)), votes)

    def step(self, state: State, fed: Federation) -> SurfState:
        assert isinstance(state, SurfState)
        accuracy = np.zeros(len(state.models))
        if fed.tau:
            accuracy = 1 - pooled(fed.evaluate(state.models), fed.counts[-1])
            if np.isnan(accuracy).any():  # nobody has news: train on, decide nothing
                w = self._grown(state.w, fed)
                return replace(state, models=fed.train(state.models, w), w=w, events=(), drifted=None)
        best = max(state.best, float(accuracy[PREDICTIVE]))
        models, w, born = state.models, state.w, state.born
        reactive, elapsed, compared = state.reactive, state.elapsed, state.compared
        events: tuple[Event, ...] = ()
        alarm = False
        if not reactive:
            stable = float(accuracy[OTHER]) if len(models) > 1 else 0.0
            below = accuracy[PREDICTIVE] < best - self.delta or accuracy[PREDICTIVE] < stable - self.delta / 2
            alarm = bool(fed.tau and below)
        if alarm:
            reactive, elapsed, compared = True, 0, np.zeros((0, 2))
            models, w = take(models, [PREDICTIVE], models.ids[:1]), w[:, :, :1]  # the stable model goes
        chosen = PREDICTIVE
        if reactive and elapsed:
            compared = np.concatenate([compared, accuracy[None]])
            chosen = OTHER if accuracy[OTHER] > accuracy[PREDICTIVE] else PREDICTIVE
        if len(models) == 1:  # a new reactive or stable model starts
            why = {"reason": "reactive phase", "accuracy": float(accuracy[0]), "best": best, "delta": self.delta}
            events = (Event("created", born, why if alarm else {"reason": "stable model"}),)
            models, born = join(models, take(fed.fresh(), [0], [born])), born + 1
            w = np.concatenate([w, np.zeros((*w.shape[:2], 1))], axis=2)
        w = self._grown(w, fed)
        models = fed.train(models, w)
        if reactive:
            elapsed += 1
        if reactive and elapsed == self.reactive_steps:
            keep = OTHER if compared[:, PREDICTIVE].mean() < compared[:, OTHER].mean() else PREDICTIVE
            if keep == OTHER:
                best = float(compared[:, OTHER].max())
            gone = models.ids[1 - keep]
            events += (Event("retired", gone, {"reason": "the other was better", "kept": models.ids[keep]}),)
            models, w = take(models, [keep], [models.ids[keep]]), w[:, :, [keep]]
            reactive, chosen = False, PREDICTIVE
        votes = np.zeros((fed.n_clients, len(models)))
        votes[:, chosen] = 1
        return SurfState(
            models,
            w,
            votes,
            events=events,
            drifted=alarm & (fed.counts[-1] > 0),
            best=best,
            reactive=reactive,
            elapsed=elapsed,
            compared=compared,
            born=born,
        )

    def _grown(self, w: Floats, fed: Federation) -> Floats:
        """w with the newest data for all models, no more remembered than the window holds."""
        return np.concatenate([w, np.ones((1, *w.shape[1:]))]) * window(self.window)(fed.tau)[:, None, None]
