"""Columns of a table, from the text of a file, from lists, or from a data frame."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from feddrift.errors import ConfigError, DataError
from feddrift.types import Bools, Floats, Ints

Values = npt.NDArray[Any]  # of numbers, dates, or objects: text, None, ...
Columns = Mapping[str, Values]
Codes = npt.NDArray[np.signedinteger[Any]]

MISSING_TEXTS = frozenset({"", "?", "NA", "N/A", "<NA>", "nan", "NaN", "NAN", "NaT", "null", "NULL"})  # missing values
SUPPORTED_KINDS = "biufMO"  # kinds of NumPy types
TEXT_KINDS = "UT"
MAX_TABLE_VALUE = 1e38  # float32 holds numbers up to 3.4e38


@dataclass(frozen=True)
class CodedTexts:
    """The texts of a column: each distinct text once, in the order of their first rows, and its position per row.

    Missing values have the text "".
    """

    texts: Sequence[str]
    codes: Codes  # [n], positions in texts

    @classmethod
    def from_values(cls, values: Iterable[object], codes: Codes) -> CodedTexts:
        """Convert distinct values to texts; values with the same text become one.

        Args:
            values: The values.
            codes: The position of each row's value.

        >>> CodedTexts.from_values([3, "3", None], np.array([0, 1, 2])).codes.tolist()
        [0, 0, 1]
        """
        position: dict[str, int] = {}
        new_codes = [position.setdefault(convert_to_text(value), len(position)) for value in values]
        if len(position) < len(new_codes):
            codes = np.array(new_codes, dtype=codes.dtype)[codes]
        return cls(list(position), codes)

    @property
    def gaps(self) -> Bools:
        """The mask of missing values."""
        return np.array([not text for text in self.texts] or [False], dtype=bool)[self.codes]

    def take(self, rows: Ints) -> CodedTexts:
        """Return the texts of these rows."""
        return CodedTexts(self.texts, self.codes[rows])

    def find_first_rows(self) -> dict[str, int]:
        """Return the first row of each text that has rows, in the order of these rows."""
        first = np.full(len(self.texts), -1, dtype=np.int64)
        first[self.codes[::-1]] = np.arange(len(self.codes) - 1, -1, -1)  # the last assignment is that of the first row
        used = np.flatnonzero(first >= 0)
        return {self.texts[k]: int(first[k]) for k in used[np.argsort(first[used])].tolist()}

    def count_rows(self) -> dict[str, int]:
        """Return the number of rows of each text that has rows."""
        counts = np.bincount(self.codes, minlength=len(self.texts)).tolist()
        return {text: n for text, n in zip(self.texts, counts, strict=True) if n}

    def look_up(self, values: Mapping[str, int]) -> Ints:
        """Return the value of each row's text; texts without a row need no value."""
        return np.array([values.get(text, 0) for text in self.texts] or [0], dtype=np.int64)[self.codes]


class SourceColumn(Protocol):
    """A column of a data frame or a file, which is parsed when it is needed."""

    def __len__(self) -> int: ...

    def parse_numbers(self) -> tuple[Floats, Bools]:
        """Return numbers, NaN where a value is missing or not a number, and the mask of missing values."""
        ...

    def encode_texts(self) -> CodedTexts:
        """Return the column as texts."""
        ...

    def format_value(self, row: int) -> str:
        """Return the value of a row for messages."""
        ...


@dataclass(frozen=True)
class ArrayColumn:
    """A column of a data frame."""

    values: Values

    def __len__(self) -> int:
        return len(self.values)

    def parse_numbers(self) -> tuple[Floats, Bools]:
        return to_numbers(self.values)

    def encode_texts(self) -> CodedTexts:
        return encode_texts(self.values)

    def format_value(self, row: int) -> str:
        return str(self.values[row])


def read_frame(frame: object) -> dict[str, Values]:
    """Return the columns of a dictionary or a data frame (pandas, polars, Arrow, ...) by their names.

    Columns are read with `frame[name]`, because the interchange protocol (`__dataframe__`) is being removed.

    Raises:
        ConfigError: The object is neither a dictionary nor a data frame.
        DataError: Two columns have the same name, their lengths differ, or a column cannot be read.

    >>> read_frame({"a": [1, 2], "b": ["x", None]})["b"].tolist()
    ['x', None]
    """
    names = frame if isinstance(frame, Mapping) else getattr(frame, "column_names", getattr(frame, "columns", None))
    if names is None or callable(names) or not hasattr(frame, "__getitem__"):
        raise ConfigError(f"a frame is a dictionary of columns or a data frame, got a {type(frame).__name__}")
    columns = {str(name): _to_array(frame[name], str(name)) for name in names}
    if len(columns) < len(list(names)):
        raise DataError(f"two columns have the same name, got {[str(name) for name in names]}")
    sizes = {name: len(values) for name, values in columns.items()}
    if len(set(sizes.values())) > 1:
        raise DataError(f"columns must be of the same length, got {sizes}")
    return columns


def _to_array(column: Any, name: str) -> Values:
    try:
        if np.ma.is_masked(column):  # masked values are missing
            column = [None if hidden else value for value, hidden in zip(column.data, column.mask, strict=True)]
        values = np.asarray(column)
        if values.dtype.kind in TEXT_KINDS and values.ndim == 1:  # also a list of numbers and text
            values = np.array([*column], dtype=object)
    except (TypeError, ValueError) as error:
        raise DataError(f"column '{name}' cannot be read: {error}") from None
    if values.ndim != 1:
        raise DataError(f"column '{name}' must be one value per row, got an array of shape {values.shape}")
    if values.dtype.kind not in SUPPORTED_KINDS:
        raise DataError(f"column '{name}' must have numbers, words or dates, got {values.dtype}")
    return values


def encode_texts(values: Values) -> CodedTexts:
    """Convert values to text, 3.0 to "3"; missing values to "".

    >>> encode_texts(np.array([2009.0, np.nan])).texts
    ['2009', '']
    >>> encode_texts(np.array([" Oslo", None, "NA", "Oslo"], dtype=object))
    CodedTexts(texts=['Oslo', ''], codes=array([0, 1, 1, 0]))
    """
    if values.dtype.kind == "O":
        position: dict[str, int] = {}
        codes = [position.setdefault(convert_to_text(value), len(position)) for value in values.tolist()]
        return CodedTexts(list(position), np.array(codes, dtype=np.int64))
    distinct, first_rows, positions = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first_rows)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    distinct = distinct[order]
    objects = format_dates(distinct) if values.dtype.kind == "M" else distinct.tolist()
    return CodedTexts.from_values(objects, rank[positions])


def format_dates(values: Values) -> list[str]:
    """Return dates as text, with the parts that they need; missing dates as "NaT"."""
    return [str(np.datetime_as_string(value, unit="auto")) for value in values]


def convert_to_text(value: object) -> str:
    """Return a value as text, "" if it is missing."""
    if isinstance(value, float):
        is_whole = math.isfinite(value) and value == int(value) and abs(value) < 1e15
        return "" if math.isnan(value) else str(int(value)) if is_whole else repr(value)
    text = "" if value is None else str(value).strip()
    return "" if text in MISSING_TEXTS else text


def to_numbers(values: Values) -> tuple[Floats, Bools]:
    """Convert values to numbers.

    Returns:
        The numbers, NaN where a value is missing or not a number; and a mask of the missing values.

    >>> to_numbers(np.array(["1.5", "?", "wet"], dtype=object))
    (array([1.5, nan, nan]), array([False,  True, False]))
    """
    kind = values.dtype.kind
    if kind in "biuf":
        as_numbers = values.astype(np.float64)
        return np.where(np.abs(as_numbers) < MAX_TABLE_VALUE, as_numbers, np.nan), np.isnan(as_numbers)
    if kind == "M":
        return np.full(len(values), np.nan), np.isnat(values)
    objects = values.tolist()
    as_numbers = np.fromiter(map(convert_to_number, objects), dtype=np.float64, count=len(objects))
    gaps = np.isnan(as_numbers)
    gaps[gaps] = [not convert_to_text(objects[i]) for i in np.flatnonzero(gaps)]
    return as_numbers, gaps


def parse_number(text: str) -> float:
    """Convert a text to a number; NaN if it is not one."""
    try:
        return math.nan if "_" in text else float(text)  # only Python reads 1_2 as 12
    except ValueError:
        return math.nan


def convert_to_number(value: object) -> float:
    """Return a value as a number; NaN if it is not one, or too large."""
    try:
        if isinstance(value, str):
            number = parse_number(value)
        else:
            number = math.nan if isinstance(value, complex | np.complexfloating) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):  # None, dates, whole numbers beyond floats
        return math.nan
    return number if -MAX_TABLE_VALUE < number < MAX_TABLE_VALUE else math.nan
