"""FedDrift-Eager (Algorithm 3) and FedDrift (Algorithm 4) of Jothimurugesan et al., AISTATS 2023.

Where the authors' code, which produced the published tables, differs from the paper's text, defaults follow the code;
docs/deviations.md numbers the differences. Equations and algorithms have the paper's numbers. Two parts of a step have
their own modules: `detection` (each client's best model and its alarms) and `new_models` (creation and retirement).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from feddrift import clustering
from feddrift.algorithms.feddrift.detection import (
    DriftDetectionOptions,
    DriftState,
    create_suppressed_alarm_events,
    detect_drift,
    update_detection_fields,
)
from feddrift.algorithms.feddrift.new_models import (
    NewModels,
    assign_remaining_clients,
    create_models,
    group_all_clients,
    group_each_client,
    retire_unused_models,
)
from feddrift.algorithms.options import option
from feddrift.clustering import Clustering
from feddrift.errors import ConfigError
from feddrift.models import take
from feddrift.types import Event, Federation, Floats, State

MIN_CLIENTS_FOR_WARNING = 20_000  # from this number of clients on, an unlimited number of models causes a warning
DRIFTED_SHARE = 0.1  # share of clients that drift in one time step, an assumption of the warning

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FedDriftEager(DriftDetectionOptions):
    """FedDrift-Eager (Algorithm 3): all clients that drift in a time step share one new model.

    Its settings are those of `DriftDetectionOptions`.
    """

    def step(self, state: State, fed: Federation) -> DriftState:
        assert isinstance(state, DriftState)
        clusters, state = end_quarantines(self, state, fed)  # not in the paper

        # Find the best model of each client, and the clients that drifted: l[c, m], argmin, eq. 4.
        detected = detect_drift(self, state, fed)
        groups = group_all_clients(detected.drifted)
        clusters, detected, groups = retire_unused_models(self, clusters, detected, groups)  # not in the paper
        suppressed = create_suppressed_alarm_events(detected, clusters.models)

        # M <- M + 1: one new model for all drifted clients; for the others w[tau] = 1{m = argmin l}.
        created = create_models(self, clusters, detected, groups, state, fed)
        clusters = clusters.assign_new_data(assign_remaining_clients(detected, groups))
        clusters = clusters.add_models(created.models, groups).add_events(suppressed).add_events(created.events)

        clusters = clusters.forget_old_data(self.memory)  # FedDrift-Eager-W
        models = fed.train(clusters.models, clusters.w)  # Algorithm 1
        return DriftState(
            models,
            clusters.w,
            votes=clusters.w[-1],
            events=clusters.events,
            next_id=state.next_id + len(groups),
            waiting=list_quarantined_models(self, state, created),
            **update_detection_fields(state, detected, fed.tau),
        )


@dataclass(frozen=True)
class FedDrift(DriftDetectionOptions):
    """FedDrift (Algorithm 4): every client that drifts gets a new model of its own, and similar models merge.

    The other settings are those of `DriftDetectionOptions`.

    Attributes:
        merge_delta: Largest distance of models that merge; None: delta.
        first: Start with one model, or with one for each client.
        redetect: A setting of FedDrift-C only. It is declared here because the records of every FedDrift contain it.
        one_global: Whether the class is FedDrift-C.
    """

    merge_delta: float | None = option(None, "models merge if their distance is at most this; none: delta")
    first: Literal["one", "each"] = option("one", "clients start with one model, or each with its own")
    redetect: bool = option(False, "FedDrift-C only: clients whose new model was dropped may raise the alarm again")
    one_global: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.merge_delta is not None:
            self._check_threshold("merge_delta", self.merge_delta)
        if self.redetect and not self.one_global:
            raise ConfigError("FedDrift.redetect is a setting of FedDrift-C only, got true")

    def init(self, fed: Federation) -> DriftState:
        state = super().init(fed)
        n = fed.n_clients
        if self.max_models is None and n >= MIN_CLIENTS_FOR_WARNING:
            log.warning("%s", describe_memory_need(type(self).__name__, n))
        if self.first == "one":
            return state
        if self.max_models is not None and self.max_models < n:
            raise ConfigError(f"first=each makes {n} models, one per client, but max_models is {self.max_models}")
        models = take(state.models, [0] * n, range(n))
        return replace(state, models=models, w=clustering.create_empty_clusters(n, n), votes=np.eye(n), next_id=n)

    def step(self, state: State, fed: Federation) -> DriftState:
        assert isinstance(state, DriftState)
        if self.first == "each" and not fed.tau:
            return train_separate_models(self, state, fed)  # the models are equal: there is nothing to choose yet
        clusters, state = self.finish_last_step(state, fed)  # not in the paper

        # Find the best model of each client, and the clients that drifted: l[c, m], argmin, eq. 4.
        detected = detect_drift(self, state, fed)
        groups = group_each_client(detected.drifted)
        clusters, detected, groups = retire_unused_models(self, clusters, detected, groups)  # not in the paper
        suppressed = create_suppressed_alarm_events(detected, clusters.models)

        # Create a local model at each drifted client; for the others w[tau] = 1{m = argmin l}.
        created = create_models(self, clusters, detected, groups, state, fed)
        clusters = clusters.assign_new_data(assign_remaining_clients(detected, groups)).add_events(suppressed)

        # D(i, j) <- max(L_ij - L_ii, L_ji - L_jj, 0); while min D <= delta: Merge(i, j, D).
        D = self.compute_distances(clusters, created, state.waiting, fed)
        clusters = self.merge_models(clusters.add_models(created.models, groups), D, fed).add_events(created.events)

        clusters = clusters.forget_old_data(self.memory)  # FedDrift-W
        models = fed.train(clusters.models, clusters.w)  # Algorithm 1
        return DriftState(
            models,
            clusters.w,
            votes=clusters.w[-1],
            events=clusters.events,
            next_id=state.next_id + len(groups),
            newborn=created.models.ids,
            previous=state.reference,
            waiting=list_quarantined_models(self, state, created),
            **update_detection_fields(state, detected, fed.tau),
        )

    def finish_last_step(self, state: DriftState, fed: Federation) -> tuple[Clustering, DriftState]:
        """Retire models before detection; return the clusters and the last state without them."""
        return end_quarantines(self, state, fed)

    def compute_distances(
        self, clusters: Clustering, created: NewModels, waiting: Sequence[int], fed: Federation
    ) -> Floats:
        """Compute the distances D of all models, the old ones first.

        New models and models in quarantine have infinite distances: they do not merge yet.

        Args:
            clusters: The old models and their data.
            created: The new models.
            waiting: Ids of the models in quarantine.
            fed: The federation.
        """
        n = len(clusters.models)
        D = np.full((n + len(created.models),) * 2, np.inf)
        if n > 1:
            D[:n, :n] = clustering.compute_distances(fed.cross_evaluate(clusters.models, clusters.w, self.metric))
            quarantined = np.flatnonzero(np.isin(clusters.models.ids, waiting))
            D[quarantined] = D[:, quarantined] = np.inf
        return D

    def merge_models(self, clusters: Clustering, D: Floats, fed: Federation) -> Clustering:
        """Merge the two closest models while their distance is within `merge_limit`."""
        models, w, events = clustering.merge_closest(clusters.models, clusters.w, D, fed.counts, self.merge_limit)
        return Clustering(models, w, clusters.events + events)

    @property
    def merge_limit(self) -> float:
        """The largest distance of models that merge."""
        return self.delta if self.merge_delta is None else self.merge_delta


def describe_memory_need(name: str, n_clients: int) -> str:
    """Return a warning about the memory that an unlimited number of models may need.

    >>> describe_memory_need("FedDrift", 100_000)  # doctest: +ELLIPSIS
    'FedDrift has no max_models: if 10,000 of 100,000 clients ... take 18 GB; max_models=50 limits it'
    """
    n_models = round(DRIFTED_SHARE * n_clients)
    gigabytes = 16 * n_models * (n_clients + n_models) / 1e9  # loss and votes [c, m], L and D [m, m], 8 bytes each
    return (
        f"{name} has no max_models: if {n_models:,} of {n_clients:,} clients drift at once, each gets a new model that "
        f"all clients score, and the scores, votes and distances take {gigabytes:.2g} GB; max_models=50 limits it"
    )


def train_separate_models(method: FedDrift, state: DriftState, fed: Federation) -> DriftState:
    """Return the state after the first time step with first=each: every client trains a model of its own.

    The models are equal before, so the loss of one is the reference of all clients.
    """
    lowest = fed.evaluate(take(state.models, [0], [0]), method.metric)[:, 0]
    created = tuple(
        Event("created", c, {"clients": [c], "reason": "an initial model"}) for c in range(1, fed.n_clients)
    )
    w = clustering.append_assignment(state.w, np.arange(fed.n_clients))
    models = fed.train(state.models, w)
    observed = np.concatenate([state.observed, lowest[None]])
    return replace(state, models=models, w=w, events=created, reference=lowest, observed=observed)


def end_quarantines(method: DriftDetectionOptions, state: DriftState, fed: Federation) -> tuple[Clustering, DriftState]:
    """End the quarantine of each model whose founder has new data; the paper has no quarantine.

    A model in quarantine serves only the one client that founded it. If it is the founder's best model on the new data,
    it stays, and all clients may choose it. Otherwise it is retired, and no model is trained on its data again. Models
    whose founder was not scored stay in quarantine.

    Returns:
        The clusters of this time step so far, and the state of the last time step without the retired models.
    """
    if not state.waiting:
        return Clustering(state.models, state.w), state
    ids = state.models.ids
    loss = fed.evaluate(state.models, method.metric)
    best, lowest = clustering.find_best_models(loss, state.votes.argmax(axis=1))
    present = [i for i in state.waiting if i in ids]
    founder = {i: int(np.flatnonzero((state.w.model == ids.index(i)).any(axis=0))[0]) for i in present}
    waiting = tuple(i for i, c in founder.items() if np.isnan(lowest[c]))
    retired = [i for i, c in founder.items() if i not in waiting and ids[best[c]] != i]
    kept = ~np.isin(ids, retired)
    models, w = clustering.keep_models(state.models, state.w, kept)
    votes = state.votes[:, kept]
    for i in retired:  # the founder returns to the best of the other models
        loss_of_kept = np.where(kept, loss[founder[i]], np.inf)
        votes[founder[i]] = np.arange(len(ids))[kept] == np.nanargmin(loss_of_kept)
    events = tuple(
        Event("retired", i, {"reason": "the next data did not confirm the drift", "client": founder[i]})
        for i in retired
    )
    newborn = tuple(i for i in state.newborn if i not in retired)
    state = replace(state, models=models, w=w, votes=votes, waiting=waiting, newborn=newborn)
    return Clustering(models, w, events), state


def list_quarantined_models(method: DriftDetectionOptions, state: DriftState, created: NewModels) -> tuple[int, ...]:
    """Return the ids of the models that are in quarantine after this time step."""
    one_founder = (i for i, clients in zip(created.models.ids, created.groups, strict=True) if len(clients) == 1)
    return (*state.waiting, *one_founder) if method.quarantine else ()
