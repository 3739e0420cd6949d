"""Your own data: DIR/client_<name>/step_<t>.csv or .npz, and perhaps DIR/classes.txt."""

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

from feddrift.data import TABLE, Stream
from feddrift.errors import DataError
from feddrift.tables.columns import read_number
from feddrift.tables.labels import check_kind, check_several, distinct, in_order, warn_of_odd_classes

LARGE = 100.0  # features beyond it hardly train with the usual step sizes

_STEP = re.compile(r"step_([0-9]+)\.(csv|npz)")

_log = logging.getLogger("feddrift")


@dataclass(frozen=True)
class DataFile:
    """A file of examples as it was read: labels are still text."""

    path: Path
    columns: tuple[str, ...]  # names of the features; an .npz has none
    x: npt.NDArray[np.float32]
    labels: list[str]
    lines: Sequence[int]

    def place(self, i: int) -> str:
        """Where an example stands, for messages."""
        return f"{self.path}, {'example' if self.path.suffix == '.npz' else 'line'} {self.lines[i]}"


def load(directory: str | Path, label: str = "label") -> Stream:
    """The stream of DIR/client_<name>/step_<t>.csv or .npz; its last time step only tests."""
    root = Path(os.path.expanduser(directory))  # unlike Path's, it leaves a home that nobody has as it is
    if not str(directory) or not os.path.isdir(root):
        raise DataError(f"'{directory}' is not a directory, expected one with files client_<name>/step_<t>.csv or .npz")
    try:
        clients = {path: _steps(path) for path in sorted(root.glob("client_?*"), key=_natural) if path.is_dir()}
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
    if largest > LARGE:
        _log.warning("%s: features reach %g; scale them to about -1 to 1, or training may fail", root, largest)
    classes, index = classes_of(root / "classes.txt", files.values())
    warn_of_odd_classes(root, classes)
    check_several(classes, f"{root}: ")
    cells = {key: (file.x, [index[text] for text in file.labels]) for key, file in files.items()}
    stream = Stream.from_arrays(
        [[cells.get((t, client)) for client in clients] for t in times],
        name=f"folder:{root.resolve().name}",
        n_classes=len(classes),
        clients=[client.name.removeprefix("client_") for client in clients],
        times=[f"step_{t}" for t in times],
    )
    return replace(stream, classes=tuple(classes), columns=first.columns if first else (), family=TABLE)


def _natural(path: Path) -> tuple[list[str | int], str]:
    parts = re.split(r"([0-9]+)", path.name)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], path.name


def _steps(client: Path) -> dict[int, Path]:
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
    """Refuse folders, links that lead nowhere, and pipes, which would be waited for."""
    if not os.path.isfile(path):
        raise DataError(f"{path} is not a file")


def read_file(path: Path, label: str, first: DataFile | None) -> DataFile:
    """A .csv or .npz file; `first`, if given, is one that it must be like."""
    if first and path.suffix != first.path.suffix:
        raise DataError(f"{path}: all files must be of one kind, and {first.path} is a {first.path.suffix}")
    try:
        return _read_csv(path, label, first) if path.suffix == ".csv" else _read_npz(path, first)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _read_csv(path: Path, label: str, first: DataFile | None) -> DataFile:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)  # a quote that nobody closes would swallow the rest
        header = [name.strip() for name in next(reader, [])]
        if not header:
            raise DataError(f"{path} is empty, expected a header line with a column '{label}'")
        if label not in header:
            raise DataError(f"{path}: no label column '{label}' among {header}; --label names another")
        numbered = [(reader.line_num, row) for row in reader if row]
    features = tuple(name for name in header if name != label)
    columns = first.columns if first else features
    count, legal = Counter(header), set(columns)
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
    where, target = [header.index(name) for name in columns], header.index(label)
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes inf and is refused below
        x = np.array([[read_number(row[i]) for i in where] for _, row in numbered], dtype=np.float64).astype(np.float32)
    x = x.reshape(len(numbered), len(columns))
    for i, j in np.argwhere(~np.isfinite(x))[:1]:
        line, row = numbered[i]
        text = row[where[j]]
        expected = "a number" if math.isnan(read_number(text)) else "a finite number below 1e38"
        raise DataError(f"{path}, line {line}, column '{columns[j]}': expected {expected}, got {text!r}")
    return DataFile(path, columns, x, [row[target].strip() for _, row in numbered], [line for line, _ in numbered])


def _read_npz(path: Path, first: DataFile | None) -> DataFile:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:  # np.load alone leaves it open
            x, y = arrays["x"], arrays["y"]
    except OSError:
        raise
    except Exception as error:  # whatever NumPy, zipfile and zlib say of a broken file
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
    for bad in np.argwhere(~np.isfinite(x))[:1]:
        raise DataError(f"{path}, example {bad[0]}: feature {bad[1:].tolist()} is missing or infinite")
    return DataFile(path, (), x, [text.strip() for text in y.astype(str).tolist()], range(len(y)))


def classes_of(path: Path, files: Iterable[DataFile]) -> tuple[list[int | str], dict[str, int]]:
    """The classes in their order, and the position of each label as written."""
    labels = [label for file in files for label in distinct(file.labels, file.place)]
    if os.path.lexists(path):
        _check_file(path)
        order = listed(path)
    else:
        order = in_order(labels)
    index = {value: i for i, value in enumerate(order)}
    for label in labels:
        if label.value not in index:
            legal = ", ".join(map(str, order[:10])) + (", ..." if len(order) > 10 else "")
            raise DataError(f"{label.place}: unknown label {label.text!r}, legal by {path.name} are {legal}")
    return order, {label.text: index[label.value] for label in labels}


def listed(path: Path) -> list[int | str]:
    """The classes that classes.txt names, in its order."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").rstrip().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    labels = distinct(lines, lambda i: f"{path}, line {i + 1}")
    check_kind(labels)
    order = [label.value for label in labels]
    if len(set(order)) < len(lines):
        raise DataError(f"{path}: {len(lines)} lines name only {len(set(order))} distinct classes")
    return order
