"""What the operating system gives: cores, files that are whole or not there, folders that one process has alone."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from feddrift.errors import BusyError, DataError


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def atomic_write(path: Path, data: bytes) -> None:
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


@contextmanager
def alone(folder: Path, busy: str) -> Iterator[None]:
    """Lock a folder meanwhile; where another process has it, that is an error with these words.

    A file system without locks cannot say who has it, which is another error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise BusyError(busy) from None
        except OSError as error:
            raise DataError(
                f"{folder} cannot be locked ({error.strerror or error}), so that two could work on it unnoticed: "
                "put it on a file system that has locks"
            ) from None
        yield
    finally:
        os.close(lock)


def _sync(folder: Path) -> None:
    """Make a new name in the folder outlast a power cut, where the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
