"""Features from columns: gaps are filled, words become 0 and 1, and numbers are standardised.

`fit_column` determines the features from the first time step, `transform_column` and `transform_table` apply them.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
import numpy.typing as npt

from feddrift.errors import DataError
from feddrift.tables.columns import CodedTexts, Columns, SourceColumn, encode_texts, to_numbers
from feddrift.types import Bools, Floats, Ints

MAX_WORDS_PER_COLUMN = 1000


@dataclass(frozen=True)
class Feature:
    """A feature and its fitted transformation of a column; exported models use it to read other tables.

    The kind ``number`` is (value - mean) / std, after gaps are filled; ``word`` is 1 where the column has this word;
    ``gap`` is 1 where it has no value.
    """

    name: str
    column: str
    kind: Literal["number", "word", "gap"]
    word: str = ""
    fill: float | None = None  # None: gaps are refused
    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class Column:
    """The parsed values of a column."""

    name: str
    words: CodedTexts | None  # None: a column of numbers
    numbers: Floats  # NaN where a value is missing or not a number
    gaps: Bools

    @property
    def invalid(self) -> Bools:
        """The mask of values in a column of numbers that are not numbers."""
        return np.zeros(len(self.gaps), dtype=bool) if self.words is not None else np.isnan(self.numbers) & ~self.gaps

    @classmethod
    def from_source(cls, name: str, source: SourceColumn) -> Column:
        """Parse a column; it has words if less than half of its values are numbers."""
        as_numbers, gaps = source.parse_numbers()
        n_numbers = len(as_numbers) - int(np.isnan(as_numbers).sum())
        has_words = n_numbers * 2 < len(gaps) - int(gaps.sum())
        return cls(name, source.encode_texts() if has_words else None, as_numbers, gaps)

    def take(self, rows: Ints) -> Column:
        """Return the values of these rows."""
        return Column(
            self.name, None if self.words is None else self.words.take(rows), self.numbers[rows], self.gaps[rows]
        )


def compute_mean_and_std(values: Floats, client: Ints) -> tuple[float, float]:
    """Compute mean and standard deviation over all clients from sums that each client computes from its own values.

    Client c has n_c values, their sum s_c, and the sum of squares q_c of their distances from its own mean. Then
    mean = sum s_c / sum n_c, and std^2 = (sum q_c + sum n_c (s_c / n_c - mean)^2) / sum n_c. If all values are equal,
    std is 1.

    Args:
        values: The values of all clients.
        client: The client of each value.

    >>> compute_mean_and_std(np.array([1.0, 2.0, 6.0]), np.array([0, 0, 1]))[0]
    3.0
    """
    n = np.bincount(client)
    s = np.bincount(client, weights=values)
    client_mean = s / np.maximum(n, 1)
    q = np.bincount(client, weights=(values - client_mean[client]) ** 2)
    mean = float(s.sum() / n.sum())
    std = float(np.sqrt((q + n * (client_mean - mean) ** 2).sum() / n.sum()))
    return mean, std if std > 1e-12 * abs(mean) else 1.0


def fit_column(
    column: Column, in_first_step: Bools, client: Ints, *, fill_gaps: bool, add_indicators: bool, scale: bool
) -> tuple[Feature, ...]:
    """Fit the features of a column; words, mean and scale are those of the first time step.

    Args:
        column: The parsed column.
        in_first_step: Mask of the rows of the first time step.
        client: The client of each row.
        fill_gaps: True to fill gaps with the mean, False to refuse tables with gaps later.
        add_indicators: True to add a feature of 0 and 1 if the column has gaps.
        scale: True to standardise numbers.

    Raises:
        DataError: The column has no value or too many words in the first time step.
    """
    features: list[Feature] = []
    name = column.name
    if column.words is None:
        has_value = in_first_step & ~column.gaps
        if not has_value.any():
            raise DataError(
                f"column '{name}' has no value in the first time step: leave it out with --drop {quote_name(name)}, "
                "or --missing drop"
            )
        mean, std = compute_mean_and_std(column.numbers[has_value], client[has_value])
        fill = mean if fill_gaps else None
        features.append(Feature(name, name, "number", "", fill, *((mean, std) if scale else ())))
    else:
        words = sorted(column.words.take(np.flatnonzero(in_first_step)).count_rows().keys() - {""})
        if not 0 < len(words) <= MAX_WORDS_PER_COLUMN:
            raise DataError(
                f"column '{name}' has {len(words)} different words in the first time step, expected 1 to "
                f"{MAX_WORDS_PER_COLUMN}: leave it out with --drop {quote_name(name)}"
            )
        fill = 0.0 if fill_gaps else None
        features += [Feature(f"{name}={word}", name, "word", word, fill) for word in words]
    if add_indicators and column.gaps.any():
        features.append(Feature(f"{name} missing", name, "gap"))
    return tuple(features)


def transform_column(feature: Feature, column: Column) -> npt.NDArray[np.float32]:
    """Return the values of a feature, computed from its column, which has no invalid values."""
    if feature.kind == "number":
        filled = column.numbers if feature.fill is None else np.where(column.gaps, feature.fill, column.numbers)
        with np.errstate(all="ignore"):  # the caller refuses infinite features
            return np.asarray(((filled - feature.mean) / feature.std).astype(np.float32))
    if feature.kind == "word" and column.words is not None:
        return column.words.look_up({feature.word: 1}).astype(np.float32)
    return column.gaps.astype(np.float32)


def transform_table(features: Sequence[Feature], table: Columns) -> npt.NDArray[np.float32]:
    """Return the features x[n, feature] of another table with the same columns.

    A word without a feature of its own is 0 in all features.

    Raises:
        DataError: A column is missing, has invalid values, or has gaps that the features do not fill.
    """
    parts: list[npt.NDArray[np.float32]] = []
    for name, group in groupby(features, key=lambda feature: feature.column):
        own_features = list(group)
        if name not in table:
            needed = ", ".join(dict.fromkeys(feature.column for feature in features))
            raise DataError(f"inputs by name need the columns {needed}: got no column '{name}'")
        as_numbers, gaps = to_numbers(table[name])
        words = encode_texts(table[name]) if any(feature.kind == "word" for feature in own_features) else None
        if words is not None:
            gaps = words.gaps
        column = Column(name, words, as_numbers, gaps)
        if column.invalid.any():
            raise DataError(f"column '{name}' must have numbers, got {table[name][int(column.invalid.argmax())]!r}")
        if column.gaps.any() and own_features[0].fill is None:
            raise DataError(f"column '{name}' has {int(column.gaps.sum())} gaps, the models were trained without gaps")
        parts += [transform_column(feature, column) for feature in own_features]
    x = np.empty((len(parts[0]), len(parts)), dtype=np.float32)
    for k, part in enumerate(parts):
        x[:, k] = part
    return x


def quote_name(name: str) -> str:
    """Return a column's name as it is written on a command line.

    >>> quote_name("flight id")
    "'flight id'"
    """
    return shlex.quote(name)
