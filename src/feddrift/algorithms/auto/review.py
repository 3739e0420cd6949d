"""The shared models on the new data, and what these data say about the decisions of the last time step.

Nothing is trained here: every model was trained before the new data arrived, so they are a fair test of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from feddrift import clustering
from feddrift.algorithms.auto import private_models
from feddrift.algorithms.auto.private_models import NEW, STAY, TUNED, EnsembleGain, private_id
from feddrift.algorithms.auto.trials import format_p, lead_z
from feddrift.clustering import Clustering
from feddrift.types import Bools, Clusters, Event, Floats, Ints, Models, Tournament

UNUSED_STEPS = 3  # time steps after which a model that one client's data trained is retired

# Contestants on the new data: the three ensembles, then the two sides of each decision under review.
SHARED_ONLY, WITH_TUNED, WITH_TUNED_AND_OWN, BASELINE, ALTERNATIVE = range(5)


@dataclass(frozen=True)
class TrackRecord:
    """Alarms that paid and alarms that did not."""

    good: float
    bad: float

    @property
    def is_trusted(self) -> bool:
        """Whether the next alarm is more likely to pay than not."""
        return (self.good + 2) / (self.good + self.bad + 3) > 0.5

    def __str__(self) -> str:
        return f"{self.good:g} alarms have paid so far, {self.bad:g} have not"


@dataclass(frozen=True)
class SharedModels:
    """The shared models before training: their data, and their mistakes on the new data."""

    clusters: Clustering
    assigned: Ints  # [c], position of the model that each client is assigned to
    mistakes: Tournament  # of every shared model on the new data of every client
    record: TrackRecord
    gain: EnsembleGain

    @property
    def models(self) -> Models:
        return self.clusters.models

    @property
    def scored(self) -> Bools:
        """[c], true for clients with new data that can be reached."""
        return np.asarray(self.mistakes.rows > 0)

    @property
    def error(self) -> Floats:
        """[c, m], NaN for clients that are not scored."""
        wrong = np.diagonal(self.mistakes.wrong, axis1=1, axis2=2)
        rows = self.mistakes.rows[:, None]
        return np.asarray(np.divide(wrong, rows, out=np.full(wrong.shape, np.nan), where=rows > 0))

    @property
    def best(self) -> Ints:
        """[c], position of the best model for each client; the assigned one where it is not scored."""
        return clustering.best_models(self.error, self.assigned)[0]

    def model_id(self, client: int) -> int:
        """Return the id of the model that a client is assigned to."""
        return self.models.ids[int(self.assigned[client])]


def list_contestants(
    models: Models, shared: SharedModels, reviewed: Bools, alarmed: Bools, previous_model: Ints
) -> Ints:
    """Return the contestants on the new data as positions [contestant, client, member], -1 for none.

    Args:
        models: All models of the last time step, shared and private.
        shared: The shared models.
        reviewed: [c], clients whose last trial is reviewed.
        alarmed: [c], those of them that raised an alarm.
        previous_model: [c], id of the model that the client left because of the alarm, -1 where it left none.
    """
    position = private_models.index_by_id(models)
    size = private_models.choose_ensemble_size(shared.gain)
    teams = np.full((5, len(reviewed), 3), -1)
    for c in np.flatnonzero(shared.scored).tolist():
        assigned = position[shared.model_id(c)]
        ensemble = private_models.list_ensemble(position, assigned, c) if private_id(TUNED, c) in position else []
        members = {SHARED_ONLY: ensemble[:1], WITH_TUNED: ensemble[:2], WITH_TUNED_AND_OWN: ensemble}
        members |= {BASELINE: [assigned], ALTERNATIVE: [assigned]}
        if reviewed[c] and ensemble:
            stay, new = ([position[private_id(kind + half, c)] for half in range(2)] for kind in (STAY, NEW))
            left = int(previous_model[c])
            if left >= 0:
                before = [position[left]] if left in position else []
                members |= {BASELINE: before + stay if size > 1 else before or stay, ALTERNATIVE: ensemble[:size]}
            else:
                members |= {BASELINE: ensemble[:size] if alarmed[c] else stay, ALTERNATIVE: new}
        for contestant, positions in members.items():
            teams[contestant, c, : len(positions)] = positions
    return teams


def update_ensemble_size(shared: SharedModels, result: Tournament) -> tuple[SharedModels, list[Event]]:
    """Add what private models gained on the new data, with an event if the ensemble size changes."""
    tuned, both = private_models.sum_ensemble_gain(result)
    gain = shared.gain[0] + tuned, shared.gain[1] + both
    size = private_models.choose_ensemble_size(gain)
    events = []
    if size != private_models.choose_ensemble_size(shared.gain):
        who = {1: "the shared models vote alone", 2: "tuned copies vote", 3: "tuned copies and own models vote"}[size]
        reason = f"from now on {who}: that would have been best so far"
        events.append(Event("decided", shared.models.ids[0], {"clients": [], "reason": reason}))
    return replace(shared, gain=gain), events


def review_alarms(
    shared: SharedModels,
    result: Tournament,
    reviewed: Bools,
    alarmed: Bools,
    previous_model: Ints,
    outcome_z: float,
    certain_z: float,
) -> tuple[SharedModels, list[Event]]:
    """Count which alarms of the last time step paid, and return clients whose alarm did not pay to their old model.

    Args:
        shared: The shared models.
        result: Mistakes of the contestants on the new data.
        reviewed: [c], clients whose last trial is reviewed.
        alarmed: [c], those of them that raised an alarm.
        previous_model: [c], id of the model that the client left because of the alarm, -1 where it left none.
        outcome_z: Standard errors by which the alternative must win or lose.
        certain_z: Standard errors by which a model of the new data alone must lose where no alarm was raised, to count
            as half an alarm that did not pay.
    """
    good = shared.record.good
    bad = shared.record.bad
    ids = shared.models.ids
    cells = shared.clusters.w.model.copy()
    assigned = shared.assigned.copy()
    events = []
    for c in np.flatnonzero(reviewed & (result.rows > 0)):
        z = lead_z(result.wrong[c], ALTERNATIVE, BASELINE)
        if not alarmed[c]:
            bad += 0.5 * (z < -certain_z)
            continue
        good += z > outcome_z
        bad += z < -outcome_z
        left = int(previous_model[c])
        if z < -outcome_z and left in ids:
            why = f"the alarm of the last time step did not pay ({format_p(-z)}): back from model"
            reason = f"{why} {ids[assigned[c]]} to model {left}"
            assigned[c] = cells[-1, c] = ids.index(left)
            events.append(Event("decided", left, {"clients": [int(c)], "reason": reason}))
    clusters = replace(shared.clusters, w=Clusters(cells, shared.clusters.w.n_models))
    record = TrackRecord(float(good), float(bad))
    return replace(shared, clusters=clusters, assigned=assigned, record=record), events


def retire_unused_models(shared: SharedModels) -> SharedModels:
    """Drop models with no assigned client, no recent data, and data from at most one client.

    The private models of that client contain what such a model has learned.
    """
    cells = shared.clusters.w.model
    unused = [
        m
        for m in range(len(shared.models))
        if m not in shared.assigned and m not in cells[-UNUSED_STEPS:] and (cells == m).any(axis=0).sum() < 2
    ]
    if not unused:
        return shared
    kept = ~np.isin(np.arange(len(shared.models)), unused)
    mistakes = replace(shared.mistakes, wrong=shared.mistakes.wrong[:, kept][:, :, kept])
    clusters = shared.clusters.retire_models(np.array(unused), "nobody is at it, and at most one client ever was")
    return replace(shared, clusters=clusters, assigned=(np.cumsum(kept) - 1)[shared.assigned], mistakes=mistakes)


def current_assignment(w: Clusters) -> Ints:
    """Return for each client the model that its newest data train; 0 if it has no data yet."""
    assigned = np.zeros(w.model.shape[1], dtype=np.int64)
    for row in w.model:
        assigned = np.where(row >= 0, row, assigned)
    return assigned
