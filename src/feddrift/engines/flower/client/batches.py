"""Where a client's data come from: its n-th batch is a file step_<n>, or what a function of its own gives for n.

Every client counts its own batches, from 0: it may get them in another rhythm than the others. Nothing here needs
Flower.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from feddrift.data import Cell
from feddrift.errors import DataError
from feddrift.streams import folder

Load = Callable[[int], Cell | None]  # a client's n-th batch, perhaps of no rows; None: not yet
Named = Callable[[int], tuple[tuple[str, ...], tuple[int | str, ...]]]  # what its features and the classes are called

PROBED = 10  # batches that a function is asked for to see what waits: it has to make each of them

_STEP = re.compile(r"step_(0|[1-9][0-9]*)\.(?:csv|npz)")


@dataclass(frozen=True)
class StepFiles:
    """Files DIR/step_<n>.csv or .npz; DIR/classes.txt names the classes, the same at all clients."""

    directory: Path
    label: str = "label"

    def __call__(self, n: int) -> Cell | None:
        path, classes = self.path(n), self.directory / "classes.txt"
        if path is None:
            return None
        file = folder.read_file(path, self.label, None)
        if not classes.exists():
            raise DataError(f"{classes} is missing, it has one class a line, the same at all clients")
        _, index = folder.classes_of(classes, [file])
        return file.x, np.array([index[text] for text in file.labels], dtype=np.int32)

    def path(self, n: int) -> Path | None:
        """The file of the n-th batch; None: it is not there."""
        paths = (self.directory / f"step_{n}{suffix}" for suffix in (".csv", ".npz"))
        return next(filter(Path.exists, paths), None)

    def numbers(self) -> list[int]:
        """The numbers of all files that are there."""
        matches = (_STEP.fullmatch(path.name) for path in self.directory.glob("step_*"))
        return sorted({int(match[1]) for match in matches if match})

    def named(self, n: int) -> tuple[tuple[str, ...], tuple[int | str, ...]]:
        """The names that a batch does not hold: those of the columns in its file's header, and of classes.txt."""
        path, classes = self.directory / f"step_{n}.csv", self.directory / "classes.txt"
        columns = folder.read_file(path, self.label, None).columns if path.exists() else ()
        return columns, tuple(folder.listed(classes)) if classes.exists() else ()

    def looks(self, numbers: Iterable[int]) -> dict[int, str]:
        """Name, size and date of those of these files that are there: what shows that somebody wrote one again."""
        found: dict[int, str] = {}
        for n in numbers:
            with suppress(FileNotFoundError):  # deleted meanwhile
                if (path := self.path(n)) is not None:
                    stat = path.stat()
                    found[n] = f"{path.name} {stat.st_size} {stat.st_mtime_ns}"
        return found


def waiting(load: Load, n: int, tau: int) -> list[int]:
    """The numbers from n on of batches that are there; a function is asked for a few of them, up to time tau."""
    if isinstance(load, StepFiles):
        return [number for number in load.numbers() if number >= n]
    return [number for number in range(n, min(n + PROBED, tau + 1)) if _is_there(load, number)]


def _is_there(load: Load, n: int) -> bool:
    try:
        return load(n) is not None
    except Exception:  # which is told when its turn comes
        return False
