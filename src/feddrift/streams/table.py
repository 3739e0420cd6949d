"""Streams of a user's table: a CSV file with a row for each example, and columns for client, time and label."""

from __future__ import annotations

import csv
import io
import logging
import math
import os
import re
from collections import Counter
from pathlib import Path

import numpy as np

from feddrift.data import TABLE_FAMILY, Stream
from feddrift.errors import DataError
from feddrift.tables.arrange import Table, TableOptions, arrange_table
from feddrift.tables.columns import MISSING_TEXTS, Columns, parse_number
from feddrift.tables.problems import Problems, join_first

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}
BINARY_FORMATS = {b"PK": "an Excel file or an archive", b"\x1f\x8b": "compressed", b"PAR1": "a Parquet file"}
OTHER_TABLE_SUFFIXES = (".parquet", ".feather", ".arrow", ".xlsx", ".xls", ".tsv")
UNDEFINED_BYTES = {0x81, 0x8D, 0x8F, 0x90, 0x9D}  # bytes that Windows-1252 has no characters for

_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]*,[0-9]+([eE][+-]?[0-9]+)?")
_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}(,[0-9]{3})+")

_log = logging.getLogger("feddrift")


def is_table(name: str) -> bool:
    """Return True if a stream's name is that of a file with a table."""
    return name.startswith("table:") or (name.lower().endswith(".csv") and not name.startswith("folder:"))


def load_table(name: str, options: TableOptions) -> Stream:
    """Load the stream of a table; its last time step only tests.

    Args:
        name: ``table:FILE``, or a FILE that ends in .csv. ``FILE+FILE+...`` is a table with the rows of several files
            with the same columns, one after the other.
        options: The roles of the columns.

    Raises:
        DataError: A file cannot be used.
    """
    if name == "table:":
        raise DataError("'table:' names no file, expected one with a table such as table:weather.csv")
    paths = split_paths(name)
    for path in paths:
        if not os.path.isfile(path):
            raise DataError(f"'{path}' is not a file, expected a table such as weather.csv")
    tables = [read_table(path, options) for path in paths]
    table = tables[0] if len(tables) == 1 else _join_tables(tables)
    return Stream(
        name=f"table:{'+'.join(path.name for path in paths)}",
        family=TABLE_FAMILY,
        **vars(arrange_table(table, options)),
    )


def split_paths(name: str) -> list[Path]:
    """Return the files of a table; a + in the path of an existing file does not separate files.

    >>> [path.name for path in split_paths("table:june.csv+july.csv")]
    ['june.csv', 'july.csv']
    >>> [path.name for path in split_paths("c++/june.csv")]
    ['june.csv']
    """
    parts = name.removeprefix("table:").split("+")
    paths: list[Path] = []
    while parts:
        candidates = [Path(os.path.expanduser("+".join(parts[: n + 1]))) for n in range(len(parts))]
        existing = [n for n, path in enumerate(candidates) if os.path.isfile(path)]
        csv_files = [n for n, path in enumerate(candidates) if path.suffix.lower() == ".csv"]
        last_part = existing[-1] if existing else csv_files[0] if csv_files else len(candidates) - 1
        paths.append(candidates[last_part])
        parts = parts[last_part + 1 :]
    return paths


def _join_tables(tables: list[Table]) -> Table:
    """Join the tables of several files; rows are named by file and line."""
    first = tables[0]
    for table in tables:
        table.problems.raise_if_any()
        if set(table.columns) != set(first.columns):
            different = sorted(set(table.columns) ^ set(first.columns))
            raise DataError(
                f"{table.name} must have the columns of {first.name}, got {join_first(different)} in one only"
            )
    name = "+".join(table.name for table in tables)
    columns = {key: np.concatenate([table.columns[key] for table in tables]) for key in first.columns}
    lines = [f"{Path(table.name).name}:{line}" for table in tables for line in table.lines]
    return Table(name, columns, lines, "line", Problems(name))


def read_table(path: Path, options: TableOptions) -> Table:
    """Read the columns of a file as text.

    Args:
        path: The file.
        options: The roles of the columns.

    Returns:
        The table, with the problems of its lines and its header.

    Raises:
        DataError: The file is not a table.
    """
    text = decode_file(path)
    problems = Problems(str(path))
    first_line = text.lstrip("\r\n").partition("\n")[0]
    delimiter = _find_delimiter(first_line, set(options.role_columns.values()))
    if delimiter != ",":
        _log.warning("%s: columns are separated by %s", path, DELIMITERS[delimiter])
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
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
    cells = {k: [row[k] for _, row in rows] for k in range(len(header))}
    if not header[-1] and not any(cells[len(header) - 1]):  # each line ends with a separator
        header = header[:-1]
        cells = {k: cells[k] for k in range(len(header))}
    _check_header(header, problems)
    if delimiter != ",":
        for k, name in enumerate(header):
            if name not in (options.client, options.label):
                cells[k] = _replace_decimal_commas(cells[k], name, problems, str(path))
    columns: Columns = {name: np.array(cells[k], dtype=object) for k, name in enumerate(header)}
    return Table(str(path), columns, [line for line, _ in rows], "line", problems)


def decode_file(path: Path) -> str:
    """Read a file as text.

    Raises:
        DataError: The file cannot be read, or is not text.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    for magic, kind in BINARY_FORMATS.items():
        if content.startswith(magic):
            raise DataError(f"{path} is {kind}, expected text: save or unpack it as a CSV file")
    is_utf16 = content.startswith((b"\xff\xfe", b"\xfe\xff"))
    try:
        text = content.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        text = "\0" if is_utf16 or set(content) & UNDEFINED_BYTES else content.decode("cp1252")
        if "\0" not in text:
            line = content.count(b"\n", 0, error.start) + 1
            _log.warning("%s, line %d: not UTF-8, read as Windows-1252; save it as UTF-8 if names look odd", path, line)
    if "\0" in text:
        raise DataError(f"{path} is not text in UTF-8, expected a CSV file: save it as one")
    return text


def _find_delimiter(header: str, wanted: set[str]) -> str:
    """Return the delimiter that gives most of the wanted columns; of several, the one that gives most columns."""

    def count_columns(delimiter: str) -> tuple[int, int]:
        try:
            names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter), [])]
        except csv.Error:
            return 0, 0
        return len(wanted & set(names)), len(names)

    return max(DELIMITERS, key=count_columns)


def _check_header(header: list[str], problems: Problems) -> None:
    if unnamed := [k for k, name in enumerate(header, start=1) if not name]:
        hint = "; pandas writes no index with index=False" if unnamed == [1] else ""
        problems.add(f"every column needs a name, got none for column {join_first(unnamed)}{hint}")
    if repeated := [name for name, n in Counter(header).items() if n > 1 and name]:
        problems.add(f"every column needs a name of its own, got {join_first(map(repr, repeated))} more than once")


def _replace_decimal_commas(cells: list[str], name: str, problems: Problems, path: str) -> list[str]:
    """Replace decimal commas by points, if the whole column is then numbers; otherwise return it unchanged."""
    commas = {cell for cell in cells if _DECIMAL_COMMA.fullmatch(cell)}
    others = {cell for cell in cells if cell not in commas and cell not in MISSING_TEXTS}
    if not commas or any("." in cell or math.isnan(parse_number(cell)) for cell in others):
        return cells
    if all(_THOUSANDS.fullmatch(cell) for cell in commas):
        problems.add(
            f"column '{name}': {min(commas)!r} may have a decimal comma or a separator of thousands: write decimals "
            "with a point, thousands without separator"
        )
    else:
        _log.warning("%s: column '%s' has decimal commas", path, name)
    return [cell.replace(",", ".") if cell in commas else cell for cell in cells]
