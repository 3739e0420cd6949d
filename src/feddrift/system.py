"""What the operating system gives: cores, and files that are whole or not there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from feddrift.errors import DataError


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all, also after a power cut; an older one stays until then."""
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        _sync(path.parent)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise DataError(f"cannot write {path}: {error.strerror or error}") from None


def _sync(folder: Path) -> None:
    """Make a new name in the folder outlast a power cut, where the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
