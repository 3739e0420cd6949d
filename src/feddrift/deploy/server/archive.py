"""Archive of past models: the server keeps the checkpoint of each time step, for a rollback.

The checkpoints are the files ``state/archive/<time>.ckpt``. An empty file ``<time>.pin`` marks a time step that is kept
permanently. Times in this module start at 1, as in the output for users.
"""

from __future__ import annotations

import itertools
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from feddrift._internal import checkpoint
from feddrift.deploy.monitor.status import read_status
from feddrift.deploy.settings import MAX_ARCHIVED_TIME_STEPS
from feddrift.errors import DataError
from feddrift.reports.summary import has_joined

MIN_FREE_CHECKPOINTS = 4  # free disk space, as a number of checkpoints, that the server itself needs


@dataclass(frozen=True)
class ArchivedStep:
    """A time step, counted from 1, whose models are in the archive."""

    time: int
    pinned: bool
    began: str = ""  # date and time; empty if the record does not contain it
    accuracy: float | None = None  # of its models on the next data, over all rows; None: not tested
    users: dict[int, list[str]] = field(default_factory=dict)  # by model id, the clients that used it most

    def to_dict(self) -> dict[str, Any]:
        """Return the time step as JSON values."""
        return asdict(self)


class Archive:
    """The archive in a server's folder `state`.

    Args:
        state: The folder.
        max_time_steps: The number of time steps to keep, besides pinned ones; 0: none are added.
    """

    def __init__(self, state: Path, max_time_steps: int = MAX_ARCHIVED_TIME_STEPS) -> None:
        self.path = state / "archive"
        self.max_time_steps = max_time_steps

    def list_times(self) -> list[int]:
        """Return the time steps in the archive, in order."""
        return sorted(int(path.stem) for path in self.path.glob("*.ckpt") if path.stem.isdecimal())

    def add_checkpoint(self, time: int, file: Path) -> None:
        """Add the checkpoint of a time step, and delete the oldest ones that are not pinned if there are too many.

        Raises:
            DataError: If the checkpoint cannot be stored, for example on a full disk.
        """
        try:
            if self.max_time_steps:
                self._link_checkpoint(time, file)
            not_pinned = [other for other in self.list_times() if not self.has_pin(other)]
            for old in not_pinned[: max(0, len(not_pinned) - self.max_time_steps)]:
                self._checkpoint_path(old).unlink(missing_ok=True)
        except OSError as error:
            raise DataError(f"cannot archive time {time} in {self.path}: {error.strerror or error}") from None

    def _link_checkpoint(self, time: int, file: Path) -> None:
        self.path.mkdir(exist_ok=True)
        target = self._checkpoint_path(time)
        if target.exists() and target.samefile(file):
            return
        free = shutil.disk_usage(self.path).free
        if free < MIN_FREE_CHECKPOINTS * file.stat().st_size:
            raise DataError(
                f"cannot archive time {time} in {self.path}: the disk has only {free / 1e6:.1f} MB left, free some"
            )
        part = target.with_suffix(".part")
        part.unlink(missing_ok=True)
        try:
            os.link(file, part)  # checkpoints are replaced, never changed: both names may share the content
        except OSError:  # the file system does not support links
            shutil.copyfile(file, part)
        os.replace(part, target)

    def has_pin(self, time: int) -> bool:
        """Return whether this time step is kept permanently."""
        return self._pin_path(time).exists()

    def pin(self, time: int) -> None:
        """Keep a time step permanently.

        Raises:
            DataError: If the archive does not contain it.
        """
        self._check_time(time)
        pin = self._pin_path(time)
        pin.touch()
        if time not in self.list_times():  # the server has deleted it meanwhile
            pin.unlink(missing_ok=True)
            self._check_time(time)

    def read_checkpoint(self, time: int) -> checkpoint.Checkpoint:
        """Read the checkpoint at the end of a time step."""
        self._check_time(time)
        return checkpoint.read(self._checkpoint_path(time))

    def rename_existing(self) -> None:
        """Rename the archive folder, since a new federation starts."""
        if self.path.exists():
            names = (self.path.with_name(f"{self.path.name}.old{k}") for k in itertools.count(1))
            self.path.rename(next(name for name in names if not name.exists()))

    def _check_time(self, time: int) -> None:
        times = self.list_times()
        if time not in times:
            available = f"it has {_format_times(times)}" if times else "it is empty"
            raise DataError(f"{self.path} has no models of time {time}: {available}")

    def _checkpoint_path(self, time: int) -> Path:
        return self.path / f"{time:06d}.ckpt"

    def _pin_path(self, time: int) -> Path:
        return self.path / f"{time:06d}.pin"


def _format_times(times: list[int]) -> str:
    """Return times as a short text.

    >>> _format_times([1, 4, 5, 6])
    'those of time 1, 4 to 6'
    """
    groups = [list(group) for _, group in itertools.groupby(enumerate(times), lambda pair: pair[1] - pair[0])]
    spans = [str(g[0][1]) if len(g) == 1 else f"{g[0][1]} to {g[-1][1]}" for g in groups]
    return f"those of time {', '.join(spans)}"


def list_archived_steps(server: Path) -> list[ArchivedStep]:
    """Return all time steps in the archive of a server, in order, with details from the record."""
    archive = Archive(server / "state")
    federation = read_status(server)
    is_member = None if federation is None else has_joined(federation.record)
    steps = []
    for time in archive.list_times():
        t = time - 1
        pinned = archive.has_pin(time)
        if federation is None or is_member is None or t >= federation.record.rows.steps:
            steps.append(ArchivedStep(time, pinned))  # the record was moved away, or does not contain the step yet
            continue
        rows = federation.record.rows
        header = federation.record.header
        users: dict[int, list[str]] = {}
        for c in np.flatnonzero(is_member[t]).tolist():
            users.setdefault(int(rows.model[t, c]), []).append(header["clients"][c])
        tested = rows.tested[t] if t < federation.record.tested else rows.tested[t] * 0
        n_right = (rows.accuracy[t] * tested)[tested > 0].sum()
        accuracy = float(n_right / tested.sum()) if tested.any() else None
        steps.append(ArchivedStep(time, pinned, header["times"][t], accuracy, dict(sorted(users.items()))))
    return steps


def read_rollback_time(server: Path) -> int | None:
    """Return the time to which an operator rolled back, if no time step has begun since, else None."""
    newest = next(checkpoint.Folder(server / "state" / "checkpoints").newest_first(), None)
    return None if newest is None or isinstance(newest, DataError) else newest.about.get("back_to")
