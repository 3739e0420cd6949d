"""FedDrift-Auto: shared models for conflicting data, private models at each client, and no setting to tune.

Shared models are clusters: each cell of data (a client's data of one time step) trains one of them, and every client is
assigned to the one that its newest data train. Private models stay with their client. A client predicts with an
ensemble of its shared model and up to two private ones (`private_models`). A time step has six phases:

1.  Evaluate all shared models on the new data of every client.
2.  Review the last time step on the new data. Choose the ensemble with the highest accuracy so far.
    Count the alarms that the new data confirm and those that they contradict: these numbers decide whether alarms are
    trusted. A client whose alarm is contradicted returns to its previous model. Retire unused models.
3.  Run trials at clients whose error rose, that have no earlier error, or that another shared model serves better
    (`trials`). A trial raises an alarm if another shared model fits the new data better, or if the new data contradict
    the old ones. An alarm is acted on if its evidence is overwhelming (`certain_z`). From the third time step on it
    is also acted on if alarms are trusted (`TrackRecord`).
4.  Update the clusters. A client whose alarm is acted on moves to the other shared model, or it is a founder: it gets
    a new shared model, alone or with other founders (`new_clusters`). Shared models that do not differ merge.
5.  Train the shared models on their cells, as in Algorithm 1 of the paper. A client trains at most two trunks.
6.  Train the private models of every client.

Private models, also those of trials, are never sent. All thresholds are shares or numbers of standard errors (z), the
same for all data. docs/auto-measured.md reports the value of each part, docs/decisions/0017-auto.md the alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from feddrift import clustering
from feddrift.algorithms.auto import new_clusters, private_models, review, trials
from feddrift.algorithms.auto.new_clusters import NewClusters
from feddrift.algorithms.auto.private_models import NEW, OWN, STAY, TUNED, EnsembleGain, get_private_id, get_trial_ids
from feddrift.algorithms.auto.review import SharedModels, TrackRecord, find_current_assignment
from feddrift.algorithms.auto.trials import Trial
from feddrift.algorithms.feddrift.detection import NOT_ACTED_ON, SUPPRESSION_REASON
from feddrift.clustering import Clustering
from feddrift.models import join
from feddrift.types import Bools, Clusters, Event, Federation, Floats, Ints, Models, State, Votes


@dataclass(frozen=True, repr=False)
class AutoState(State):
    """State of FedDrift-Auto after a time step."""

    w: Clusters
    # Numbers of alarms that later data confirmed and contradicted, see `TrackRecord`.
    confirmed: float = field(default=0.0, metadata={"former_name": "good"})
    contradicted: float = field(default=0.0, metadata={"former_name": "bad"})
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
class StepDecisions:
    """Decisions of a time step, before the clusters change."""

    alarmed: Bools  # [c], whether the trial raised an alarm
    acted_on: Bools  # [c], whether the alarm is acted on; the new model of a founder may still be delayed
    reviewed_next: Bools  # [c], whether the next data review the trial
    assigned: Ints  # [c], position of the shared model that each client is assigned to; founders keep theirs for now
    founders: list[int]  # clients that need a new model
    trial_by_client: dict[int, Trial]
    trial_models: list[Models]  # private models of the trials that are reviewed
    events: list[Event]  # of all alarms except those of founders


@dataclass(frozen=True)
class FedDriftAuto:
    """FedDrift-Auto, the default method. It has no settings: its fields are constants that only experiments change."""

    # Rounds of training, as a share of the rounds of a time step.
    tuned_rounds_share: float = 0.25  # of a tuned model, and of the models of a trial
    own_rounds_share: float = 0.5  # of an own model

    # Thresholds in standard errors.
    trial_rise_z: float = 1.0  # a client runs a trial if its error rose by more
    switch_z: float = 1.28  # a trial raises an alarm if another shared model is ahead by more
    # Above this lead over `stay`, a risen error alone is evidence, and a trial without an alarm is reviewed.
    not_worse_z: float = -1.0
    review_z: float = 1.645  # the next data confirm or contradict an alarm if they show a larger difference
    # An alarm needs no trust if its lead is above this and the alternative halves the mistakes. A trial without an
    # alarm counts as half a contradicted alarm if the next data show that its alternative is behind by more.
    certain_z: float = 4.0
    # Founders share a model if each other's candidates are at most this much worse than the own one.
    group_z: float = 0.84
    merge_z: float = 2.0  # models merge if they differ by at most this

    # Expected share of false alarms among those of a time step that ask for a new model.
    false_discovery_rate: float = 0.2

    def init(self, fed: Federation) -> AutoState:
        """Return the state before the first time step: one untrained model."""
        n = fed.n_clients
        private_models.check_client_count(n)
        zeros = np.zeros(n, dtype=np.int64)
        return AutoState(
            fed.fresh(), clustering.create_empty_clusters(n), Votes.for_one_model(zeros, 1), ballot="soft",
            error=np.full(n, np.nan), rows=zeros, previous_model=zeros - 1, reviewed_next=np.zeros(n, dtype=bool),
        )  # fmt: skip

    def step(self, state: State, fed: Federation) -> AutoState:
        """Return the state after one time step; the module's docstring describes the phases."""
        assert isinstance(state, AutoState)
        private_models.check_client_count(fed.n_clients)  # clients may have joined
        shared = self.evaluate_shared_models(state, fed)  # phase 1
        shared = self.review_last_step(state, shared, fed)  # phase 2
        decisions = self.decide_changes(state, shared, fed)  # phase 3
        clusters, next_id, delayed = self.update_clusters(state, shared, decisions, fed)  # phase 4
        assigned = find_current_assignment(clusters.w)
        training_data = limit_trunks_per_client(clusters, assigned, fed.counts)
        trained = fed.train(clusters.models, training_data)  # phase 5
        private, gain = self.train_private_models(state, shared, trained, clusters.w, assigned, fed)  # phase 6
        models = join(trained, private, *decisions.trial_models)
        error, rows = find_reference_errors(state, shared, decisions, delayed, fed)
        assigned_ids = np.asarray(shared.models.ids)[shared.assigned]  # after the review, before moves
        return AutoState(
            models,
            Clusters(clusters.w.model, len(models)),  # w also has columns for the private models, which no cell trains
            private_models.share_votes_equally(models, assigned, private_models.choose_ensemble_size(gain)),
            ballot="soft",
            events=clusters.events,
            drifted=decisions.alarmed,
            confirmed=shared.track_record.confirmed,
            contradicted=shared.track_record.contradicted,
            ensemble_gain=gain,
            next_id=next_id,
            error=error,
            rows=rows,
            previous_model=np.where(decisions.acted_on & ~delayed, assigned_ids, -1),
            reviewed_next=decisions.reviewed_next,
        )

    def evaluate_shared_models(self, state: AutoState, fed: Federation) -> SharedModels:
        """Phase 1: count the mistakes of all shared models on the new data.

        In a state the shared models come before the private ones, so positions in `state.w` are also positions in the
        shared models.
        """
        ids = [i for i, owner in zip(state.models.ids, state.models.owner, strict=True) if owner < 0]
        models = private_models.select_by_id(state.models, ids)
        clusters = Clustering(models, Clusters(state.w.model.copy(), len(ids)))
        assigned = find_current_assignment(clusters.w)
        every_model = np.repeat(np.arange(len(ids))[:, None], fed.n_clients, axis=1)  # each model by itself
        received = fed.find_receivers(models)
        teams = np.where(received.T, every_model, assigned)  # in place of a withheld model the assigned one
        mistakes = fed.contest(models, teams[:, :, None])
        record = TrackRecord(state.confirmed, state.contradicted)
        return SharedModels(clusters, assigned, mistakes, record, state.ensemble_gain, received)

    def review_last_step(self, state: AutoState, shared: SharedModels, fed: Federation) -> SharedModels:
        """Phase 2: review the ensembles and the last alarms on the new data, before any model is trained on them."""
        if not fed.tau or not shared.scored.any():
            return shared
        reviewed = shared.scored & state.reviewed_next
        alarmed = reviewed & (state.drifted if state.drifted is not None else False)
        previous = state.previous_model
        contestants = review.list_contestants(state.models, shared, reviewed, alarmed, previous)
        result = fed.contest(state.models, contestants)
        shared, ensemble_events = review.add_ensemble_gain(shared, result)
        shared, return_events = review.review_alarms(
            shared, result, reviewed, alarmed, previous, self.review_z, self.certain_z
        )
        clusters = shared.clustering.add_events([*ensemble_events, *return_events])
        return review.retire_abandoned_models(replace(shared, clustering=clusters))

    def decide_changes(self, state: AutoState, shared: SharedModels, fed: Federation) -> StepDecisions:
        """Phase 3: run trials, and decide which clients move to another shared model or need a new one."""
        clients = np.arange(fed.n_clients)
        trial_by_client, trial_models = self.run_trials(state, shared, fed)
        alarms = trials.raise_alarms(
            trial_by_client, int(shared.scored.sum()), self.false_discovery_rate, self.switch_z, self.not_worse_z
        )
        assigned = shared.assigned.copy()
        acted_on = np.zeros(fed.n_clients, dtype=bool)
        founders = list[int]()
        events = list[Event]()
        for c in alarms:
            trial = trial_by_client[c]
            acted_on[c] = self.is_acted_on(trial, shared.track_record, fed.tau)
            if not acted_on[c]:
                events.append(self.build_ignored_alarm_event(c, trial, shared, fed.tau))
            elif trial.prefers_other_model:
                assigned[c] = shared.best[c]
                events.append(self.build_move_event(c, trial, shared))
            else:
                founders.append(c)  # `update_clusters` adds the event: the new model may be delayed
        not_worse = [c for c, trial in trial_by_client.items() if trial.lead_z > self.not_worse_z]
        alarmed = np.isin(clients, alarms)
        reviewed_next = alarmed | np.isin(clients, not_worse)
        ids = [i for c in np.flatnonzero(reviewed_next) for i in get_trial_ids(STAY, c) + get_trial_ids(NEW, c)]
        return StepDecisions(
            alarmed=alarmed,
            acted_on=acted_on,
            reviewed_next=reviewed_next,
            assigned=assigned,
            founders=founders,
            trial_by_client=trial_by_client,
            trial_models=[private_models.select_by_id(models, ids) for models in trial_models] if ids else [],
            events=events,
        )

    def is_acted_on(self, trial: Trial, track_record: TrackRecord, tau: int) -> bool:
        """Return True if the alarm of a trial is acted on: its evidence is overwhelming, or alarms are trusted."""
        is_certain = trial.lead_z > self.certain_z and trial.halves_mistakes
        return is_certain or (track_record.is_trusted and tau > 1)

    def build_ignored_alarm_event(self, client: int, trial: Trial, shared: SharedModels, tau: int) -> Event:
        """Return the event of an alarm that is not acted on: the client keeps its model."""
        cause = "no earlier alarm has been compared with later data yet" if tau < 2 else str(shared.track_record)
        reason = f"{trial.describe(self.not_worse_z)}; {NOT_ACTED_ON}: {cause}"
        return _build_decision_event(shared.get_model_id(client), client, reason)

    def build_move_event(self, client: int, trial: Trial, shared: SharedModels) -> Event:
        """Return the event of a client that moves to its best shared model."""
        old_id = shared.get_model_id(client)
        new_id = shared.models.ids[int(shared.best[client])]
        reason = f"{trial.describe(self.not_worse_z)}; the client moves from model {old_id} to model {new_id}"
        return _build_decision_event(new_id, client, reason)

    def build_delay_event(self, client: int, trial: Trial, shared: SharedModels, is_allowed: bool) -> Event:
        """Return the event of a founder that keeps its model in this time step.

        Args:
            client: The founder.
            trial: Its trial.
            shared: The shared models.
            is_allowed: Whether the federation allowed it to create a model. Then no group of founders fitted.
        """
        cause = new_clusters.DELAY_REASON if is_allowed else SUPPRESSION_REASON
        reason = f"{trial.describe(self.not_worse_z)}; {NOT_ACTED_ON}: {cause}"
        return _build_decision_event(shared.get_model_id(client), client, reason)

    def run_trials(
        self, state: AutoState, shared: SharedModels, fed: Federation
    ) -> tuple[dict[int, Trial], list[Models]]:
        """Run trials at the clients whose shared model may no longer fit; see `trials.run_trials`."""
        rows = fed.counts[-1]
        error = shared.error[np.arange(fed.n_clients), shared.assigned]
        rise_z = trials.compute_rise_z(error, rows, state.error, state.rows)
        needs_trial = (rise_z > self.trial_rise_z) | np.isnan(rise_z) | (shared.best != shared.assigned)
        on_trial = shared.scored & (fed.tau > 0) & (rows > 1) & needs_trial
        if not on_trial.any():
            return {}, []
        rounds = _count_rounds(self.tuned_rounds_share, fed)
        return trials.run_trials(
            shared.models, shared.clustering.w, shared.assigned, shared.best, rise_z, on_trial, rounds, fed
        )

    def update_clusters(
        self, state: AutoState, shared: SharedModels, decisions: StepDecisions, fed: Federation
    ) -> tuple[Clustering, int, Bools]:
        """Phase 4: move clients, create models for founders, and merge models that do not differ.

        A founder that is not allowed to create a model yet can share the new model of a founder that is.

        Returns:
            The clusters, the next free id, and [c], whether the client is a founder whose new model is delayed.
        """
        clients = np.arange(fed.n_clients)
        is_founder = np.isin(clients, decisions.founders)
        allowed = fed.allowed(is_founder)  # all False without founders
        delayed = is_founder
        created: NewClusters | None = None
        if allowed.any():
            starts_fresh = [decisions.trial_by_client[c].starts_fresh for c in decisions.founders]
            rounds = _count_rounds(self.tuned_rounds_share, fed)
            created = new_clusters.create_clusters(
                decisions.founders, starts_fresh, allowed, shared.models, shared.best, state.next_id, rounds,
                self.group_z, fed,
            )  # fmt: skip
            delayed = is_founder & ~np.isin(clients, [c for group in created.groups for c in group])
        delays = [
            self.build_delay_event(c, decisions.trial_by_client[c], shared, bool(allowed[c]))
            for c in np.flatnonzero(delayed).tolist()
        ]
        assigned = np.where(is_founder & ~delayed, -1, decisions.assigned)  # -1: a new model, which is added below
        clusters = shared.clustering.assign_new_data(assigned).add_events([*decisions.events, *delays])
        next_id = state.next_id
        if created is not None:
            clusters = clusters.add_models(created.models, created.groups)
            clusters = clusters.add_events(self._build_creation_events(created, decisions.trial_by_client))
            next_id += len(created.groups)
        clusters = new_clusters.merge_similar(clusters, shared.clustering, shared.mistakes, assigned, self.merge_z, fed)
        return clusters, next_id, delayed

    def train_private_models(
        self, state: AutoState, shared: SharedModels, trained: Models, w: Clusters, assigned: Ints, fed: Federation
    ) -> tuple[Models, EnsembleGain]:
        """Phase 6: train the private models of all clients; at the first time step also measure their gain."""
        rounds = (_count_rounds(self.tuned_rounds_share, fed), _count_rounds(self.own_rounds_share, fed))
        if not fed.tau:
            gain = private_models.measure_first_gain(trained, w, assigned, rounds, fed)
            return private_models.train_private_models(None, trained, w, assigned, rounds, fed), gain
        ids = [get_private_id(kind, c) for kind in (TUNED, OWN) for c in range(fed.n_clients)]
        previous = private_models.select_by_id(state.models, ids)
        return private_models.train_private_models(previous, trained, w, assigned, rounds, fed), shared.gain

    def _build_creation_events(self, created: NewClusters, trial_by_client: dict[int, Trial]) -> list[Event]:
        """Return the event of each new model; its reason is the trial of the first founder."""
        events = []
        for model_id, family, group, parent in zip(
            created.models.ids, created.models.family, created.groups, created.parents, strict=True
        ):
            reason = trial_by_client[group[0]].describe(self.not_worse_z)
            together = f"; {len(group)} clients share the new model" if len(group) > 1 else ""
            cause: dict[str, Any] = {"clients": list(group), "reason": reason + together}
            cause |= {"start": "fresh"} if parent is None else {"from": parent}
            cause |= {"family": family} if family != model_id else {}
            events.append(Event("created", model_id, cause))
        return events


def _count_rounds(share: float, fed: Federation) -> int:
    """Return a share of the rounds of a time step as a number of rounds, at least 1."""
    return max(1, round(share * fed.local.rounds))


def _build_decision_event(model_id: int, client: int, reason: str) -> Event:
    """Return the event of a decision about a client; `model_id` is the model that it concerns."""
    return Event("decided", model_id, {"clients": [client], "reason": reason})


def find_reference_errors(
    state: AutoState, shared: SharedModels, decisions: StepDecisions, delayed: Bools, fed: Federation
) -> tuple[Floats, Ints]:
    """Return [c], the errors with which those of the next time step are compared, and [c], their numbers of rows.

    This is the error of the client's model on the new data. It is NaN if the model was not trained before these data:
    at the first time step, and for founders of a new model. Clients that were not scored keep their earlier error, and
    so do those whose new model is delayed: their alarms can be raised again.
    """
    clients = np.arange(fed.n_clients)
    is_updated = shared.scored & ~delayed
    is_untrained = (np.isin(clients, decisions.founders) & ~delayed) | (fed.tau == 0)
    error = np.where(is_updated, shared.error[clients, decisions.assigned], state.error)
    return np.where(is_untrained, np.nan, error), np.where(is_updated, fed.counts[-1], state.rows)


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
    cells = clusters.w.model.copy()
    trunk = np.where(cells >= 0, family[cells], -1)  # [t, c], the family whose trunk the cell trains
    for c in range(trunk.shape[1]):
        assigned_trunk = family[assigned[c]]
        other_trunks = [f for f in np.unique(trunk[:, c]) if f >= 0 and f != assigned_trunk]
        rows_of = {f: counts[trunk[:, c] == f, c].sum() for f in other_trunks}
        if len(rows_of) > 1:
            largest = max(rows_of, key=lambda f: rows_of[f])
            cells[~np.isin(trunk[:, c], [assigned_trunk, largest]), c] = -1
    return Clusters(cells, clusters.w.n_models)
