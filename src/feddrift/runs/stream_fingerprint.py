"""Fingerprints of streams, and the check that a stream begins with the data of another one and continues them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from feddrift.data import Stream
from feddrift.errors import DataError, describe_validation_error
from feddrift.tables.problems import join_first

RERUN_HINT = "run it again on all data"


@dataclass(frozen=True)
class StreamFingerprint:
    """Plain values that describe the stream of a run; a longer stream is compared with them."""

    clients: list[str]
    classes: list[int | str]
    columns: list[str]
    shape: list[int]
    steps: list[str]  # [T + 1], digests of the data of each time step

    @classmethod
    def from_stream(cls, stream: Stream) -> StreamFingerprint:
        """Compute the fingerprint of a stream."""
        classes = list(stream.classes or range(stream.n_classes))
        steps = [_hash_time_step(stream, t) for t in range(stream.n_steps + 1)]
        return cls(list(stream.clients), classes, list(stream.columns), list(stream.features), steps)

    @classmethod
    def from_checkpoint(cls, about: Mapping[str, Any], path: Path) -> StreamFingerprint | None:
        """Read the fingerprint in a checkpoint; None if there is none, as in older checkpoints.

        Args:
            about: The description in the checkpoint.
            path: The checkpoint, for messages.

        Raises:
            DataError: If it is not a fingerprint.
        """
        if about.get("data") is None:
            return None
        try:
            fingerprint: StreamFingerprint = TypeAdapter(cls).validate_python(about["data"])
        except ValidationError as error:
            raise DataError(f"{path} is not a checkpoint of a run: {describe_validation_error(error)}") from None
        return fingerprint


def hash_stream(stream: Stream, rows: int | None = None) -> str:
    """Return a digest of the first rows of a stream, for the name of a record.

    Args:
        stream: The stream.
        rows: The number of rows; None: all.
    """
    digest = hashlib.sha256()
    for part in (stream.x, stream.y, stream.group):
        if part is not None:
            digest.update(np.ascontiguousarray(part[:rows]).data)
    return digest.hexdigest()[:8]


def _hash_time_step(stream: Stream, t: int) -> str:
    """Return a digest of the data at time t and of their clients' names; clients without data do not change it."""
    names = [(name, int(n)) for name, n in zip(stream.clients, stream.counts[t], strict=True) if n]
    start = int(stream.starts[t, 0])
    rows = slice(start, start + int(stream.counts[t].sum()))
    digest = hashlib.sha256(repr(names).encode())
    for part in (stream.x, stream.y, stream.group):
        if part is not None:
            digest.update(np.ascontiguousarray(part[rows]).data)
    return digest.hexdigest()[:16]


def reorder_clients(stream: Stream, clients: Sequence[str]) -> Stream:
    """Return the stream with these clients first, in this order, then its other clients.

    Args:
        stream: The stream.
        clients: The names of the clients.

    Raises:
        DataError: If the stream does not have one of them.
    """
    if missing := [name for name in clients if name not in stream.clients]:
        raise DataError(
            f"{stream.name} has no data of client {join_first(missing)}, which the run has: {_build_hint(stream)}"
        )
    names = [*clients, *(name for name in stream.clients if name not in set(clients))]
    if tuple(names) == stream.clients:
        return stream
    position = {name: c for c, name in enumerate(stream.clients)}
    order = np.array([position[name] for name in names])
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


def check_continuation(stream: Stream, name: str, before: StreamFingerprint | None, header: Mapping[str, Any]) -> None:
    """Check that a stream continues that of a run.

    Args:
        stream: The stream.
        name: Its name, for messages.
        before: The fingerprint of the run's stream; None for older runs, of which only the header is known.
        header: The header of the run.

    Raises:
        DataError: If other data come first, or no data are new.
    """
    if before is not None:
        _check_shape(stream, name, before)
    old_steps = int(header["n_steps"])
    new_steps = stream.n_steps
    for t, (new, old) in enumerate(zip(stream.times, header["times"], strict=False)):
        if new != old:
            raise DataError(f"{name}: time {t + 1} is {new}, in the run it is {old}: {_build_hint(stream)}")
    if new_steps < old_steps:
        sizes = f"it has {new_steps} time steps + 1 to test, the run {old_steps} + 1"
        raise DataError(f"{name} ends before the run does: {sizes}")
    for t, digest in enumerate(before.steps if before is not None else ()):
        if digest != _hash_time_step(stream, t):
            time_name = f" ({stream.times[t]})" if stream.times else ""
            hint = "; an update needs the complete last time step" if t == old_steps else ""
            raise DataError(
                f"{name}: the data of time {t + 1}{time_name} differ from those of the run{hint}: {RERUN_HINT}"
            )
    rows = int(stream.counts[: old_steps + 1].sum())
    if before is None and hash_stream(stream, rows) != header["overrides"].get("data"):
        raise DataError(f"{name}: the data up to time {old_steps + 1} differ from those of the run: {RERUN_HINT}")
    if new_steps == old_steps:
        raise DataError(f"nothing to update: {name} has the same {new_steps} time steps + 1 to test")


def _build_hint(stream: Stream) -> str:
    return "expected all of its data, and more" + ("; append adds rows to a table" if stream.recipe else "")


def _check_shape(stream: Stream, name: str, before: StreamFingerprint) -> None:
    """Raise DataError if a stream has other features or classes than before."""
    for kind, new, old in (
        ("features", list(stream.columns), before.columns),
        ("classes", list(stream.classes or range(stream.n_classes)), before.classes),
        ("features of shape", list(stream.features), before.shape),
    ):
        if new != old:
            added = [value for value in new if value not in old]
            got = f"also has the {kind} {join_first(added)}" if added else f"has the {kind} {join_first(new, 10)}"
            raise DataError(f"{name} {got}, the run was trained with {join_first(old, 10)}: {RERUN_HINT}")
