"""Trials at the clients: do the new data contradict the old ones? And which trials raise an alarm.

A client whose error rose, or that another shared model serves better, trains three private models on one half of its
new data. The other half evaluates them; then the halves are exchanged.

    stay    starts from the shared model that the client is assigned to; trained on the client's data of that model too;
    new     starts from the best shared model;
    fresh   starts from an untrained model.

Both `stay` and `new` learn a season or another region of the inputs. Where labels were exchanged, `stay` cannot fit the
old and the new data at once.
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
CONTESTANTS = STAY_TRAINED, NEW_TRAINED, BEST_SHARED, ASSIGNED_SHARED, FRESH_TRAINED = range(5)


@dataclass(frozen=True)
class Trial:
    """Result of a client's trial: its alternative against staying, on all of its new rows."""

    switch: bool  # the alternative is the best shared model, not a model of the new data alone
    fresh: bool  # the alternative started from an untrained model
    rows: int
    won: int  # rows that only the alternative predicts correctly
    lost: int  # rows that only staying predicts correctly
    lead_z: float  # lead of the alternative in standard errors; of another shared model also over the assigned one
    rise_z: float  # rise of the assigned model's error since the last data in standard errors; 0 if not known
    halves_mistakes: bool  # the alternative makes less than half of the mistakes

    def strength(self, not_worse_z: float) -> float:
        """Return the evidence for an alarm: the lead, both together, or the rise if the lead is above `not_worse_z`."""
        both = (self.lead_z + self.rise_z) / math.sqrt(2)
        return max(self.lead_z, both, self.rise_z if self.lead_z > not_worse_z else -math.inf)

    def describe(self, not_worse_z: float) -> str:
        """Return the evidence as a sentence for an event."""
        what = "another shared model" if self.switch else "a model of the new data alone"
        counts = f"of {self.rows} new rows {self.won} are right only with {what}, {self.lost} only with what it had"
        strength = self.lead_z if self.switch else self.strength(not_worse_z)
        if not self.switch and self.rise_z == strength:
            return f"its error rose ({format_p(strength)}), and {counts}"
        finding = "another shared model fits the new data" if self.switch else "new data contradict the old ones"
        return f"{finding}: {counts} ({format_p(strength)})"


def lead_z(wrong: Ints, a: int, b: int) -> float:
    """Return by how many standard errors a is better than b, on the rows that only one of them predicts correctly.

    >>> lead_z(np.array([[3, 3], [3, 12]]), 0, 1)
    3.0
    """
    won, lost = clustering.count_decisive_rows(wrong, a, b)
    return (won - lost) / math.sqrt(max(1, won + lost))


def format_p(z: float) -> str:
    """Return the one-sided p-value of z as text.

    >>> format_p(2.33), format_p(6.0)
    ('p = 0.01', 'p < 0.0001')
    """
    p = upper_tail_p(z)
    return "p < 0.0001" if p < 1e-4 else f"p = {p:.1g}"


def upper_tail_p(z: float) -> float:
    """Return the probability that a standard normal variable exceeds z."""
    return 0.5 * math.erfc(z / math.sqrt(2))


def error_rise_z(error: Floats, rows: Ints, previous_error: Floats, previous_rows: Ints) -> Floats:
    """Return by how many standard errors each client's error rose; NaN where an error is not known."""
    variance = error * (1 - error) / np.maximum(rows, 1)
    variance = variance + previous_error * (1 - previous_error) / np.maximum(previous_rows, 1)
    return np.asarray((error - previous_error) / np.maximum(np.sqrt(variance), 1e-9))


def run_trials(
    models: Models, w: Clusters, assigned: Ints, best: Ints, rise: Floats, on_trial: Bools, rounds: int, fed: Federation
) -> tuple[dict[int, Trial], list[Models]]:
    """Run the trials of some clients.

    Args:
        models: The shared models.
        w: The cells that train each of them, without the new data.
        assigned: [c], position of the model that each client is assigned to.
        best: [c], position of the model that serves it best.
        rise: [c], rise of its error in standard errors, NaN where it is not known.
        on_trial: [c], clients that run a trial.
        rounds: Rounds of training.
        fed: The federation.

    Returns:
        The trial of each client with held-out rows, and the trained `stay` and `new` models of either half.
    """
    clients = np.flatnonzero(on_trial)
    n = fed.n_clients
    lane = np.full(n, -1)
    lane[clients] = np.arange(len(clients))
    old_cells = np.where((w.model == assigned) & on_trial, lane, -1)
    with_old = Clusters(np.concatenate([old_cells, lane[None]]), len(clients))
    new_only = Clusters(np.concatenate([np.full_like(old_cells, -1), lane[None]]), len(clients))
    trained: list[Models] = []
    total = Tournament.empty(n, len(CONTESTANTS))
    for half, holds in enumerate(HELD_OUT_HALVES):
        local = replace(fed.local, hold_out=0.5, holds=holds)
        stay, new, fresh = (
            fed.train(copy_for_clients(source, start, kind + half, clients), cells, rounds, local)
            for kind, source, start, cells in (
                (STAY, models, assigned[clients], with_old),
                (NEW, models, best[clients], new_only),
                (FRESH, fed.fresh(), np.zeros_like(clients), new_only),
            )
        )
        teams = np.full((len(CONTESTANTS), n, 1), -1)
        for block, contestant in enumerate((STAY_TRAINED, NEW_TRAINED, FRESH_TRAINED)):
            teams[contestant, clients, 0] = len(models) + block * len(clients) + np.arange(len(clients))
        teams[BEST_SHARED, clients, 0] = best[clients]
        teams[ASSIGNED_SHARED, clients, 0] = assigned[clients]
        result = fed.contest(join(models, stay, new, fresh), teams, local)
        total = Tournament(total.rows + result.rows, total.wrong + result.wrong)
        trained += [stay, new]
    known_rise = np.nan_to_num(rise)
    evaluated = clients[total.rows[clients] > 0].tolist()
    return {c: _judge_trial(total, c, bool(best[c] != assigned[c]), float(known_rise[c])) for c in evaluated}, trained


def _judge_trial(result: Tournament, client: int, has_other: bool, rise: float) -> Trial:
    """Choose the alternative to staying, the simplest that does well, and compare the two.

    Args:
        result: Mistakes of the contestants on both halves.
        client: The client.
        has_other: Whether the best shared model is another than the assigned one.
        rise: Rise of its error in standard errors.
    """
    wrong = result.wrong[client]
    fresh = clustering.wins_sign_test(wrong, FRESH_TRAINED, NEW_TRAINED)
    alternative = FRESH_TRAINED if fresh else NEW_TRAINED
    switch = has_other and not clustering.wins_sign_test(wrong, alternative, BEST_SHARED)
    if switch:
        alternative = BEST_SHARED
    z = lead_z(wrong, alternative, STAY_TRAINED)
    if switch:
        z = min(z, lead_z(wrong, BEST_SHARED, ASSIGNED_SHARED))
    won, lost = clustering.count_decisive_rows(wrong, alternative, STAY_TRAINED)
    halves = 2 * int(wrong[alternative, alternative]) < int(wrong[STAY_TRAINED, STAY_TRAINED])
    return Trial(switch, fresh and not switch, int(result.rows[client]), won, lost, z, rise, halves)


def raise_alarms(
    trials: Mapping[int, Trial], n_scored: int, false_discovery_rate: float, switch_z: float, not_worse_z: float
) -> list[int]:
    """Return the clients whose trials raise an alarm.

    A client may move to another shared model as soon as that leads by `switch_z` standard errors: a wrong move costs
    little. For new models the share of false alarms of a time step is limited (Benjamini and Hochberg, 1995), so one
    client needs strong evidence, and many clients that drift at once need less.

    Args:
        trials: The trial of each client.
        n_scored: Number of clients with new data.
        false_discovery_rate: Expected share of false alarms among those for new models.
        switch_z: Lead of another shared model that is enough, in standard errors.
        not_worse_z: See `Trial.strength`.
    """
    strength = {c: trial.strength(not_worse_z) for c, trial in trials.items() if not trial.switch}
    p_values = sorted(upper_tail_p(z) for z in strength.values())
    passed = [p for k, p in enumerate(p_values, 1) if p <= false_discovery_rate * k / max(n_scored, 1)]
    limit = max(passed, default=-1.0)
    raised = [c for c, z in strength.items() if upper_tail_p(z) <= limit]
    return sorted(raised + [c for c, trial in trials.items() if trial.switch and trial.lead_z > switch_z])
