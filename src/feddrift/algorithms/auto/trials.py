"""Trials, in which clients find out whether their new data contradict the old ones, and the alarms that follow.

In a trial a client trains three private models on one half of its new data. They are evaluated on the other half; then
the halves are exchanged.

    stay    starts from the shared model that the client is assigned to, and also trains on half of the client's old
            data of that model;
    new     starts from the best shared model;
    fresh   starts from an untrained model.

If only the inputs have changed, for example with the season, `stay` learns the new data as well as `new` does. If
labels were exchanged, `stay` cannot fit the old and the new data at once, and `new` is better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from feddrift import clustering
from feddrift.algorithms.auto.private_models import FRESH, NEW, STAY, copy_for_clients
from feddrift.models import join
from feddrift.types import Bools, Clusters, Federation, Floats, Holds, Ints, Models, Tournament

HELD_OUT_HALVES: tuple[Holds, ...] = ("last", "first")
N_TRIAL_CONTESTANTS = 5
STAY_TRAINED, NEW_TRAINED, BEST_SHARED, ASSIGNED_SHARED, FRESH_TRAINED = range(N_TRIAL_CONTESTANTS)


@dataclass(frozen=True)
class Trial:
    """Result of a client's trial: the best alternative compared with `stay`, on all of the client's new rows."""

    prefers_other_model: bool  # the alternative is the best shared model, not a model of the new data alone
    starts_fresh: bool  # the alternative is `fresh`
    rows: int  # number of new rows
    won: int  # number of rows that only the alternative predicts correctly
    lost: int  # number of rows that only `stay` predicts correctly
    lead_z: float  # lead of the alternative over `stay` in standard errors; see `_evaluate_trial`
    rise_z: float  # rise of the assigned model's error since the last data, in standard errors; 0 if not known
    halves_mistakes: bool  # the alternative makes less than half of the mistakes of `stay`

    def compute_evidence_z(self, not_worse_z: float) -> float:
        """Return the evidence for an alarm in standard errors.

        This is the largest of three: the lead, the lead and the rise combined, and the rise alone. The rise alone
        counts only if the lead is above `not_worse_z`.
        """
        combined_z = (self.lead_z + self.rise_z) / math.sqrt(2)
        rise_alone_z = self.rise_z if self.lead_z > not_worse_z else -math.inf
        return max(self.lead_z, combined_z, rise_alone_z)

    def describe(self, not_worse_z: float) -> str:
        """Return the evidence as a sentence for an event."""
        other = "another shared model" if self.prefers_other_model else "a model of the new data alone"
        verb = "is" if self.won == 1 else "are"
        counts = (
            f"of {self.rows} new rows, {self.won} {verb} predicted correctly only by {other}, "
            f"{self.lost} only by a model of old and new data"
        )
        evidence_z = self.lead_z if self.prefers_other_model else self.compute_evidence_z(not_worse_z)
        if not self.prefers_other_model and self.rise_z == evidence_z:
            return f"its error rose ({format_p(evidence_z)}), and {counts}"
        finding = (
            "another shared model fits the new data better"
            if self.prefers_other_model
            else "the new data contradict the old data"
        )
        return f"{finding}: {counts} ({format_p(evidence_z)})"


def compute_lead_z(wrong: Ints, a: int, b: int) -> float:
    """Return the lead of contestant a over b in standard errors, on the rows that only one of them predicts correctly.

    Args:
        wrong: [contestant, contestant], the number of rows that both get wrong.
        a: Position of a contestant.
        b: Position of the other contestant.

    >>> compute_lead_z(np.array([[3, 3], [3, 12]]), 0, 1)
    3.0
    """
    won, lost = clustering.count_decisive_rows(wrong, a, b)
    return (won - lost) / math.sqrt(max(1, won + lost))


def format_p(z: float) -> str:
    """Return the one-sided p-value of z as text.

    >>> format_p(2.33), format_p(6.0)
    ('p = 0.01', 'p < 0.0001')
    """
    p = compute_p(z)
    return "p < 0.0001" if p < 1e-4 else f"p = {p:.1g}"


def compute_p(z: float) -> float:
    """Return the probability that a standard normal variable exceeds z."""
    return 0.5 * math.erfc(z / math.sqrt(2))


def compute_rise_z(error: Floats, rows: Ints, previous_error: Floats, previous_rows: Ints) -> Floats:
    """Return [c], the rise of each client's error in standard errors; NaN where an error is not known.

    Args:
        error: [c], the error on the new data.
        rows: [c], the number of rows behind it.
        previous_error: [c], the error on the last data before.
        previous_rows: [c], the number of rows behind it.
    """
    variance = error * (1 - error) / np.maximum(rows, 1)
    variance = variance + previous_error * (1 - previous_error) / np.maximum(previous_rows, 1)
    return np.asarray((error - previous_error) / np.maximum(np.sqrt(variance), 1e-9))


def run_trials(
    models: Models, w: Clusters, assigned: Ints, best: Ints, rise_z: Floats, on_trial: Bools, rounds: int,
    fed: Federation,
) -> tuple[dict[int, Trial], list[Models]]:  # fmt: skip
    """Run the trials of some clients.

    Args:
        models: The shared models.
        w: The cells that train each of them, without the new data.
        assigned: [c], position of the model that each client is assigned to.
        best: [c], position of the best model for each client.
        rise_z: [c], rise of each client's error in standard errors, NaN where it is not known.
        on_trial: [c], whether the client runs a trial.
        rounds: Rounds of training.
        fed: The federation.

    Returns:
        The trial of each client with held-out rows, and the trained `stay` and `new` models of both halves.
    """
    clients = np.flatnonzero(on_trial)
    n = fed.n_clients
    position = np.full(n, -1)  # [c], of the client's model in each stack of trained models
    position[clients] = np.arange(len(clients))
    old_cells = np.where((w.model == assigned) & on_trial, position, -1)
    with_old = Clusters(np.concatenate([old_cells, position[None]]), len(clients))
    new_only = Clusters(np.concatenate([np.full_like(old_cells, -1), position[None]]), len(clients))
    trained: list[Models] = []
    total = Tournament.empty(n, N_TRIAL_CONTESTANTS)
    for half, holds in enumerate(HELD_OUT_HALVES):
        local = replace(fed.local, hold_out=0.5, holds=holds)
        stay = copy_for_clients(models, assigned[clients], STAY + half, clients)
        stay = fed.train(stay, with_old, rounds, local)
        new = copy_for_clients(models, best[clients], NEW + half, clients)
        new = fed.train(new, new_only, rounds, local)
        fresh = copy_for_clients(fed.fresh(), np.zeros_like(clients), FRESH + half, clients)
        fresh = fed.train(fresh, new_only, rounds, local)
        contestants = np.full((N_TRIAL_CONTESTANTS, n, 1), -1)
        for block, contestant in enumerate((STAY_TRAINED, NEW_TRAINED, FRESH_TRAINED)):
            contestants[contestant, clients, 0] = len(models) + block * len(clients) + np.arange(len(clients))
        contestants[BEST_SHARED, clients, 0] = best[clients]
        contestants[ASSIGNED_SHARED, clients, 0] = assigned[clients]
        result = fed.contest(join(models, stay, new, fresh), contestants, local)
        total = Tournament(total.rows + result.rows, total.wrong + result.wrong)
        trained += [stay, new]
    rise_z = np.nan_to_num(rise_z)
    evaluated = clients[total.rows[clients] > 0].tolist()
    results = {c: _evaluate_trial(total, c, bool(best[c] != assigned[c]), float(rise_z[c])) for c in evaluated}
    return results, trained


def _evaluate_trial(result: Tournament, client: int, other_is_best: bool, rise_z: float) -> Trial:
    """Choose the best alternative to `stay`, and compare the two.

    Of the models of the new data alone the alternative is `fresh` if it beats `new` in a sign test, else `new`. If
    another shared model is the best, it is the alternative, unless the model of the new data alone beats it. It must
    also be ahead of the assigned model: its lead is the smaller one of those over `stay` and over the assigned model.

    Args:
        result: Mistakes of the contestants on both halves.
        client: The client.
        other_is_best: Whether the best shared model is not the assigned one.
        rise_z: Rise of the client's error in standard errors.
    """
    wrong = result.wrong[client]
    fresh_is_better = clustering.wins_sign_test(wrong, FRESH_TRAINED, NEW_TRAINED)
    alternative = FRESH_TRAINED if fresh_is_better else NEW_TRAINED
    prefers_other = other_is_best and not clustering.wins_sign_test(wrong, alternative, BEST_SHARED)
    if prefers_other:
        alternative = BEST_SHARED
    lead_z = compute_lead_z(wrong, alternative, STAY_TRAINED)
    if prefers_other:
        lead_z = min(lead_z, compute_lead_z(wrong, BEST_SHARED, ASSIGNED_SHARED))
    won, lost = clustering.count_decisive_rows(wrong, alternative, STAY_TRAINED)
    halves_mistakes = 2 * int(wrong[alternative, alternative]) < int(wrong[STAY_TRAINED, STAY_TRAINED])
    return Trial(
        prefers_other_model=prefers_other,
        starts_fresh=fresh_is_better and not prefers_other,
        rows=int(result.rows[client]),
        won=won,
        lost=lost,
        lead_z=lead_z,
        rise_z=rise_z,
        halves_mistakes=halves_mistakes,
    )


def raise_alarms(
    trial_by_client: Mapping[int, Trial],
    n_scored: int,
    false_discovery_rate: float,
    switch_z: float,
    not_worse_z: float,
) -> list[int]:
    """Return the clients whose trials raise an alarm, in ascending order.

    A lead of `switch_z` standard errors is enough to move to another shared model, because a wrong move costs little.
    For new models the share of false alarms of a time step is limited (Benjamini and Hochberg, 1995): a single client
    needs strong evidence, and each of many clients that drift at once needs less.

    Args:
        trial_by_client: The trial of each client.
        n_scored: Number of reachable clients with new data: the number of tests. Clients without a trial count as tests
            without an alarm.
        false_discovery_rate: Expected share of false alarms among those for new models.
        switch_z: Lead of another shared model, in standard errors, above which the client moves.
        not_worse_z: See `Trial.compute_evidence_z`.
    """
    evidence_z = {
        c: trial.compute_evidence_z(not_worse_z)
        for c, trial in trial_by_client.items()
        if not trial.prefers_other_model
    }
    p_values = sorted(compute_p(z) for z in evidence_z.values())
    passed = [p for k, p in enumerate(p_values, 1) if p <= false_discovery_rate * k / max(n_scored, 1)]
    largest_p = max(passed, default=-1.0)
    for_new_models = [c for c, z in evidence_z.items() if compute_p(z) <= largest_p]
    for_moves = [c for c, trial in trial_by_client.items() if trial.prefers_other_model and trial.lead_z > switch_z]
    return sorted(for_new_models + for_moves)
