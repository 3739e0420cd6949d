"""Tables in Parquet, Arrow and Feather files, and columns of Arrow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import ipc
from pyarrow import parquet as pq

from feddrift.errors import DataError
from feddrift.tables.arrange import Table
from feddrift.tables.columns import (
    MAX_TABLE_VALUE,
    MISSING_TEXTS,
    CodedTexts,
    SourceColumn,
    convert_to_number,
    convert_to_text,
    format_dates,
)
from feddrift.tables.features import quote_name
from feddrift.tables.problems import Problems, join_first
from feddrift.types import Bools, Floats

FORMAT_NAMES = {"parquet": "a Parquet file", "arrow": "an Arrow file", "arrow stream": "an Arrow stream"}


class ArrowColumn:
    """A column of Arrow; a file is read each time that the column is needed, because a table may not fit into memory.

    Args:
        name: The name of the column.
        n_rows: The number of rows.
        load: Reads the values.
    """

    def __init__(self, name: str, n_rows: int, load: Callable[[], pa.ChunkedArray]) -> None:
        self._name = name
        self._n_rows = n_rows
        self._load_values = load

    def __len__(self) -> int:
        return self._n_rows

    def parse_numbers(self) -> tuple[Floats, Bools]:
        values = self._load()
        if pa.types.is_null(values.type) or pa.types.is_temporal(values.type):
            return np.full(self._n_rows, np.nan), _find_nulls(values)
        if pa.types.is_large_string(values.type):
            try:
                return _parse_texts(values)
            except UnicodeDecodeError:
                raise DataError(f"column '{self._name}' has text that is not UTF-8: write the file again") from None
        if pa.types.is_boolean(values.type):
            values = values.cast(pa.uint8())
        as_numbers = _read_floats(values.cast(pa.float64(), safe=False))
        return _limit_numbers(as_numbers), np.isnan(as_numbers)

    def encode_texts(self) -> CodedTexts:
        try:
            codes, distinct = _encode(self._load())
        except UnicodeDecodeError:  # PyArrow writes no such text
            raise DataError(f"column '{self._name}' has text that is not UTF-8: write the file again") from None
        return CodedTexts.from_values(distinct, codes)

    def format_value(self, row: int) -> str:
        return str(self._load()[row].as_py()).strip()

    def _load(self) -> pa.ChunkedArray:
        """Return the values as numbers, dates or texts.

        Raises:
            DataError: The column has other values, or the file is damaged.
        """
        values = self._load_values()
        if len(values) != self._n_rows:
            raise DataError(
                f"column '{self._name}' has {len(values)} values in {self._n_rows} rows: write the file again"
            )
        kind = values.type
        if pa.types.is_dictionary(kind):
            values = values.cast(kind.value_type)
            kind = values.type
        if pa.types.is_decimal(kind) or pa.types.is_time(kind):  # decimals become the nearest floats
            values = values.cast(pa.string())
            kind = values.type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view():
            return values if pa.types.is_large_string(kind) else values.cast(pa.large_string())
        is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
        if is_number or pa.types.is_null(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind):
            return values
        raise DataError(
            f"column '{self._name}' must have numbers, words or dates, got {kind}: leave it out with --drop "
            f"{quote_name(self._name)}"
        )


def _parse_texts(values: pa.ChunkedArray) -> tuple[Floats, Bools]:
    """Convert texts to numbers as `to_numbers` does: NaN where a value is missing or not a number; and the gaps.

    Casts of Arrow give the same numbers as Python, and fail for forms that only one of them reads.
    """
    with suppress(pa.ArrowInvalid):  # most columns have only numbers
        numbers = _read_floats(values.cast(pa.float64()))
        if not np.isnan(numbers).any():
            return _limit_numbers(numbers), np.zeros(len(numbers), dtype=bool)
    with suppress(pa.ArrowInvalid):  # or numbers and gaps
        texts = pc.utf8_trim_whitespace(values)
        is_missing = pc.or_kleene(texts.is_null(), pc.is_in(texts, value_set=_list_missing_texts()))
        gaps = read_bools(is_missing)
        numbers = np.full(len(gaps), np.nan)
        numbers[~gaps] = _read_floats(texts.filter(pc.invert(is_missing)).cast(pa.float64()))
        return _limit_numbers(numbers), gaps
    codes, distinct = _encode(values)
    numbers = np.array([convert_to_number(text) for text in distinct], dtype=np.float64)
    gaps = np.array([not convert_to_text(text) for text in distinct], dtype=bool)
    return numbers[codes], (gaps & np.isnan(numbers))[codes]


def _encode(values: pa.ChunkedArray) -> tuple[npt.NDArray[np.int32], list[Any]]:
    """Return the position of each row's value among the distinct values, and these; missing values are None."""
    encoded = values.dictionary_encode().unify_dictionaries()
    if not encoded.num_chunks:
        return np.empty(0, dtype=np.int32), [None]
    distinct = encoded.chunk(0).dictionary
    codes = read_integers(pa.chunked_array([chunk.indices for chunk in encoded.chunks]))
    if encoded.null_count:
        codes = np.where(_find_nulls(encoded), np.int32(len(distinct)), codes)
    is_date = pa.types.is_temporal(values.type)
    texts = format_dates(_to_datetimes(distinct)) if is_date else distinct.to_pylist()
    return codes, [*texts, None]


def _limit_numbers(numbers: Floats) -> Floats:
    """Return the numbers, NaN in place of numbers that are infinite or too large."""
    is_usual = np.abs(numbers) < MAX_TABLE_VALUE
    return numbers if is_usual.all() else np.where(is_usual, numbers, np.nan)


# PyArrow's own conversion to NumPy imports pandas where it is installed, which takes longer than reading a usual table.


def _read_floats(values: pa.ChunkedArray) -> Floats:
    """Return numbers of 64 bits, NaN where a value is missing."""
    numbers: Floats = _concatenate_buffers(values, np.float64)
    if values.null_count:
        numbers[_find_nulls(values)] = np.nan
    return numbers


def read_integers(values: pa.ChunkedArray) -> npt.NDArray[np.int32]:
    """Return whole numbers of 32 bits; a missing one has any value."""
    return np.asarray(_concatenate_buffers(values, np.int32))


def read_bools(values: pa.ChunkedArray) -> Bools:
    """Return a mask without missing values."""
    return np.concatenate([_unpack_bits(chunk, chunk.buffers()[1]) for chunk in values.chunks] or [np.empty(0, bool)])


def _find_nulls(values: pa.ChunkedArray) -> Bools:
    return read_bools(values.is_null())


def _concatenate_buffers(values: pa.ChunkedArray, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    parts = [
        np.frombuffer(chunk.buffers()[1], dtype=dtype, count=chunk.offset + len(chunk))[chunk.offset :]
        for chunk in values.chunks
        if len(chunk)
    ]
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)


def _unpack_bits(chunk: pa.Array, buffer: pa.Buffer) -> Bools:
    if not len(chunk):
        return np.empty(0, dtype=bool)
    bits = np.unpackbits(np.frombuffer(buffer, dtype=np.uint8), count=chunk.offset + len(chunk), bitorder="little")
    return bits[chunk.offset :].astype(bool)


@cache
def _list_missing_texts() -> pa.Array:
    texts = [text.encode() for text in sorted(MISSING_TEXTS)]
    ends = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(texts))]
    return pa.Array.from_buffers(pa.large_string(), len(texts), buffers)


def _to_datetimes(dates: pa.Array) -> Any:
    """Return dates as NumPy's; those with a time zone are in UTC."""
    if pa.types.is_date(dates.type):
        days = read_integers(pa.chunked_array([dates.cast(pa.date32()).cast(pa.int32())]))
        return days.astype("datetime64[D]")
    ticks = _concatenate_buffers(pa.chunked_array([dates.cast(pa.int64())]), np.int64)
    return ticks.astype(f"datetime64[{dates.type.unit}]")


def read_arrow(path: Path, kind: str) -> Table:
    """Open a Parquet, Arrow or Feather file; columns are read when they are needed.

    Args:
        path: The file.
        kind: One of FORMAT_NAMES.

    Raises:
        DataError: The file is damaged.
    """
    try:
        if kind == "parquet":
            with pq.ParquetFile(path, memory_map=True) as file:
                names = file.schema_arrow.names
                n_rows = file.metadata.num_rows
        else:
            with _open_ipc(path, kind) as file:
                names = file.schema.names
            with _open_ipc(path, kind, 0) as file:
                n_rows = file.read_all().num_rows if names else 0
    except (pa.ArrowException, OSError) as error:
        raise _build_damage_error(path, kind, error) from None
    problems = Problems(str(path))
    if repeated := [name for name, n in Counter(names).items() if n > 1]:
        problems.add(f"every column needs a name of its own, got {join_first(map(repr, repeated))} more than once")
        problems.raise_if_any()
    columns: dict[str, SourceColumn] = {
        name: ArrowColumn(name, n_rows, partial(_read_column, path, kind, name, k)) for k, name in enumerate(names)
    }
    return Table(str(path), columns, range(n_rows), "row", problems)


def _read_column(path: Path, kind: str, name: str, position: int) -> pa.ChunkedArray:
    """Read one column of a file.

    Raises:
        DataError: The file is damaged.
    """
    try:
        if kind == "parquet":
            with pq.ParquetFile(path, memory_map=True) as file:
                return file.read(columns=[name]).column(name)
        with _open_ipc(path, kind, position) as file:
            return file.read_all().column(name)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise _build_damage_error(path, kind, error) from None


def _open_ipc(path: Path, kind: str, position: int | None = None) -> Any:
    """Open an Arrow file or stream, or one of its columns."""
    options = ipc.IpcReadOptions(included_fields=None if position is None else [position])
    source = pa.memory_map(str(path))
    return ipc.open_file(source, options=options) if kind == "arrow" else ipc.open_stream(source, options=options)


def _build_damage_error(path: Path, kind: str, error: Exception) -> DataError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DataError(f"{path} cannot be read as {FORMAT_NAMES[kind]}: {reason}; write or copy it again")
