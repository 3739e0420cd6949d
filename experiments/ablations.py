"""FedDrift-Auto without one of its parts: `--algorithm experiments.ablations:shared_alone`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from feddrift.algorithms.auto import private_models
from feddrift.algorithms.auto.method import AutoState, FedDriftAuto
from feddrift.algorithms.auto.review import find_current_assignment
from feddrift.types import Federation, State


@dataclass(frozen=True)
class shared_alone(FedDriftAuto):
    """Private models never vote."""

    def step(self, state: State, fed: Federation) -> AutoState:
        return _set_ensemble_gain(super().step(state, fed), (-1e9, -1e9))


@dataclass(frozen=True)
class private_always(FedDriftAuto):
    """Private models always vote."""

    def step(self, state: State, fed: Federation) -> AutoState:
        return _set_ensemble_gain(super().step(state, fed), (0.0, 1e9))


def _set_ensemble_gain(state: AutoState, gain: private_models.EnsembleGain) -> AutoState:
    size = private_models.choose_ensemble_size(gain)
    votes = private_models.share_votes_equally(state.models, find_current_assignment(state.w), size)
    return replace(state, ensemble_gain=gain, votes=votes)


@dataclass(frozen=True)
class all_trusted(FedDriftAuto):
    """Every alarm is acted on, whether later data confirmed earlier ones or not."""

    def step(self, state: State, fed: Federation) -> AutoState:
        return replace(super().step(state, fed), confirmed=1e9, contradicted=0.0)


@dataclass(frozen=True)
class error_alone(FedDriftAuto):
    """A risen error is an alarm even where what fits the new data fits the old ones."""

    not_worse_z: float = -math.inf


@dataclass(frozen=True)
class never_merged(FedDriftAuto):
    """Models never merge."""

    merge_z: float = -math.inf


@dataclass(frozen=True)
class never_split(FedDriftAuto):
    """No alarm is ever raised: one shared model, and private models."""

    false_discovery_rate: float = -1.0
    switch_z: float = math.inf
