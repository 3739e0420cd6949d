"""Your own data as one table: a CSV file with a row per example, and columns for client, time and label."""

from __future__ import annotations

import csv
import io
import logging
import os
import re
from collections import Counter
from pathlib import Path

import numpy as np

from feddrift.data import TABLE, Stream
from feddrift.errors import DataError
from feddrift.tables.arrange import Plan, Table, arrange
from feddrift.tables.columns import GAPS, Columns, read_number
from feddrift.tables.problems import Problems, listed

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}
BINARY = {b"PK": "an Excel file or an archive", b"\x1f\x8b": "compressed", b"PAR1": "a Parquet file"}
UNDEFINED = {0x81, 0x8D, 0x8F, 0x90, 0x9D}  # bytes that Windows-1252 has no characters for

_COMMA = re.compile(r"[+-]?[0-9]*,[0-9]+([eE][+-]?[0-9]+)?")
_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}(,[0-9]{3})+")

_log = logging.getLogger("feddrift")


def is_table(name: str) -> bool:
    """Whether a stream's name is that of a file with a table."""
    return name.startswith("table:") or (name.lower().endswith(".csv") and not name.startswith("folder:"))


def load(name: str, plan: Plan) -> Stream:
    """The stream of table:FILE, or of a FILE that ends in .csv; its last time step only tests.

    FILE+FILE+... is one table, too: the rows of several files with the same columns, one after the other.
    """
    if name == "table:":
        raise DataError("'table:' names no file, expected one with a table such as table:weather.csv")
    paths = files(name)
    for path in paths:
        if not os.path.isfile(path):
            raise DataError(f"'{path}' is not a file, expected a table such as weather.csv")
    tables = [read(path, plan) for path in paths]
    table = tables[0] if len(tables) == 1 else _joined(tables)
    return Stream(name=f"table:{'+'.join(path.name for path in paths)}", family=TABLE, **vars(arrange(table, plan)))


def files(name: str) -> list[Path]:
    """The files of a table; a + in the name of a file that is there, or of its folder, parts nothing.

    >>> [path.name for path in files("table:june.csv+july.csv")], [path.name for path in files("c++/june.csv")]
    (['june.csv', 'july.csv'], ['june.csv'])
    """
    parts, paths = name.removeprefix("table:").split("+"), list[Path]()
    while parts:
        begun = [Path(os.path.expanduser("+".join(parts[: n + 1]))) for n in range(len(parts))]
        there = [n for n, path in enumerate(begun) if os.path.isfile(path)]
        named = [n for n, path in enumerate(begun) if path.suffix.lower() == ".csv"]
        end = there[-1] if there else named[0] if named else len(begun) - 1
        paths.append(begun[end])
        parts = parts[end + 1 :]
    return paths


def _joined(tables: list[Table]) -> Table:
    """Several files as one; a place in it is that of a file."""
    first = tables[0]
    for table in tables:
        table.problems.stop()
        if set(table.columns) != set(first.columns):
            odd = sorted(set(table.columns) ^ set(first.columns))
            raise DataError(f"{table.name} must have the columns of {first.name}, got {listed(odd)} in one only")
    name = "+".join(table.name for table in tables)
    columns = {key: np.concatenate([table.columns[key] for table in tables]) for key in first.columns}
    lines = [f"{Path(table.name).name}:{line}" for table in tables for line in table.lines]
    return Table(name, columns, lines, "line", Problems(name))


def read(path: Path, plan: Plan) -> Table:
    """The columns of a file, as text; what is wrong with its lines goes with them."""
    text = _decoded(path)
    problems = Problems(str(path))
    first = text.lstrip("\r\n").partition("\n")[0]
    delimiter = _delimiter(first, set(plan.keys.values()))
    if delimiter != ",":
        _log.warning("%s: columns are separated by %s", path, DELIMITERS[delimiter])
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
    numbered: list[tuple[int, list[str]]] = []
    try:
        for row in reader:
            if any(row):  # spreadsheets leave lines of nothing but separators
                numbered.append((reader.line_num, [cell.strip() for cell in row]))
    except csv.Error as error:  # a quote that nobody closes, a field without end
        raise DataError(f"{path}, line {reader.line_num}: cannot be read as CSV: {error}; is a quote open?") from None
    if not numbered:
        raise DataError(f"{path} is empty, expected a header line with the names of the columns")
    header = numbered[0][1]
    rows = [(line, row) for line, row in numbered[1:] if len(row) == len(header)]
    if ragged := [(line, row) for line, row in numbered[1:] if len(row) != len(header)]:
        lines = listed(f"{line} ({len(row)})" for line, row in ragged)
        cure = f"a value with a {delimiter!r} in it stands in quotes"
        problems.add(f"every line must have {len(header)} values as the header has, got line {lines}; {cure}")
    cells = {k: [row[k] for _, row in rows] for k in range(len(header))}
    if not header[-1] and not any(cells[len(header) - 1]):  # each line ends with a separator
        header, cells = header[:-1], {k: cells[k] for k in range(len(header) - 1)}
    _check_header(header, problems)
    if delimiter != ",":
        for k, name in enumerate(header):
            if name not in (plan.client, plan.label):
                cells[k] = _with_points(cells[k], name, problems, str(path))
    columns: Columns = {name: np.array(cells[k], dtype=object) for k, name in enumerate(header)}
    return Table(str(path), columns, [line for line, _ in rows], "line", problems)


def _decoded(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    for magic, kind in BINARY.items():
        if content.startswith(magic):
            raise DataError(f"{path} is {kind}, expected text: save or unpack it as a CSV file")
    wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))
    try:
        text = content.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        text = "\0" if wide or set(content) & UNDEFINED else content.decode("cp1252")
        if "\0" not in text:
            line = content.count(b"\n", 0, error.start) + 1
            _log.warning("%s, line %d: not UTF-8, read as Windows-1252; save it as UTF-8 if names look odd", path, line)
    if "\0" in text:
        raise DataError(f"{path} is not text in UTF-8, expected a CSV file: save it as one")
    return text


def _delimiter(header: str, wanted: set[str]) -> str:
    """What separates the columns: that by which most of the wanted ones are there, and then most of all."""

    def score(delimiter: str) -> tuple[int, int]:
        try:
            names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter), [])]
        except csv.Error:
            return 0, 0
        return len(wanted & set(names)), len(names)

    return max(DELIMITERS, key=score)


def _check_header(header: list[str], problems: Problems) -> None:
    if unnamed := [k for k, name in enumerate(header, start=1) if not name]:
        cure = "; pandas writes no index with index=False" if unnamed == [1] else ""
        problems.add(f"every column needs a name, got none for column {listed(unnamed)}{cure}")
    if twice := [name for name, n in Counter(header).items() if n > 1 and name]:
        problems.add(f"every column needs a name of its own, got {listed(map(repr, twice))} more than once")


def _with_points(cells: list[str], name: str, problems: Problems, path: str) -> list[str]:
    """Numbers with a decimal comma as numbers with a point, where all of a column can be read so."""
    commas = {cell for cell in cells if _COMMA.fullmatch(cell)}
    rest = {cell for cell in cells if cell not in commas and cell not in GAPS}
    if not commas or any("." in cell or read_number(cell) != read_number(cell) for cell in rest):
        return cells
    if all(_THOUSANDS.fullmatch(cell) for cell in commas):
        problems.add(
            f"column '{name}': {min(commas)!r} may have a decimal comma or a separator of thousands: write decimals "
            "with a point, thousands without separator"
        )
    else:
        _log.warning("%s: column '%s' has decimal commas", path, name)
    return [cell.replace(",", ".") if cell in commas else cell for cell in cells]
