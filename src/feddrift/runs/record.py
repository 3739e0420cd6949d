"""One record per run, as JSON lines (their fields are in `schema`): read for reports, also while it is written."""

from __future__ import annotations

import hashlib
import itertools
import json
import lzma
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from feddrift.errors import DataError
from feddrift.runs import schema
from feddrift.runs.line_sequence import Order
from feddrift.scores import ACCURACY, SCORES, Score, score
from feddrift.types import Bools, Floats, Ints

LOOKS = 5  # at a file that somebody may be renaming or asking about just now
PACKED = ".jsonl.xz"
HEADER = re.compile(rb'\{"kind": ?"header"')  # how a packed record begins
OLD_HISTORY = "history.jsonl"  # what deployments of version 0.1 wrote
AUDIT = "audit.jsonl"  # what the server of a deployment keeps beside its record
Weigh = Literal["clients", "rows"]
KINDS = {"Floats": (np.float64, np.nan), "Ints": (np.int64, -1), "Bools": (np.bool_, False)}  # of Rows; where unknown


@dataclass(frozen=True, eq=False, repr=False)
class Rows:
    """The whole time steps of a record: the fields of its rows as arrays [t, c]."""

    accuracy: Floats  # NaN without test data
    tested: Ints
    concept: Ints  # -1 where unknown
    next_concept: Ints  # -1 where unknown
    model: Ints
    n_models: Ints
    drift: Bools
    models_sent: Floats
    sent_scoring: Floats  # NaN where unknown
    received: Ints  # -1 where unknown
    loss: Floats  # NaN where unknown, as all below
    log_loss: Floats
    brier: Floats
    auc: Floats
    balanced_accuracy: Floats
    f1: Floats
    majority: Floats
    routed: Floats  # NaN where inputs had no choice

    @property
    def steps(self) -> int:
        """The number of time steps done."""
        return len(self.accuracy)

    def __repr__(self) -> str:
        return f"Rows({self.steps} time steps, {self.model.shape[1]} clients)"


@dataclass(frozen=True, eq=False, repr=False)
class Record:
    """A run as read from its file; header, events and exchanges are the lines themselves.

    Of a federation of real machines (no `n_steps` in its header) the header names all clients and times so far. Of a
    client that joined later the rows before say that it received nothing.

    >>> import tempfile
    >>> from feddrift import record
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = record("sine-2", "FedDrift", out=folder, rounds=1)
    >>> run, run.rows.accuracy.shape, run.header["settings"]["delta"]
    (Record(sine-2, FedDrift, seed 0: complete, 10 of 10 time steps, 10 clients), (10, 10), 0.1)
    """

    header: dict[str, Any]
    rows: Rows
    events: tuple[dict[str, Any], ...]
    status: Literal["complete", "interrupted", "failed", "unfinished"]  # unfinished: still running, or killed
    tested: int  # time steps that are tested: all, or all but the last
    exchanges: tuple[dict[str, Any], ...] = ()  # the questions to clients of real machines
    seconds: float | None = None  # that it took, once it has ended
    score: Score = ACCURACY  # what stands in rows.accuracy: see `by_score`
    accuracy: Floats | None = None  # where another score has its place: the accuracy itself
    weigh: Weigh = "clients"  # what means over cells count alike: see `weights`
    shifts: Mapping[tuple[int, int], dict[str, Any]] = field(default_factory=dict)  # by (t, c): what moved at an alarm

    @property
    def weights(self) -> Floats:
        """[t, c], how much a test counts in means: all alike, or by its rows."""
        tested = self.rows.tested
        return tested.astype(np.float64) if self.weigh == "rows" else np.ones(tested.shape)

    @property
    def runs_on(self) -> bool:
        """Whether it has no end that is known beforehand."""
        return self.header["n_steps"] is None

    def __repr__(self) -> str:
        of = "" if self.runs_on else f" of {self.header['n_steps']}"
        name = f"{self.header['stream']}, {self.header['algorithm']}, seed {self.header['seed']}"
        size = f"{self.rows.steps}{of} time steps, {self.header['n_clients']} clients"
        return f"Record({name}: {self.status}, {size})"


def by_score(records: Iterable[Record], name: str) -> list[Record]:
    """The records with another score in the place of accuracy, so that everything that is made of accuracies is made
    of it."""
    chosen = score(name)
    given = [record if record.accuracy is None else _with_accuracy(record) for record in records]
    if chosen == ACCURACY:
        return given
    if given and all(np.isnan(getattr(record.rows, name)).all() for record in given):
        why = "an older version made them, no step is tested yet, or (AUC) no test has two classes"
        raise DataError(f"these records have no {chosen.title}: {why}")
    return [
        replace(
            record,
            score=chosen,
            rows=replace(record.rows, accuracy=getattr(record.rows, name)),
            accuracy=record.rows.accuracy,
        )
        for record in given
    ]


def _with_accuracy(record: Record) -> Record:
    """A record as it was read, after `by_score`."""
    assert record.accuracy is not None
    rows = replace(record.rows, accuracy=record.accuracy)
    return replace(record, score=ACCURACY, rows=rows, accuracy=None)


Wanted = Callable[[Mapping[str, Any]], bool]  # a header's


def configuration(header: Mapping[str, Any]) -> str:
    """What runs that differ in their seed only have in common, as text."""
    parts = [header[key] for key in ("stream", "algorithm", "settings", "overrides")]
    if header.get("n_steps", 0) is None:  # the name of a federation alone does not tell whose it is
        parts += [header["clients"], header["local"]]
    return json.dumps(schema.plain(parts), sort_keys=True)


def file_name(header: Mapping[str, Any]) -> str:
    """A readable name, one per configuration and seed.

    >>> file_name({"stream": "folder:my data", "algorithm": "FedDrift", "settings": {}, "overrides": {}, "seed": 0})
    'folder-my-data_FedDrift_a8577acc_seed0'
    """
    names = (re.sub(r"[^A-Za-z0-9.-]+", "-", header[key])[:60].strip(".-") for key in ("stream", "algorithm"))
    digest = hashlib.sha256(configuration(header).encode()).hexdigest()[:8]
    return f"{'_'.join(names)}_{digest}_seed{header['seed']}"


def part_of(path: Path) -> Path:
    """Where a record is written before it has its final name."""
    return path.with_name(f"{path.name}.part")


def read(path: str | Path) -> Record:
    """Read a record; a last line that was cut off is left out, and so is a last time step that is not whole."""
    try:
        return _read(Path(path))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


def latest(path: Path) -> Record | None:
    """The record of this name: the closed one if it is complete, else what is written just now; None: there is none."""
    for _ in range(LOOKS):  # between two looks it may have got its other name
        candidates = []
        for file in (path, part_of(path)):
            try:
                if file == path or file.stat().st_size:  # nothing yet: a run has only just taken it in hand
                    candidates.append(_read(file))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise DataError(f"cannot read {file}: {error.strerror or error}") from None
        if candidates:
            return candidates[0] if candidates[0].status == "complete" else candidates[-1]
    return None


def _read(path: Path) -> Record:
    return _parsed(path.read_bytes().split(b"\n"), path)


def find_packed(folder: str | Path) -> list[Path]:
    """Return the packed files (``*.jsonl.xz``) below a folder in order of their paths, or the given packed file."""
    if os.path.isfile(folder):  # unlike Path's, it takes any string
        return [Path(folder)] if str(folder).endswith(PACKED) else []
    return sorted(Path(folder).rglob(f"*{PACKED}")) if os.path.isdir(folder) else []


def split_packed(path: Path) -> list[list[bytes]]:
    """Decompress a packed file and return the lines of each record, without line ends, in the order of the file.

    Args:
        path: A file that contains one record after the other, each of which begins with its header.

    Raises:
        DataError: If the file cannot be read or decompressed, or does not begin with a header.
    """
    try:
        lines = lzma.decompress(path.read_bytes()).split(b"\n")
    except (lzma.LZMAError, OSError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    if not lines[-1]:  # nothing after the last newline
        lines.pop()
    starts = [k for k, line in enumerate(lines) if HEADER.match(line)]
    if not starts or starts[0] != 0:
        raise DataError(f"{path}: not a file of records, it has no header in its first line")
    return [lines[start:end] for start, end in itertools.pairwise([*starts, len(lines)])]


def read_packed(path: Path, wanted: Wanted = lambda header: True) -> Iterator[Record]:
    """Read those records of a packed file whose header is `wanted`; the file is decompressed once."""
    first_line = 1
    for lines in split_packed(path):
        if wanted(schema.parse(lines[0], f"{path}, line {first_line}")):
            yield _parsed(lines.copy(), path, first_line)
        first_line += len(lines)


def _parsed(lines: list[bytes], path: Path, first_line: int = 1) -> Record:
    if not schema.is_json(lines[-1]):  # nothing after the last newline, or a line cut off
        lines.pop()
    if not lines:
        raise DataError(f"{path}: not a record, it has no header")
    header = schema.parse(lines[0], f"{path}, line {first_line}")
    if header["kind"] != "header":
        raise DataError(f"{path}, line {first_line}: a record starts with its header, got {header['kind']!r}")
    order, by_kind = Order.after(header), dict[str, list[dict[str, Any]]]()
    columns: dict[str, list[Any]] = {name: [] for name in schema.COLUMNS}
    n_clients: list[int] = []  # of each time step
    for number, text in enumerate(lines[1:], start=first_line + 1):
        where = f"{path}, line {number}"
        line = schema.parse(text, where)
        before = order.steps
        order.take(line, where)
        if line["kind"] == "row":
            for name, values in columns.items():
                values.append(line.get(name))
        elif line["kind"] == "columns":
            for name, values in columns.items():
                values += line.get(name) or [None] * order.n_clients
        else:
            by_kind.setdefault(line["kind"], []).append(line)
        n_clients += [order.n_clients] * (order.steps - before)
    starts = [0, *itertools.accumulate(n_clients)]
    for test in by_kind.get("test", []):
        for c, tested in enumerate(test["tested"]):
            k = starts[test["t"]] + c
            if tested or not columns["tested"][k]:  # a client that is away now may have been tested before
                for name in ("accuracy", "tested", *SCORES, "routed"):
                    columns[name][k] = test[name][c] if test.get(name) is not None else None
    if header["schema"] == 2:
        names = [line["name"] for line in by_kind.get("client", [])]
        named = {line["t"]: line["name"] for line in by_kind.get("time", [])}
        times = [named.get(t, "") for t in range(order.begun)]
        header |= {"n_clients": order.n_clients, "clients": header["clients"] + names, "times": times}
    return Record(
        header,
        _rows(columns, n_clients, order.n_clients),
        tuple(event for event in by_kind.get("event", []) if event["t"] < order.steps),
        by_kind["end"][0]["status"] if order.ended else "unfinished",
        order.tested if header["schema"] == 2 else order.steps,
        tuple(by_kind.get("exchange", [])),
        by_kind["end"][0]["seconds"] if order.ended else None,
        shifts=_shifts(columns["shifts"], starts),
    )


def read_all(folder: str | Path, wanted: Wanted = lambda header: True) -> list[Record]:
    """All records below a folder whose header is `wanted`, by configuration and seed, or the one of a file.

    An unfinished part is left out where a complete record of the same name is there. A file ``*.jsonl.xz`` may hold
    many records, one after the other, as `experiments/publish.py` packs them.
    """
    packed = find_packed(folder)
    records = [record for path in packed for record in read_packed(path, wanted)]
    if os.path.isfile(folder):
        records += [] if packed else [read(folder)]
    else:
        single = paths(folder, may_be_none=bool(packed))
        records += [record for path in single if (record := latest(path)) is not None]
    return sorted((r for r in records if wanted(r.header)), key=lambda r: (configuration(r.header), r.header["seed"]))


def paths(folder: str | Path, may_be_none: bool = False) -> list[Path]:
    """Return the final paths of the plain records below a folder, or of one file, for `latest`.

    Args:
        folder: A folder of records, or the file of one record. Packed files are not listed: see `find_packed`.
        may_be_none: Return an empty list if the folder contains no plain records.

    Raises:
        DataError: If there is neither a folder nor a record of this name, or if the folder contains no records.
    """
    if not os.path.isdir(folder):
        if may_be_none and find_packed(folder):
            return []
        if os.path.isfile(folder) or os.path.isfile(f"{folder}.part"):
            return [Path(str(folder).removesuffix(".part"))]
        raise DataError(f"{folder} is neither a folder of records nor a record")
    found = {path for path in Path(folder).rglob("*.jsonl") if path.name not in (OLD_HISTORY, AUDIT)}
    found |= {path.with_suffix("") for path in Path(folder).rglob("*.jsonl.part")}
    if not found and not may_be_none:
        raise DataError(f"no records (*.jsonl) below {folder}")
    return sorted(found)


def _rows(columns: Mapping[str, Sequence[Any]], n_clients: Sequence[int], most: int) -> Rows:
    """The columns, one time step after the other with so many clients each, as arrays."""
    arrays: dict[str, Any] = {}
    for column in fields(Rows):
        dtype, missing = KINDS[str(column.type)]
        whole = columns[column.name][: sum(n_clients)]
        array: np.ndarray[Any, Any] = np.array([missing if value is None else value for value in whole], dtype=dtype)
        if all(n == most for n in n_clients):
            arrays[column.name] = array.reshape(-1, most)
            continue
        arrays[column.name] = np.zeros((len(n_clients), most), dtype=dtype)
        for t, row in enumerate(np.split(array, np.cumsum(n_clients)[:-1])):
            arrays[column.name][t, : len(row)] = row
            arrays[column.name][t, len(row) :] = _before_joining(column.name, row, missing)
    arrays["tested"] = np.maximum(arrays["tested"], 0)  # where it is not tested yet
    return Rows(**arrays)


def _shifts(column: Sequence[dict[str, Any] | None], starts: Sequence[int]) -> dict[tuple[int, int], dict[str, Any]]:
    """By (t, c) what moved, of the whole time steps, whose rows begin at these."""
    shifts = {}
    for k, moved in enumerate(column[: starts[-1]]):
        if moved is not None:
            t = bisect_right(starts, k) - 1
            shifts[t, k - starts[t]] = moved
    return shifts


def _before_joining(name: str, row: np.ndarray[Any, Any], missing: Any) -> Any:
    """What a client has before it joins: nothing, and the model that most others use."""
    if name == "model":
        ids, counts = np.unique(row, return_counts=True)
        return ids[counts.argmax()]
    if name == "n_models":
        return row[0]
    return 0 if name in ("tested", "received", "models_sent", "sent_scoring") else missing


def is_complete(path: Path) -> bool:
    """Whether there is a record of a whole run."""
    try:
        return read(path).status == "complete"
    except DataError:
        return False
