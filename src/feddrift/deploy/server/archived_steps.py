"""What the archive of a federation has, by its names and by the record."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from feddrift._internal import checkpoint
from feddrift.deploy.monitor.status import status
from feddrift.deploy.server.archive import Archive
from feddrift.errors import DataError
from feddrift.reports.summary import joined


@dataclass(frozen=True)
class Kept:
    """A time step, counted from 1, whose models are kept."""

    time: int
    pinned: bool
    began: str = ""  # where the record says it
    accuracy: float | None = None  # of its models on the next data, over all rows; None: not tested, or nobody had any
    users: dict[int, list[str]] = field(default_factory=dict)  # by the id of a model, the clients that used it most

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def kept(server: Path) -> list[Kept]:
    """All time steps whose models are kept, in order."""
    archive, federation = Archive(server / "state"), status(server)
    found, here = [], None if federation is None else joined(federation.record)
    for time in archive.times():
        t, pinned = time - 1, archive.pinned(time)
        if (
            federation is None or here is None or t >= federation.record.rows.steps
        ):  # the record was moved away, or is a moment behind
            found.append(Kept(time, pinned))
            continue
        rows, header = federation.record.rows, federation.record.header
        users: dict[int, list[str]] = {}
        for c in np.flatnonzero(here[t]).tolist():
            users.setdefault(int(rows.model[t, c]), []).append(header["clients"][c])
        tested = rows.tested[t] if t < federation.record.tested else rows.tested[t] * 0
        right = (rows.accuracy[t] * tested)[tested > 0].sum()
        accuracy = float(right / tested.sum()) if tested.any() else None
        found.append(Kept(time, pinned, header["times"][t], accuracy, dict(sorted(users.items()))))
    return found


def back_to(server: Path) -> int | None:
    """The time whose models the next time step starts from, where an operator went back and it has not begun yet."""
    newest = next(checkpoint.Folder(server / "state" / "checkpoints").newest_first(), None)
    return None if newest is None or isinstance(newest, DataError) else newest.about.get("back_to")
