"""Streams of a user's folder: DIR/client_<name>/step_<t>.csv or .npz, and optionally DIR/classes.txt."""

from __future__ import annotations

import csv
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from feddrift.data import TABLE_FAMILY, Stream
from feddrift.errors import DataError
from feddrift.tables.columns import parse_number
from feddrift.tables.labels import (
    check_class_count,
    check_label_kinds,
    list_class_warnings,
    list_distinct_labels,
    sort_classes,
)

MAX_USUAL_FEATURE = 100.0  # features beyond it hardly train with the usual step sizes

_STEP = re.compile(r"step_([0-9]+)\.(csv|npz)")

_log = logging.getLogger("feddrift")


@dataclass(frozen=True)
class DataFile:
    """Examples of a file, with labels as text."""

    path: Path
    columns: tuple[str, ...]  # names of the features; empty for an .npz
    x: npt.NDArray[np.float32]
    labels: list[str]
    lines: Sequence[int]  # of a .csv; an .npz numbers its examples from 0

    def describe_row(self, i: int) -> str:
        """Name the file and the line of an example, for messages."""
        return f"{self.path}, {'example' if self.path.suffix == '.npz' else 'line'} {self.lines[i]}"


def load_folder(directory: str | Path, label: str = "label") -> Stream:
    """Load the stream of DIR/client_<name>/step_<t>.csv or .npz; its last time step only tests.

    Args:
        directory: DIR.
        label: The label column of CSV files.

    Raises:
        DataError: A file cannot be used, or there are fewer than two time steps.
    """
    root = Path(os.path.expanduser(directory))  # Path.expanduser raises an error for the home of an unknown user
    if not str(directory) or not os.path.isdir(root):
        raise DataError(f"'{directory}' is not a directory, expected one with files client_<name>/step_<t>.csv or .npz")
    try:
        folders = [path for path in sorted(root.glob("client_?*"), key=_natural_sort_key) if path.is_dir()]
        clients = {path: _find_step_files(path) for path in folders}
        not_clients = [path for path in root.iterdir() if path not in clients]
        strays = [path.name for path in not_clients if path.is_dir() or path.name.startswith("client_")]
    except OSError as error:
        raise DataError(f"{root} cannot be read: {error}") from None
    if not clients:
        raise DataError(f"{root} has no clients, expected folders client_<name> with files step_<t>.csv or .npz")
    times = sorted({t for steps in clients.values() for t in steps})
    if len(times) < 2:
        raise DataError(f"{root} has {len(times)} time steps, but at least 2 are needed: to train, then to test")
    files: dict[tuple[int, Path], DataFile] = {}
    first: DataFile | None = None
    for client, steps in clients.items():
        for t, path in steps.items():
            files[t, client] = read_file(path, label, first)
            first = first or files[t, client]
    strays = [name for name in strays if not name.startswith(".")]
    if strays:
        _log.warning("%s: left out %s, since clients are folders client_<name>", root, ", ".join(sorted(strays)))
    largest = max(float(np.abs(file.x).max(initial=0.0)) for file in files.values())
    if largest > MAX_USUAL_FEATURE:
        _log.warning("%s: features reach %g; scale them to about -1 to 1, or training may fail", root, largest)
    classes, index = read_classes(root / "classes.txt", files.values())
    for sentence in list_class_warnings(classes):
        _log.warning("%s: %s", root, sentence)
    check_class_count(classes, f"{root}: ")
    cells = {key: (file.x, [index[text] for text in file.labels]) for key, file in files.items()}
    stream = Stream.from_arrays(
        [[cells.get((t, client)) for client in clients] for t in times],
        name=f"folder:{root.resolve().name}",
        n_classes=len(classes),
        clients=[client.name.removeprefix("client_") for client in clients],
        times=[f"step_{t}" for t in times],
    )
    return replace(stream, classes=tuple(classes), columns=first.columns if first else (), family=TABLE_FAMILY)


def _natural_sort_key(path: Path) -> tuple[list[str | int], str]:
    parts = re.split(r"([0-9]+)", path.name)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], path.name


def _find_step_files(client: Path) -> dict[int, Path]:
    steps: dict[int, Path] = {}
    for path in sorted(client.iterdir()):
        if path.name.startswith("."):
            continue
        match = _STEP.fullmatch(path.name)
        if match is None:
            raise DataError(f"{path}: expected a name like step_<number>.csv or step_<number>.npz")
        _check_file(path)
        earlier = steps.setdefault(int(match[1]), path)
        if earlier != path:
            raise DataError(f"{earlier} and {path.name} are the same time step, keep one of them")
    return steps


def _check_file(path: Path) -> None:
    """Raise DataError for folders, broken links, and pipes, which would block."""
    if not os.path.isfile(path):
        raise DataError(f"{path} is not a file")


def read_file(path: Path, label: str, first: DataFile | None) -> DataFile:
    """Read a .csv or .npz file.

    Args:
        path: The file.
        label: The label column of a CSV file.
        first: Another file of the same stream, whose kind and features this one must have.

    Raises:
        DataError: The file cannot be used.
    """
    if first and path.suffix != first.path.suffix:
        raise DataError(f"{path}: all files must be of one kind, and {first.path} is a {first.path.suffix}")
    try:
        return _read_csv(path, label, first) if path.suffix == ".csv" else _read_npz(path, first)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _read_csv(path: Path, label: str, first: DataFile | None) -> DataFile:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)  # an open quote would take the rest of the file
        header = [name.strip() for name in next(reader, [])]
        if not header:
            raise DataError(f"{path} is empty, expected a header line with a column '{label}'")
        if label not in header:
            raise DataError(f"{path}: no label column '{label}' among {header}; choose one with --label")
        numbered = [(reader.line_num, row) for row in reader if row]
    features = tuple(name for name in header if name != label)
    columns = first.columns if first else features
    count = Counter(header)
    legal = set(columns)
    for name in (label, *columns, *features):
        if count[name] != 1:
            raise DataError(f"{path}: expected one column '{name}', got {count[name]} in the header {header}")
        if first and name not in legal and name != label:
            raise DataError(f"{path}: column '{name}' is not in {first.path}, all files need the same columns")
    if not columns or "" in header:
        raise DataError(f"{path}: expected named feature columns beside '{label}', got the header {header}")
    for line, row in numbered:
        if len(row) != len(header):
            raise DataError(f"{path}, line {line}: expected {len(header)} values as in the header, got {len(row)}")
    positions = [header.index(name) for name in columns]
    target = header.index(label)
    numbers = np.array([[parse_number(row[i]) for i in positions] for _, row in numbered], dtype=np.float64)
    with np.errstate(over="ignore"):  # numbers that float32 cannot represent become inf and are refused below
        x = numbers.astype(np.float32).reshape(len(numbered), len(columns))
    for i, j in np.argwhere(~np.isfinite(x))[:1]:
        line, row = numbered[i]
        text = row[positions[j]]
        expected = "a number" if math.isnan(parse_number(text)) else "a finite number below 1e38"
        raise DataError(f"{path}, line {line}, column '{columns[j]}': expected {expected}, got {text!r}")
    return DataFile(path, columns, x, [row[target].strip() for _, row in numbered], [line for line, _ in numbered])


def _read_npz(path: Path, first: DataFile | None) -> DataFile:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:  # np.load(path) may leave it open
            x = arrays["x"]
            y = arrays["y"]
    except OSError:
        raise
    except Exception as error:  # NumPy, zipfile and zlib raise many kinds of errors for broken files
        raise DataError(f"{path}: expected an .npz of two plain arrays x and y, without pickled objects") from error
    if x.ndim < 2 or y.shape != x.shape[:1] or x.dtype.kind not in "biuf" or y.dtype.kind not in "biufU":
        raise DataError(
            f"{path}: expected numbers x[n, features] and labels y[n], got {x.dtype} {x.shape} and {y.dtype} {y.shape}"
        )
    if not math.prod(x.shape[1:]):
        raise DataError(f"{path}: expected at least one feature, got x of shape {x.shape}")
    if first and x.shape[1:] != first.x.shape[1:]:
        raise DataError(f"{path}: features of shape {x.shape[1:]}, but {first.path} has {first.x.shape[1:]}")
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    for position in np.argwhere(~np.isfinite(x))[:1]:
        raise DataError(f"{path}, example {position[0]}: feature {position[1:].tolist()} is missing or infinite")
    return DataFile(path, (), x, [text.strip() for text in y.astype(str).tolist()], range(len(y)))


def read_classes(path: Path, files: Iterable[DataFile]) -> tuple[list[int | str], dict[str, int]]:
    """Return the classes in their order, and the index of the class of each label text.

    Args:
        path: The file classes.txt, which defines the order if it exists.
        files: The files whose labels are read.

    Raises:
        DataError: A label is invalid or not in classes.txt, or some labels are numbers and others words.
    """
    labels = [label for file in files for label in list_distinct_labels(file.labels, file.describe_row)]
    if os.path.lexists(path):
        _check_file(path)
        classes = read_class_list(path)
    else:
        classes = sort_classes(labels)
    index = {value: i for i, value in enumerate(classes)}
    for label in labels:
        if label.value not in index:
            legal = ", ".join(map(str, classes[:10])) + (", ..." if len(classes) > 10 else "")
            raise DataError(f"{label.place}: unknown label {label.text!r}, {path.name} has {legal}")
    return classes, {label.text: index[label.value] for label in labels}


def read_class_list(path: Path) -> list[int | str]:
    """Read the classes of a file classes.txt, one on each line."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").rstrip().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    labels = list_distinct_labels(lines, lambda i: f"{path}, line {i + 1}")
    check_label_kinds(labels)
    classes = [label.value for label in labels]
    if len(set(classes)) < len(lines):
        raise DataError(f"{path}: {len(lines)} lines name only {len(set(classes))} distinct classes")
    return classes
