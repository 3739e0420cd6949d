"""Do new data contradict the old ones? Trials at the clients, and alarms.

A client whose model does worse than before, or whom another model serves better, trains privately, on either half of
its new data, and is judged on the other half:

    stay    the shared model of its home, on the client's own data of this home and the half,
    new     the best shared model, on the half alone,
    fresh   a fresh model, on the half alone.

A season, or a place, is learned by stay as well as by new; where swapped labels came, stay cannot fit both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from feddrift import clustering
from feddrift.algorithms.auto.private_models import FRESH, NEW, STAY, copies
from feddrift.models import join
from feddrift.types import Bools, Clusters, Federation, Floats, Holds, Ints, Models, Tournament

HALVES: tuple[Holds, ...] = ("last", "first")  # which half is held out
STAYING, ANEW, BEST, HOME, AFRESH = range(5)  # the contestants of a trial


@dataclass(frozen=True)
class Trial:
    """What a client's trial showed: its alternative against staying, on all of its new rows."""

    switch: bool  # the alternative is the best shared model, else a model of the new data alone
    fresh: bool  # which begins afresh
    rows: int
    won: int  # rows that only the alternative gets right
    lost: int  # rows that only staying gets right
    ahead: float  # of the alternative, in standard errors; of another shared model, over that of its home too
    rise: float  # of the error of the home's model since the last data, in standard errors; 0 if not known
    halves: bool  # the alternative has less than half of the mistakes

    def strength(self, least: float) -> float:
        """How strongly this speaks for an alarm: being ahead, a risen error unless it is behind, or both together."""
        both = (self.ahead + self.rise) / math.sqrt(2)
        return max(self.ahead, both, self.rise if self.ahead > least else -math.inf)

    def words(self, least: float) -> str:
        """The evidence in words."""
        what = "another shared model" if self.switch else "a model of the new data alone"
        counts = f"of {self.rows} new rows {self.won} are right only with {what}, {self.lost} only with what it had"
        strength = self.ahead if self.switch else self.strength(least)
        if not self.switch and self.rise == strength:
            return f"its error rose ({chance(strength)}), and {counts}"
        said = "another shared model fits the new data" if self.switch else "new data contradict the old ones"
        return f"{said}: {counts} ({chance(strength)})"


def ahead(wrong: Ints, a: int, b: int) -> float:
    """By how many standard errors a is better than b, on the rows that only one of them gets right.

    >>> ahead(np.array([[3, 3], [3, 12]]), 0, 1)
    3.0
    """
    won, lost = clustering.decisive(wrong, a, b)
    return (won - lost) / math.sqrt(max(1, won + lost))


def chance(z: float) -> str:
    """How likely so many standard errors are by chance, in words.

    >>> chance(2.33), chance(6.0)
    ('p = 0.01', 'p < 0.0001')
    """
    p = tail(z)
    return "p < 0.0001" if p < 1e-4 else f"p = {p:.1g}"


def tail(z: float) -> float:
    """The chance of more than z standard errors."""
    return 0.5 * math.erfc(z / math.sqrt(2))


def risen(error: Floats, rows: Ints, before: Floats, rows_before: Ints) -> Floats:
    """By how many standard errors each client's error is above the one before; NaN where that is not known."""
    variance = error * (1 - error) / np.maximum(rows, 1) + before * (1 - before) / np.maximum(rows_before, 1)
    return np.asarray((error - before) / np.maximum(np.sqrt(variance), 1e-9))


def hold(
    models: Models, home: Clusters, at: Ints, best: Ints, rise: Floats, who: Bools, rounds: int, fed: Federation
) -> tuple[dict[int, Trial], list[Models]]:
    """The trials of these clients, and the private models that stay and new became on either half."""
    clients, n = np.flatnonzero(who), fed.n_clients
    place = np.full(n, -1)
    place[clients] = np.arange(len(clients))
    past = np.where((home.model == at) & who, place, -1)  # the own cells of this home
    with_past, alone = (
        Clusters(np.concatenate([cells, place[None]]), len(clients)) for cells in (past, np.full_like(past, -1))
    )
    kept: list[Models] = []
    total = Tournament.nobody(n, 5)
    for half, holds in enumerate(HALVES):
        local = replace(fed.local, hold_out=0.5, holds=holds)
        stay, new, fresh = (
            fed.train(copies(source, start, kind + half, clients), w, rounds, local)
            for kind, source, start, w in (
                (STAY, models, at[clients], with_past),
                (NEW, models, best[clients], alone),
                (FRESH, fed.fresh(), np.zeros_like(clients), alone),
            )
        )
        teams = np.full((5, n, 1), -1)
        for contestant, first in {STAYING: 0, ANEW: 1, AFRESH: 2}.items():
            teams[contestant, clients, 0] = len(models) + first * len(clients) + np.arange(len(clients))
        teams[BEST, clients, 0], teams[HOME, clients, 0] = best[clients], at[clients]
        result = fed.contest(join(models, stay, new, fresh), teams, local)
        total = Tournament(total.rows + result.rows, total.wrong + result.wrong)
        kept += [stay, new]
    judged = clients[total.rows[clients] > 0]
    known = np.nan_to_num(rise)
    return {int(c): _trial(total, int(c), best[c] != at[c], float(known[c])) for c in judged}, kept


def _trial(result: Tournament, c: int, other: bool, rise: float) -> Trial:
    wrong = result.wrong[c]
    fresh = clustering.beats(wrong, AFRESH, ANEW)
    new = AFRESH if fresh else ANEW
    switch = bool(other) and not clustering.beats(wrong, new, BEST)
    best = BEST if switch else new
    z = ahead(wrong, best, STAYING)
    if switch:
        z = min(z, ahead(wrong, BEST, HOME))
    won, lost = clustering.decisive(wrong, best, STAYING)
    halves = 2 * int(wrong[best, best]) < int(wrong[STAYING, STAYING])
    return Trial(switch, fresh and not switch, int(result.rows[c]), won, lost, z, rise, halves)


def alarms(trials: Mapping[int, Trial], n_scored: int, false: float, switch: float, least: float) -> list[int]:
    """The clients whose trials raise an alarm.

    To another shared model a client may move as soon as that is ahead by `switch` standard errors: little is lost by
    it. For new models the share of false alarms among all of a time step is bounded (Benjamini and Hochberg), so that
    one client needs strong evidence, and many that drift at once need less.
    """
    strength = {c: trial.strength(least) for c, trial in trials.items() if not trial.switch}
    chances = sorted(tail(z) for z in strength.values())
    passed = [p for k, p in enumerate(chances, 1) if p <= false * k / max(n_scored, 1)]
    limit = max(passed, default=-1.0)
    raised = [c for c, z in strength.items() if tail(z) <= limit]
    return sorted(raised + [c for c, trial in trials.items() if trial.switch and trial.ahead > switch])
