"""Conversion of a table to a stream: rows are sorted by time step and client, columns become features."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from feddrift.errors import ConfigError, DataError, safe_repr, suggest_name, unknown_name_error
from feddrift.tables import labels
from feddrift.tables.columns import Columns, to_texts
from feddrift.tables.features import Column, Feature, fit_features, transform_columns
from feddrift.tables.problems import Problems, join_first
from feddrift.tables.times import TimeSteps, build_time_steps, natural_sort_key, parse_every
from feddrift.types import Bools, Ints

MISSING = ("drop", "mean", "indicator")
CATEGORIES = ("onehot",)
MAX_USUAL_FEATURE = 100.0  # features beyond it hardly train with the usual step sizes
MAX_USUAL_TIME_STEPS = 1000  # more are probably a mistake
MISSING_VALUE_HINT = (
    '--missing drop (in Python missing="drop") leaves such rows out, mean fills in the mean of the first time step, '
    "indicator also adds a column of 0 and 1"
)

_log = logging.getLogger("feddrift")


@dataclass(frozen=True)
class TableOptions:
    """The roles of a table's columns, and the treatment of times, missing values, words and scales.

    Attributes:
        client: Name of the column with the clients.
        time: Name of the column with the times.
        label: Name of the column with the labels.
        every: Length of a time step: a word of the calendar or a number; None: each value is a time step.
        missing: Treatment of missing values, one of `MISSING`; None: they are errors.
        categories: Treatment of words, one of `CATEGORIES`; None: they are errors.
        scale: True to standardise numbers by the first time step.
    """

    client: str | None
    time: str | None
    label: str
    every: str | float | None = None
    missing: str | None = None
    categories: str | None = None
    scale: bool = True

    def __post_init__(self) -> None:
        for role, column in self.role_columns.items():
            if not isinstance(column, str):
                raise ConfigError(f"{role} must be the name of a column, got {safe_repr(column)}")
        if not isinstance(self.scale, bool):
            raise ConfigError(f"scale must be True or False, got {safe_repr(self.scale)}")
        object.__setattr__(self, "every", parse_every(self.every))
        for name, legal in (("missing", MISSING), ("categories", CATEGORIES)):
            if getattr(self, name) not in (None, *legal):
                raise unknown_name_error(name, getattr(self, name), legal)

    @property
    def role_columns(self) -> dict[str, str]:
        """The names of the columns that are not features, by role."""
        columns = {"client": self.client, "time": self.time, "label": self.label}
        return {role: name for role, name in columns.items() if name is not None}


@dataclass(frozen=True)
class Table:
    """Columns by name, and the position of each row in its source."""

    name: str
    columns: Columns
    lines: Sequence[int | str]
    row_word: str = "line"  # for a row in messages
    problems: Problems = field(default_factory=lambda: Problems("table"))  # found while reading

    def describe_rows(self, selected: Bools) -> str:
        """Name the first selected rows by number, for a message."""
        lines = [self.lines[i] for i in np.flatnonzero(selected).tolist()]
        return f"{self.row_word}{'s' * (len(lines) > 1)} {join_first(lines)}"


@dataclass(frozen=True)
class StreamFields:
    """The arguments of `Stream` that are made from a table, with the same names."""

    x: npt.NDArray[np.float32]
    y: npt.NDArray[np.int32]
    counts: Ints
    n_classes: int
    clients: tuple[str, ...]
    times: tuple[str, ...]
    classes: tuple[int | str, ...]
    columns: tuple[str, ...]
    recipe: tuple[Feature, ...]


def arrange_table(table: Table, options: TableOptions) -> StreamFields:
    """Convert a table to the data of each client at each time step.

    Args:
        table: The columns; more problems may be added to its problems.
        options: The roles of the columns.

    Returns:
        The arguments of `Stream`.

    Raises:
        DataError: The table has problems; the message lists them.
    """
    problems = table.problems
    if not _check_column_names(table, options):
        problems.raise_if_any()
    role_columns = options.role_columns
    texts = {role: to_texts(table.columns[name]) for role, name in role_columns.items()}
    features = [Column.from_values(n, values) for n, values in table.columns.items() if n not in role_columns.values()]
    is_used = _select_rows(table, options, texts, features)
    _check_features(table, options, features, is_used)
    rows = np.flatnonzero(is_used)
    used_texts = {role: [role_texts[i] for i in rows] for role, role_texts in texts.items()}
    with problems.collect(f"column '{options.time}': "):
        times = _read_time_steps(table, used_texts["time"], rows, options.every)
    with problems.collect(f"column '{options.label}', "):
        classes, class_of_text = _read_classes(table, options.label, used_texts["label"], rows)
    problems.raise_if_any()
    clients = sorted(set(used_texts["client"]), key=natural_sort_key)
    client_index = {name: c for c, name in enumerate(clients)}
    t = np.array([times.step_by_text[text] for text in used_texts["time"]], dtype=np.int64)
    c = np.array([client_index[text] for text in used_texts["client"]], dtype=np.int64)
    y = np.array([class_of_text[text] for text in used_texts["label"]], dtype=np.int32)
    columns = [_take_rows(column, rows) for column in features]
    try:
        recipe = fit_features(
            columns,
            t == 0,
            c,
            fill_gaps=options.missing in ("mean", "indicator"),
            add_indicators=options.missing == "indicator",
            scale=options.scale,
        )
    except DataError as error:
        raise DataError(f"{table.name}: {error}") from None
    order = np.lexsort((c, t))  # stable: rows of a cell stay in their order
    x = transform_columns(recipe, columns)[order]
    _check_scale(table.name, recipe, x, options.scale)
    _log_warnings(table, recipe, columns, times.names)
    labels.warn_about_classes(table.name, classes)
    counts = np.zeros((len(times.names), len(clients)), dtype=np.int64)
    np.add.at(counts, (t, c), 1)
    return StreamFields(
        x=x,
        y=y[order],
        counts=counts,
        n_classes=len(classes),
        clients=tuple(clients),
        times=times.names,
        classes=tuple(classes),
        columns=tuple(feature.name for feature in recipe),
        recipe=recipe,
    )


def _check_column_names(table: Table, options: TableOptions) -> bool:
    """Add a problem for each role without its own column, and return True if there is none."""
    names = list(table.columns)
    problems = table.problems
    n_before = len(problems.sentences)
    for role in ("client", "time", "label"):
        name = options.role_columns.get(role)
        if name is None:
            problems.add(f"{role} must name a column")
        elif name not in table.columns:
            problems.add(f"{role} must name a column, got '{name}'{suggest_name(name, names)}")
    if len(problems.sentences) > n_before:
        problems.sentences[-1] += f" (there are: {join_first(names, 20)})"
    elif len(set(options.role_columns.values())) < 3:
        problems.add(f"client, time and label must be three columns, got {', '.join(options.role_columns.values())}")
    elif len(names) < 4:
        problems.add("no column is left for features beside client, time and label")
    elif not table.lines:
        problems.add("expected rows below the names of the columns, got none")
    return len(problems.sentences) == n_before


def _select_rows(table: Table, options: TableOptions, texts: dict[str, list[str]], features: Sequence[Column]) -> Bools:
    """Return the mask of the rows to use; without the option `missing`, rows with gaps are a problem."""
    gaps = {
        name: np.array([not text for text in texts[role]], dtype=bool) for role, name in options.role_columns.items()
    }
    if options.missing in (None, "drop"):
        gaps |= {column.name: column.gaps for column in features}
    gaps = {name: is_gap for name, is_gap in gaps.items() if is_gap.any()}
    if not gaps:
        return np.ones(len(table.lines), dtype=bool)
    is_used: Bools = ~np.logical_or.reduce(list(gaps.values()))
    n_unused = int((~is_used).sum())
    places = join_first(
        (f"'{name}' ({int(is_gap.sum())}: {table.describe_rows(is_gap)})" for name, is_gap in gaps.items()), 5
    )
    if options.missing is None:
        table.problems.add(f"{n_unused} rows have no value in {places}: {MISSING_VALUE_HINT}")
    elif not is_used.any():
        table.problems.add(f"every row lacks a value in some column: {places}; leave out columns that are mostly empty")
    else:
        _log.warning("%s: left out %d of %d rows without a value in %s", table.name, n_unused, len(is_used), places)
    return is_used


def _check_features(table: Table, options: TableOptions, features: Sequence[Column], is_used: Bools) -> None:
    """Add a problem for each column that is empty, has invalid values, or has words without `categories`."""
    for column in features:
        if column.gaps.all():
            table.problems.add(f"column '{column.name}' is empty: leave it out")
        if (invalid := column.invalid & is_used).any():
            got = str(table.columns[column.name][int(invalid.argmax())])
            hint = "; decimals have a point, thousands no separator" if "," in got else ""
            table.problems.add(
                f"column '{column.name}' must have finite numbers, got {got!r} ({table.describe_rows(invalid)}){hint}"
            )
    words = [repr(column.name) for column in features if column.words is not None and not column.gaps.all()]
    if words and options.categories is None:
        table.problems.add(
            f"{join_first(words, 10)} {'have' if len(words) > 1 else 'has'} words, but features are numbers: "
            '--categories onehot (in Python categories="onehot") makes a feature of each word, or leave the column out'
        )


def _read_time_steps(table: Table, times: Sequence[str], rows: Ints, every: str | float | None) -> TimeSteps:
    if not times:  # no row is used, which is a problem already
        return TimeSteps({}, ())
    first: dict[str, int] = {}
    for text, i in zip(times, rows.tolist(), strict=True):
        first.setdefault(text, i)
    time_steps = build_time_steps(
        list(first), every, lambda text: f"{text!r} ({table.row_word} {table.lines[first[text]]})"
    )
    if len(time_steps.names) < 2:
        hint = "; a shorter every gives more" if every is not None else ""
        raise DataError(
            f"at least 2 time steps are needed, to train, then to test, got {join_first(time_steps.names)}{hint}"
        )
    return time_steps


def _read_classes(
    table: Table, column: str, texts: Sequence[str], rows: Ints
) -> tuple[list[int | str], dict[str, int]]:
    """Return the classes in their order, and the index of the class of each label text."""
    labels.check_not_measurement(column, texts)
    distinct = labels.list_distinct_labels(texts, lambda k: f"{table.row_word} {table.lines[int(rows[k])]}")
    classes = labels.sort_classes(distinct)
    labels.check_class_count(classes)
    index = {value: i for i, value in enumerate(classes)}
    return classes, {label.text: index[label.value] for label in distinct}


def _take_rows(column: Column, rows: Ints) -> Column:
    words = None if column.words is None else [column.words[i] for i in rows]
    return Column(column.name, words, column.numbers[rows], column.gaps[rows])


def _check_scale(name: str, recipe: Sequence[Feature], x: npt.NDArray[np.float32], is_scaled: bool) -> None:
    """Raise DataError for infinite features, and warn about very large ones."""
    largest = np.abs(x).max(axis=0)
    worst = int(largest.argmax())
    if not np.isfinite(largest[worst]):
        raise DataError(
            f"{name}: column '{recipe[worst].column}' later leaves the scale of the first time step by more than 1e38"
        )
    if largest[worst] > MAX_USUAL_FEATURE:
        why = "in standard deviations of the first time step" if is_scaled else "and nothing is scaled"
        _log.warning("%s: '%s' reaches %g, %s: training may fail", name, recipe[worst].name, largest[worst], why)


def _log_warnings(table: Table, recipe: Sequence[Feature], columns: Sequence[Column], names: Sequence[str]) -> None:
    """Warn about many time steps, and about words that are not features."""
    if len(names) > MAX_USUAL_TIME_STEPS:
        _log.warning(
            "%s: %d time steps, from %s to %s; --every month, or a number, makes fewer",
            table.name, len(names), names[0], names[-1],
        )  # fmt: skip
    for column in columns:
        if column.words is not None:
            words = {feature.word for feature in recipe if feature.column == column.name} | {""}
            if late := sorted(set(column.words) - words):
                _log.warning(
                    "%s: column '%s' has words that the first time step does not have, and which are not features: %s",
                    table.name, column.name, join_first(late, 5),
                )  # fmt: skip
