"""Tables in CSV files: separator, encoding and decimal commas are detected.

Files without irregular quotes or line ends are read by PyArrow. All others are read by Python's `csv` module, whose
results are the same but which takes ten times as long. It also reports the lines with problems.
"""

from __future__ import annotations

import csv
import gzip
import io
import logging
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from feddrift.errors import DataError
from feddrift.tables.arrange import Table, TableOptions
from feddrift.tables.columns import MISSING_TEXTS, SourceColumn, parse_number
from feddrift.tables.problems import Problems, join_first
from feddrift.types import Ints

if TYPE_CHECKING:
    import pyarrow as pa

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}
GZIP_MAGIC = b"\x1f\x8b"
UNDEFINED_BYTES = {0x81, 0x8D, 0x8F, 0x90, 0x9D}  # bytes that Windows-1252 has no characters for
MAX_LINE_BYTES = 131_072  # longer ones are perhaps an open quote, which Python's csv module reports

_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]*,[0-9]+([eE][+-]?[0-9]+)?")
_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}(,[0-9]{3})+")

_log = logging.getLogger("feddrift")


def read_csv(path: Path, options: TableOptions, use_arrow: bool = True) -> Table:
    """Read a CSV file, which may be compressed by gzip.

    Args:
        path: The file.
        options: The roles of the columns, which decide on the separator.
        use_arrow: False reads every file with Python's `csv` module.

    Returns:
        The table, with the problems of its lines and its header.

    Raises:
        DataError: The file is not text, or not CSV.
    """
    problems = Problems(str(path))
    content = decode_file(path, problems.warn)
    start = len(content) - len(content.lstrip(b"\r\n"))
    end = content.find(b"\n", start)
    first_line = content[start : None if end < 0 else end].decode()
    delimiter = _find_delimiter(first_line, options)
    if delimiter != ",":
        problems.warn(f"{path}: columns are separated by {DELIMITERS[delimiter]}")
    lines: Sequence[int]
    if use_arrow and (found := _read_regular(content, delimiter)) is not None:
        header, cells, lines = found
    else:
        header, cells, lines = _read_irregular(path, content, delimiter, problems)
    if not header[-1] and not any(_list_distinct(cells[-1])):  # each line ends with a separator
        header = header[:-1]
        cells = cells[:-1]
    _check_header(header, problems)
    if delimiter != ",":
        label = options.label if options.label in header else None
        cells = [
            column if name in (options.client, label) else _replace_decimal_commas(column, name, problems, str(path))
            for name, column in zip(header, cells, strict=True)
        ]
    from feddrift.streams.arrow_table import ArrowColumn

    columns: dict[str, SourceColumn] = {
        name: ArrowColumn(name, len(column), lambda column=column: column)  # type: ignore[misc]
        for name, column in zip(header, cells, strict=True)
    }
    return Table(str(path), columns, lines, "line", problems)


def decode_file(path: Path, warn: Callable[[str], None] = _log.warning) -> bytes:
    """Read a file as text in UTF-8.

    Args:
        path: The file.
        warn: Reports an assumption about the encoding.

    Raises:
        DataError: The file cannot be read, or is not text.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    if content.startswith(GZIP_MAGIC):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{path} is compressed and cannot be decompressed: {error or 'it is incomplete'}; copy it again, or "
                "unpack it to see its content"
            ) from None
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        try:
            content = content.decode("utf-16").encode()
        except UnicodeError:
            content = b"\0"
    else:
        content = content.removeprefix(b"\xef\xbb\xbf")
        try:
            if not content.isascii():
                content.decode()
        except UnicodeDecodeError as error:
            if set(content) & UNDEFINED_BYTES or b"\0" in content:
                content = b"\0"
            else:
                line = content.count(b"\n", 0, error.start) + 1
                warn(f"{path}, line {line}: not UTF-8, read as Windows-1252; save it as UTF-8 if names look odd")
                content = content.decode("cp1252").encode()
    if b"\0" in content:
        raise DataError(f"{path} is not text in UTF-8, expected a CSV file: save it as one")
    return content


def _find_delimiter(header: str, options: TableOptions) -> str:
    """Return the delimiter that gives most of the wanted columns; of several, the one that gives most columns."""

    def count_columns(delimiter: str) -> tuple[int, int]:
        try:
            names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter), [])]
        except csv.Error:
            return 0, 0
        try:
            wanted = set(options.find_roles(names).values())
        except DataError:  # of an expression, which is reported later
            wanted = {options.client or "", options.time or ""}
        return len(wanted & set(names)), len(names)

    return max(DELIMITERS, key=count_columns)


def _read_regular(content: bytes, delimiter: str) -> tuple[list[str], list[pa.ChunkedArray], Sequence[int]] | None:
    """Read a file whose lines are its rows, and whose quotes enclose whole values.

    Returns:
        The header, the columns as text, and the line of each row; None if the file is not of this kind.
    """
    data = np.frombuffer(content, dtype=np.uint8)
    newlines = np.flatnonzero(data == ord("\n"))
    returns = np.flatnonzero(data == ord("\r")) if b"\r" in content else np.empty(0, dtype=np.int64)
    if len(returns) and (returns[-1] + 1 == len(data) or (data[returns + 1] != ord("\n")).any()):
        return None
    if not _are_quotes_regular(data, newlines, delimiter):
        return None
    starts = np.concatenate([[0], newlines + 1])
    ends = np.concatenate([newlines, [len(data)]])
    ends[:-1] -= (newlines > 0) & (data[newlines - 1] == ord("\r"))
    lengths = ends - starts
    is_row = lengths > 0
    rows = np.flatnonzero(is_row)
    if len(rows) < 2 or lengths.max() > MAX_LINE_BYTES:
        return None
    first_line = content[starts[rows[0]] : ends[rows[0]]].decode()
    header = [name.strip() for name in next(csv.reader([first_line], strict=True, delimiter=delimiter))]
    if not any(header):
        return None
    cells = _parse_cells(memoryview(content)[starts[rows[1]] :], delimiter, len(header), len(rows) - 1)
    if cells is None:
        return None
    numbers: Any = rows[1:] + 1
    if rows[-1] - rows[1] == len(rows) - 2:  # no empty lines between
        numbers = range(int(rows[1]) + 1, int(rows[-1]) + 2)
    return header, *_leave_out_empty_rows(cells, numbers)


def _are_quotes_regular(data: npt.NDArray[np.uint8], newlines: Ints, delimiter: str) -> bool:
    """Return True if each quote begins or ends a value or is doubled, and no value contains a line end."""
    quotes = np.flatnonzero(data == ord('"'))
    if not len(quotes):
        return True
    if len(quotes) % 2 or (np.searchsorted(quotes, newlines) % 2).any():
        return False
    is_limit = np.zeros(256, dtype=bool)  # by byte: it separates values
    is_limit[[ord(delimiter), ord("\n"), ord("\r")]] = True
    opening = quotes[::2]
    closing = quotes[1::2]
    is_doubled = opening[1:] == closing[:-1] + 1
    begins_value = is_limit[data[opening - 1]]
    begins_value[0] |= opening[0] == 0
    begins_value[1:] |= is_doubled
    ends_value = is_limit[data[np.minimum(closing + 1, len(data) - 1)]]
    ends_value[-1] |= closing[-1] + 1 == len(data)
    ends_value[:-1] |= is_doubled
    return bool(begins_value.all() and ends_value.all())


def _parse_cells(content: memoryview, delimiter: str, n_columns: int, n_rows: int) -> list[pa.ChunkedArray] | None:
    """Return the columns as text; None if the rows differ in their number of values."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    names = [str(k) for k in range(n_columns)]
    try:
        table = arrow_csv.read_csv(
            pa.BufferReader(pa.py_buffer(content)),
            read_options=arrow_csv.ReadOptions(column_names=names),
            parse_options=arrow_csv.ParseOptions(delimiter=delimiter),
            convert_options=arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
            ),
        )
    except pa.ArrowInvalid:
        return None
    return list(table.columns) if table.num_rows == n_rows else None


def _leave_out_empty_rows(cells: list[pa.ChunkedArray], lines: Sequence[int]) -> tuple[list[pa.ChunkedArray], Any]:
    """Leave out rows that have only separators, as spreadsheets write them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from feddrift.streams.arrow_table import read_integers

    is_empty = np.ones(len(lines), dtype=bool)
    for column in cells:
        is_empty &= read_integers(pc.binary_length(column)) == 0
        if not is_empty.any():
            return cells, lines
    kept = pa.array(~is_empty)
    return [column.filter(kept) for column in cells], np.asarray(lines)[~is_empty]


def _read_irregular(
    path: Path, content: bytes, delimiter: str, problems: Problems
) -> tuple[list[str], list[pa.ChunkedArray], Sequence[int]]:
    """Read a file with Python's `csv` module, and add the lines that are not rows to the problems.

    Returns:
        The header, the columns as text, and the line of each row.

    Raises:
        DataError: The file has an open quote, or no header.
    """
    import pyarrow as pa

    reader = csv.reader(io.StringIO(content.decode(), newline=""), strict=True, delimiter=delimiter)
    numbered: list[tuple[int, list[str]]] = []
    try:
        for row in reader:
            if any(row):  # spreadsheets leave lines that have only separators
                numbered.append((reader.line_num, [cell.strip() for cell in row]))
    except csv.Error as error:  # an open quote, or a very long field
        raise DataError(f"{path}, line {reader.line_num}: cannot be read as CSV: {error}; is a quote open?") from None
    if not numbered:
        raise DataError(f"{path} is empty, expected a header line with the names of the columns")
    header = numbered[0][1]
    rows = [(line, row) for line, row in numbered[1:] if len(row) == len(header)]
    if ragged := [(line, row) for line, row in numbered[1:] if len(row) != len(header)]:
        lines = join_first(f"{line} ({len(row)})" for line, row in ragged)
        hint = f"a value that contains {delimiter!r} needs quotes"
        problems.add(f"every line must have {len(header)} values as the header has, got line {lines}; {hint}")
    cells = [pa.chunked_array([pa.array([row[k] for _, row in rows], pa.large_string())]) for k in range(len(header))]
    return header, cells, [line for line, _ in rows]


def _check_header(header: list[str], problems: Problems) -> None:
    if unnamed := [k for k, name in enumerate(header, start=1) if not name]:
        hint = "; pandas writes no index with index=False" if unnamed == [1] else ""
        problems.add(f"every column needs a name, got none for column {join_first(unnamed)}{hint}")
    if repeated := [name for name, n in Counter(header).items() if n > 1 and name]:
        problems.add(f"every column needs a name of its own, got {join_first(map(repr, repeated))} more than once")


def _list_distinct(column: pa.ChunkedArray) -> list[str]:
    return [text.strip() for text in column.unique().to_pylist()]


def _replace_decimal_commas(column: pa.ChunkedArray, name: str, problems: Problems, path: str) -> pa.ChunkedArray:
    """Replace decimal commas by points, if the whole column is then numbers; otherwise return it unchanged."""
    import pyarrow.compute as pc

    if not pc.any(pc.match_substring(column, ",")).as_py():
        return column
    column = pc.utf8_trim_whitespace(column)
    cells = _list_distinct(column)
    commas = {cell for cell in cells if _DECIMAL_COMMA.fullmatch(cell)}
    others = {cell for cell in cells if cell not in commas and cell not in MISSING_TEXTS}
    if not commas or any("." in cell or math.isnan(parse_number(cell)) for cell in others):
        return column
    if all(_THOUSANDS.fullmatch(cell) for cell in commas):
        problems.add(
            f"column '{name}': {min(commas)!r} may have a decimal comma or a separator of thousands: write decimals "
            "with a point, thousands without separator"
        )
    else:
        problems.warn(f"{path}: column '{name}' has decimal commas")
    return pc.replace_substring(column, ",", ".")
