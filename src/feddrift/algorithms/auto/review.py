"""Review of the last time step on the new data: the shared models, their alarms and the ensemble size.

No model is trained here. All models were trained before the new data arrived, so the new data are a fair test.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from feddrift import clustering
from feddrift.algorithms.auto import private_models
from feddrift.algorithms.auto.private_models import (
    NEW,
    SHARED_ONLY,
    STAY,
    TUNED,
    WITH_TUNED,
    WITH_TUNED_AND_OWN,
    EnsembleGain,
    get_private_id,
    get_trial_ids,
)
from feddrift.algorithms.auto.trials import compute_lead_z, format_p
from feddrift.clustering import Clustering
from feddrift.types import Bools, Clusters, Event, Floats, Ints, Models, Tournament

UNUSED_STEPS = 3  # time steps without data after which a model with data of at most one client is retired

# Contestants on the new data: the three ensembles, then the two sides of the decision under review.
BASELINE = private_models.N_ENSEMBLES
ALTERNATIVE = BASELINE + 1
N_REVIEWED = ALTERNATIVE + 1

VOTERS = {  # by ensemble size
    1: "the shared model predicts alone",
    2: "the shared model and the client's fine-tuned copy predict together",
    3: "the shared model, the fine-tuned copy and the client's own model predict together",
}


@dataclass(frozen=True)
class TrackRecord:
    """Numbers of alarms that later data confirmed and contradicted; a trial without an alarm can count as half of one.

    >>> TrackRecord(0, 0).is_trusted, TrackRecord(5, 5.5).is_trusted, TrackRecord(5, 6).is_trusted
    (True, True, False)
    """

    confirmed: float
    contradicted: float

    @property
    def is_trusted(self) -> bool:
        """True if later data will more likely confirm than contradict the next alarm.

        The probability is the mean of a beta distribution with prior (2, 1).
        """
        return (self.confirmed + 2) / (self.confirmed + self.contradicted + 3) > 0.5

    def __str__(self) -> str:
        noun = "alarm" if self.confirmed == 1 else "alarms"
        return f"so far, later data confirmed {self.confirmed:g} {noun} and contradicted {self.contradicted:g}"


@dataclass(frozen=True)
class SharedModels:
    """Shared models before training on the new data: cells, assignment, evaluation, and the results of all reviews."""

    clustering: Clustering
    assigned: Ints  # [c], position of the model that each client is assigned to
    mistakes: Tournament  # of every shared model on the new data of every client
    track_record: TrackRecord  # of all alarms until now
    gain: EnsembleGain  # of private models over the shared one until now
    received: Bools | None = None  # [c, m], whether the client received the model (`share_from`); None: all did

    @property
    def models(self) -> Models:
        return self.clustering.models

    @property
    def scored(self) -> Bools:
        """[c], whether the client is reachable and has new data."""
        return np.asarray(self.mistakes.rows > 0)

    @cached_property
    def error(self) -> Floats:
        """[c, m], the error of each model on each client's new data; NaN for pairs that were not scored."""
        wrong = np.diagonal(self.mistakes.wrong, axis1=1, axis2=2)
        rows = self.mistakes.rows[:, None]
        is_scored = rows > 0 if self.received is None else (rows > 0) & self.received
        return np.asarray(np.divide(wrong, rows, out=np.full(wrong.shape, np.nan), where=is_scored))

    @cached_property
    def best(self) -> Ints:
        """[c], the position of the best model for each client; the assigned one if the client was not scored."""
        return clustering.find_best_models(self.error, self.assigned)[0]

    def get_model_id(self, client: int) -> int:
        """Return the id of the model that a client is assigned to."""
        return self.models.ids[int(self.assigned[client])]


def list_contestants(
    models: Models, shared: SharedModels, reviewed: Bools, alarmed: Bools, previous_model: Ints
) -> Ints:
    """Return the contestants on the new data: positions of models [contestant, client, member], -1 for none.

    Contestants 0 to 2 are the three ensembles of each client. BASELINE and ALTERNATIVE depend on its last trial:

        last trial             BASELINE                                                         ALTERNATIVE
        alarm, acted on        its previous model, with its `stay` models if private ones vote  its ensemble
        alarm, not acted on    its ensemble                                                     its `new` models
        no alarm               its `stay` models                                                its `new` models
        not reviewed           its shared model                                                 its shared model

    If the previous model no longer exists, its `stay` models replace it. An alarm that is not acted on is represented
    by its `new` models, whatever alternative it preferred: only these and the `stay` models are kept.

    Args:
        models: All models of the last time step, shared and private.
        shared: The shared models.
        reviewed: [c], whether the client's last trial is reviewed.
        alarmed: [c], whether that trial raised an alarm.
        previous_model: [c], id of the model that the client left because of the alarm, -1 if it left none.
    """
    position = private_models.index_by_id(models)
    size = private_models.choose_ensemble_size(shared.gain)
    contestants = np.full((N_REVIEWED, len(reviewed), 3), -1)
    for c in np.flatnonzero(shared.scored).tolist():
        assigned = position[shared.get_model_id(c)]
        has_private_models = get_private_id(TUNED, c) in position  # False for a client that has just joined
        ensemble = private_models.list_ensemble(position, assigned, c) if has_private_models else []
        members = {SHARED_ONLY: ensemble[:1], WITH_TUNED: ensemble[:2], WITH_TUNED_AND_OWN: ensemble}
        members |= {BASELINE: [assigned], ALTERNATIVE: [assigned]}
        if reviewed[c] and has_private_models:
            stay = [position[i] for i in get_trial_ids(STAY, c)]
            new = [position[i] for i in get_trial_ids(NEW, c)]
            previous_id = int(previous_model[c])
            if previous_id >= 0:
                previous = [position[previous_id]] if previous_id in position else []
                # Private models vote with the previous model only in ensembles of several models.
                members[BASELINE] = (previous + stay) if size > 1 else (previous or stay)
                members[ALTERNATIVE] = ensemble[:size]
            else:
                members[BASELINE] = ensemble[:size] if alarmed[c] else stay
                members[ALTERNATIVE] = new
        for contestant, positions in members.items():
            contestants[contestant, c, : len(positions)] = positions
    return contestants


def add_ensemble_gain(shared: SharedModels, result: Tournament) -> tuple[SharedModels, list[Event]]:
    """Add the gain of private models on the new data; if that changes the ensemble size, also return an event."""
    tuned, both = private_models.sum_ensemble_gain(result)
    gain = (shared.gain[0] + tuned, shared.gain[1] + both)
    size = private_models.choose_ensemble_size(gain)
    events = []
    if size != private_models.choose_ensemble_size(shared.gain):
        reason = f"from now on {VOTERS[size]}: so far, this would have been most accurate on average over the clients"
        # An event needs a model, also one about all clients: the first.
        events.append(Event("decided", shared.models.ids[0], {"clients": [], "reason": reason}))
    return replace(shared, gain=gain), events


def review_alarms(
    shared: SharedModels,
    result: Tournament,
    reviewed: Bools,
    alarmed: Bools,
    previous_model: Ints,
    review_z: float,
    certain_z: float,
) -> tuple[SharedModels, list[Event]]:
    """Compare the alarms of the last time step with the new data, and return clients to their previous models.

    The lead of ALTERNATIVE over BASELINE on the new data decides, see `list_contestants`.

    Args:
        shared: The shared models.
        result: Mistakes of the contestants on the new data, see `list_contestants`.
        reviewed: [c], whether the client's last trial is reviewed.
        alarmed: [c], whether that trial raised an alarm.
        previous_model: [c], id of the model that the client left because of the alarm, -1 if it left none.
        review_z: An alarm is confirmed if the alternative is ahead by more standard errors; it is contradicted if the
            alternative is behind by more.
        certain_z: A trial without an alarm counts as half a contradicted alarm if its alternative is behind by more
            standard errors.

    Returns:
        The shared models with the new assignment and track record, and events: one with the numbers of confirmed and
        contradicted alarms, if there were alarms, and one for each client that returns to its previous model.
    """
    n_alarms = 0
    n_confirmed = 0
    n_contradicted = 0
    refuted_trials = 0.0  # trials without an alarm, each counted as half an alarm
    ids = shared.models.ids
    cells = shared.clustering.w.model.copy()
    assigned = shared.assigned.copy()
    events = []
    for c in np.flatnonzero(reviewed & (result.rows > 0)):
        z = compute_lead_z(result.wrong[c], ALTERNATIVE, BASELINE)
        if not alarmed[c]:
            refuted_trials += 0.5 * (z < -certain_z)
            continue
        n_alarms += 1
        n_confirmed += int(z > review_z)
        n_contradicted += int(z < -review_z)
        previous_id = int(previous_model[c])
        if z < -review_z and previous_id in ids:
            outcome = f"the new data contradict the alarm of the last time step ({format_p(-z)})"
            reason = f"{outcome}: the client returns from model {ids[assigned[c]]} to model {previous_id}"
            assigned[c] = cells[-1, c] = ids.index(previous_id)
            events.append(Event("decided", previous_id, {"clients": [int(c)], "reason": reason}))
    if n_alarms:
        reason = "the alarms of the last time step were compared with the new data"
        numbers = {"alarms": n_alarms, "confirmed": n_confirmed, "contradicted": n_contradicted}
        events.insert(0, Event("decided", ids[0], {"clients": [], "reason": reason, **numbers}))
    clusters = replace(shared.clustering, w=Clusters(cells, shared.clustering.w.n_models))
    track_record = TrackRecord(
        shared.track_record.confirmed + n_confirmed,
        shared.track_record.contradicted + refuted_trials + n_contradicted,
    )
    return replace(shared, clustering=clusters, assigned=assigned, track_record=track_record), events


def retire_abandoned_models(shared: SharedModels) -> SharedModels:
    """Retire models with no assigned client, no recent data, and data from at most one client.

    The private models of that client were trained on the same data.
    """
    cells = shared.clustering.w.model
    unused = [
        m
        for m in range(len(shared.models))
        if m not in shared.assigned and m not in cells[-UNUSED_STEPS:] and (cells == m).any(axis=0).sum() < 2
    ]
    if not unused:
        return shared
    kept = ~np.isin(np.arange(len(shared.models)), unused)
    mistakes = replace(shared.mistakes, wrong=shared.mistakes.wrong[:, kept][:, :, kept])
    clusters = shared.clustering.retire_models(
        np.array(unused), "no client is assigned to it, and at most one client ever was"
    )
    new_positions = np.cumsum(kept) - 1
    received = None if shared.received is None else shared.received[:, kept]
    assigned = new_positions[shared.assigned]
    return replace(shared, clustering=clusters, assigned=assigned, mistakes=mistakes, received=received)


def find_current_assignment(w: Clusters) -> Ints:
    """Return [c], the position of the model that the newest data of each client train; 0 if it has no data yet."""
    assigned = np.zeros(w.model.shape[1], dtype=np.int64)
    for row in w.model:
        assigned = np.where(row >= 0, row, assigned)
    return assigned
