"""The models of past time steps, to go back to: the server keeps the checkpoint that each one ended with.

They lie in ``state/archive`` as ``<time>.ckpt``, beside each that is to stay for ever an empty ``<time>.pin``. Time
counts from 1 here, as people see it.
"""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

from feddrift._internal import checkpoint
from feddrift.deploy.settings import MAX_ARCHIVED
from feddrift.errors import DataError

RESERVE = 4  # checkpoints for which the disk must have room, else it is kept for those that the server goes on from


class Archive:
    """The archive of a server's folder `state`."""

    def __init__(self, state: Path, most: int = MAX_ARCHIVED) -> None:
        self.path, self.most = state / "archive", most

    def times(self) -> list[int]:
        """The time steps whose models are here."""
        return sorted(int(path.stem) for path in self.path.glob("*.ckpt") if path.stem.isdecimal())

    def keep(self, time: int, saved: Path) -> None:
        """Keep the checkpoint of this time step, and no longer the oldest ones that are too many and not pinned."""
        try:
            if self.most:
                self._link(time, saved)
            loose = [other for other in self.times() if not self.pinned(other)]
            for old in loose[: max(0, len(loose) - self.most)]:
                self._file(old).unlink(missing_ok=True)
        except OSError as error:
            raise DataError(f"time {time} is not kept in {self.path}: {error.strerror or error}") from None

    def _link(self, time: int, saved: Path) -> None:
        self.path.mkdir(exist_ok=True)
        file, part = self._file(time), self.path / f"{time:06d}.part"
        if file.exists() and file.samefile(saved):
            return
        free = shutil.disk_usage(self.path).free
        if free < RESERVE * saved.stat().st_size:
            raise DataError(f"time {time} is not kept in {self.path}: the disk has only {free / 1e6:.1f} MB left")
        part.unlink(missing_ok=True)
        try:
            os.link(saved, part)  # a checkpoint never changes, it is only replaced
        except OSError:  # a file system without links
            shutil.copyfile(saved, part)
        os.replace(part, file)

    def pinned(self, time: int) -> bool:
        """Whether this time step stays for ever."""
        return self._pin(time).exists()

    def pin(self, time: int) -> None:
        """Keep this time step for ever."""
        pin = self._pin(self._known(time))
        pin.touch()
        if time not in self.times():  # the server was quicker
            pin.unlink(missing_ok=True)
            self._known(time)

    def read(self, time: int) -> checkpoint.Checkpoint:
        """The checkpoint that this time step ended with."""
        return checkpoint.read(self._file(self._known(time)))

    def put_aside(self) -> None:
        """Give the archive of a federation that starts over another name."""
        if self.path.exists():
            names = (self.path.with_name(f"{self.path.name}.old{k}") for k in itertools.count(1))
            self.path.rename(next(name for name in names if not name.exists()))

    def _known(self, time: int) -> int:
        times = self.times()
        if time not in times:
            there = f"there are {_ranges(times)}" if times else "there are none yet"
            raise DataError(f"{self.path} has no models of time {time}: {there}")
        return time

    def _file(self, time: int) -> Path:
        return self.path / f"{time:06d}.ckpt"

    def _pin(self, time: int) -> Path:
        return self.path / f"{time:06d}.pin"


def _ranges(times: list[int]) -> str:
    """Times in few words.

    >>> _ranges([1, 4, 5, 6])
    'those of time 1, 4 to 6'
    """
    groups = [list(group) for _, group in itertools.groupby(enumerate(times), lambda pair: pair[1] - pair[0])]
    spans = [str(g[0][1]) if len(g) == 1 else f"{g[0][1]} to {g[-1][1]}" for g in groups]
    return f"those of time {', '.join(spans)}"
