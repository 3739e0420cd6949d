"""What an alarm may come from: the inputs and class shares of a client that moved since its data before.

Everything is computed from two cells of one client, where its data are; what leaves it are names, means and shares.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from feddrift.data import Stream
from feddrift.tables.features import Feature
from feddrift.types import Bools, Floats, Ints

What = Literal["mean", "deviation", "share", "missing", "class"]

LEVEL = 0.01  # of all tests together, and again of those within classes: how often chance alone names something
NAMED = 3  # inputs, and classes, that are named
TOLD = 12  # inputs that a client tells, of which those are named that moved there only
WITHIN = 1  # inputs that are told to have moved within a class only, where others moved among all rows
OTHERS = 20  # clients without an alarm that are asked as well, at most
FEW = 10  # rows that a mean or a share must be of at least: fewer tell little of chance and much of themselves
ROOM = 1 << 21  # numbers of a cell that are looked at; of a larger one a part of the rows, of pictures of the inputs
LEAST_ROWS = 100  # of a large cell that are looked at
MAX_STATISTIC = 1e15  # clients report no feature statistic beyond it
GAP = " missing"  # "age missing" is the feature that is 1 where age has no value

Rows = tuple[Floats, npt.NDArray[np.integer]]  # x[n, feature] and y[n]
Test = tuple[Floats, Bools]  # [column], a distance, and whether it is beyond chance


@dataclass(frozen=True)
class Shift:
    """One thing that moved, before and after.

    Mean and deviation are those of an input, in the units of its column, where it has a value; a share is that of the
    ones in an input of 0 and 1, of the rows in which an input is missing, or of a class.
    """

    what: What
    name: str  # of the input or the class
    before: float
    after: float
    distance: float  # of Kolmogorov and Smirnov; of shares it is their difference
    within: str | None = None  # the class among whose rows it moved; None: among all
    common: bool = False  # most other clients moved the same way, at least half as far


@dataclass(frozen=True)
class Shifts:
    """What moved at a client between two of its cells."""

    since: int  # the time step of the earlier one
    rows: tuple[int, int]  # of both
    moved: tuple[Shift, ...]  # none: nothing did by more than chance
    more: int = 0  # inputs that moved as well

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        moved = [{k: v for k, v in asdict(shift).items() if v is not None and v is not False} for shift in self.moved]
        return {"since": self.since, "rows": list(self.rows), "moved": moved, "more": self.more}


def shifts(stream: Stream, t: int, c: int, counts: Ints) -> Shifts | None:
    """What client c has at time t, against the last data before; None without both. It has counts[t] usable rows."""
    earlier = np.flatnonzero(counts[:t])
    if not len(earlier) or not counts[t]:
        return None
    since = int(earlier[-1])
    (x0, y0), (x1, y1) = stream.cell(since, c), stream.cell(t, c)
    features = described(stream)
    classes = [str(name) for name in stream.classes] or [str(k) for k in range(stream.n_classes)]
    columns = _evenly(len(features), ROOM // LEAST_ROWS)
    known = [features[k] for k in columns]
    x0, x1 = (x.reshape(len(x), -1)[:, columns] if len(known) < len(features) else x for x in (x0, x1))
    moved, more = compare((in_units(x0, known), y0), (in_units(x1, known), y1), known, classes)
    return Shifts(since, (len(y0), len(y1)), moved, more)


def asked(alarmed: Sequence[int], have_data: Iterable[int]) -> list[int]:
    """Who is asked what moved: who raised an alarm, and some of the others, to tell what moved everywhere."""
    others = sorted(set(have_data) - set(alarmed))
    return sorted([*alarmed, *(others[k] for k in _evenly(len(others), OTHERS))])


def told(answers: Mapping[int, Shifts], alarmed: Sequence[int]) -> dict[int, Shifts]:
    """What is told of those who raised an alarm: what moved there only first, what moved at most others last.

    Others count if they compare with the same time step and have rows enough for it.
    """
    moves, comparable = defaultdict[Any, list[float]](list), Counter[int]()
    for answer in answers.values():
        comparable[answer.since] += min(answer.rows) >= FEW
        for shift in answer.moved:
            moves[answer.since, _movement(shift)].append(2 * shift.distance)
    for distances in moves.values():
        distances.sort()  # many clients may alarm at once: none is held against every other
    result = {}
    for c in alarmed:
        if (own := answers.get(c)) is not None:
            marked = []
            for shift in own.moved:
                doubles = moves[own.since, _movement(shift)]
                alike = len(doubles) - bisect_left(doubles, shift.distance) - 1  # not itself
                marked.append(replace(shift, common=2 * alike > comparable[own.since] - 1))
            result[c] = _named(replace(own, moved=tuple(marked)))
    return result


def rank(what: str, within: str | None, common: bool) -> tuple[bool, int]:
    """The order in which shifts are told: missing values, classes, what moved within a class, other inputs."""
    return common, 0 if what == "missing" else 1 if what == "class" else 2 if within is not None else 3


def _movement(shift: Shift) -> tuple[Any, ...]:
    return shift.what, shift.name, shift.within, shift.after > shift.before


def _named(shifts: Shifts) -> Shifts:
    """The first of them, in the order in which they are told."""
    ordered = sorted(shifts.moved, key=lambda shift: rank(shift.what, shift.within, shift.common))
    inputs, classes = ([s for s in ordered if (s.what == "class") == is_class] for is_class in (False, True))
    left_out = inputs[NAMED:] + classes[NAMED:]
    return replace(shifts, moved=tuple(s for s in ordered if s not in left_out), more=shifts.more + len(inputs[NAMED:]))


def described(stream: Stream) -> tuple[Feature, ...]:
    """What is known of each feature, in the order of x made flat; one that has no name is called by its place."""
    if stream.recipe:
        return stream.recipe
    names = stream.columns or tuple(
        f"input {where[0] if len(where) == 1 else where}" for where in np.ndindex(*stream.features)
    )
    known = set(names)
    return tuple(
        Feature(name, column, "gap") if name.endswith(GAP) and column in known else Feature(name, name, "number")
        for name in names
        for column in (name.removesuffix(GAP),)
    )


def in_units(x: npt.NDArray[Any], features: Sequence[Feature]) -> Floats:
    """x[n, feature] in the units of the columns, NaN where a value is missing; of many rows an even part."""
    rows = _looked_at(len(x), len(features))
    mean, std = np.array([(feature.mean, feature.std) for feature in features]).T
    values: Floats = x[rows].reshape(len(rows), -1) * std + mean
    for gap, of_gap in enumerate(features):
        if of_gap.kind == "gap":
            same = [k for k, f in enumerate(features) if f.column == of_gap.column and k != gap]
            values[np.ix_(values[:, gap] == 1, same)] = np.nan
    return values


def _looked_at(n: int, n_features: int) -> Ints:
    return _evenly(n, max(ROOM // n_features, LEAST_ROWS))


def _evenly(n: int, most: int) -> Ints:
    """At most so many of 0 to n - 1, from the first to the last."""
    if n <= most:
        return np.arange(n)
    return np.linspace(0, n - 1, most).astype(np.int64)


def compare(
    before: Rows, after: Rows, features: Sequence[Feature], classes: Sequence[str]
) -> tuple[tuple[Shift, ...], int]:
    """The inputs and classes that moved, and how many inputs moved beyond those named.

    Of those that did not, also those that moved among the rows of one class: then inputs belong to other classes than
    before. Where others did, the farthest of them stands for all.
    """
    (x0, y0), (x1, y1) = before, after
    level = LEVEL / (len(features) + len(classes))
    inputs, moved = _inputs(x0, x1, features, level)
    shares = _classes(y0, y1, classes, level)
    if moved and not inputs:  # nothing is told of them
        return (*shares,), len(moved)
    y0, y1 = y0[_looked_at(len(y0), len(features))], y1[_looked_at(len(y1), len(features))]
    still = sorted(set(range(len(features))) - set(moved))
    x0, x1, same = x0[:, still], x1[:, still], [features[k] for k in still]
    within: list[Shift] = []
    n_within = 0
    for k, name in enumerate(classes):
        of_class, moved_within = _inputs(x0[y0 == k], x1[y1 == k], same, LEVEL / (len(features) * len(classes)), name)
        within, n_within = within + of_class, n_within + len(moved_within)
    within = sorted(within, key=lambda shift: -shift.distance)[: WITHIN if moved else TOLD]
    return (*inputs, *within, *shares), len(moved) - len(inputs) if moved else n_within - len(within)


def _classes(
    y0: npt.NDArray[np.integer], y1: npt.NDArray[np.integer], classes: Sequence[str], level: float
) -> list[Shift]:
    """The classes whose shares moved farthest; of two the second stands for both."""
    shown = np.arange(len(classes) == 2, len(classes))
    labels0, labels1 = (np.equal.outer(y, shown).astype(np.float64) for y in (y0, y1))
    distance, moved = _of_shares(labels0, labels1, level)
    return [
        _rounded("class", classes[shown[k]], labels0[:, k].mean(), labels1[:, k].mean(), distance[k])
        for k in _farthest(distance, moved)[:NAMED]
    ]


def _inputs(
    x0: Floats, x1: Floats, features: Sequence[Feature], level: float, within: str | None = None
) -> tuple[list[Shift], list[int]]:
    """The inputs that moved farthest, and the columns of all that moved."""
    if not len(x0) or not len(x1) or not features:
        return [], []
    both = np.concatenate([x0, x1])
    binary = (np.isnan(both) | (np.abs(both) < 1e-4) | (np.abs(both - 1) < 1e-4)).all(axis=0)
    distance, moved = np.zeros(len(features)), np.zeros(len(features), dtype=bool)
    for columns, test in ((binary, _of_shares), (~binary, _of_values)):
        if columns.any():
            distance[columns], moved[columns] = test(x0[:, columns], x1[:, columns], level)
    farthest = _farthest(distance, moved)
    shifts = []
    for k in farthest[:TOLD]:
        a, b, feature = x0[~np.isnan(x0[:, k]), k], x1[~np.isnan(x1[:, k]), k], features[k]
        is_gap = feature.kind == "gap" and binary[k]
        what: What = "missing" if is_gap else "share" if binary[k] else "mean"
        ends = a.mean(), b.mean()
        if what == "mean" and _spread_tells_more(a, b):
            what, ends = "deviation", (a.std(), b.std())
        if max(map(abs, ends)) <= MAX_STATISTIC:
            shifts.append(_rounded(what, feature.column if is_gap else feature.name, *ends, distance[k], within))
    return shifts, farthest


def _farthest(distance: Floats, moved: Bools) -> list[int]:
    order: list[int] = np.argsort(-np.where(moved, distance, -1.0), kind="stable")[: int(moved.sum())].tolist()
    return order


def _of_values(x0: Floats, x1: Floats, level: float) -> Test:
    """Kolmogorov's and Smirnov's distance of two samples, against what chance alone exceeds with this probability."""
    n0, n1 = (np.maximum((~np.isnan(x)).sum(axis=0), 1e-9) for x in (x0, x1))
    both = np.concatenate([x0, x1])
    order = np.argsort(both, axis=0, kind="stable")  # missing values come last and have no weight
    weight = np.concatenate([~np.isnan(x0) / n0, ~np.isnan(x1) / -n1])
    gap, in_order = (np.take_along_axis(values, order, axis=0) for values in (weight, both))
    last = np.concatenate([in_order[1:] != in_order[:-1], np.ones((1, both.shape[1]), dtype=bool)])  # of equal values
    distance: Floats = np.abs(np.where(last, np.cumsum(gap, axis=0), 0.0)).max(axis=0)
    chance = math.sqrt(-math.log(level / 2) / 2) * np.sqrt(1 / n0 + 1 / n1)
    return distance, (distance > chance) & (np.minimum(n0, n1) >= FEW)


def _of_shares(x0: Floats, x1: Floats, level: float) -> Test:
    """The difference of two shares, by the normal approximation with Yates's correction."""
    n0, n1 = (np.maximum((~np.isnan(x)).sum(axis=0), 1e-9) for x in (x0, x1))
    ones0, ones1 = np.nansum(x0, axis=0), np.nansum(x1, axis=0)
    distance: Floats = np.abs(ones1 / n1 - ones0 / n0)
    share, unit = (ones0 + ones1) / (n0 + n1), 1 / n0 + 1 / n1
    chance = NormalDist().inv_cdf(1 - level / 2) * np.sqrt(np.maximum(share * (1 - share), 0.0) * unit)
    return distance, (distance > chance + unit / 2) & (np.minimum(n0, n1) >= FEW)


def _spread_tells_more(a: Floats, b: Floats) -> bool:
    """Whether the deviation changed more than the mean, both measured by the deviation."""
    spread = max(a.std(), b.std())
    return bool(abs(a.mean() - b.mean()) < abs(a.std() - b.std()) and spread > 0)


def _rounded(what: What, name: str, before: float, after: float, distance: float, within: str | None = None) -> Shift:
    first, last, apart = (float(f"{value:.6g}") for value in (before, after, distance))
    return Shift(what, name, first, last, apart, within)
