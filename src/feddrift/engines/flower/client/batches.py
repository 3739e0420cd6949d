"""Sources of a client's data: batch n is a file step_<n>, or the result of the client's own function for n.

Each client numbers its own batches from 0. They need not arrive at the same time as those of other clients. This
module does not need Flower.
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

Load = Callable[[int], Cell | None]  # returns batch n of a client, perhaps without rows; None: it has not arrived
ReadNames = Callable[[int], tuple[tuple[str, ...], tuple[int | str, ...]]]  # the features and classes of batch n

MAX_PROBED_BATCHES = 10  # maximum number of batches that a function loads to count those that wait

_STEP = re.compile(r"step_(0|[1-9][0-9]*)\.(?:csv|npz)")


@dataclass(frozen=True)
class StepFiles:
    """Batches in files DIR/step_<n>.csv or .npz; DIR/classes.txt lists the classes, the same at all clients."""

    directory: Path
    label: str = "label"

    def __call__(self, n: int) -> Cell | None:
        """Read the n-th batch.

        Returns:
            x and y of the batch; None if its file does not exist.

        Raises:
            DataError: The file is not valid, or classes.txt is missing.
        """
        path = self.find_file(n)
        classes = self.directory / "classes.txt"
        if path is None:
            return None
        file = folder.read_file(path, self.label, None)
        if not classes.exists():
            raise DataError(f"{classes} is missing: it must contain one class per line, the same at all clients")
        _, index = folder.read_classes(classes, [file])
        return file.x, np.array([index[text] for text in file.labels], dtype=np.int32)

    def find_file(self, n: int) -> Path | None:
        """Return the file of the n-th batch; None: it does not exist."""
        paths = (self.directory / f"step_{n}{suffix}" for suffix in (".csv", ".npz"))
        return next(filter(Path.exists, paths), None)

    def list_numbers(self) -> list[int]:
        """List the numbers of all files that exist."""
        matches = (_STEP.fullmatch(path.name) for path in self.directory.glob("step_*"))
        return sorted({int(match[1]) for match in matches if match})

    def read_names(self, n: int) -> tuple[tuple[str, ...], tuple[int | str, ...]]:
        """Return the names of the features in the header of the n-th file, and those of the classes in classes.txt."""
        path = self.directory / f"step_{n}.csv"
        classes = self.directory / "classes.txt"
        columns = folder.read_file(path, self.label, None).columns if path.exists() else ()
        return columns, tuple(folder.read_class_list(classes)) if classes.exists() else ()

    def read_file_stamps(self, numbers: Iterable[int]) -> dict[int, str]:
        """Return name, size and modification time of these files, to detect changes; missing files are left out."""
        stamps: dict[int, str] = {}
        for n in numbers:
            with suppress(FileNotFoundError):  # deleted meanwhile
                if (path := self.find_file(n)) is not None:
                    stat = path.stat()
                    stamps[n] = f"{path.name} {stat.st_size} {stat.st_mtime_ns}"
        return stamps


def list_waiting_batches(load: Load, n: int, tau: int) -> list[int]:
    """List the batches from number n that have arrived; a function is called for a few numbers, at most tau."""
    if isinstance(load, StepFiles):
        return [number for number in load.list_numbers() if number >= n]
    return [number for number in range(n, min(n + MAX_PROBED_BATCHES, tau + 1)) if _can_load(load, number)]


def _can_load(load: Load, n: int) -> bool:
    try:
        return load(n) is not None
    except Exception:  # reported when this batch is loaded
        return False
