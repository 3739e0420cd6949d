"""FedDrift-Auto: shared models for conflicting data, private models at each client, and no setting to tune.

Shared models are clusters: each cell of data (a client's data of one time step) trains one of them, and every client is
assigned to the one that its newest data train. Private models stay with their client. A time step has six phases:

1.  Evaluate the shared models on the new data.
2.  Review the alarms of the last time step: do the new data show that they paid? A client whose alarm did not pay
    returns to its old model. The numbers of alarms that paid and that did not decide whether alarms are trusted. The
    mistakes of the three possible ensembles decide which of them predicts.
3.  Run trials at clients whose error rose, that have no error to compare with, or that another shared model serves
    better. An alarm means that another shared model fits better, or that the new data contradict the old ones.
4.  Update the clusters: alarms that are acted on move a client to another shared model or create a new one; shared
    models that do not differ merge.
5.  Train the shared models on their cells, as in Algorithm 1 of the paper. Only this phase sends parameters.
6.  Train the private models.

All thresholds are shares or numbers of standard errors (z), the same for all data. docs/auto.md reports the value of
each part and the alternatives that were tried.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from feddrift import clustering
from feddrift.algorithms.auto import new_clusters, private_models, review, trials
from feddrift.algorithms.auto.new_clusters import NewClusters
from feddrift.algorithms.auto.private_models import NEW, OWN, STAY, TUNED, EnsembleGain, get_private_id
from feddrift.algorithms.auto.review import SharedModels, TrackRecord, find_current_assignment
from feddrift.algorithms.auto.trials import Trial
from feddrift.algorithms.feddrift.detection import SUPPRESSION_REASON
from feddrift.clustering import Clustering
from feddrift.models import join
from feddrift.types import Bools, Clusters, Event, Federation, Floats, Ints, Models, State, Votes


@dataclass(frozen=True, repr=False)
class AutoState(State):
    """State of FedDrift-Auto after a time step."""

    w: Clusters
    good: float = 0.0  # number of alarms that paid
    bad: float = 0.0  # number of alarms that did not pay
    # Gain of the tuned model, and of the tuned and own model, over the shared one.
    ensemble_gain: EnsembleGain = field(default=(0.0, 0.0), metadata={"former_name": "helped"})
    next_id: int = field(default=1, metadata={"former_name": "born"})
    error: Floats = field(kw_only=True, metadata={"newcomer": np.nan})  # [c], of the assigned model on the last data
    rows: Ints = field(kw_only=True, metadata={"newcomer": 0})  # [c], number of rows behind `error`
    # [c], id of the model that the client just left, or -1.
    previous_model: Ints = field(kw_only=True, metadata={"newcomer": -1, "former_name": "left"})
    # [c], whether the next data review the trial.
    reviewed_next: Bools = field(kw_only=True, metadata={"newcomer": False, "former_name": "looked"})


@dataclass(frozen=True)
class Plan:
    """Decisions of a time step, before the clusters change."""

    alarmed: Bools  # [c], whether the trial raised an alarm
    acted: Bools  # [c], whether the alarm is acted on
    reviewed_next: Bools  # [c], whether the next data review the trial
    target: Ints  # [c], position of the shared model to be assigned to; for founders the present one
    founders: list[int]  # clients that need a new model
    trials: dict[int, Trial]  # by client
    trial_models: list[Models]  # private models of the trials that are reviewed
    events: tuple[Event, ...]


@dataclass(frozen=True)
class FedDriftAuto:
    """FedDrift-Auto, the default method. It has no settings: its fields are constants that only experiments change."""

    # Rounds of training, as a share of the rounds of a time step.
    tuned_rounds_share: float = 0.25  # of a tuned model, and of the models of a trial
    own_rounds_share: float = 0.5  # of an own model

    # Thresholds in standard errors.
    trial_rise_z: float = 1.0  # a client runs a trial if its error rose by more
    switch_z: float = 1.28  # a trial raises an alarm if another shared model is ahead by more
    not_worse_z: float = -1.0  # a risen error is evidence only if the alternative is not further behind
    outcome_z: float = 1.645  # an alarm paid, or did not, if the next data show a larger difference
    certain_z: float = 4.0  # an alarm is acted on whatever the track record if the alternative is ahead by more
    share_model_z: float = 0.84  # founders share a model unless their own candidate is better by more
    merge_z: float = 2.0  # models merge if they differ by at most this

    # Expected share of false alarms among those of a time step that ask for a new model.
    false_discovery_rate: float = 0.2

    def init(self, fed: Federation) -> AutoState:
        """Return the state before the first time step: one untrained model."""
        n = fed.n_clients
        private_models.check_client_count(n)
        zeros = np.zeros(n, dtype=np.int64)
        return AutoState(
            fed.fresh(), clustering.create_empty_clusters(n), Votes.for_one_model(zeros, 1), "soft",
            error=np.full(n, np.nan), rows=zeros, previous_model=zeros - 1, reviewed_next=np.zeros(n, dtype=bool),
        )  # fmt: skip

    def step(self, state: State, fed: Federation) -> AutoState:
        """Return the state after one time step. The numbers are those of the phases in the module's docstring."""
        assert isinstance(state, AutoState)
        private_models.check_client_count(fed.n_clients)  # clients may have joined
        shared = self.evaluate_shared_models(state, fed)  # 1
        shared = self.review_last_step(state, shared, fed)  # 2
        plan = self.plan_changes(state, shared, fed)  # 3
        clusters, next_id, delayed = self.update_clusters(state, shared, plan, fed)  # 4
        assigned = find_current_assignment(clusters.w)
        trained = fed.train(clusters.models, limit_trunks_per_client(clusters, assigned, fed.counts))  # 5
        private, gain = self.train_private_models(state, shared, trained, clusters.w, assigned, fed)  # 6
        models = join(trained, private, *plan.trial_models)

        # The next error of a client is compared with that of its model on the new data. Founders have no such error. An
        # alarm whose new model is delayed must be raised again if it is right, so its client keeps the old error.
        updated = shared.scored & ~delayed
        error = np.where(updated, shared.error[np.arange(fed.n_clients), plan.target], state.error)
        error[[c for c in plan.founders if not delayed[c]]] = np.nan
        return AutoState(
            models,
            Clusters(clusters.w.model, len(models)),
            private_models.share_votes_equally(models, assigned, private_models.choose_ensemble_size(gain)),
            "soft",
            events=clusters.events,
            drifted=plan.alarmed,
            good=shared.record.good,
            bad=shared.record.bad,
            ensemble_gain=gain,
            next_id=next_id,
            error=error if fed.tau else np.full(fed.n_clients, np.nan),  # at first the model was not trained yet
            rows=np.where(updated, fed.counts[-1], state.rows),
            previous_model=np.where(plan.acted & ~delayed, np.asarray(shared.models.ids)[shared.assigned], -1),
            reviewed_next=plan.reviewed_next,
        )

    def evaluate_shared_models(self, state: AutoState, fed: Federation) -> SharedModels:
        """Phase 1: count the mistakes of all shared models on the new data."""
        ids = [i for i, owner in zip(state.models.ids, state.models.owner, strict=True) if owner < 0]
        models = private_models.select_by_id(state.models, ids)
        clusters = Clustering(models, Clusters(state.w.model.copy(), len(ids)))
        every_model = np.repeat(np.arange(len(ids))[:, None, None], fed.n_clients, axis=1)
        mistakes = fed.contest(models, every_model)
        record = TrackRecord(state.good, state.bad)
        return SharedModels(clusters, find_current_assignment(clusters.w), mistakes, record, state.ensemble_gain)

    def review_last_step(self, state: AutoState, shared: SharedModels, fed: Federation) -> SharedModels:
        """Phase 2: review the last alarms on the new data, before any model is trained on them."""
        if not fed.tau or not shared.scored.any():
            return shared
        reviewed = shared.scored & state.reviewed_next
        alarmed = reviewed & (state.drifted if state.drifted is not None else False)
        previous = state.previous_model
        contestants = review.list_contestants(state.models, shared, reviewed, alarmed, previous)
        result = fed.contest(state.models, contestants)
        shared, ensemble_events = review.update_ensemble_size(shared, result)
        shared, return_events = review.review_alarms(
            shared, result, reviewed, alarmed, previous, self.outcome_z, self.certain_z
        )
        clusters = shared.clusters.add_events([*ensemble_events, *return_events])
        return review.retire_unused_models(replace(shared, clusters=clusters))

    def plan_changes(self, state: AutoState, shared: SharedModels, fed: Federation) -> Plan:
        """Phase 3: run trials, and decide which clients move to another shared model or need a new one."""
        n = fed.n_clients
        rows = fed.counts[-1]
        best = shared.best
        error = shared.error[np.arange(n), shared.assigned]
        rise = trials.compute_rise_z(error, rows, state.error, state.rows)
        suspicious = (rise > self.trial_rise_z) | np.isnan(rise) | (best != shared.assigned)
        on_trial = shared.scored & (fed.tau > 0) & (rows > 1) & suspicious
        trial_of = dict[int, Trial]()
        trial_models = list[Models]()
        if on_trial.any():
            rounds = self._count_rounds(self.tuned_rounds_share, fed)
            trial_of, trial_models = trials.run_trials(
                shared.models, shared.clusters.w, shared.assigned, best, rise, on_trial, rounds, fed
            )
        n_scored = int(shared.scored.sum())
        alarming_clients = set(
            trials.raise_alarms(trial_of, n_scored, self.false_discovery_rate, self.switch_z, self.not_worse_z)
        )
        alarmed, acted, reviewed_next = (np.zeros(n, dtype=bool) for _ in range(3))
        target = shared.assigned.copy()
        events = list[Event]()
        founders = list[int]()
        for c, trial in trial_of.items():
            alarmed[c] = c in alarming_clients
            reviewed_next[c] = alarmed[c] or trial.lead_z > self.not_worse_z
            is_certain = trial.lead_z > self.certain_z and trial.halves_mistakes
            acted[c] = alarmed[c] and (is_certain or (shared.record.is_trusted and fed.tau > 1))
            if acted[c] and trial.switch:
                target[c] = best[c]
            elif acted[c]:
                founders.append(c)  # the event follows when the model is created or delayed
            if alarmed[c] and (trial.switch or not acted[c]):
                target_id = shared.models.ids[target[c]]
                outcome = f"it moves from model {shared.get_model_id(c)} to model {target_id}"
                if not acted[c]:
                    early = "it is too early to know whether alarms pay"
                    outcome = f"not acted on: {early if fed.tau < 2 else shared.record}"
                events.append(_create_decision(target_id, c, f"{trial.describe(self.not_worse_z)}; {outcome}"))
        reviewed_clients = np.flatnonzero(reviewed_next)
        ids = [get_private_id(kind + half, c) for kind in (STAY, NEW) for half in range(2) for c in reviewed_clients]
        selected = (private_models.select_by_id(models, ids) for models in trial_models)
        kept = [models for models in selected if models.ids]
        return Plan(alarmed, acted, reviewed_next, target, founders, trial_of, kept, tuple(events))

    def update_clusters(
        self, state: AutoState, shared: SharedModels, plan: Plan, fed: Federation
    ) -> tuple[Clustering, int, Bools]:
        """Phase 4: move clients, create models for founders, and merge models that do not differ.

        A founder that is not allowed to create a model yet can share the new model of a founder that is.

        Returns:
            The clusters, the next free id, and [c] the founders whose new model is delayed.
        """
        targets = plan.target.copy()
        events = list(plan.events)
        is_founder = np.isin(np.arange(fed.n_clients), plan.founders)
        allowed = fed.allowed(is_founder)
        delayed = is_founder
        created: NewClusters | None = None
        if allowed.any():
            created = new_clusters.create_clusters(
                plan.founders, [plan.trials[c].fresh for c in plan.founders], allowed, shared.models, shared.best,
                state.next_id, self._count_rounds(self.tuned_rounds_share, fed), self.share_model_z, fed,
            )  # fmt: skip
            delayed = is_founder & ~np.isin(np.arange(fed.n_clients), [c for group in created.groups for c in group])
            targets[is_founder & ~delayed] = -1
        for c in np.flatnonzero(delayed).tolist():
            cause = new_clusters.DELAY_REASON if allowed[c] else SUPPRESSION_REASON
            reason = f"{plan.trials[c].describe(self.not_worse_z)}; not acted on: {cause}"
            events.append(_create_decision(shared.get_model_id(c), c, reason))
        clusters = shared.clusters.assign_new_data(targets).add_events(events)
        next_id = state.next_id
        if created is not None:
            creation_events = self._list_creations(created, plan.trials)
            clusters = clusters.add_models(created.models, created.groups).add_events(creation_events)
            next_id += len(created.groups)
        clusters = new_clusters.merge_similar(clusters, shared.clusters, shared.mistakes, targets, self.merge_z, fed)
        return clusters, next_id, delayed

    def train_private_models(
        self, state: AutoState, shared: SharedModels, trained: Models, w: Clusters, assigned: Ints, fed: Federation
    ) -> tuple[Models, EnsembleGain]:
        """Phase 6: train the private models of all clients; at the first time step also measure their gain."""
        rounds = (
            self._count_rounds(self.tuned_rounds_share, fed),
            self._count_rounds(self.own_rounds_share, fed),
        )
        if not fed.tau:
            gain = private_models.measure_first_gain(trained, w, assigned, rounds, fed)
            return private_models.train_private_models(None, trained, w, assigned, rounds, fed), gain
        ids = [get_private_id(kind, c) for kind in (TUNED, OWN) for c in range(fed.n_clients)]
        previous = private_models.select_by_id(state.models, ids)
        return private_models.train_private_models(previous, trained, w, assigned, rounds, fed), shared.gain

    def _count_rounds(self, share: float, fed: Federation) -> int:
        """Return a share of the rounds of a time step as a number of rounds, at least 1."""
        return max(1, round(share * fed.local.rounds))

    def _list_creations(self, created: NewClusters, trial_of: dict[int, Trial]) -> list[Event]:
        """Return the event of each new model; its reason is the trial of the first founder."""
        events = []
        for model_id, family, group, parent in zip(
            created.models.ids, created.models.family, created.groups, created.parents, strict=True
        ):
            reason = trial_of[group[0]].describe(self.not_worse_z)
            together = f"; {len(group)} clients found it together" if len(group) > 1 else ""
            cause: dict[str, Any] = {"clients": list(group), "reason": reason + together}
            cause |= {"start": "fresh"} if parent is None else {"from": parent}
            cause |= {"family": family} if family != model_id else {}
            events.append(Event("created", model_id, cause))
        return events


def limit_trunks_per_client(clusters: Clustering, assigned: Ints, counts: Ints) -> Clusters:
    """Return the cells to train on: for each client those of at most two trunks.

    These are the trunk of its assigned model and the one that most of its other data train, so that a client never
    sends more than twice the parameters of one model.

    Args:
        clusters: The shared models and their cells.
        assigned: [c], position of the model that each client is assigned to.
        counts: [t, c], number of examples of each cell.
    """
    family = np.asarray(clusters.models.family)
    trunk = np.where(
        clusters.w.model >= 0, family[clusters.w.model], -1
    )  # [t, c], the family whose trunk the cell trains
    cells = clusters.w.model.copy()
    for c in range(trunk.shape[1]):
        assigned_trunk = family[assigned[c]]
        others = [f for f in np.unique(trunk[:, c]) if f >= 0 and f != assigned_trunk]
        rows_of = {f: counts[trunk[:, c] == f, c].sum() for f in others}
        if len(rows_of) > 1:
            largest = max(rows_of, key=lambda f: rows_of[f])
            cells[~np.isin(trunk[:, c], [assigned_trunk, largest]), c] = -1
    return Clusters(cells, clusters.w.n_models)


def _create_decision(model: int, client: int, reason: str) -> Event:
    """Return the event of a decision about a client; `model` is the id of the model that it concerns."""
    return Event("decided", model, {"clients": [client], "reason": reason})
