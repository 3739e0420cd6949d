"""A table as a stream: rows find their time step and client, columns become features, labels classes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift.errors import ConfigError, DataError, nearest, safe_repr, unknown
from feddrift.tables import labels
from feddrift.tables.columns import Columns, texts
from feddrift.tables.features import Column, Feature, learn, values_of
from feddrift.tables.problems import Problems, listed
from feddrift.tables.times import Steps, natural, read_every, steps
from feddrift.types import Bools, Ints

MISSING = ("drop", "mean", "indicator")
CATEGORIES = ("onehot",)
LARGE = 100.0  # features beyond it hardly train with the usual step sizes
MANY = 1000  # time steps, which hardly anybody means
CURES = (
    '--missing drop (in Python missing="drop") leaves such rows out, mean fills in the mean of the first time step, '
    "indicator also adds a column of 0 and 1"
)

_log = logging.getLogger("feddrift")


@dataclass(frozen=True)
class Plan:
    """Which columns of a table are what, and what becomes of them."""

    client: str | None
    time: str | None
    label: str
    every: str | float | None = None
    missing: str | None = None
    categories: str | None = None
    scale: bool = True

    def __post_init__(self) -> None:
        for what, column in self.keys.items():
            if not isinstance(column, str):
                raise ConfigError(f"{what} must be the name of a column, got {safe_repr(column)}")
        if not isinstance(self.scale, bool):
            raise ConfigError(f"scale must be True or False, got {safe_repr(self.scale)}")
        object.__setattr__(self, "every", read_every(self.every))
        for name, legal in (("missing", MISSING), ("categories", CATEGORIES)):
            if getattr(self, name) not in (None, *legal):
                raise unknown(name, getattr(self, name), legal)

    @property
    def keys(self) -> dict[str, str]:
        """The columns that are no features, by what they are."""
        columns = {"client": self.client, "time": self.time, "label": self.label}
        return {what: name for what, name in columns.items() if name is not None}


@dataclass(frozen=True)
class Table:
    """Columns by name, with where each row stands."""

    name: str
    columns: Columns
    lines: Sequence[int | str]
    row: str = "line"  # what a place is called
    problems: Problems = field(default_factory=lambda: Problems("table"))  # found already

    def places(self, where: Bools) -> str:
        """The rows that these are, the first few by number."""
        lines = [self.lines[i] for i in np.flatnonzero(where).tolist()]
        return f"{self.row}{'s' * (len(lines) > 1)} {listed(lines)}"


@dataclass(frozen=True)
class Arranged:
    """All that a stream needs, under its own names."""

    x: npt.NDArray[np.float32]
    y: npt.NDArray[np.int32]
    counts: Ints
    n_classes: int
    clients: tuple[str, ...]
    times: tuple[str, ...]
    classes: tuple[int | str, ...]
    columns: tuple[str, ...]
    recipe: tuple[Feature, ...]


def arrange(table: Table, plan: Plan) -> Arranged:
    """What the table gives every client at every time step, or all that is wrong with it in one sentence."""
    problems = table.problems
    if _names_are_wrong(table, plan):
        problems.stop()
    keys = {what: texts(table.columns[name]) for what, name in plan.keys.items()}
    features = [Column.of(n, values) for n, values in table.columns.items() if n not in plan.keys.values()]
    keep = _kept(table, plan, keys, features)
    _check_features(table, plan, features, keep)
    where = np.flatnonzero(keep)
    kept = {what: [column[i] for i in where] for what, column in keys.items()}
    times = _attempt(problems, f"column '{plan.time}': ", lambda: _steps(table, kept["time"], where, plan.every))
    labelled = _attempt(problems, f"column '{plan.label}', ", lambda: _classes(table, plan.label, kept["label"], where))
    problems.stop()
    assert times is not None and labelled is not None
    classes, index = labelled
    clients = sorted(set(kept["client"]), key=natural)
    place = {name: c for c, name in enumerate(clients)}
    t = np.array([times.of[text] for text in kept["time"]], dtype=np.int64)
    c = np.array([place[text] for text in kept["client"]], dtype=np.int64)
    y = np.array([index[text] for text in kept["label"]], dtype=np.int32)
    columns = [_taken(column, where) for column in features]
    fills = plan.missing in ("mean", "indicator")
    try:
        recipe = learn(columns, t == 0, c, fills=fills, indicates=plan.missing == "indicator", scales=plan.scale)
    except DataError as error:
        raise DataError(f"{table.name}: {error}") from None
    order = np.lexsort((c, t))  # stable: rows of a cell stay in their order
    x = values_of(recipe, columns)[order]
    _check_scale(table.name, recipe, x, plan.scale)
    _tell(table, recipe, columns, times.names)
    labels.warn_of_odd_classes(table.name, classes)
    counts = np.zeros((len(times.names), len(clients)), dtype=np.int64)
    np.add.at(counts, (t, c), 1)
    names = tuple(feature.name for feature in recipe)
    return Arranged(x, y[order], counts, len(classes), tuple(clients), times.names, tuple(classes), names, recipe)


def _names_are_wrong(table: Table, plan: Plan) -> bool:
    """Then nothing can be said of the rest."""
    names, problems = list(table.columns), table.problems
    before, wrong = len(problems.sentences), 0
    for what in ("client", "time", "label"):
        name = plan.keys.get(what)
        if name is None:
            problems.add(f"{what} must name a column")
        elif name not in table.columns:
            problems.add(f"{what} must name a column, got '{name}'{nearest(name, names)}")
        else:
            continue
        wrong += 1
    if wrong:
        problems.sentences[-1] += f" (there are: {listed(names, 20)})"
    elif len(set(plan.keys.values())) < 3:
        problems.add(f"client, time and label must be three columns, got {', '.join(plan.keys.values())}")
    elif len(names) < 4:
        problems.add("no column is left for features beside client, time and label")
    elif not table.lines:
        problems.add("expected rows below the names of the columns, got none")
    return len(problems.sentences) > before


def _kept(table: Table, plan: Plan, keys: dict[str, list[str]], features: Sequence[Column]) -> Bools:
    """The rows that are used: without a choice all of them must be whole."""
    gaps = {name: np.array([not text for text in keys[what]], dtype=bool) for what, name in plan.keys.items()}
    if plan.missing in (None, "drop"):
        gaps |= {column.name: column.gaps for column in features}
    gaps = {name: where for name, where in gaps.items() if where.any()}
    if not gaps:
        return np.ones(len(table.lines), dtype=bool)
    keep: Bools = ~np.logical_or.reduce(list(gaps.values()))
    where_they_are = listed(
        (f"'{name}' ({int(where.sum())}: {table.places(where)})" for name, where in gaps.items()), 5
    )
    if plan.missing is None:
        table.problems.add(f"{int((~keep).sum())} rows have no value in {where_they_are}: {CURES}")
    elif not keep.any():
        table.problems.add(
            f"every row lacks a value in some column: {where_they_are}; leave out columns that are mostly empty"
        )
    else:
        _log.warning(
            "%s: left out %d of %d rows without a value in %s", table.name, (~keep).sum(), len(keep), where_they_are
        )
    return keep


def _check_features(table: Table, plan: Plan, features: Sequence[Column], keep: Bools) -> None:
    for column in features:
        if column.gaps.all():
            table.problems.add(f"column '{column.name}' is empty: leave it out")
        if (bad := column.bad & keep).any():
            got = str(table.columns[column.name][int(bad.argmax())])
            cure = "; decimals have a point, thousands no separator" * ("," in got)
            table.problems.add(
                f"column '{column.name}' must have finite numbers, got {got!r} ({table.places(bad)}){cure}"
            )
    words = [repr(column.name) for column in features if column.words is not None and not column.gaps.all()]
    if words and plan.categories is None:
        table.problems.add(
            f"{listed(words, 10)} {'have' if len(words) > 1 else 'has'} words, but features are numbers: "
            '--categories onehot (in Python categories="onehot") makes a feature of each word, or leave the column out'
        )


def _attempt(problems: Problems, where: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except DataError as error:
        problems.add(f"{where}{error}")
        return None


def _steps(table: Table, times: Sequence[str], where: Ints, every: str | float | None) -> Steps | None:
    if not times:  # told already
        return None

    first: dict[str, int] = {}
    for text, i in zip(times, where.tolist(), strict=True):
        first.setdefault(text, i)
    time_steps = steps(list(first), every, lambda text: f"{text!r} ({table.row} {table.lines[first[text]]})")
    if len(time_steps.names) < 2:
        cure = "; a shorter every gives more" if every is not None else ""
        raise DataError(
            f"at least 2 time steps are needed, to train, then to test, got {listed(time_steps.names)}{cure}"
        )
    return time_steps


def _classes(table: Table, label: str, written: Sequence[str], where: Ints) -> tuple[list[int | str], dict[str, int]]:
    lines = [table.lines[i] for i in where.tolist()]
    labels.check_not_measured(label, written)
    distinct = labels.distinct(written, lambda k: f"{table.row} {lines[k]}")
    classes = labels.in_order(distinct)
    labels.check_several(classes)
    index = {value: i for i, value in enumerate(classes)}
    return classes, {label.text: index[label.value] for label in distinct}


def _taken(column: Column, where: Ints) -> Column:
    words = None if column.words is None else [column.words[i] for i in where]
    return Column(column.name, words, column.numbers[where], column.gaps[where])


def _check_scale(name: str, recipe: Sequence[Feature], x: npt.NDArray[np.float32], scaled: bool) -> None:
    largest = np.abs(x).max(axis=0)
    worst = int(largest.argmax())
    if not np.isfinite(largest[worst]):
        raise DataError(
            f"{name}: column '{recipe[worst].column}' later leaves the scale of the first time step by more than 1e38"
        )
    if largest[worst] > LARGE:
        why = "in standard deviations of the first time step" if scaled else "and nothing is scaled"
        _log.warning("%s: '%s' reaches %g, %s: training may fail", name, recipe[worst].name, largest[worst], why)


def _tell(table: Table, recipe: Sequence[Feature], columns: Sequence[Column], names: Sequence[str]) -> None:
    """What is done without being asked for, and what may not be meant."""
    if len(names) > MANY:
        _log.warning("%s: %d time steps, from %s to %s; --every month, or a number, makes fewer",
                     table.name, len(names), names[0], names[-1])  # fmt: skip
    for column in columns:
        if column.words is not None:
            words = {feature.word for feature in recipe if feature.column == column.name} | {""}
            if late := sorted(set(column.words) - words):
                _log.warning(
                    "%s: column '%s' has words that the first time step did not have, and which are no feature: %s",
                    table.name, column.name, listed(late, 5),
                )  # fmt: skip
