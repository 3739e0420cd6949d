"""Columns of a table, from the text of a file, from lists, or from a data frame."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift.errors import ConfigError, DataError
from feddrift.types import Bools, Floats

Values = npt.NDArray[Any]  # of numbers, dates, or objects: text, None, ...
Columns = Mapping[str, Values]

MISSING_TEXTS = frozenset({"", "?", "NA", "N/A", "<NA>", "nan", "NaN", "NAN", "NaT", "null", "NULL"})  # missing values
SUPPORTED_KINDS = "biufMO"  # kinds of NumPy types
TEXT_KINDS = "UT"
MAX_TABLE_VALUE = 1e38  # float32 holds numbers up to 3.4e38


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


def to_texts(values: Values) -> list[str]:
    """Convert values to text, 3.0 to "3"; missing values to "".

    >>> to_texts(np.array([2009.0, np.nan])), to_texts(np.array([" Oslo", None, "NA"], dtype=object))
    (['2009', ''], ['Oslo', '', ''])
    """
    if values.dtype.kind == "M":
        dates = [str(np.datetime_as_string(value, unit="auto")) for value in values]
        return ["" if text == "NaT" else text for text in dates]
    return [_to_text(value) for value in values.tolist()]


def _to_text(value: object) -> str:
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
    as_numbers = np.fromiter(map(_to_number, objects), dtype=np.float64, count=len(objects))
    gaps = np.isnan(as_numbers)
    gaps[gaps] = [not _to_text(objects[i]) for i in np.flatnonzero(gaps)]
    return as_numbers, gaps


def parse_number(text: str) -> float:
    """Convert a text to a number; NaN if it is not one."""
    try:
        return math.nan if "_" in text else float(text)  # only Python reads 1_2 as 12
    except ValueError:
        return math.nan


def _to_number(value: object) -> float:
    try:
        if isinstance(value, str):
            number = parse_number(value)
        else:
            number = math.nan if isinstance(value, complex | np.complexfloating) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):  # None, dates, whole numbers beyond floats
        return math.nan
    return number if -MAX_TABLE_VALUE < number < MAX_TABLE_VALUE else math.nan
