"""Store of a client on its own disk: its batches, parts of models, optimiser moments, and the models in use.

A store belongs to one experiment and one client. Files are written atomically. This module does not need Flower.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift._internal import checkpoint
from feddrift.data import Cell, Stream
from feddrift.engines.flower.client.batches import Load, StepFiles, list_waiting_batches
from feddrift.errors import ConfigError, DataError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_CELL = re.compile(r"([0-9]{6,})-([0-9]+)(?:-([0-9]+))?\.cell")

_log = logging.getLogger("feddrift")


def check_name(name: object, description: str) -> str:
    """Return the name if it is safe as the name of a folder.

    Args:
        name: The name.
        description: The beginning of the error message, such as "a client".

    Raises:
        ConfigError: It is not safe.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"the name of {description} must consist of at most 64 letters, digits, '_', '-' and '.', and start with a "
            f"letter or digit, got {name!r}"
        )
    return name


@dataclass(frozen=True)
class StoredBatch:
    """Batch in the store."""

    t: int  # time step to which it is assigned
    rows: int
    n: int  # its number among the client's batches

    @property
    def file_name(self) -> str:
        """Name of its file, without the number if that equals the time step."""
        return f"{self.t:06d}-{self.rows}" + (f"-{self.n}" if self.n != self.t else "") + ".cell"


class Store:
    """Store in the folder `root/experiment/client`."""

    def __init__(self, root: Path, experiment: str, client: str) -> None:
        self.path = root / check_name(experiment, "an experiment") / check_name(client, "a client")
        self.damaged: dict[int, bool] = {}  # by number, damaged batches, and whether they could be loaded again

    def count_rows(self) -> dict[int, int]:
        """Return the number of rows by time step, for all time steps that have any."""
        return {t: batch.rows for t, batch in self.list_batches().items() if batch.rows}

    def read_batch(self, t: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        """Return x and y of time step t."""
        return self._read_arrays(self.list_batches()[t])

    def list_batches(self) -> dict[int, StoredBatch]:
        """Return the batches by time step, in order; time steps without data may have a batch without rows."""
        matches = (_CELL.fullmatch(path.name) for path in (self.path / "cells").glob("*.cell"))
        numbers = ((int(match[1]), int(match[2]), int(match[3] or match[1])) for match in matches if match)
        return {t: StoredBatch(t, rows, n) for t, rows, n in sorted(numbers)}

    def get_next_batch_number(self) -> int:
        """Return the number after that of the newest batch in the store."""
        batches = self.list_batches()
        return batches[max(batches)].n + 1 if batches else 0

    def take_next_batch(self, load: Load, tau: int, features: tuple[int, ...], n_classes: int) -> StoredBatch | None:
        """Load the next batch and assign it to time step tau, if it has arrived and the time step has none yet.

        Returns:
            The batch, or None if none was loaded.
        """
        if max(self.list_batches(), default=-1) >= tau:
            return None
        n = self.get_next_batch_number()
        cell = load(n)
        if cell is None:
            return None
        x, y = check_batch(cell, n, features, n_classes)
        batch = StoredBatch(tau, len(x), n)
        self._write(self.path / "cells" / batch.file_name, {"x": x, "y": y})
        return batch

    def read_or_repair_batch(
        self, load: Load, t: int, features: tuple[int, ...], n_classes: int
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        """Return x and y of time step t; load its batch again if it is damaged.

        A damaged batch that can no longer be loaded is replaced by one without rows.
        """
        batch = self.list_batches()[t]
        cells = self.path / "cells"
        try:
            return self._read_arrays(batch)
        except DataError as error:
            cell = load(batch.n)
            self.damaged[batch.n] = cell is not None
            consequence = "is lost: its rows are deleted" if cell is None else "is loaded again"
            _log.warning("client %s: %s; batch %d %s", self.path.name, error, batch.n, consequence)
        x, y = check_batch(([], []) if cell is None else cell, batch.n, features, n_classes)
        self._write(cells / replace(batch, rows=len(x)).file_name, {"x": x, "y": y})
        if len(x) != batch.rows:
            (cells / batch.file_name).unlink()
        return x, y

    def _read_arrays(self, batch: StoredBatch) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        arrays = self._read(self.path / "cells" / batch.file_name)
        return arrays["x"], arrays["y"]

    def move_unseen_batch(self, tau: int, seen: int, min_rows: int = 1) -> None:
        """Assign the newest batch to time step tau if the server has not counted it yet.

        Args:
            tau: The time step.
            seen: The newest time step for which the server has a row count of this client.
            min_rows: The number of rows below which a batch is not shown to the server, so it is not moved.
        """
        batches = self.list_batches()
        newest = batches[max(batches)] if batches else StoredBatch(tau, 0, 0)
        if newest.rows >= min_rows and seen < newest.t < tau:
            cells = self.path / "cells"
            (cells / newest.file_name).rename(cells / replace(newest, t=tau).file_name)

    def count_waiting_batches(self, load: Load, tau: int) -> tuple[int, int | None]:
        """Count the batches that have arrived and are not in the store yet, and log problems with them.

        Returns:
            How many there are; and the number of the missing batch that must arrive before them, or None.
        """
        if isinstance(load, StepFiles):
            for name in self._find_changed_files(load):
                _log.warning("client %s: %s was changed after it was loaded, which has no effect", self.path.name, name)
        n = self.get_next_batch_number()
        later = list_waiting_batches(load, n, tau)
        if not later or n in later:
            return len(later), None
        text = "client %s: its batch %d is missing, and %s wait for it: provide it, without rows if it had no data"
        _log.warning(text, self.path.name, n, ", ".join(map(str, later[:10])))
        return len(later), n

    def _find_changed_files(self, files: StepFiles) -> list[str]:
        """Find files that were changed after their batches were stored; each change is returned once."""
        path = self.path / "files"
        stored = range(self.get_next_batch_number())
        try:
            old: dict[int, str] = self._read(path) if path.exists() else {}
        except DataError:  # damaged: compare with the files as they are now
            old = {}
        new = old | files.read_file_stamps(n for n in files.list_numbers() if n in stored)
        if new != old:
            self._write(path, new)
        return [stamp.split()[0] for n, stamp in new.items() if old.get(n, stamp) != stamp]

    def delete_old_batches(self, tau: int, max_rows: int | None, max_age: int | None) -> None:
        """Delete batches that are too old, and the oldest while there are too many rows; the newest is always kept.

        Args:
            tau: The time step.
            max_rows: The maximum number of rows in the store; None: no limit.
            max_age: The age in time steps from which batches are deleted; None: no limit.
        """
        batches = self.list_batches()
        rows = sum(batch.rows for batch in batches.values())
        newest = {max(batches, default=0), max((t for t, batch in batches.items() if batch.rows), default=0)}
        for t, batch in batches.items():
            too_old = max_age is not None and t <= tau - max_age
            if t in newest or not (too_old or (max_rows is not None and rows > max_rows)):
                continue
            (self.path / "cells" / batch.file_name).unlink()
            rows -= batch.rows

    def has_part(self, name: str) -> bool:
        """Return whether the store contains this part of a model, undamaged."""
        try:
            self.read_part(name)
        except DataError:
            return False
        return True

    def read_part(self, name: str) -> list[npt.NDArray[Any]]:
        """Return the arrays of the part of a model with this name."""
        arrays: list[npt.NDArray[Any]] = self._read(self.path / "parts" / check_name(name, "a part"))
        return arrays

    def list_parts(self) -> list[str]:
        """List the names of all parts of models in the store."""
        return [path.name for path in (self.path / "parts").glob("*")]

    def put_parts(self, parts: Mapping[str, list[npt.NDArray[Any]]]) -> None:
        """Add or replace these parts."""
        for name, part in parts.items():
            self._write(self.path / "parts" / check_name(name, "a part"), part)

    def drop_parts(self, names: Iterable[str]) -> None:
        """Delete these parts."""
        for name in names:
            (self.path / "parts" / check_name(name, "a part")).unlink(missing_ok=True)

    def keep_parts(self, names: Iterable[str]) -> None:
        """Delete all other parts."""
        kept = set(names)
        for path in (self.path / "parts").glob("*"):
            if path.name not in kept:
                path.unlink(missing_ok=True)

    @property
    def serving(self) -> dict[str, Any] | None:
        """Models in use with their votes, as in `Hello.serve`; None before the end of the first time step."""
        path = self.path / "serving"
        return self._read(path) if path.exists() else None

    def write_serving(self, serving: Mapping[str, Any]) -> None:
        """Store the models to use from now on; the store must contain their parts."""
        self._write(self.path / "serving", dict(serving))

    def read_optimizer(self) -> dict[str, Any] | None:
        """Return the optimiser's moments before and after the last round of local training."""
        path = self.path / "moments"
        try:
            return dict(self._read(path)) if path.exists() else None
        except DataError as error:
            _log.warning("%s: local training starts with new optimiser moments", error)
            return None

    def read_optimizer_before(self, tau: int, round: int) -> Any:
        """Return the optimiser's moments at the start of this round; None: the round starts with new moments."""
        last = self.read_optimizer()
        if last is None or last["tau"] != tau or not round:
            return None
        if last["round"] < round:
            return last["after"]
        if last["round"] > round:
            text = "client %s: round %d of time %d follows round %d, so it starts with new optimiser moments"
            _log.warning(text, self.path.name, round, tau, last["round"])
            return None
        return last["before"]

    def write_optimizer(self, moments: Mapping[str, Any]) -> None:
        """Store the optimiser's moments before and after the last round, with its time step and number."""
        self._write(self.path / "moments", dict(moments))

    def _read(self, path: Path) -> Any:
        return checkpoint.read(path).decode(None)

    def _write(self, path: Path, value: Any) -> None:
        checkpoint.write(path, {}, value)


def check_batch(
    cell: Cell, n: int, features: tuple[int, ...] | None, n_classes: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Check a client's n-th batch.

    Args:
        cell: x and y of the batch; both may be empty.
        n: The number of the batch.
        features: The shape of one input in this federation; None: any.
        n_classes: The number of classes.

    Returns:
        x and y as arrays.

    Raises:
        DataError: The batch is not valid.
    """
    if (
        isinstance(cell, Sequence)
        and len(cell) == 2
        and all(isinstance(part, Sized) and not len(part) for part in cell)
    ):
        return np.zeros((0, *(features or ())), dtype=np.float32), np.zeros(0, dtype=np.int32)
    checked = Stream.from_arrays([[cell], [None]], name=f"batch {n}", n_classes=n_classes)
    if features is not None and checked.x.shape[1:] != features:
        raise DataError(f"batch {n}: features of shape {checked.x.shape[1:]}, the federation has {features}")
    return checked.x, checked.y
