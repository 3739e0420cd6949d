"""What a comparison should not leave to the reader: sentences on runs whose one number looks better than they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from feddrift.algorithms import ALGORITHMS
from feddrift.algorithms.aue import AUE
from feddrift.algorithms.kue import KUE
from feddrift.reports.summary import configurations, mean_of_known
from feddrift.reports.words import describe, differences
from feddrift.runs.record import Record
from feddrift.scores import ACCURACY

SEEN = 0.1  # points of accuracy: less is not worth a sentence
WORSE = 1.01  # times Oblivious's log loss
ALIKE = 0.3  # points of accuracy that two runs of one model may be apart
SAME_PRICE = 1.05  # times Oblivious's traffic
Group = Sequence[Record]  # the seeds of one configuration


def remarks(records: Iterable[Record], name_streams: bool = True) -> list[str]:
    """Sentences on the accuracy of finished runs, stream by stream; none is the best there can be."""
    groups = configurations(record for record in records if record.score == ACCURACY)
    heads = [group[0].header for group in groups]
    differing = differences([(h["stream"], h["algorithm"], h["settings"]) for h in heads])
    sentences = []
    for group, differs in zip(groups, differing, strict=True):
        header = group[0].header
        name = header["algorithm"] + (f" ({describe(differs)})" if differs else "")
        oblivious = next((other for other in groups if other is not group and _is_oblivious_on(other, group)), None)
        if header["algorithm"] == "Majority":  # what others are measured by
            continue
        about = [_against(group, oblivious) if oblivious else None, _below_majority(group), _unused(group)]
        where = f"{header['stream']}, {name}" if name_streams else name
        sentences += [f"{where}: {sentence}." for sentence in about if sentence]
    return sentences


def _is_oblivious_on(other: Group, group: Group) -> bool:
    """Whether it is Oblivious on the same data with the same training."""
    a, b = other[0].header, group[0].header
    return a["algorithm"] == "Oblivious" and all(a[key] == b[key] for key in ("stream", "overrides"))


def _against(group: Group, oblivious: Group) -> str | None:
    mine, theirs = _mean(group, "accuracy"), _mean(oblivious, "accuracy")
    price = _sent(group) / max(_sent(oblivious), 1e-9)
    gap = 100 * (mine - theirs)
    one_model = _one_vote(group) and all((run.rows.model == run.rows.model[:, :1]).all() for run in group)
    if one_model and abs(gap) < ALIKE and price > SAME_PRICE:
        return f"all clients use one model all the time, as Oblivious does, for {price:.1f} times its traffic"
    if gap <= -SEEN:
        return f"{-gap:.2f} points less accurate than Oblivious"
    loss, usual = _mean(group, "log_loss"), _mean(oblivious, "log_loss")
    if gap >= SEEN and loss > usual * WORSE:
        return (
            f"{gap:.2f} points more accurate than Oblivious, but its probabilities are worse: log loss "
            f"{loss:.4f}, Oblivious {usual:.4f}"
        )
    return None


def _one_vote(group: Group) -> bool:
    """Whether each client uses the one model that its record names; ensembles vote, and of others nobody knows."""
    entry = ALGORITHMS.get(group[0].header["algorithm"])
    return entry is not None and entry.cls not in (AUE, KUE)


def _below_majority(group: Group) -> str | None:
    mine, usual = _mean(group, "accuracy"), _mean(group, "majority")
    if not mine < usual:
        return None
    return f"{100 * mine:.2f} % right, less than always naming the client's most frequent class ({100 * usual:.2f} %)"


def _unused(group: Group) -> str | None:
    """Of the models at the end those that no client uses, where they are more than the ones that are used."""
    kept = np.mean([run.rows.n_models[-1].max() for run in group])
    used = np.mean([len(np.unique(run.rows.model[-1])) for run in group])
    if kept < 2 * used + 1 or not _one_vote(group):
        return None
    return f"{kept - used:.3g} of its {kept:.3g} models are used by no client at the end"


def _mean(group: Group, name: str) -> float:
    """Over clients, times and seeds; NaN where unknown."""
    return float(np.mean([mean_of_known(getattr(run.rows, name).reshape(1, -1), 1)[0] for run in group]))


def _sent(group: Group) -> float:
    return float(np.mean([run.rows.models_sent.sum() for run in group]))
