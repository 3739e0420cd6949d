"""Streams of a user's tables: files with a row for each example, and columns for client, time and label.

A table is one file, several files that are joined by +, or a folder of files.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import overload

import numpy as np

from feddrift.data import TABLE_FAMILY, Stream
from feddrift.errors import DataError
from feddrift.streams import table_cache
from feddrift.streams.csv_table import read_csv
from feddrift.streams.files import check_format, read_magic_bytes
from feddrift.tables.arrange import Table, TableOptions, arrange_table
from feddrift.tables.columns import CodedTexts, SourceColumn
from feddrift.tables.problems import Problems, join_first
from feddrift.tables.times import natural_sort_key
from feddrift.types import Bools, Floats

TABLE_SUFFIXES = (".csv", ".csv.gz", ".parquet", ".arrow", ".feather")
OTHER_TABLE_SUFFIXES = (".xlsx", ".xls", ".tsv")


def has_table_suffix(path: str | Path) -> bool:
    """Return True if a name ends like that of a file with a table."""
    return str(path).lower().endswith(TABLE_SUFFIXES)


def is_table(name: str) -> bool:
    """Return True if a stream's name is that of a file with a table."""
    return name.startswith("table:") or (has_table_suffix(name) and not name.startswith("folder:"))


def load_table(name: str, options: TableOptions) -> Stream:
    """Load the stream of a table; its last time step only tests.

    Args:
        name: ``table:FILE``, or a FILE that ends in one of `TABLE_SUFFIXES`. A folder is a table with the rows of its
            files, one after the other; ``FILE+FILE+...`` is one with the rows of several files. All files have the same
            columns.
        options: The roles of the columns.

    Raises:
        DataError: A file cannot be used.
    """
    if name == "table:":
        raise DataError("'table:' names no file, expected one with a table such as table:weather.csv")
    parts = split_paths(name)
    paths = [path for part in parts for path in list_files(part)]
    cached = table_cache.open_entry(paths, options)
    fields = cached.load()
    if fields is None:
        tables = [read_table(path, options) for path in paths]
        table = tables[0] if len(tables) == 1 else _join_tables(tables, options)
        fields = arrange_table(table, options)
        cached.store(fields, table.problems.warnings)
    return Stream(name=f"table:{'+'.join(path.name for path in parts)}", family=TABLE_FAMILY, **vars(fields))


def split_paths(name: str) -> list[Path]:
    """Return the files and folders of a table; a + in the path of an existing file does not separate files.

    >>> [path.name for path in split_paths("table:june.csv+july.csv")]
    ['june.csv', 'july.csv']
    >>> [path.name for path in split_paths("c++/june.csv")]
    ['june.csv']
    """
    parts = name.removeprefix("table:").split("+")
    paths: list[Path] = []
    while parts:
        candidates = [Path(os.path.expanduser("+".join(parts[: n + 1]))) for n in range(len(parts))]
        existing = [n for n, path in enumerate(candidates) if os.path.isfile(path) or os.path.isdir(path)]
        tables = [n for n, path in enumerate(candidates) if has_table_suffix(path)]
        last_part = existing[-1] if existing else tables[0] if tables else len(candidates) - 1
        paths.append(candidates[last_part])
        parts = parts[last_part + 1 :]
    return paths


def list_files(path: Path) -> list[Path]:
    """Return the files of a table: a file itself, or those of a folder in natural order.

    Raises:
        DataError: The file does not exist, or the folder contains something else than tables.
    """
    if os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        raise DataError(f"'{path}' is not a file, expected a table such as weather.csv")
    try:
        inside = sorted(path.iterdir(), key=lambda file: natural_sort_key(file.name))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    files = [file for file in inside if not file.name.startswith((".", "_"))]  # such as _SUCCESS of Spark
    expected = f"expected files that end in {', '.join(TABLE_SUFFIXES)}"
    if not files:
        raise DataError(f"the folder {path} has no tables, {expected}")
    if others := [file.name for file in files if not (os.path.isfile(file) and has_table_suffix(file))]:
        hint = f": did you mean 'folder:{path}'?" if others[0].startswith("client_") else ""
        raise DataError(f"the folder {path} has {join_first(others)}, {expected}{hint}")
    return files


def read_table(path: Path, options: TableOptions) -> Table:
    """Read a file; its content decides on the format.

    Args:
        path: The file.
        options: The roles of the columns.

    Returns:
        The table, with the problems of its lines and its header. Columns that the options leave out are not parsed.

    Raises:
        DataError: The file is not a table.
    """
    kind = check_format(path, read_magic_bytes(path))
    if kind == "csv":
        return read_csv(path, options)
    from feddrift.streams.arrow_table import read_arrow  # imported here, because importing PyArrow takes 0.1 s

    return read_arrow(path, kind)


def _join_tables(tables: Sequence[Table], options: TableOptions) -> Table:
    """Join the tables of several files; rows are named by file and line."""
    first = tables[0]
    names = options.select_columns(first.columns)
    for table in tables:
        table.problems.raise_if_any()
        if set(options.select_columns(table.columns)) != set(names):
            different = sorted(set(options.select_columns(table.columns)) ^ set(names))
            raise DataError(
                f"{table.name} must have the columns of {first.name}, got {join_first(different)} in one only"
            )
    joined_name = "+".join(table.name for table in tables)
    name = joined_name if len(tables) <= 3 else f"{first.name} and {len(tables) - 1} more files"
    columns: dict[str, SourceColumn] = {}
    for column in dict.fromkeys(column for table in tables for column in table.columns):
        parts = [table.columns[column] for table in tables if column in table.columns]
        columns[column] = parts[0] if len(parts) < len(tables) else _JoinedColumn(parts)  # not in all: it is left out
    problems = Problems(name)
    problems.warnings = [sentence for table in tables for sentence in table.problems.warnings]
    return Table(name, columns, _JoinedLines(tables), first.row_word, problems)


@dataclass(frozen=True)
class _JoinedColumn:
    """A column of several files."""

    parts: Sequence[SourceColumn]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def parse_numbers(self) -> tuple[Floats, Bools]:
        numbers, gaps = zip(*(part.parse_numbers() for part in self.parts), strict=True)
        return np.concatenate(numbers), np.concatenate(gaps)

    def encode_texts(self) -> CodedTexts:
        position: dict[str, int] = {}
        codes = []
        for part in self.parts:
            texts = part.encode_texts()
            for text in texts.texts:
                position.setdefault(text, len(position))
            codes.append(texts.look_up(position))
        return CodedTexts(list(position), np.concatenate(codes))

    def format_value(self, row: int) -> str:
        for part in self.parts:
            if row < len(part):
                return part.format_value(row)
            row -= len(part)
        raise IndexError(row)


class _JoinedLines(Sequence[str]):
    """The rows of several files, which are named by file and line."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._ends = list(accumulate(len(table.lines) for table in tables))

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[str]: ...
    def __getitem__(self, row: int | slice) -> str | Sequence[str]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        k = bisect_right(self._ends, row)
        if row < 0 or k == len(self._tables):
            raise IndexError(row)
        table = self._tables[k]
        return f"{Path(table.name).name}:{table.lines[row - self._ends[k] + len(table.lines)]}"
