"""FedDrift-C of the paper's appendix: of the models created in one time step only one becomes global."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from feddrift import clustering, rng
from feddrift.algorithms.feddrift.detection import DriftState
from feddrift.algorithms.feddrift.drift_tests import Sequential, drift_test
from feddrift.algorithms.feddrift.method import FedDrift
from feddrift.clustering import Clustering
from feddrift.errors import ConfigError
from feddrift.types import Event, Federation


@dataclass(frozen=True)
class FedDriftC(FedDrift):
    """FedDrift-C: FedDrift that sends at most one new model per time step to all clients.

    All settings are those of FedDrift; `first` must be one.

    Attributes:
        redetect: Whether clients whose new model was dropped are compared with the reference before their alarm, so
            that they may raise the alarm again.
    """

    one_global: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first == "each":
            raise ConfigError("FedDrift-C starts with one model, got first=each")
        if self.redetect and isinstance(drift_test(self.test, self.delta), Sequential):
            raise ConfigError(f"FedDrift-C.redetect needs a test that compares two scores, got test={self.test}")

    def finish_last_step(self, state: DriftState, fed: Federation) -> tuple[Clustering, DriftState]:
        """Keep one of the models created in the last step, drawn at random, and retire the others with their data."""
        clusters, state = super().finish_last_step(state, fed)
        if len(state.newborn) < 2:
            return clusters, state
        survivor = state.newborn[rng.choice(fed.key("survivor"), len(state.newborn))]
        kept = np.array([i not in state.newborn or i == survivor for i in state.models.ids])
        orphans = state.votes[:, ~kept].any(axis=1)  # [c], clients whose model is retired
        models, w = clustering.keep_models(state.models, state.w, kept)
        votes = state.votes[:, kept]
        votes[orphans, 0] = 1  # the oldest model serves orphans without new data in this time step
        redetected = orphans & self.redetect
        reference = np.where(redetected, state.previous, state.reference)
        observed = state.observed.copy()
        observed[-1, redetected] = np.nan  # the last scores of these clients are discarded
        cause = {"reason": "another new model was drawn at random", "kept": survivor}
        events = tuple(Event("retired", i, cause) for i in state.newborn if i != survivor)
        state = replace(state, models=models, w=w, votes=votes, reference=reference, observed=observed)
        return Clustering(models, w, clusters.events + events), state
