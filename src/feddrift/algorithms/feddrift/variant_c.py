"""FedDrift-C of the paper's appendix: of the models created at one time only one becomes global."""

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
    """FedDrift that sends at most one new model per time step to all clients."""

    one_global: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first == "each":
            raise ConfigError("FedDrift-C starts with one model, got first=each")
        if self.redetect and isinstance(drift_test(self.test, self.delta), Sequential):
            raise ConfigError(f"FedDrift-C.redetect needs a test that compares two scores, got test={self.test}")

    def settle(self, state: DriftState, fed: Federation) -> tuple[Clustering, DriftState]:
        """Of the models created in the last step one, drawn at random, stays; the others' data go with them."""
        now, state = super().settle(state, fed)
        if len(state.newborn) < 2:
            return now, state
        survivor = state.newborn[rng.choice(fed.key("survivor"), len(state.newborn))]
        kept = np.array([i not in state.newborn or i == survivor for i in state.models.ids])
        orphans = state.votes[:, ~kept].any(axis=1)
        models, w = clustering.keep(state.models, state.w, kept)
        votes = state.votes[:, kept]
        votes[orphans, 0] = 1  # should one bring no new data now, it falls back on the first model there is
        again = orphans & self.redetect
        reference = np.where(again, state.previous, state.reference)
        observed = state.observed.copy()
        observed[-1, again] = np.nan  # as if they had not been scored
        cause = {"reason": "another new model was drawn", "kept": survivor}
        events = tuple(Event("retired", i, cause) for i in state.newborn if i != survivor)
        state = replace(state, models=models, w=w, votes=votes, reference=reference, observed=observed)
        return Clustering(models, w, now.events + events), state
