"""From columns to numbers: gaps are filled, words become 0 and 1, scales are those of the first time step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
import numpy.typing as npt

from feddrift.errors import DataError
from feddrift.tables.columns import Columns, Values, numbers, texts
from feddrift.types import Bools, Floats, Ints

MOST_WORDS = 1000  # of one column


@dataclass(frozen=True)
class Feature:
    """One feature, and how it is made of a column: what a model needs to know to read a table again.

    A ``number`` is scaled, (value - mean) / std, a gap filled before; a ``word`` is 1 where the column has this word; a
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
    """A column as it was understood."""

    name: str
    words: list[str] | None  # empty where there is no value; None: it has numbers
    numbers: Floats  # NaN where there is none
    gaps: Bools

    @property
    def bad(self) -> Bools:
        """Where something stands that is no number."""
        return np.zeros(len(self.gaps), dtype=bool) if self.words is not None else np.isnan(self.numbers) & ~self.gaps

    @classmethod
    def of(cls, name: str, values: Values) -> Column:
        """A column has words if less than half of its values are numbers."""
        as_numbers, gaps = numbers(values)
        n_numbers = int((~np.isnan(as_numbers)).sum())
        wordy = n_numbers * 2 < len(gaps) - int(gaps.sum())
        return cls(name, texts(values) if wordy else None, as_numbers, gaps)


def moments(values: Floats, client: Ints) -> tuple[float, float]:
    """Mean and standard deviation over all clients, from sums that each can tell of its own values alone.

    Client c tells how many it has, n_c, their sum s_c, and the sum of squares q_c of their distances from its own mean.
    Then mean = sum s_c / sum n_c, and std^2 = (sum q_c + sum n_c (s_c / n_c - mean)^2) / sum n_c. Where all values are
    the same, std is 1.

    >>> moments(np.array([1.0, 2.0, 6.0]), np.array([0, 0, 1]))[0]
    3.0
    """
    n = np.bincount(client)
    s = np.bincount(client, weights=values)
    own = s / np.maximum(n, 1)
    q = np.bincount(client, weights=(values - own[client]) ** 2)
    mean = float(s.sum() / n.sum())
    std = float(np.sqrt((q + n * (own - mean) ** 2).sum() / n.sum()))
    return mean, std if std > 1e-12 * abs(mean) else 1.0


def learn(
    columns: Sequence[Column], first: Bools, client: Ints, *, fills: bool, indicates: bool, scales: bool
) -> tuple[Feature, ...]:
    """The features of these columns; words, means and scales are those of the rows of the first time step."""
    features: list[Feature] = []
    for column in columns:
        name = column.name
        if column.words is None:
            has_value = first & ~column.gaps
            if not has_value.any():
                raise DataError(f"column '{name}' has no value in the first time step: leave it out, or --missing drop")
            mean, std = moments(column.numbers[has_value], client[has_value])
            fill = mean if fills else None
            features.append(Feature(name, name, "number", "", fill, *((mean, std) if scales else ())))
        else:
            words = sorted({column.words[i] for i in np.flatnonzero(first)} - {""})
            if not 0 < len(words) <= MOST_WORDS:
                raise DataError(
                    f"column '{name}' has {len(words)} different words in the first time step, expected 1 to "
                    f"{MOST_WORDS}: leave it out"
                )
            fill = 0.0 if fills else None
            features += [Feature(f"{name}={word}", name, "word", word, fill) for word in words]
        if indicates and column.gaps.any():
            features.append(Feature(f"{name} missing", name, "gap"))
    return tuple(features)


def values_of(features: Sequence[Feature], columns: Sequence[Column]) -> npt.NDArray[np.float32]:
    """x[n, feature] of columns whose values are all understood."""
    by_name = {column.name: column for column in columns}
    words = {column.name: np.array(column.words, dtype=object) for column in columns if column.words is not None}
    x = np.empty((len(columns[0].gaps), len(features)), dtype=np.float32)
    for k, feature in enumerate(features):
        column = by_name[feature.column]
        if feature.kind == "number":
            filled = column.numbers if feature.fill is None else np.where(column.gaps, feature.fill, column.numbers)
            with np.errstate(all="ignore"):  # what is not finite is refused
                x[:, k] = (filled - feature.mean) / feature.std
        elif feature.kind == "word":
            x[:, k] = words[feature.column] == feature.word
        else:
            x[:, k] = column.gaps
    return x


def read_again(features: Sequence[Feature], table: Columns) -> npt.NDArray[np.float32]:
    """x[n, feature] of another table with the same columns; a word that is not among the features is none of them."""
    columns = []
    for name, group in groupby(features, key=lambda feature: feature.column):
        kinds = {feature.kind: feature for feature in group}
        if name not in table:
            needed = ", ".join(dict.fromkeys(feature.column for feature in features))
            raise DataError(f"inputs by name need the columns {needed}: got no column '{name}'")
        as_numbers, gaps = numbers(table[name])
        column = Column(name, texts(table[name]) if "word" in kinds else None, as_numbers, gaps)
        if column.words is not None:
            column = Column(name, column.words, as_numbers, np.array([not word for word in column.words], dtype=bool))
        if column.bad.any():
            raise DataError(f"column '{name}' must have numbers, got {table[name][int(column.bad.argmax())]!r}")
        if column.gaps.any() and next(iter(kinds.values())).fill is None:
            raise DataError(f"column '{name}' has {int(column.gaps.sum())} gaps, the models have learned without any")
        columns.append(column)
    return values_of(features, columns)
