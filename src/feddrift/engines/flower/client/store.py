"""What a client keeps on its own disk: its data over time, parts of models, moments, and the model it serves.

Every file appears whole or not at all; a store belongs to one experiment and one client. Nothing here needs Flower.
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
from feddrift.engines.flower.client.batches import Load, StepFiles, waiting
from feddrift.errors import ConfigError, DataError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_CELL = re.compile(r"([0-9]{6,})-([0-9]+)(?:-([0-9]+))?\.cell")

_log = logging.getLogger("feddrift")


def checked_name(name: object, what: str) -> str:
    """A name that is safe as the name of a folder."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{what} must be letters, digits, '_', '-' and '.', at most 64 of them, got {name!r}")
    return name


@dataclass(frozen=True)
class Held:
    """A batch in the store: its number among the client's own, its rows, and the time step at which it was shown."""

    t: int
    rows: int
    n: int

    @property
    def file(self) -> str:
        """The name of its file; where batches come as time steps do, the number is the time and is left out."""
        return f"{self.t:06d}-{self.rows}" + (f"-{self.n}" if self.n != self.t else "") + ".cell"


class Store:
    """The folder `root/experiment/client`."""

    def __init__(self, root: Path, experiment: str, client: str) -> None:
        self.path = root / checked_name(experiment, "an experiment") / checked_name(client, "a client")
        self.damaged: dict[int, bool] = {}  # batches that were found damaged, and whether they are whole again

    def cells(self) -> dict[int, int]:
        """The number of rows of every time step held."""
        return {t: held.rows for t, held in self.held().items() if held.rows}

    def cell(self, t: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        """x and y of time step t."""
        return self._arrays(self.held()[t])

    def held(self) -> dict[int, Held]:
        """By time, in order, the batches that are here; those of no rows stand for time steps without data."""
        matches = (_CELL.fullmatch(path.name) for path in (self.path / "cells").glob("*.cell"))
        numbers = ((int(match[1]), int(match[2]), int(match[3] or match[1])) for match in matches if match)
        return {t: Held(t, rows, n) for t, rows, n in sorted(numbers)}

    def next_number(self) -> int:
        """The number of the oldest batch that was not shown yet."""
        held = self.held()
        return held[max(held)].n + 1 if held else 0

    def take_in(self, load: Load, tau: int, features: tuple[int, ...], n_classes: int) -> None:
        """Show at time tau the oldest batch that was not shown yet, if it has come; of each time step one at most."""
        if max(self.held(), default=-1) >= tau:
            return
        if (cell := load(n := self.next_number())) is not None:
            x, y = checked_batch(cell, n, features, n_classes)
            self._write(self.path / "cells" / Held(tau, len(x), n).file, {"x": x, "y": y})

    def mended(
        self, load: Load, t: int, features: tuple[int, ...], n_classes: int
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        """x and y of time step t; a batch that is damaged is taken in again, and has no rows where it is gone."""
        damaged, cells = self.held()[t], self.path / "cells"
        try:
            return self._arrays(damaged)
        except DataError as error:
            cell = load(damaged.n)
            self.damaged[damaged.n] = cell is not None
            what = "forgotten: it is gone" if cell is None else "taken in again"
            _log.warning("client %s: %s; batch %d is %s", self.path.name, error, damaged.n, what)
        x, y = checked_batch(([], []) if cell is None else cell, damaged.n, features, n_classes)
        self._write(cells / replace(damaged, rows=len(x)).file, {"x": x, "y": y})
        if len(x) != damaged.rows:
            (cells / damaged.file).unlink()
        return x, y

    def _arrays(self, batch: Held) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        arrays = self._read(self.path / "cells" / batch.file)
        return arrays["x"], arrays["y"]

    def show_again(self, tau: int, seen: int) -> None:
        """Show the newest batch at time tau if the server never got to know of it: all after time `seen` is unknown."""
        held = self.held()
        newest = held[max(held)] if held else Held(tau, 0, 0)
        if newest.rows and seen < newest.t < tau:
            cells = self.path / "cells"
            (cells / newest.file).rename(cells / replace(newest, t=tau).file)

    def waiting(self, load: Load, tau: int) -> tuple[int, int | None]:
        """How many batches wait to be shown, and the number of one that is missing before them; the log names both."""
        if isinstance(load, StepFiles):
            for name in self._changed(load):
                what = "client %s: %s was written again after it was taken in, which is ignored"
                _log.warning(what, self.path.name, name)
        n = self.next_number()
        later = waiting(load, n, tau)
        if not later or n in later:
            return len(later), None
        what = "client %s: its batch %d is missing, and %s wait for it; one without rows says that there was nothing"
        _log.warning(what, self.path.name, n, ", ".join(map(str, later[:10])))
        return len(later), n

    def _changed(self, files: StepFiles) -> list[str]:
        """The files whose batches are here and that were written again since; each change is told once."""
        path, taken_in = self.path / "files", range(self.next_number())
        try:
            before: dict[int, str] = self._read(path) if path.exists() else {}
        except DataError:  # of what is damaged it starts anew
            before = {}
        now = before | files.looks(n for n in files.numbers() if n in taken_in)
        if now != before:
            self._write(path, now)
        return [look.split()[0] for n, look in now.items() if before.get(n, look) != look]

    def limit(self, tau: int, max_rows: int | None, max_age: int | None) -> None:
        """Forget time steps that are too old, and the oldest ones while there are too many rows; never the newest."""
        held = self.held()
        rows = sum(batch.rows for batch in held.values())
        newest = {max(held, default=0), max((t for t, batch in held.items() if batch.rows), default=0)}
        for t, batch in held.items():
            old = max_age is not None and t <= tau - max_age
            if t in newest or not (old or (max_rows is not None and rows > max_rows)):
                continue
            (self.path / "cells" / batch.file).unlink()
            rows -= batch.rows

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


def checked_batch(
    cell: Cell, n: int, features: tuple[int, ...] | None, n_classes: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The n-th batch as the federation's clients have them; None: whatever features it has."""
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
