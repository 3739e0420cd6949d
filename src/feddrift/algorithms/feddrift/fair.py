"""FairFedDrift of Salazar et al., IEEE TNNLS 2025: FedDrift with a loss for each group of rows.

Let l[c, m, g] be the loss of model m on the rows of group g at client c. Model m suits client c if

    l[c, m, g] <= reference[c, g] + delta   for every g.

A client gets the suitable model with the smallest sum of losses over g. If no model is suitable, the client drifted.
Two models merge only if no group of any client is worse by more than delta with the other (`compute_group_distances`).
Groups are those of the stream (`Stream.group`), or the classes if the stream has no groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np

from feddrift import clustering
from feddrift.algorithms.feddrift.detection import (
    UNSCORED,
    DetectionResult,
    DriftState,
    create_suppressed_alarm_events,
    update_detection_fields,
)
from feddrift.algorithms.feddrift.method import FedDrift
from feddrift.algorithms.feddrift.new_models import (
    NewModels,
    assign_remaining_clients,
    create_models,
    group_each_client,
    retire_unused_models,
)
from feddrift.algorithms.options import option
from feddrift.clustering import TOLERANCE, Clustering
from feddrift.errors import ConfigError
from feddrift.types import Bools, Clusters, Federation, Floats, Ints, Parting, State


@dataclass(frozen=True, repr=False)
class FairState(DriftState):
    """State of FairFedDrift after a time step."""

    # [g, c], losses by group when last scored, the reference of the drift test
    levels: Floats = field(default_factory=lambda: np.zeros((0, 0)), metadata=UNSCORED)


@dataclass(frozen=True)
class FairFedDrift(FedDrift):
    """FairFedDrift: a client drifts if no model suits all of its groups, and models merge if no group is harmed.

    The other settings are those of FedDrift; `test`, `quarantine` and `first` must have their defaults.

    Attributes:
        delta: Threshold of drift detection and of merging, for the loss of a group.
        metric: The loss: cross-entropy or error.
        max_models: Largest number of models; None: no limit.
    """

    delta: float = option(0.25, "a drift is a rise of a group's loss by more than this with every model")
    metric: Literal["error", "loss"] = option("loss", "what is compared: cross-entropy (loss), or error")
    max_models: int | None = option(30, "largest number of models, above it unused ones are retired; none: no limit")
    has_own_test: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, default in {"test": "threshold", "quarantine": False, "first": "one"}.items():
            if getattr(self, name) != default:
                raise ConfigError(f"FairFedDrift.{name} can only be {default}, got {getattr(self, name)}")
        super().__post_init__()

    def init(self, fed: Federation) -> FairState:
        unscored = np.full((fed.n_groups or fed.n_classes, fed.n_clients), np.nan)
        return FairState(**vars(super().init(fed)), levels=unscored)

    def step(self, state: State, fed: Federation) -> FairState:
        assert isinstance(state, FairState)
        loss = fed.evaluate(state.models, self.metric, by=choose_row_groups(fed))  # l[c, m, g]
        detected, levels = choose_models(loss, state.levels, state.votes.argmax(axis=1), self.delta)
        drifted = fed.allowed(detected.drifted)
        suppressed = detected.drifted & ~drifted
        detected = replace(detected, drifted=drifted, suppressed=suppressed)
        levels = np.where(suppressed, state.levels, levels)
        clusters = Clustering(state.models, state.w)
        founders = group_each_client(detected.drifted)
        clusters, detected, founders = retire_unused_models(self, clusters, detected, founders)
        start_from_first = replace(detected, best=np.where(detected.drifted, 0, detected.best))
        created = create_models(self, clusters, start_from_first, founders, state, fed)  # copies of the first model
        clusters = clusters.assign_new_data(assign_remaining_clients(detected, founders))
        clusters = clusters.add_events(create_suppressed_alarm_events(detected, clusters.models))
        D = self.compute_distances(clusters, created, (), fed)
        clusters = clusters.add_models(created.models, founders)
        clusters = self.merge_models(clusters, D, fed).add_events(created.events)
        clusters = clusters.forget_old_data(self.memory)
        return FairState(
            fed.train(clusters.models, clusters.w),
            clusters.w,
            votes=clusters.w[-1],
            events=clusters.events,
            next_id=state.next_id + len(founders),
            newborn=created.models.ids,
            previous=state.reference,
            levels=levels,
            **update_detection_fields(state, detected, fed.tau),
        )

    def compute_distances(
        self, clusters: Clustering, created: NewModels, waiting: Sequence[int], fed: Federation
    ) -> Floats:
        """Compute D of the old models on data from before this time step, then of the new models, which do not merge.

        Args:
            clusters: The old models and their data.
            created: The new models.
            waiting: Not used: FairFedDrift has no quarantine.
            fed: The federation.
        """
        n = len(clusters.models)
        D = np.full((n + len(created.models),) * 2, np.inf)
        if n > 1:
            is_old = np.arange(len(clusters.w))[:, None] < fed.tau
            old_data = Clusters(np.where(is_old, clusters.w.model, -1), n, clusters.w.weight)
            L = fed.cross_evaluate(clusters.models, old_data, self.metric, by=choose_row_groups(fed), per_client=True)
            D[:n, :n] = compute_group_distances(L, self.delta)
        return D

    @property
    def merge_limit(self) -> float:
        """The largest distance of models that merge; without a merge_delta, all models at a finite distance merge."""
        return float(np.finfo(np.float64).max) if self.merge_delta is None else self.merge_delta


def choose_row_groups(fed: Federation) -> Parting:
    """Return "group" if the stream has groups of rows, else "class"."""
    return "group" if fed.n_groups else "class"


def choose_models(loss: Floats, levels: Floats, current: Ints, delta: float) -> tuple[DetectionResult, Floats]:
    """Choose each client's model and detect drift from losses by group.

    A group without new or earlier rows does not make a model unsuitable.

    Args:
        loss: [c, m, g], the losses on the new data; NaN for groups without rows.
        levels: [g, c], the losses by group when each client was last scored.
        current: [c], the position of the model that a client without new data keeps.
        delta: The largest rise of a group's loss that a suitable model may have.

    Returns:
        The result of detection, and the next levels [g, c].
    """
    scored: Bools = np.isfinite(loss).sum(axis=2) > 0  # [c, m]
    total = np.where(scored, np.nansum(loss, axis=2), np.nan)
    worse = loss - levels.T[:, None] > delta + TOLERANCE  # False for NaN
    suits: Bools = scored & (worse.sum(axis=2) == 0)
    drifted: Bools = (scored.sum(axis=1) > 0) & (suits.sum(axis=1) == 0)
    best, lowest = clustering.find_best_models(np.where(suits | drifted[:, None], total, np.nan), current)
    new_levels = loss[np.arange(len(loss)), best].T  # [g, c]
    return DetectionResult(best, lowest, drifted), np.where(np.isnan(new_levels), levels, new_levels)


def compute_group_distances(L: Floats, delta: float) -> Floats:
    """Compute D(i, j), infinite on the diagonal, from losses by client and group.

    For each client with data of model j and each with data of model i, L_ij - L_ii is compared group by group. The
    distance is infinite if the difference exceeds delta in any group of any pair of clients; otherwise it is the
    largest sum over the groups that both clients have. D(i, j) is the larger of both directions.

    Args:
        L: [i, j, c, g], the loss of model i on the rows of group g among client c's data of model j.
        delta: The largest difference that a group may have.

    >>> L = np.zeros((2, 2, 1, 2))  # one client, two groups
    >>> L[0, 1, 0] = [0.2, 0.1]
    >>> float(compute_group_distances(L, 0.25)[0, 1].round(9)), float(compute_group_distances(L, 0.15)[0, 1])
    (0.3, inf)
    """
    D = np.full(L.shape[:2], np.inf)
    for i, j in np.argwhere(~np.eye(len(L), dtype=bool)):
        worse = L[i, j][:, None] - L[i, i]  # [client in j, client in i, g]
        comparable = ~np.isnan(worse).all(axis=2)
        if comparable.any() and np.nanmax(worse) <= delta + TOLERANCE:
            D[i, j] = max(0.0, float(np.nansum(worse, axis=2)[comparable].max()))
    return np.asarray(np.maximum(D, D.T))
