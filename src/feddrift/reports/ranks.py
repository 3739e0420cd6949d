"""Who is best over several streams: ranks on each of them, their mean, and how far apart means must be to differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from feddrift.errors import DataError
from feddrift.reports.labels import names
from feddrift.reports.summary import configurations, scores
from feddrift.runs.record import Record
from feddrift.types import Floats

NAMED = 10  # of those that are left out


@dataclass(frozen=True)
class Ranking:
    """Methods, the one with the best mean rank first."""

    methods: tuple[str, ...]
    streams: tuple[str, ...]
    ranks: Floats  # [method, stream], 1: best; equals share the mean of their places
    left_out: tuple[str, ...] = ()  # who did not run on all of these streams, or not with the seeds of the others

    @property
    def without(self) -> str:
        """Who is left out, in words; of many the first."""
        more = f" and {len(self.left_out) - NAMED} more" if len(self.left_out) > NAMED else ""
        return f"not on all streams, or with too few seeds: {', '.join(self.left_out[:NAMED])}{more}"

    @property
    def mean(self) -> Floats:
        """[method]"""
        return np.asarray(self.ranks.mean(axis=1))

    @property
    def critical_difference(self) -> float:
        """How far two mean ranks must be apart to differ at 5 % (Nemenyi's test).

        >>> round(Ranking(("a", "b", "c", "d"), ("s",) * 14, np.ones((4, 14))).critical_difference, 2)
        1.25
        """
        from scipy.stats import studentized_range  # here, since SciPy takes a while to import

        k, n = self.ranks.shape
        return float(studentized_range.ppf(0.95, k, np.inf) / np.sqrt(2) * np.sqrt(k * (k + 1) / (6 * n)))


def ranking(records: Iterable[Record]) -> Ranking:
    """The finished runs, ranked on each stream by the mean over the seeds that all methods have there.

    What is ranked is the accuracy omitting drifts, or including them where drifts are not known. Who ran in one setting
    on each stream is one method, whatever that was; of several settings each is one. Left out is who has not run on all
    streams, and where there is no seed that all have, who has the fewest.
    """
    by_stream: dict[str, dict[str, list[Record]]] = {}
    groups = list(configurations(records))
    for stream in dict.fromkeys(group[0].header["stream"] for group in groups):
        here = [group for group in groups if group[0].header["stream"] == stream]
        elsewhere = [group[0].header for group in groups if group[0].header["stream"] != stream]
        by_stream[stream] = dict(zip(names([group[0].header for group in here], elsewhere), here, strict=True))
    every = list(dict.fromkeys(name for methods in by_stream.values() for name in methods))
    everywhere = [name for name in every if all(name in methods for methods in by_stream.values())]
    if len(by_stream) < 2 or len(everywhere) < 2:
        found = f"{len(everywhere)} on all of {len(by_stream)}"
        raise DataError(f"ranks are of two or more methods on two or more streams, there are {found}")
    for stream, methods in by_stream.items():
        while not _seeds([methods[name] for name in everywhere]):
            fewest = min(len(_seeds([methods[name]])) for name in everywhere)
            left = [name for name in everywhere if len(_seeds([methods[name]])) > fewest]
            if len(left) < 2:
                raise DataError(f"the methods on {stream} have no seed in common: ranks compare runs on the same seeds")
            everywhere = left
    means = {stream: _means(stream, [methods[name] for name in everywhere]) for stream, methods in by_stream.items()}
    left_out = tuple(name for name in every if name not in everywhere)
    return ranked(
        {name: [means[s][k] for s in by_stream] for k, name in enumerate(everywhere)}, list(by_stream), left_out
    )


def _seeds(groups: Sequence[Sequence[Record]]) -> set[int]:
    """Those that all have."""
    return set.intersection(*({run.header["seed"] for run in group} for group in groups))


def ranked(values: Mapping[str, Sequence[float]], streams: Sequence[str], left_out: tuple[str, ...] = ()) -> Ranking:
    """Methods by their values on each stream, higher is better.

    >>> ranked({"a": [50, 90], "b": [60, 90], "c": [40, 80]}, ["s", "t"]).ranks.tolist()
    [[1.0, 1.5], [2.0, 1.5], [3.0, 3.0]]
    """
    table = np.array(list(values.values()), dtype=float).round(9)
    better, equal = table[None] > table[:, None], table[None] == table[:, None]
    ranks = better.sum(axis=1) + (equal.sum(axis=1) + 1) / 2
    order = np.argsort(ranks.mean(axis=1), kind="stable")
    methods = list(values)
    return Ranking(tuple(methods[k] for k in order), tuple(streams), ranks[order], left_out)


def _means(stream: str, groups: Sequence[Sequence[Record]]) -> list[float]:
    """Of each method, over the seeds that all have; a lower score that is better with its sign turned."""
    seeds = _seeds(groups)
    sign = 1 if groups[0][0].score.higher_is_better else -1
    found = []
    for group in groups:
        of_seeds = [scores(run) for run in group if run.header["seed"] in seeds]
        values = [s.including_drifts if s.omitting_drifts is None else s.omitting_drifts for s in of_seeds]
        if any(value is None for value in values):
            raise DataError(
                f"no run of {group[0].header['algorithm']} on {stream} was tested: there is nothing to rank"
            )
        found.append(sign * float(np.mean([value for value in values if value is not None])))
    return found
