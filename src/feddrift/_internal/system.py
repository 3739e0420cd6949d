"""Functions of the operating system: number of cores, atomic writes of files, locks of folders, sizes of caches."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from feddrift.errors import BusyError, DataError


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file completely or not at all, also in case of a power failure.

    An older file of this name remains until the new one is complete.

    Raises:
        DataError: The file cannot be written.
    """
    check_file_path(path)
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        _sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise DataError(f"cannot write {path}: {error.strerror or error}") from None


def check_file_path(path: Path) -> None:
    """Raise DataError if a path cannot be that of a file: it is a folder, or below a file; folders may be missing."""
    if not path.name or os.path.isdir(path):
        raise DataError(f"cannot write {path}: it is a folder, give the name of a file, such as {path / 'NAME'}")
    check_folder_path(path.parent)


def check_folder_path(folder: Path) -> None:
    """Raise DataError if a path cannot be that of a folder: it is a file, or below one; folders may be missing."""
    for parent in (folder, *folder.parents):
        if os.path.exists(parent) and not os.path.isdir(parent):
            raise DataError(f"cannot write below {parent}: it is a file, not a folder")


@contextmanager
def lock_folder(folder: Path, busy: str, wait_seconds: float = 0.0) -> Iterator[None]:
    """Lock a folder within the context.

    Args:
        folder: The folder, which is created if it is missing.
        busy: The message if another process has the lock.
        wait_seconds: The time to wait for another process that has the lock.

    Raises:
        BusyError: Another process has the lock.
        DataError: The file system has no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    deadline = time.monotonic() + wait_seconds
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= deadline:
                    raise BusyError(busy) from None
                time.sleep(0.05)
            except OSError as error:
                raise DataError(
                    f"{folder} cannot be locked ({error.strerror or error}), so two processes could write to it at "
                    "once: move it to a file system that has locks"
                ) from None
        yield
    finally:
        os.close(lock)


def _sync_folder(folder: Path) -> None:
    """Write the entries of a folder to the disk, if the system supports it: new names survive a power failure."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def delete_oldest_files(folder: Path, max_bytes: int) -> None:
    """Delete the oldest files of a folder until the others have at most `max_bytes` in total."""
    statuses = [(path, _stat_file(path)) for path in folder.rglob("*")]
    entries = [(status.st_mtime, status.st_size, path) for path, status in statuses if status]
    excess = sum(size for _, size, _ in entries) - max_bytes
    for _, size, path in sorted(entries):
        if excess <= 0:
            return
        path.unlink(missing_ok=True)  # another process may have deleted it
        excess -= size


def _stat_file(path: Path) -> os.stat_result | None:
    """Return the status of a file; None: it is not a file, or was deleted meanwhile."""
    try:
        return path.stat() if path.is_file() else None
    except OSError:
        return None
