"""Caveats of a comparison: sentences about runs that are worse than their mean accuracy suggests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np

from feddrift.algorithms import ALGORITHMS
from feddrift.algorithms.baselines.aue import AUE
from feddrift.algorithms.baselines.kue import KUE
from feddrift.reports.labels import build_labels
from feddrift.reports.summary import (
    average_cells,
    average_known_values,
    compute_difference,
    compute_interval,
    compute_spread,
    list_configurations,
    summarise_run,
)
from feddrift.runs.record import Record, select_score

MIN_REPORTED_GAP = 0.1  # points of accuracy; smaller differences are not reported
MIN_LOG_LOSS_RATIO = 1.01  # times Oblivious's log loss
MAX_EQUAL_GAP = 0.3  # points of accuracy between two runs of one model
MAX_EQUAL_TRAFFIC_RATIO = 1.05  # times Oblivious's traffic; up to it the costs count as equal
MIN_TEST_ROWS = 10  # rows per time step; clients with fewer are reported if the largest has the square of this number
Group = Sequence[Record]  # the seeds of one configuration


def find_caveats(records: Iterable[Record], name_streams: bool = True) -> list[str]:
    """Return sentences about weaknesses of finished runs, stream by stream; an empty list is the best result.

    They are about accuracy, also if the reports show another score. A difference whose confidence interval contains 0
    is not reported.

    Args:
        records: The runs to compare.
        name_streams: True to begin each sentence with its stream.
    """
    groups = list_configurations(select_score(records, "accuracy"))
    sentences = []
    for stream, groups_of_stream in groupby(groups, key=lambda group: str(group[0].header["stream"])):
        sentences += _find_caveats_of_stream(list(groups_of_stream), stream if name_streams else "")
    return sentences


def _find_caveats_of_stream(groups: Sequence[Group], stream: str) -> list[str]:
    """Return the sentences on one stream; they begin with its name unless it is empty."""
    unequal = _describe_unequal_clients([run for group in groups for run in group])
    sentences = [f"{stream}: {unequal}." if stream else f"{unequal}."] if unequal else []
    prefix = f"{stream}, " if stream else ""
    for group, name in zip(groups, build_labels([group[0].header for group in groups]), strict=True):
        oblivious = next(
            (other for other in groups if other is not group and _is_oblivious_baseline(other, group)), None
        )
        if group[0].header["algorithm"] == "Majority":  # the baseline of `_compare_with_majority`
            continue
        caveats = [
            _compare_with_oblivious(group, oblivious) if oblivious else None,
            _compare_with_majority(group),
            _describe_unused_models(group),
        ]
        sentences += [f"{prefix}{name}: {sentence}." for sentence in caveats if sentence]
    return sentences


def _describe_unequal_clients(runs: Sequence[Record]) -> str | None:
    """Describe the clients with few rows but equal weight in means, of the run with most such clients."""
    found = []
    for run in (run for run in runs if run.weigh == "clients"):
        tested = np.where(run.rows.tested > 0, run.rows.tested, np.nan)
        rows = average_known_values(tested.T, 1)
        rows = rows[~np.isnan(rows)]  # means leave out clients that are never tested
        if rows.size and rows.max() >= MIN_TEST_ROWS * MIN_TEST_ROWS:
            found.append((int((rows < MIN_TEST_ROWS).sum()), len(rows), rows.max()))
    n_small, n_clients, largest = max(found, default=(0, 0, 0))
    if not n_small:
        return None
    verb = "has" if n_small == 1 else "have"
    return (
        f"{n_small} of {n_clients} clients {verb} fewer than {MIN_TEST_ROWS} rows a step to test on, the largest "
        f"{largest:.0f}, and every mean counts all clients alike; `feddrift report --weigh rows` counts rows alike"
    )


def _is_oblivious_baseline(other: Group, group: Group) -> bool:
    """Return whether `other` is Oblivious on the data of `group`, with the same training."""
    header = other[0].header
    return header["algorithm"] == "Oblivious" and all(
        header[key] == group[0].header[key] for key in ("stream", "overrides")
    )


def _compare_with_oblivious(group: Group, oblivious: Group) -> str | None:
    """Return a sentence if a configuration is worse than Oblivious, or equal and more expensive."""
    difference = compute_difference(group, oblivious, "Oblivious")  # the same as of `--against Oblivious`
    if difference is None:
        return None
    gap = difference.mean
    n_seeds = len(difference.seeds)
    traffic_ratio = _average_traffic(group) / max(_average_traffic(oblivious), 1e-9)
    one_model = _has_one_model_per_client(group) and all(
        (run.rows.model == run.rows.model[:, :1]).all() for run in group
    )
    if one_model and abs(gap) < MAX_EQUAL_GAP and traffic_ratio > MAX_EQUAL_TRAFFIC_RATIO:
        return f"all clients use one model all the time, as Oblivious does, for {traffic_ratio:.1f} times its traffic"
    if abs(gap) < MIN_REPORTED_GAP:
        return None
    if not _is_clear(difference.low, difference.high):
        sentence_start = "neither clearly more nor less accurate than Oblivious, and"
        return _compare_log_loss(group, oblivious, sentence_start)
    if gap < 0:
        return f"{-gap:.2f} points less accurate than Oblivious{_format_one_seed(n_seeds)}"
    sentence_start = f"{gap:.2f} points more accurate than Oblivious{_format_one_seed(n_seeds)}, but"
    return _compare_log_loss(group, oblivious, sentence_start)


def _compare_log_loss(group: Group, oblivious: Group, sentence_start: str) -> str | None:
    """Return a sentence if the log loss is clearly higher than that of Oblivious."""
    if any(np.isnan(run.rows.log_loss).all() for run in (*group, *oblivious)):
        return None
    group = select_score(group, "log_loss")
    oblivious = select_score(oblivious, "log_loss")
    difference = compute_difference(group, oblivious, "Oblivious")
    loss = _average_shown_score(group)
    baseline = _average_shown_score(oblivious)
    if difference is None or not _is_clear(difference.low, difference.high) or not loss > baseline * MIN_LOG_LOSS_RATIO:
        return None
    return f"{sentence_start} its probabilities are worse: log loss {loss:.4f}, Oblivious {baseline:.4f}"


def _is_clear(low: float | None, high: float | None) -> bool:
    """Return whether an interval excludes 0; True without an interval, which needs two seeds."""
    return low is None or high is None or low > 0 or high < 0


def _format_one_seed(n_seeds: int) -> str:
    return " in one seed" if n_seeds == 1 else ""


def _has_one_model_per_client(group: Group) -> bool:
    """Return whether each client uses only the model in the record: False for ensembles and unknown algorithms."""
    entry = ALGORITHMS.get(group[0].header["algorithm"])
    return entry is not None and entry.cls not in (AUE, KUE)


def _compare_with_majority(group: Group) -> str | None:
    """Return a sentence if a configuration is clearly worse than predicting each client's most frequent class."""
    runs = [(average_cells(run, run.rows.accuracy), average_cells(run, run.rows.majority)) for run in group]
    pairs = [(accuracy, majority) for accuracy, majority in runs if accuracy is not None and majority is not None]
    if not pairs:
        return None
    gap, low, high = compute_interval([accuracy - majority for accuracy, majority in pairs])
    if gap >= 0 or not _is_clear(low, high):
        return None
    accuracy, majority = np.mean(pairs, axis=0)
    has_drifts = any((run.rows.concept >= 0).any() for run in group)
    tests = "including drifts, " if has_drifts else ""
    right = f"{tests}{100 * accuracy:.2f} % right{_format_one_seed(len(pairs))}"
    return f"{right}, less than always naming the client's most frequent class ({100 * majority:.2f} %)"


def _describe_unused_models(group: Group) -> str | None:
    """Return a sentence if more models are unused than used after the last time step."""
    kept = np.mean([run.rows.n_models[-1].max() for run in group])
    used = np.mean([len(np.unique(run.rows.model[-1])) for run in group])
    if kept < 2 * used + 1 or not _has_one_model_per_client(group):
        return None
    return f"{kept - used:.3g} of its {kept:.3g} models are used by no client at the end"


def _average_shown_score(group: Group) -> float:
    """Average over seeds the score omitting drifts, or including them if drifts are unknown."""
    runs = [summarise_run(run) for run in group]
    levels = [run.including_drifts if run.omitting_drifts is None else run.omitting_drifts for run in runs]
    spread = compute_spread([level for level in levels if level is not None])
    return spread.mean if spread else np.nan


def _average_traffic(group: Group) -> float:
    """Return the number of models sent in a run, averaged over seeds."""
    return float(np.mean([run.rows.models_sent.sum() for run in group]))
