"""Whether a stream goes on where another ended: the same data up to there, and more behind them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from feddrift.data import Stream
from feddrift.errors import DataError, problem
from feddrift.tables.problems import listed

AGAIN = "run it again on all data"


@dataclass(frozen=True)
class Remembered:
    """What a run has to remember of its stream to know it again when it has grown, as plain values."""

    clients: list[str]
    classes: list[int | str]
    columns: list[str]
    shape: list[int]
    steps: list[str]  # [T + 1], a digest of what each time step brought

    @classmethod
    def of(cls, stream: Stream) -> Remembered:
        """What is to be remembered of this stream."""
        classes = list(stream.classes or range(stream.n_classes))
        steps = [_digest(stream, t) for t in range(stream.n_steps + 1)]
        return cls(list(stream.clients), classes, list(stream.columns), list(stream.features), steps)

    @classmethod
    def read(cls, about: Mapping[str, Any], where: object) -> Remembered | None:
        """What a checkpoint says of it; older ones say nothing."""
        if about.get("data") is None:
            return None
        try:
            remembered: Remembered = TypeAdapter(cls).validate_python(about["data"])
        except ValidationError as error:
            raise DataError(f"{where} is no checkpoint of a run: {problem(error)}") from None
        return remembered


def digest_of(stream: Stream, rows: int | None = None) -> str:
    """What the first rows of a stream are, or all, for the name of a record."""
    digest = hashlib.sha256()
    for part in (stream.x, stream.y, stream.group):
        if part is not None:
            digest.update(np.ascontiguousarray(part[:rows]).data)
    return digest.hexdigest()[:8]


def _digest(stream: Stream, t: int) -> str:
    """Who received what at time t; a client without data leaves no trace."""
    names = [(name, int(n)) for name, n in zip(stream.clients, stream.counts[t], strict=True) if n]
    start = int(stream.starts[t, 0])
    rows = slice(start, start + int(stream.counts[t].sum()))
    digest = hashlib.sha256(repr(names).encode())
    for part in (stream.x, stream.y, stream.group):
        if part is not None:
            digest.update(np.ascontiguousarray(part[rows]).data)
    return digest.hexdigest()[:16]


def in_order(stream: Stream, clients: Sequence[str]) -> Stream:
    """The stream with these clients first, in this order, and behind them those who are new in it."""
    if gone := [name for name in clients if name not in stream.clients]:
        cure = "expected all of its data, and more" + "; append adds rows to a table" * bool(stream.recipe)
        raise DataError(f"{stream.name} has nothing of client {listed(gone)}, which the run has: {cure}")
    names = [*clients, *(name for name in stream.clients if name not in set(clients))]
    if tuple(names) == stream.clients:
        return stream
    place = {name: c for c, name in enumerate(stream.clients)}
    order = np.array([place[name] for name in names])
    cells = [stream.rows(t, int(c)) for t in range(stream.n_steps + 1) for c in order]
    rows = np.concatenate([np.arange(cell.start, cell.stop) for cell in cells])
    return replace(
        stream,
        x=stream.x[rows],
        y=stream.y[rows],
        counts=stream.counts[:, order],
        concepts=None if stream.concepts is None else stream.concepts[:, order],
        clients=tuple(names),
        group=None if stream.group is None else stream.group[rows],
    )


def check(stream: Stream, name: str, before: Remembered | None, header: Mapping[str, Any]) -> None:
    """Refuse a stream that does not go on where a run with this header ended; an older run remembers nothing else."""
    if before is not None:
        _check_kind(stream, name, before)
    last, n = int(header["n_steps"]), stream.n_steps
    for t, (new, old) in enumerate(zip(stream.times, header["times"], strict=False)):
        if new != old:
            cure = "expected all of its data, and more" + "; append adds rows to a table" * bool(stream.recipe)
            raise DataError(f"{name}: time {t + 1} is {new}, in the run it is {old}: {cure}")
    if n < last:
        raise DataError(f"{name} ends before the run does: it has {n} time steps + 1 to test, the run {last} + 1")
    for t, digest in enumerate(before.steps if before is not None else ()):
        if digest != _digest(stream, t):
            called = f" ({stream.times[t]})" if stream.times else ""
            cure = "; a run is updated when its last time step is whole" if t == last else ""
            raise DataError(f"{name}: the data of time {t + 1}{called} are not those that the run had{cure}: {AGAIN}")
    rows = int(stream.counts[: last + 1].sum())
    if before is None and digest_of(stream, rows) != header["overrides"].get("data"):
        raise DataError(f"{name}: the data up to time {last + 1} are not those that the run had: {AGAIN}")
    if n == last:
        raise DataError(f"there is nothing new: {name} has the same {n} time steps + 1 to test")


def _check_kind(stream: Stream, name: str, before: Remembered) -> None:
    for what, now, then in (
        ("features", list(stream.columns), before.columns),
        ("classes", list(stream.classes or range(stream.n_classes)), before.classes),
        ("features of shape", list(stream.features), before.shape),
    ):
        if now != then:
            new = [value for value in now if value not in then]
            got = f"also has the {what} {listed(new)}" if new else f"has the {what} {listed(now, 10)}"
            raise DataError(f"{name} {got}, the run learned with {listed(then, 10)}: {AGAIN}")
