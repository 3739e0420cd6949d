"""What a client keeps on its own disk: its data over time, parts of models, moments, and the model it serves.

Every file appears whole or not at all; a store belongs to one experiment and one client. Nothing here needs Flower.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift import checkpoint
from feddrift.data import Cell, Stream
from feddrift.errors import ConfigError, DataError
from feddrift.streams import folder

Load = Callable[[int], Cell | None]  # what a client received at time t; None: nothing, or not yet
Named = Callable[[int], tuple[tuple[str, ...], tuple[int | str, ...]]]  # what its features and the classes are called

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_CELL = re.compile(r"([0-9]{6,})-([0-9]+)\.cell")

_log = logging.getLogger("feddrift")


def checked_name(name: object, what: str) -> str:
    """A name that is safe as the name of a folder."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{what} must be letters, digits, '_', '-' and '.', at most 64 of them, got {name!r}")
    return name


class Store:
    """The folder `root/experiment/client`."""

    def __init__(self, root: Path, experiment: str, client: str) -> None:
        self.path = root / checked_name(experiment, "an experiment") / checked_name(client, "a client")

    def cells(self) -> dict[int, int]:
        """The number of rows of every time step held."""
        matches = (_CELL.fullmatch(path.name) for path in (self.path / "cells").glob("*.cell"))
        return dict(sorted((int(match[1]), int(match[2])) for match in matches if match))

    def cell(self, t: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        """x and y of time step t."""
        arrays = self._read(self._cell(t, self.cells()[t]))
        return arrays["x"], arrays["y"]

    def take_in(self, load: Load, tau: int, features: tuple[int, ...], n_classes: int) -> None:
        """Hold what has arrived up to time tau, missed time steps included."""
        stored, floor = self.cells(), self._floor()
        for t in range(floor, tau + 1):
            cell = None if t in stored else load(t)
            if cell is None:
                continue
            checked = Stream.from_arrays([[cell], [None]], name=f"time {t}", n_classes=n_classes)
            if checked.x.shape[1:] != features:
                raise DataError(f"time {t}: features of shape {checked.x.shape[1:]}, the federation has {features}")
            self._write(self._cell(t, len(checked.x)), {"x": checked.x, "y": checked.y})

    def limit(self, tau: int, max_rows: int | None, max_age: int | None) -> None:
        """Forget time steps that are too old, and the oldest ones while there are too many rows; never the newest."""
        stored = self.cells()
        rows, newest = sum(stored.values()), max(stored, default=0)
        for t, n in stored.items():
            old = max_age is not None and t <= tau - max_age
            if t == newest or not (old or (max_rows is not None and rows > max_rows)):
                continue
            self._write(self.path / "floor", t + 1)  # first: what was forgotten is not taken in again
            self._cell(t, n).unlink()
            rows -= n

    def _floor(self) -> int:
        path = self.path / "floor"
        return int(self._read(path)) if path.exists() else 0

    def _cell(self, t: int, n: int) -> Path:
        return self.path / "cells" / f"{t:06d}-{n}.cell"

    def has(self, part: str) -> bool:
        """Whether this part of a model is here and whole."""
        try:
            self.part(part)
        except DataError:
            return False
        return True

    def part(self, name: str) -> list[npt.NDArray[Any]]:
        """The arrays of the part of a model that has this name."""
        arrays: list[npt.NDArray[Any]] = self._read(self.path / "parts" / checked_name(name, "a part"))
        return arrays

    def parts(self) -> list[str]:
        """The names of all parts of models that are here."""
        return [path.name for path in (self.path / "parts").glob("*")]

    def put_parts(self, parts: Mapping[str, list[npt.NDArray[Any]]]) -> None:
        """Store these parts beside those that are there."""
        for name, part in parts.items():
            self._write(self.path / "parts" / checked_name(name, "a part"), part)

    def drop_parts(self, names: Iterable[str]) -> None:
        """Delete these parts."""
        for name in names:
            (self.path / "parts" / checked_name(name, "a part")).unlink(missing_ok=True)

    def keep_parts(self, names: Iterable[str]) -> None:
        """Delete all parts but these."""
        kept = set(names)
        for path in (self.path / "parts").glob("*"):
            if path.name not in kept:
                path.unlink(missing_ok=True)

    @property
    def serving(self) -> dict[str, Any] | None:
        """The models this client uses, and how they vote; None before the first time step is done."""
        path = self.path / "serving"
        return self._read(path) if path.exists() else None

    def serve(self, what: Mapping[str, Any]) -> None:
        """Use these models from now on; their parts must be here."""
        self._write(self.path / "serving", dict(what))

    def moments(self) -> dict[str, Any] | None:
        """The optimiser before and after the last round of local training."""
        path = self.path / "moments"
        try:
            return dict(self._read(path)) if path.exists() else None
        except DataError as error:
            _log.warning("%s; local training starts with fresh moments", error)
            return None

    def moments_before(self, tau: int, round: int) -> Any:
        """The optimiser's moments at the start of this round; they live for one time step."""
        past = self.moments()
        if past is None or past["tau"] != tau or not round:
            return None
        if past["round"] < round:
            return past["after"]
        if past["round"] > round:
            what = "client %s: round %d of time %d comes after round %d, its moments start anew"
            _log.warning(what, self.path.name, round, tau, past["round"])
            return None
        return past["before"]

    def put_moments(self, moments: Mapping[str, Any]) -> None:
        """Store the optimiser before and after the last round."""
        self._write(self.path / "moments", dict(moments))

    def _read(self, path: Path) -> Any:
        return checkpoint.read(path).value(None)

    def _write(self, path: Path, value: Any) -> None:
        checkpoint.write(path, {}, value)


def from_folder(directory: Path, label: str = "label") -> Load:
    """New time steps are files DIR/step_<t>.csv or .npz; DIR/classes.txt names the classes, the same at all clients."""
    classes = directory / "classes.txt"

    def load(t: int) -> Cell | None:
        paths = [directory / f"step_{t}{suffix}" for suffix in (".csv", ".npz")]
        for path in filter(Path.exists, paths):
            file = folder.read_file(path, label, None)
            if not classes.exists():
                raise DataError(f"{classes} is missing, it has one class a line, the same at all clients")
            _, index = folder.classes_of(classes, [file])
            return (file.x, np.array([index[text] for text in file.labels], dtype=np.int32)) if len(file.x) else None
        return None

    return load


def named_in(directory: Path, label: str = "label") -> Named:
    """The names that `from_folder` reads past: those of the columns in the file's header, and of classes.txt."""

    def named(t: int) -> tuple[tuple[str, ...], tuple[int | str, ...]]:
        path, classes = directory / f"step_{t}.csv", directory / "classes.txt"
        columns = folder.read_file(path, label, None).columns if path.exists() else ()
        return columns, tuple(folder.listed(classes)) if classes.exists() else ()

    return named
