"""Ranks of methods on each stream, the mean ranks, and their critical difference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from feddrift.errors import DataError
from feddrift.reports.labels import build_labels
from feddrift.reports.summary import list_configurations, summarise_run
from feddrift.runs.record import Record
from feddrift.types import Floats

MAX_NAMED_METHODS = 10  # names of methods that are left out; more are only counted


@dataclass(frozen=True)
class Ranking:
    """Methods and their ranks, in the order of the mean rank."""

    methods: tuple[str, ...]
    streams: tuple[str, ...]
    ranks: Floats  # [method, stream], 1: best; methods with equal values share their mean rank
    left_out: tuple[str, ...] = ()  # methods without runs on all streams, or with too few seeds

    @property
    def left_out_text(self) -> str:
        """The sentence that names the first methods that are left out, and counts the others."""
        more = f" and {len(self.left_out) - MAX_NAMED_METHODS} more" if len(self.left_out) > MAX_NAMED_METHODS else ""
        return f"not on all streams, or with too few seeds: {', '.join(self.left_out[:MAX_NAMED_METHODS])}{more}"

    @property
    def mean(self) -> Floats:
        """[method], the mean rank over the streams."""
        return np.asarray(self.ranks.mean(axis=1))

    @property
    def critical_difference(self) -> float:
        """The smallest difference of two mean ranks that is significant at the level of 5 % (Nemenyi's test).

        >>> round(Ranking(("a", "b", "c", "d"), ("s",) * 14, np.ones((4, 14))).critical_difference, 2)
        1.25
        """
        from scipy.stats import studentized_range  # here, since SciPy takes a while to import

        k, n = self.ranks.shape
        return float(studentized_range.ppf(0.95, k, np.inf) / np.sqrt(2) * np.sqrt(k * (k + 1) / (6 * n)))


def rank_methods(records: Iterable[Record]) -> Ranking:
    """Rank finished runs on each stream, by the mean over the seeds that all methods have there.

    Ranks are by the accuracy omitting drifts, or including them where drifts are unknown. An algorithm with one
    configuration per stream is one method, even if its settings differ between streams. If it has several
    configurations on a stream, each is a method. Methods without runs on all streams are left out. If the methods have
    no common seed on a stream, the methods with the fewest seeds are left out.

    Args:
        records: Runs on two or more streams.

    Raises:
        DataError: Fewer than two methods or streams are left, the seeds of the methods do not overlap, or a run has no
            tested time step.
    """
    by_stream: dict[str, dict[str, list[Record]]] = {}
    groups = list(list_configurations(records))
    for stream in dict.fromkeys(group[0].header["stream"] for group in groups):
        here = [group for group in groups if group[0].header["stream"] == stream]
        elsewhere = [group[0].header for group in groups if group[0].header["stream"] != stream]
        by_stream[stream] = dict(zip(build_labels([group[0].header for group in here], elsewhere), here, strict=True))
    all_names = list(dict.fromkeys(name for methods in by_stream.values() for name in methods))
    ranked = [name for name in all_names if all(name in methods for methods in by_stream.values())]
    if len(by_stream) < 2 or len(ranked) < 2:
        found = f"{len(ranked)} on all of {len(by_stream)}"
        raise DataError(f"ranks need two or more methods on two or more streams, there are {found}")
    for stream, methods in by_stream.items():
        while not _get_common_seeds([methods[name] for name in ranked]):
            fewest = min(len(_get_common_seeds([methods[name]])) for name in ranked)
            kept = [name for name in ranked if len(_get_common_seeds([methods[name]])) > fewest]
            if len(kept) < 2:
                raise DataError(f"the methods on {stream} have no seed in common: ranks compare runs on the same seeds")
            ranked = kept
    means = {
        stream: _average_scores(stream, [methods[name] for name in ranked]) for stream, methods in by_stream.items()
    }
    left_out = tuple(name for name in all_names if name not in ranked)
    return build_ranking(
        {name: [means[s][k] for s in by_stream] for k, name in enumerate(ranked)}, list(by_stream), left_out
    )


def _get_common_seeds(groups: Sequence[Sequence[Record]]) -> set[int]:
    """Return the seeds that all groups of runs have."""
    return set.intersection(*({run.header["seed"] for run in group} for group in groups))


def build_ranking(
    values: Mapping[str, Sequence[float]], streams: Sequence[str], left_out: tuple[str, ...] = ()
) -> Ranking:
    """Rank methods by their values on each stream; a higher value is better.

    Args:
        values: By method, its values on the streams, in their order.
        streams: Names of the streams.
        left_out: Names of the methods that are not ranked.

    >>> build_ranking({"a": [50, 90], "b": [60, 90], "c": [40, 80]}, ["s", "t"]).ranks.tolist()
    [[1.0, 1.5], [2.0, 1.5], [3.0, 3.0]]
    """
    table = np.array(list(values.values()), dtype=float).round(9)
    better = table[None] > table[:, None]
    equal = table[None] == table[:, None]
    ranks = better.sum(axis=1) + (equal.sum(axis=1) + 1) / 2
    order = np.argsort(ranks.mean(axis=1), kind="stable")
    methods = list(values)
    return Ranking(tuple(methods[k] for k in order), tuple(streams), ranks[order], left_out)


def _average_scores(stream: str, groups: Sequence[Sequence[Record]]) -> list[float]:
    """Average the score of each method over the seeds that all have; negative if lower scores are better."""
    seeds = _get_common_seeds(groups)
    sign = 1 if groups[0][0].score.higher_is_better else -1
    means = []
    for group in groups:
        scores = [summarise_run(run) for run in group if run.header["seed"] in seeds]
        values = [s.including_drifts if s.omitting_drifts is None else s.omitting_drifts for s in scores]
        if any(value is None for value in values):
            raise DataError(
                f"no run of {group[0].header['algorithm']} on {stream} was tested: there is nothing to rank"
            )
        means.append(sign * float(np.mean([value for value in values if value is not None])))
    return means
