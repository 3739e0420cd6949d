"""What a comparison should not leave to the reader: sentences on runs whose one number looks better than they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np

from feddrift.algorithms import ALGORITHMS
from feddrift.algorithms.baselines.aue import AUE
from feddrift.algorithms.baselines.kue import KUE
from feddrift.reports.labels import names
from feddrift.reports.summary import (
    configurations,
    difference_of,
    interval,
    mean_of_known,
    mean_over_cells,
    scores,
    spread_of,
)
from feddrift.runs.record import Record, by_score

SEEN = 0.1  # points of accuracy: less is not worth a sentence
WORSE = 1.01  # times Oblivious's log loss
ALIKE = 0.3  # points of accuracy that two runs of one model may be apart
SAME_PRICE = 1.05  # times Oblivious's traffic
FEW = 10  # rows a step that a client is tested on, where the largest client has so many times as many
Group = Sequence[Record]  # the seeds of one configuration


def remarks(records: Iterable[Record], name_streams: bool = True) -> list[str]:
    """Sentences on the accuracy of finished runs, stream by stream; none is the best there can be.

    They are on accuracy also where another score has its place, and claim no difference whose interval contains 0.
    """
    groups = configurations(by_score(records, "accuracy"))
    sentences = []
    for stream, on_stream in groupby(groups, key=lambda group: str(group[0].header["stream"])):
        where = f"{stream}, " if name_streams else ""
        sentences += _on_stream(list(on_stream), stream if name_streams else "", where)
    return sentences


def _on_stream(groups: Sequence[Group], stream: str, where: str) -> list[str]:
    unequal = _unequal([run for group in groups for run in group])
    sentences = [f"{stream}: {unequal}." if stream else f"{unequal}."] if unequal else []
    for group, name in zip(groups, names([group[0].header for group in groups]), strict=True):
        oblivious = next((other for other in groups if other is not group and _is_oblivious_on(other, group)), None)
        if group[0].header["algorithm"] == "Majority":  # what others are measured by
            continue
        about = [_against(group, oblivious) if oblivious else None, _below_majority(group), _unused(group)]
        sentences += [f"{where}{name}: {sentence}." for sentence in about if sentence]
    return sentences


def _unequal(runs: Sequence[Record]) -> str | None:
    """Whether clients with hardly a row count in means like large ones; the run with most such clients speaks."""
    counted = []
    for run in (run for run in runs if run.weigh == "clients"):
        tested = np.where(run.rows.tested > 0, run.rows.tested, np.nan)
        rows = mean_of_known(tested.T, 1)
        rows = rows[~np.isnan(rows)]  # clients that are never tested are in no mean
        if rows.size and rows.max() >= FEW * FEW:
            counted.append((int((rows < FEW).sum()), len(rows), rows.max()))
    few, clients, most = max(counted, default=(0, 0, 0))
    if not few:
        return None
    return (
        f"{few} of {clients} clients {'has' if few == 1 else 'have'} fewer than {FEW} rows a step to test on, the "
        f"largest {most:.0f}, and every mean counts all clients alike; `feddrift report --weigh rows` counts rows alike"
    )


def _is_oblivious_on(other: Group, group: Group) -> bool:
    """Whether it is Oblivious on the same data with the same training."""
    a, b = other[0].header, group[0].header
    return a["algorithm"] == "Oblivious" and all(a[key] == b[key] for key in ("stream", "overrides"))


def _against(group: Group, oblivious: Group) -> str | None:
    difference = difference_of(group, oblivious, "Oblivious")  # as `--against Oblivious` has it
    if difference is None:
        return None
    gap, seeds = difference.mean, len(difference.seeds)
    price = _sent(group) / max(_sent(oblivious), 1e-9)
    one_model = _one_vote(group) and all((run.rows.model == run.rows.model[:, :1]).all() for run in group)
    if one_model and abs(gap) < ALIKE and price > SAME_PRICE:
        return f"all clients use one model all the time, as Oblivious does, for {price:.1f} times its traffic"
    if abs(gap) < SEEN:
        return None
    if not _is_clear(difference.low, difference.high):
        unclear = "neither clearly more nor less accurate than Oblivious, and"
        return _worse_probabilities(group, oblivious, unclear)
    if gap < 0:
        return f"{-gap:.2f} points less accurate than Oblivious{_in_one(seeds)}"
    more = f"{gap:.2f} points more accurate than Oblivious{_in_one(seeds)}, but"
    return _worse_probabilities(group, oblivious, more)


def _worse_probabilities(group: Group, oblivious: Group, before: str) -> str | None:
    if any(np.isnan(run.rows.log_loss).all() for run in (*group, *oblivious)):
        return None
    group, oblivious = by_score(group, "log_loss"), by_score(oblivious, "log_loss")
    difference, loss, usual = difference_of(group, oblivious, "Oblivious"), _level(group), _level(oblivious)
    if difference is None or not _is_clear(difference.low, difference.high) or not loss > usual * WORSE:
        return None
    return f"{before} its probabilities are worse: log loss {loss:.4f}, Oblivious {usual:.4f}"


def _is_clear(low: float | None, high: float | None) -> bool:
    """Whether an interval leaves out 0; one seed has no interval, and its sentence says so."""
    return low is None or high is None or low > 0 or high < 0


def _in_one(seeds: int) -> str:
    return " in one seed" if seeds == 1 else ""


def _one_vote(group: Group) -> bool:
    """Whether each client uses the one model that its record names; ensembles vote, and of others nobody knows."""
    entry = ALGORITHMS.get(group[0].header["algorithm"])
    return entry is not None and entry.cls not in (AUE, KUE)


def _below_majority(group: Group) -> str | None:
    runs = [(mean_over_cells(run, run.rows.accuracy), mean_over_cells(run, run.rows.majority)) for run in group]
    pairs = [(mine, usual) for mine, usual in runs if mine is not None and usual is not None]
    if not pairs:
        return None
    gap, low, high = interval([mine - usual for mine, usual in pairs])
    if gap >= 0 or not _is_clear(low, high):
        return None
    mine, usual = np.mean(pairs, axis=0)
    right = f"{100 * mine:.2f} % right{_in_one(len(pairs))}"
    return f"{right}, less than always naming the client's most frequent class ({100 * usual:.2f} %)"


def _unused(group: Group) -> str | None:
    """Of the models at the end those that no client uses, where they are more than the ones that are used."""
    kept = np.mean([run.rows.n_models[-1].max() for run in group])
    used = np.mean([len(np.unique(run.rows.model[-1])) for run in group])
    if kept < 2 * used + 1 or not _one_vote(group):
        return None
    return f"{kept - used:.3g} of its {kept:.3g} models are used by no client at the end"


def _level(group: Group) -> float:
    """The mean over seeds that tables show first: omitting drifts, or of all where these are unknown."""
    runs = [scores(run) for run in group]
    levels = [run.including_drifts if run.omitting_drifts is None else run.omitting_drifts for run in runs]
    spread = spread_of([level for level in levels if level is not None])
    return spread.mean if spread else np.nan


def _sent(group: Group) -> float:
    return float(np.mean([run.rows.models_sent.sum() for run in group]))
