"""Explanation of drift alarms: inputs and class shares of a client that differ from its previous data.

The computation compares two cells of one client and runs where its data are. The client sends names, means and shares.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from feddrift.data import Stream
from feddrift.tables.features import Feature
from feddrift.types import Bools, Floats, Ints

ShiftKind = Literal["mean", "deviation", "share", "missing", "class"]

SIGNIFICANCE_LEVEL = 0.01  # of all tests together, and again of all tests within classes
MAX_NAMED_SHIFTS = 3  # of inputs, and of classes
MAX_REPORTED_INPUTS = 12  # per client; the server prefers those that did not move at other clients
MAX_WITHIN_CLASS_SHIFTS = 1  # reported if other inputs moved among all rows
MAX_OTHER_CLIENTS = 20  # clients without an alarm that also report changes, for comparison
MIN_ROWS_PER_TEST = 10  # fewer rows do not support a test, and their statistics would reveal much about single rows
MAX_SAMPLED_VALUES = 1 << 21  # larger cells are sampled: some of their rows, and of images also some of the inputs
MIN_SAMPLED_ROWS = 100  # of a larger cell
MAX_STATISTIC = 1e15  # clients report no feature statistic beyond it
MISSING_SUFFIX = " missing"  # the feature "age missing" is 1 where age has no value

Cell = tuple[Floats, npt.NDArray[np.integer]]  # x[n, feature] and y[n]
TestResult = tuple[Floats, Bools]  # [column], the distance; and [column], True where it is significant


@dataclass(frozen=True)
class Shift:
    """Change of one input or class share, before and after.

    Means and deviations leave out missing values; their units are those of the column. A share is that of ones in a
    binary input, of rows in which an input is missing, or of a class.
    """

    what: ShiftKind
    name: str  # of the input or the class
    before: float
    after: float
    distance: float  # Kolmogorov-Smirnov distance, or the difference of two shares
    within: str | None = None  # the class whose rows were compared; None: all rows
    common: bool = False  # True: most other clients report the same change, at least half as large


@dataclass(frozen=True)
class Shifts:
    """Significant changes at a client between two of its cells."""

    since: int  # time step of the earlier cell
    rows: tuple[int, int]  # numbers of rows of the two cells
    moved: tuple[Shift, ...]  # empty: no significant change
    more: int = 0  # number of further inputs that moved

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON values of a record; fields with defaults are left out."""
        moved = [{k: v for k, v in asdict(shift).items() if v is not None and v is not False} for shift in self.moved]
        return {"since": self.since, "rows": list(self.rows), "moved": moved, "more": self.more}


def find_shifts(stream: Stream, t: int, c: int, counts: Ints) -> Shifts | None:
    """Compare the data of client c at time t with its previous data.

    Args:
        stream: The data.
        t: The time step.
        c: The position of the client.
        counts: [t], the number of rows that the client can use.

    Returns:
        The changes, or None if the client has no data now or before.
    """
    earlier = np.flatnonzero(counts[:t])
    if not len(earlier) or not counts[t]:
        return None
    since = int(earlier[-1])
    x0, y0 = stream.cell(since, c)
    x1, y1 = stream.cell(t, c)
    features = list_features(stream)
    classes = [str(name) for name in stream.classes] or [str(k) for k in range(stream.n_classes)]
    columns = _sample_evenly(len(features), MAX_SAMPLED_VALUES // MIN_SAMPLED_ROWS)
    sampled = [features[k] for k in columns]
    x0, x1 = (x.reshape(len(x), -1)[:, columns] if len(sampled) < len(features) else x for x in (x0, x1))
    before = convert_to_units(x0, sampled), y0
    after = convert_to_units(x1, sampled), y1
    moved, more = compare_cells(before, after, sampled, classes)
    return Shifts(since, (len(y0), len(y1)), moved, more)


def choose_reporting_clients(alarmed: Sequence[int], with_data: Iterable[int]) -> list[int]:
    """Choose the clients that report changes: those with an alarm, and some others for comparison."""
    others = sorted(set(with_data) - set(alarmed))
    return sorted([*alarmed, *(others[k] for k in _sample_evenly(len(others), MAX_OTHER_CLIENTS))])


def mark_common_shifts(reports: Mapping[int, Shifts], alarmed: Sequence[int], n_others: int) -> dict[int, Shifts]:
    """Mark changes that most other clients report too, and select the changes to name.

    A client is compared with the clients whose earlier cell is of the same time step, and which have enough rows in
    both cells. The clients without an alarm are a sample if there are many: each of them then counts for several.

    Args:
        reports: By client: the changes that it reported.
        alarmed: The clients with an alarm.
        n_others: The number of clients with data and without an alarm; `choose_reporting_clients` samples them.

    Returns:
        By client: the named changes of the alarmed clients that reported, those that are not common first.
    """
    with_alarm = set(alarmed)
    other_weight = max(1.0, n_others / MAX_OTHER_CLIENTS)
    n_comparable = defaultdict[int, float](float)  # by time of the earlier cell, estimated over all clients
    doubled_distances = defaultdict[Any, list[float]](list)  # of clients with an alarm
    other_distances = defaultdict[Any, list[float]](list)  # doubled as well
    for c, report in reports.items():
        weight = 1.0 if c in with_alarm else other_weight
        n_comparable[report.since] += weight * (min(report.rows) >= MIN_ROWS_PER_TEST)
        for shift in report.moved:
            distances = doubled_distances if c in with_alarm else other_distances
            distances[report.since, _get_change(shift)].append(2 * shift.distance)
    for values in (*doubled_distances.values(), *other_distances.values()):
        values.sort()  # for a binary search: many clients may raise an alarm at the same time
    result = {}
    for c in alarmed:
        if c not in reports:
            continue
        own = reports[c]
        marked = []
        for shift in own.moved:
            key = own.since, _get_change(shift)
            n_alarmed = _count_at_least(doubled_distances[key], shift.distance) - 1  # without the client itself
            n_similar = n_alarmed + other_weight * _count_at_least(other_distances[key], shift.distance)
            marked.append(replace(shift, common=2 * n_similar > n_comparable[own.since] - 1))
        result[c] = _limit_named_shifts(replace(own, moved=tuple(marked)))
    return result


def _count_at_least(values: Sequence[float], limit: float) -> int:
    """Return the number of sorted values that are not below the limit."""
    return len(values) - bisect_left(values, limit)


def rank_shift(what: str, within: str | None, common: bool) -> tuple[bool, int]:
    """Return a sort key for reports: missing values, classes, inputs within a class, other inputs; common ones last."""
    ranks = {"missing": 0, "class": 1}
    return common, ranks.get(what, 3 if within is None else 2)


def _get_change(shift: Shift) -> tuple[Any, ...]:
    """Return the input or class, and the direction of its change: equal for the same change at other clients."""
    return shift.what, shift.name, shift.within, shift.after > shift.before


def _limit_named_shifts(shifts: Shifts) -> Shifts:
    """Keep the first MAX_NAMED_SHIFTS inputs, and as many classes, in the order of reports."""
    ordered = sorted(shifts.moved, key=lambda shift: rank_shift(shift.what, shift.within, shift.common))
    further_inputs = [shift for shift in ordered if shift.what != "class"][MAX_NAMED_SHIFTS:]
    further_classes = [shift for shift in ordered if shift.what == "class"][MAX_NAMED_SHIFTS:]
    named = tuple(shift for shift in ordered if shift not in further_inputs + further_classes)
    return replace(shifts, moved=named, more=shifts.more + len(further_inputs))


def list_features(stream: Stream) -> tuple[Feature, ...]:
    """List the features in the order of flattened x; features without a name are named by their index."""
    if stream.recipe:
        return stream.recipe
    names = stream.columns or tuple(
        f"input {index[0] if len(index) == 1 else index}" for index in np.ndindex(*stream.features)
    )
    missing_names = {name + MISSING_SUFFIX for name in names}
    return tuple(
        Feature(name, name.removesuffix(MISSING_SUFFIX), "gap")
        if name in missing_names
        else Feature(name, name, "number")
        for name in names
    )


def convert_to_units(x: npt.NDArray[Any], features: Sequence[Feature]) -> Floats:
    """Convert x[n, feature] to the units of the columns, NaN for missing values; large cells are sampled."""
    rows = _sample_rows(len(x), len(features))
    mean, std = np.array([(feature.mean, feature.std) for feature in features]).T
    values: Floats = x[rows].reshape(len(rows), -1) * std + mean
    for gap, indicator in enumerate(features):
        if indicator.kind == "gap":
            same_column = [k for k, f in enumerate(features) if f.column == indicator.column and k != gap]
            values[np.ix_(values[:, gap] == 1, same_column)] = np.nan
    return values


def _sample_rows(n: int, n_features: int) -> Ints:
    """Return the rows of a cell with n rows that are compared."""
    return _sample_evenly(n, max(MAX_SAMPLED_VALUES // n_features, MIN_SAMPLED_ROWS))


def _sample_evenly(n: int, limit: int) -> Ints:
    """Return at most `limit` of the numbers 0 to n - 1, evenly spaced from the first to the last."""
    if n <= limit:
        return np.arange(n)
    return np.linspace(0, n - 1, limit).astype(np.int64)


def compare_cells(
    before: Cell, after: Cell, features: Sequence[Feature], classes: Sequence[str]
) -> tuple[tuple[Shift, ...], int]:
    """Test which inputs and classes moved between two cells.

    Inputs that did not move among all rows are also compared among the rows of each class: a change there means that
    inputs belong to other classes than before. If other inputs moved, only the largest such change is returned.

    Args:
        before: The earlier cell.
        after: The later cell.
        features: The columns of x.
        classes: The names of the classes.

    Returns:
        The changes, and the number of further inputs that moved.
    """
    x0, y0 = before
    x1, y1 = after
    level = SIGNIFICANCE_LEVEL / (len(features) + len(classes))
    input_shifts, moved = _find_input_shifts(x0, x1, features, level)
    class_shifts = _find_class_shifts(y0, y1, classes, level)
    if moved and not input_shifts:  # all of them exceed MAX_STATISTIC
        return tuple(class_shifts), len(moved)
    y0 = y0[_sample_rows(len(y0), len(features))]
    y1 = y1[_sample_rows(len(y1), len(features))]
    unmoved = sorted(set(range(len(features))) - set(moved))
    unmoved_features = [features[k] for k in unmoved]
    level = SIGNIFICANCE_LEVEL / (len(features) * len(classes))
    within_shifts: list[Shift] = []
    n_moved_within = 0
    for k, name in enumerate(classes):
        shifts, moved_within = _find_input_shifts(
            x0[y0 == k][:, unmoved], x1[y1 == k][:, unmoved], unmoved_features, level, within=name
        )
        within_shifts += shifts
        n_moved_within += len(moved_within)
    within_shifts.sort(key=lambda shift: -shift.distance)
    within_shifts = within_shifts[: MAX_WITHIN_CLASS_SHIFTS if moved else MAX_REPORTED_INPUTS]
    n_more = len(moved) - len(input_shifts) if moved else n_moved_within - len(within_shifts)
    return (*input_shifts, *within_shifts, *class_shifts), n_more


def _find_class_shifts(
    y0: npt.NDArray[np.integer], y1: npt.NDArray[np.integer], classes: Sequence[str], level: float
) -> list[Shift]:
    """Return the classes with the largest significant changes of their shares; of two classes only the second."""
    compared = np.arange(1 if len(classes) == 2 else 0, len(classes))
    labels0, labels1 = (np.equal.outer(y, compared).astype(np.float64) for y in (y0, y1))
    distance, moved = _test_shares(labels0, labels1, level)
    return [
        _create_shift("class", classes[compared[k]], labels0[:, k].mean(), labels1[:, k].mean(), distance[k])
        for k in _sort_by_distance(distance, moved)[:MAX_NAMED_SHIFTS]
    ]


def _find_input_shifts(
    x0: Floats, x1: Floats, features: Sequence[Feature], level: float, within: str | None = None
) -> tuple[list[Shift], list[int]]:
    """Return the largest changes of inputs, and the columns of all significant changes."""
    if not len(x0) or not len(x1) or not features:
        return [], []
    both = np.concatenate([x0, x1])
    is_binary = (np.isnan(both) | (np.abs(both) < 1e-4) | (np.abs(both - 1) < 1e-4)).all(axis=0)
    distance = np.zeros(len(features))
    moved = np.zeros(len(features), dtype=bool)
    for columns, test in ((is_binary, _test_shares), (~is_binary, _test_values)):
        if columns.any():
            distance[columns], moved[columns] = test(x0[:, columns], x1[:, columns], level)
    moved_columns = _sort_by_distance(distance, moved)
    shifts = []
    for k in moved_columns[:MAX_REPORTED_INPUTS]:
        values0 = x0[~np.isnan(x0[:, k]), k]
        values1 = x1[~np.isnan(x1[:, k]), k]
        feature = features[k]
        is_gap = feature.kind == "gap" and is_binary[k]
        what: ShiftKind = "missing" if is_gap else "share" if is_binary[k] else "mean"
        before = values0.mean()
        after = values1.mean()
        if what == "mean" and _is_deviation_clearer(values0, values1):
            what = "deviation"
            before = values0.std()
            after = values1.std()
        if max(abs(before), abs(after)) <= MAX_STATISTIC:
            name = feature.column if is_gap else feature.name
            shifts.append(_create_shift(what, name, before, after, distance[k], within))
    return shifts, moved_columns


def _sort_by_distance(distance: Floats, moved: Bools) -> list[int]:
    """Return the columns that moved, the largest distance first."""
    order: list[int] = np.argsort(-np.where(moved, distance, -1.0), kind="stable")[: int(moved.sum())].tolist()
    return order


def _test_values(x0: Floats, x1: Floats, level: float) -> TestResult:
    """Compute the Kolmogorov-Smirnov distance of two samples, and whether it is significant at this level."""
    n0, n1 = (np.maximum((~np.isnan(x)).sum(axis=0), 1e-9) for x in (x0, x1))
    both = np.concatenate([x0, x1])
    order = np.argsort(both, axis=0, kind="stable")  # missing values are last, with weight 0
    weight = np.concatenate([~np.isnan(x0) / n0, ~np.isnan(x1) / -n1])
    sorted_weight, sorted_values = (np.take_along_axis(values, order, axis=0) for values in (weight, both))
    is_last = np.ones(both.shape, dtype=bool)  # of equal values
    is_last[:-1] = sorted_values[1:] != sorted_values[:-1]
    distance: Floats = np.abs(np.where(is_last, np.cumsum(sorted_weight, axis=0), 0.0)).max(axis=0)
    critical = math.sqrt(-math.log(level / 2) / 2) * np.sqrt(1 / n0 + 1 / n1)
    return distance, (distance > critical) & (np.minimum(n0, n1) >= MIN_ROWS_PER_TEST)


def _test_shares(x0: Floats, x1: Floats, level: float) -> TestResult:
    """Compute the difference of two shares; significance by the normal approximation with Yates's correction."""
    n0, n1 = (np.maximum((~np.isnan(x)).sum(axis=0), 1e-9) for x in (x0, x1))
    ones0, ones1 = (np.nansum(x, axis=0) for x in (x0, x1))
    distance: Floats = np.abs(ones1 / n1 - ones0 / n0)
    share = (ones0 + ones1) / (n0 + n1)
    unit = 1 / n0 + 1 / n1
    critical = NormalDist().inv_cdf(1 - level / 2) * np.sqrt(np.maximum(share * (1 - share), 0.0) * unit)
    return distance, (distance > critical + unit / 2) & (np.minimum(n0, n1) >= MIN_ROWS_PER_TEST)


def _is_deviation_clearer(a: Floats, b: Floats) -> bool:
    """Return True if the standard deviation changed more than the mean."""
    return bool(abs(a.mean() - b.mean()) < abs(a.std() - b.std()) and max(a.std(), b.std()) > 0)


def _create_shift(
    what: ShiftKind, name: str, before: float, after: float, distance: float, within: str | None = None
) -> Shift:
    """Create a Shift whose numbers are rounded to six significant digits."""

    def round_to_six_digits(value: float) -> float:
        return float(f"{value:.6g}")

    return Shift(
        what, name, round_to_six_digits(before), round_to_six_digits(after), round_to_six_digits(distance), within
    )
