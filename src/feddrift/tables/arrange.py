"""Conversion of a table to a stream: rows are sorted by time step and client, columns become features."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift.errors import ConfigError, DataError, safe_repr, suggest_name, unknown_name_error
from feddrift.tables import labels
from feddrift.tables.columns import CodedTexts, SourceColumn
from feddrift.tables.expressions import LabelExpression, looks_like_expression, parse_expression
from feddrift.tables.features import Column, Feature, fit_column, quote_name, transform_column
from feddrift.tables.problems import Problems, join_first
from feddrift.tables.times import TimeSteps, build_time_steps, natural_sort_key, parse_every
from feddrift.types import Bools, Ints

MISSING = ("drop", "mean", "indicator")
CATEGORIES = ("onehot",)
MAX_USUAL_FEATURE = 100.0  # features beyond it hardly train with the usual step sizes
MAX_USUAL_TIME_STEPS = 1000  # more are probably a mistake
MAX_KEPT_VALUES = 30_000_000  # parsed columns of larger tables are parsed again when they are needed
MIN_ROWS_FOR_IDS = 100  # in a smaller table, numbers may all differ by chance
MIN_SHARE_OF_IDS = 0.99  # share of rows with a value of their own, in a column of ids
ROWS_PER_BLOCK = 65_536  # rows that are copied at once; their features fit into the processor's cache
MISSING_VALUE_HINT = (
    '--missing drop (in Python missing="drop") leaves such rows out, mean fills in the mean of the first time step, '
    "indicator also adds a column of 0 and 1"
)


def parse_names(option: str, value: object) -> tuple[str, ...]:
    """Return the column names of an option.

    Args:
        option: The name of the option, for messages.
        value: A text with names that are separated by commas, or a list of names. In a text, a name that contains a
            comma is enclosed in double quotes.

    Raises:
        ConfigError: The value is neither.

    >>> parse_names("drop", 'id, "town, state"'), parse_names("drop", ["id", "town, state"])
    (('id', 'town, state'), ('id', 'town, state'))
    """
    names: list[object] = [None]
    if isinstance(value, str):
        try:
            names = [name for row in csv.reader([value], skipinitialspace=True, strict=True) for name in row]
        except csv.Error:  # an open quote
            names = [None]
        names = names or [None]
    elif isinstance(value, Iterable) and not isinstance(value, bytes | Mapping):
        names = list(value)
    stripped = [name.strip() if isinstance(name, str) else "" for name in names]
    if not all(stripped):
        raise ConfigError(f'{option} must be names of columns such as "id,day", got {safe_repr(value)}')
    return tuple(dict.fromkeys(stripped))


def format_names(names: Sequence[str]) -> str:
    """Return column names as one text, which `parse_names` reads.

    >>> format_names(["id", "town, state"])
    'id,"town, state"'
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(names)
    return text.getvalue()


@dataclass(frozen=True)
class TableOptions:
    """The roles of a table's columns, and the treatment of times, missing values, words and scales.

    Attributes:
        client: Name of the column with the clients.
        time: Name of the column with the times.
        label: Name of the column with the labels, or an expression: see `LabelExpression`.
        every: Length of a time step: a word of the calendar or a number; None: each value is a time step.
        missing: Treatment of missing values, one of `MISSING`; None: they are errors.
        categories: Treatment of words, one of `CATEGORIES`; None: they are errors.
        scale: True to standardise numbers by the first time step.
        drop: Names of columns that are not features.
        features: Names of the columns that are features; None: all others.
    """

    client: str | None
    time: str | None
    label: str
    every: str | float | None = None
    missing: str | None = None
    categories: str | None = None
    scale: bool = True
    drop: str | Sequence[str] = ()
    features: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        for role, column in (("client", self.client), ("time", self.time), ("label", self.label)):
            if column is not None and not isinstance(column, str):
                raise ConfigError(f"{role} must be the name of a column, got {safe_repr(column)}")
        if not isinstance(self.scale, bool):
            raise ConfigError(f"scale must be True or False, got {safe_repr(self.scale)}")
        object.__setattr__(self, "every", parse_every(self.every))
        for name, legal in (("missing", MISSING), ("categories", CATEGORIES)):
            if getattr(self, name) not in (None, *legal):
                raise unknown_name_error(name, getattr(self, name), legal)
        object.__setattr__(self, "drop", parse_names("drop", () if self.drop is None else self.drop))
        if self.features is not None:
            object.__setattr__(self, "features", parse_names("features", self.features))
            if not self.features:
                raise ConfigError("features must name at least one column, got none")
            if self.drop:
                raise ConfigError("give either drop or features: columns that features does not name are left out")

    def find_label(self, names: Iterable[str]) -> str | LabelExpression:
        """Return the label column, or the expression if no column has this name.

        Args:
            names: The names of the table's columns.

        Raises:
            DataError: The label is an expression with an error.
        """
        if self.label in names or not looks_like_expression(self.label):
            return self.label
        return parse_expression(self.label)

    def find_roles(self, names: Iterable[str]) -> dict[str, str]:
        """Return the names of the columns that are not features, by role.

        Args:
            names: The names of the table's columns.

        Raises:
            DataError: The label is an expression with an error.
        """
        label = self.find_label(names)
        columns = {"client": self.client, "time": self.time}
        columns["label"] = label.column if isinstance(label, LabelExpression) else label
        return {role: name for role, name in columns.items() if name is not None}

    def select_columns(self, names: Iterable[str]) -> list[str]:
        """Return the names of the columns that the options use, in the order of the table."""
        names = list(names)
        if self.features is None:
            return [name for name in names if name not in self.drop]
        return [name for name in names if name in {*self.features, *self.find_roles(names).values()}]


@dataclass(frozen=True)
class Table:
    """Columns by name, and the position of each row in its source."""

    name: str
    columns: Mapping[str, SourceColumn]
    lines: Sequence[int | str]
    row_word: str = "line"  # for a row in messages
    problems: Problems = field(default_factory=lambda: Problems("table"))  # found while reading

    def describe_rows(self, selected: Bools) -> str:
        """Name the first selected rows by number, for a message."""
        rows = np.flatnonzero(selected)
        lines = [self.lines[i] for i in rows[:3].tolist()]
        rest = len(rows) - len(lines)
        return f"{self.row_word}{'s' * (len(rows) > 1)} {join_first(lines)}" + (f" and {rest} more" if rest else "")


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


class _FeatureColumns:
    """The parsed columns of features; those of a large table are parsed each time."""

    def __init__(self, table: Table, names: Sequence[str]) -> None:
        self.names = names
        self._table = table
        self._keeps = len(table.lines) * len(names) <= MAX_KEPT_VALUES
        self._parsed: dict[str, Column] = {}

    def parse(self, name: str) -> Column:
        column = self._parsed.get(name) or Column.from_source(name, self._table.columns[name])
        if self._keeps:
            self._parsed[name] = column
        return column


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
    feature_names = _check_column_names(table, options)
    if feature_names is None:
        problems.raise_if_any()
        raise AssertionError("a table without features has a problem")
    roles = _read_roles(table, options)
    features = _FeatureColumns(table, feature_names)
    is_used = _check_columns(table, options, roles, features)
    rows = np.flatnonzero(is_used)
    used = {role: texts.take(rows) for role, texts in roles.items()} if len(rows) < len(is_used) else roles
    with problems.collect(f"column '{options.time}': "):
        times = _read_time_steps(table, used["time"], rows, options.every)
    with problems.collect(f"column '{options.label}', "):
        classes, class_by_text = _read_classes(table, options.label, used["label"], rows)
    problems.raise_if_any()
    clients = sorted(used["client"].find_first_rows(), key=natural_sort_key)
    t = used["time"].look_up(times.step_by_text)
    c = used["client"].look_up({name: c for c, name in enumerate(clients)})
    y = used["label"].look_up(class_by_text).astype(np.int32)
    _warn_about_lost_clients(table, options, roles, clients)
    order, counts = _sort_cells(t, c, len(times.names), len(clients))
    recipe, x = _build_features(table, options, features, rows, t, c, order)
    _warn_about_times(table, times.names)
    for sentence in labels.list_class_warnings(classes):
        problems.warn(f"{table.name}: {sentence}")
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


def _check_column_names(table: Table, options: TableOptions) -> list[str] | None:
    """Return the names of the features; None after adding a problem for each name without its own column."""
    names = list(table.columns)
    problems = table.problems
    n_before = len(problems.sentences)
    try:
        roles = options.find_roles(names)
    except DataError as error:
        problems.add(str(error))
        return None
    for role in ("client", "time", "label"):
        name = roles.get(role)
        if name is None:
            problems.add(f"{role} must name a column")
        elif name not in table.columns:
            problems.add(f"{role} must name a column, got '{name}'{suggest_name(name, names)}")
    for option, chosen in (("drop", options.drop), ("features", options.features or ())):
        for name in chosen:
            own_role = next((role for role, column in roles.items() if column == name), None)
            if name not in table.columns:
                problems.add(f"{option} must name columns of the table, got '{name}'{suggest_name(name, names)}")
            elif own_role is not None:
                problems.add(f"{option} must name columns of features, got '{name}', which is the {own_role} column")
    features = [name for name in options.select_columns(names) if name not in roles.values()]
    if len(problems.sentences) > n_before:
        problems.sentences[-1] += f" (there are: {join_first(names, 20)})"
    elif len(set(roles.values())) < 3:
        problems.add(f"client, time and label must be three columns, got {', '.join(roles.values())}")
    elif not features:
        problems.add("no column is left for features beside client, time and label")
    elif not len(table.lines):
        problems.add("expected rows below the names of the columns, got none")
    return features if len(problems.sentences) == n_before else None


def _read_roles(table: Table, options: TableOptions) -> dict[str, CodedTexts]:
    """Return the clients, times and labels; an expression for the label that cannot be computed is a problem."""
    roles: dict[str, CodedTexts] = {}
    label = options.find_label(table.columns)
    for role, name in options.find_roles(table.columns).items():
        source = table.columns[name]
        if role == "label" and isinstance(label, LabelExpression):
            try:
                roles[role] = label.compute_labels(source)
            except DataError as error:
                table.problems.add(f"column '{name}': {error}")
                table.problems.raise_if_any()
        else:
            roles[role] = source.encode_texts()
    return roles


def _check_columns(
    table: Table, options: TableOptions, roles: Mapping[str, CodedTexts], features: _FeatureColumns
) -> Bools:
    """Return the mask of the rows to use, and add the problems of all columns.

    Without the option `missing`, rows with gaps are a problem. So are columns that are empty, have invalid values, or
    have words without the option `categories`.
    """
    n_rows = len(table.lines)
    has_gap = np.zeros(n_rows, dtype=bool)
    places: list[str] = []

    def add_gaps(name: str, gaps: Bools) -> None:
        if gaps.any():
            has_gap[gaps] = True
            places.append(f"'{name}' ({int(gaps.sum())}: {table.describe_rows(gaps)})")

    for role, name in options.find_roles(table.columns).items():
        add_gaps(name, roles[role].gaps)
    empty: set[str] = set()
    words: set[str] = set()
    invalid: dict[str, Bools] = {}
    for name in features.names:
        column = features.parse(name)
        if options.missing in (None, "drop"):
            add_gaps(name, column.gaps)
        if column.gaps.all():
            empty.add(name)
        elif column.words is not None:
            words.add(name)
        elif (is_invalid := column.invalid).any():
            invalid[name] = is_invalid
    is_used = ~has_gap
    n_unused = n_rows - int(is_used.sum())
    if places:
        listed = join_first(places, 5)
        if options.missing is None:
            table.problems.add(f"{n_unused} rows have no value in {listed}: {MISSING_VALUE_HINT}")
        elif n_unused == n_rows:
            table.problems.add(
                f"every row lacks a value in some column: {listed}; leave out columns that are mostly empty, with "
                "--drop COLUMN"
            )
        else:
            table.problems.warn(f"{table.name}: left out {n_unused} of {n_rows} rows without a value in {listed}")
    _check_values(table, features.names, empty, invalid, is_used)
    if words and options.categories is None:
        listed = join_first([repr(name) for name in features.names if name in words], 10)
        table.problems.add(
            f"{listed} {'have' if len(words) > 1 else 'has'} words, but features are numbers: "
            '--categories onehot (in Python categories="onehot") makes a feature of each word, or leave the column out '
            "with --drop COLUMN"
        )
    return is_used


def _check_values(
    table: Table, names: Sequence[str], empty: Set[str], invalid: Mapping[str, Bools], is_used: Bools
) -> None:
    """Add a problem for each column that is empty or has invalid values in used rows."""
    for name in names:
        if name in empty:
            table.problems.add(f"column '{name}' is empty: leave it out with --drop {quote_name(name)}")
        elif name in invalid and (is_invalid := invalid[name] & is_used).any():
            got = table.columns[name].format_value(int(is_invalid.argmax()))
            hint = "; decimals have a point, thousands no separator" if "," in got else ""
            table.problems.add(
                f"column '{name}' must have finite numbers, got {got!r} ({table.describe_rows(is_invalid)}){hint}"
            )


def _warn_about_lost_clients(
    table: Table, options: TableOptions, roles: Mapping[str, CodedTexts], clients: Sequence[str]
) -> None:
    """Name the clients of which no row is used, and the clients that have no label."""
    n_rows = roles["client"].count_rows()
    lost = sorted(n_rows.keys() - {"", *clients}, key=natural_sort_key)
    if not lost:
        return
    labelled = roles["client"].take(np.flatnonzero(~roles["label"].gaps)).count_rows()
    without_labels = [name for name in lost if name not in labelled]
    others = [name for name in lost if name in labelled]
    if without_labels:
        table.problems.warn(
            f"{table.name}: left out {_format_clients(without_labels)}: no row has a label in '{options.label}'"
        )
    if others:
        table.problems.warn(f"{table.name}: left out {_format_clients(others)}: every row lacks a value in some column")


def _format_clients(names: Sequence[str]) -> str:
    return f"client{'s' if len(names) > 1 else ''} {join_first(names, 20)}"


def _read_time_steps(table: Table, times: CodedTexts, rows: Ints, every: str | float | None) -> TimeSteps:
    if not len(rows):  # which is a problem already
        return TimeSteps({}, ())
    first = times.find_first_rows()
    time_steps = build_time_steps(
        list(first), every, lambda text: f"{text!r} ({table.row_word} {table.lines[int(rows[first[text]])]})"
    )
    if len(time_steps.names) < 2:
        hint = "; a shorter every gives more" if every is not None else ""
        raise DataError(
            f"at least 2 time steps are needed, to train, then to test, got {join_first(time_steps.names)}{hint}"
        )
    return time_steps


def _read_classes(table: Table, label: str, texts: CodedTexts, rows: Ints) -> tuple[list[int | str], dict[str, int]]:
    """Return the classes in their order, and the index of the class of each label text."""
    labels.check_not_measurement(label, texts.count_rows())
    first = texts.find_first_rows()
    places = list(first.values())
    distinct = labels.list_distinct_labels(first, lambda k: f"{table.row_word} {table.lines[int(rows[places[k]])]}")
    classes = labels.sort_classes(distinct)
    labels.check_class_count(classes)
    index = {value: i for i, value in enumerate(classes)}
    return classes, {label.text: index[label.value] for label in distinct}


def _sort_cells(t: Ints, c: Ints, n_steps: int, n_clients: int) -> tuple[Ints | slice, Ints]:
    """Return the order of the rows by time and client, in which rows of a cell stay in their order, and the counts."""
    cell = t * n_clients + c
    counts = np.bincount(cell, minlength=n_steps * n_clients).reshape(n_steps, n_clients)
    if (cell[1:] >= cell[:-1]).all():
        return slice(None), counts
    small = next(kind for kind in (np.uint16, np.uint32, np.int64) if n_steps * n_clients <= np.iinfo(kind).max)
    return np.argsort(cell.astype(small), kind="stable"), counts


def _build_features(
    table: Table,
    options: TableOptions,
    columns: _FeatureColumns,
    rows: Ints,
    t: Ints,
    c: Ints,
    order: Ints | slice,
) -> tuple[tuple[Feature, ...], npt.NDArray[np.float32]]:
    """Return the features that are fitted to the first time step, and their values x[n, feature] in this order."""
    recipe: list[Feature] = []
    parts: list[npt.NDArray[np.float32]] = []
    in_first_step = t == 0
    id_columns: list[str] = []
    for name in columns.names:
        column = columns.parse(name)
        if len(rows) < len(table.lines):
            column = column.take(rows)
        try:
            fitted = fit_column(
                column,
                in_first_step,
                c,
                fill_gaps=options.missing in ("mean", "indicator"),
                add_indicators=options.missing == "indicator",
                scale=options.scale,
            )
        except DataError as error:
            raise DataError(f"{table.name}: {error}") from None
        parts += [transform_column(feature, column)[order] for feature in fitted]
        recipe += fitted
        if _looks_like_id(column):
            id_columns.append(name)
        if column.words is not None:
            known = {feature.word for feature in fitted} | {""}
            if late := sorted(column.words.count_rows().keys() - known):
                table.problems.warn(
                    f"{table.name}: column '{name}' has words that the first time step does not have, and which are "
                    f"not features: {join_first(late, 5)}"
                )
    _check_scale(table, recipe, parts, options.scale)
    for name in id_columns:
        table.problems.warn(
            f"{table.name}: column '{name}' looks like an id, since hardly any value occurs twice or each row has a "
            f"larger one than the row before: --drop {quote_name(name)} leaves it out"
        )
    x = np.empty((len(rows), len(recipe)), dtype=np.float32)
    for start in range(0, len(rows), ROWS_PER_BLOCK):
        block = slice(start, start + ROWS_PER_BLOCK)
        for k, part in enumerate(parts):
            x[block, k] = part[block]
    return tuple(recipe), x


def _looks_like_id(column: Column) -> bool:
    """Return True for whole numbers that increase from row to row, and for values that are distinct in nearly all rows.

    Fractions are often distinct, but they are measurements.
    """
    n = len(column.gaps) - int(column.gaps.sum())
    if n < MIN_ROWS_FOR_IDS:
        return False
    if column.words is not None:
        return len(column.words.count_rows().keys() - {""}) >= MIN_SHARE_OF_IDS * n
    values = column.numbers[~column.gaps] if n < len(column.gaps) else column.numbers
    if values[-1] - values[0] + 1 >= n and (values[1:] > values[:-1]).all():
        return bool((values == np.floor(values)).all())
    if values.max() - values.min() + 1 < MIN_SHARE_OF_IDS * n or (values != np.floor(values)).any():
        return False
    return bool(len(np.unique(values)) >= MIN_SHARE_OF_IDS * n)


def _check_scale(table: Table, recipe: Sequence[Feature], parts: Sequence[npt.NDArray[Any]], is_scaled: bool) -> None:
    """Raise DataError for infinite features, and warn about very large ones."""
    largest = np.array([np.abs(part).max() for part in parts])
    worst = int(largest.argmax())
    if not np.isfinite(largest[worst]):
        raise DataError(
            f"{table.name}: column '{recipe[worst].column}' later leaves the scale of the first time step by more than "
            "1e38"
        )
    if largest[worst] > MAX_USUAL_FEATURE:
        why = "in standard deviations of the first time step" if is_scaled else "and nothing is scaled"
        table.problems.warn(
            f"{table.name}: '{recipe[worst].name}' reaches {largest[worst]:g}, {why}: training may fail"
        )


def _warn_about_times(table: Table, names: Sequence[str]) -> None:
    if len(names) > MAX_USUAL_TIME_STEPS:
        table.problems.warn(
            f"{table.name}: {len(names)} time steps, from {names[0]} to {names[-1]}; --every month, or a number, makes "
            "fewer"
        )
