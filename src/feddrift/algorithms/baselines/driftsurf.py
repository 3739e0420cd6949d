"""DriftSurf of Tahmasbi, Jothimurugesan, Tirthapura and Gibbons, ICML 2021, on the pooled new data of all clients.

A predictive and a stable model are trained at the same time. If the accuracy of the predictive one is delta below its
best, or delta / 2 below that of the stable one, a reactive phase of `reactive_steps` begins. In it a new model, called
reactive, replaces the stable one. At each time step the better of the two predicts, and finally the one that was better
on average stays (Algorithm 1 of the publication).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from feddrift.algorithms.options import option
from feddrift.errors import ConfigError
from feddrift.memory import average_over_clients, window
from feddrift.models import join, take
from feddrift.types import Event, Federation, Floats, State

PREDICTIVE = 0  # position of the predictive model
OTHER = 1  # position of the stable model, or of the reactive one in a reactive phase


@dataclass(frozen=True, repr=False)
class SurfState(State):
    """State of DriftSurf after a time step."""

    w: Floats
    best: float = 0.0  # the highest accuracy of the predictive model on new data
    reactive: bool = False  # whether this is a reactive phase
    elapsed: int = 0  # time steps in which the models of the reactive phase were trained
    compared: Floats = field(  # [comparison, position], accuracies of both models in the reactive phase
        default_factory=lambda: np.zeros((0, 2))
    )
    next_id: int = field(default=1, metadata={"former_name": "born"})


@dataclass(frozen=True)
class DriftSurf:
    """DriftSurf: one model for all, replaced if a central test detects a drift and a new model is better in a trial."""

    delta: float = option(0.05, "a reactive phase starts if the accuracy falls by more than this below the best")
    reactive_steps: int = option(3, "length of a reactive phase, in time steps")
    window: int = option(10, "maximum number of time steps whose data a model is trained on")

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
            accuracy = 1 - average_over_clients(fed.evaluate(state.models), fed.counts[-1])
            if np.isnan(accuracy).any():  # no client has new data: train, and decide nothing
                w = self._add_newest_data(state.w, fed)
                return replace(state, models=fed.train(state.models, w), w=w, events=(), drifted=None)
        best = max(state.best, float(accuracy[PREDICTIVE]))
        models = state.models
        w = state.w
        next_id = state.next_id
        reactive = state.reactive
        elapsed = state.elapsed
        compared = state.compared
        events: tuple[Event, ...] = ()
        alarm = False
        if not reactive:
            stable = float(accuracy[OTHER]) if len(models) > 1 else 0.0
            is_worse = accuracy[PREDICTIVE] < best - self.delta or accuracy[PREDICTIVE] < stable - self.delta / 2
            alarm = bool(fed.tau and is_worse)
        if alarm:
            reactive = True
            elapsed = 0
            compared = np.zeros((0, 2))
            models = take(models, [PREDICTIVE], models.ids[:1])  # the stable model is removed
            w = w[:, :, :1]
        chosen = PREDICTIVE
        if reactive and elapsed:
            compared = np.concatenate([compared, accuracy[None]])
            chosen = OTHER if accuracy[OTHER] > accuracy[PREDICTIVE] else PREDICTIVE
        if len(models) == 1:  # a new reactive or stable model starts
            cause = {"reason": "reactive phase", "accuracy": float(accuracy[0]), "best": best, "delta": self.delta}
            events = (
                Event("created", next_id, cause if alarm else {"reason": "a stable model for the next drift test"}),
            )
            models = join(models, take(fed.fresh(), [0], [next_id]))
            next_id += 1
            w = np.concatenate([w, np.zeros((*w.shape[:2], 1))], axis=2)
        w = self._add_newest_data(w, fed)
        models = fed.train(models, w)
        if reactive:
            elapsed += 1
        if reactive and elapsed == self.reactive_steps:
            kept = OTHER if compared[:, PREDICTIVE].mean() < compared[:, OTHER].mean() else PREDICTIVE
            if kept == OTHER:
                best = float(compared[:, OTHER].max())
            cause = {"reason": "the other model was more accurate", "kept": models.ids[kept]}
            events += (Event("retired", models.ids[1 - kept], cause),)
            models = take(models, [kept], [models.ids[kept]])
            w = w[:, :, [kept]]
            reactive = False
            chosen = PREDICTIVE
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
            next_id=next_id,
        )

    def _add_newest_data(self, w: Floats, fed: Federation) -> Floats:
        """Let the newest data train all models, and forget data from before the window."""
        return np.concatenate([w, np.ones((1, *w.shape[1:]))]) * window(self.window)(fed.tau)[:, None, None]
