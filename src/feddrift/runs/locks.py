"""File locks that allow one writer per record, also between machines that share a folder; they end with the process."""

from __future__ import annotations

import errno
import fcntl
import io
import tempfile
import time
from pathlib import Path

from feddrift.errors import BusyError, DataError
from feddrift.runs.record import MAX_ATTEMPTS, get_part_path

# The error numbers of file systems without locks.
UNSUPPORTED_ERRNOS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class NoLocksError(DataError):
    """The file system has no locks, so two processes could write the same record."""


def lock_file(path: Path, allow_unlocked: bool = True) -> io.FileIO:
    """Open a file for appending and lock it.

    Args:
        path: The file; it is created if it does not exist.
        allow_unlocked: Return the file without a lock if the file system has no locks.

    Raises:
        BusyError: If another process has locked it.
        NoLocksError: If the file system has no locks and `allow_unlocked` is False.
        OSError: If it cannot be opened.
    """
    # Unbuffered: a time step is written by one system call, which Ctrl-C cannot interrupt halfway.
    file = open(path, "ab", buffering=0)  # noqa: SIM115
    try:
        for _ in range(MAX_ATTEMPTS):  # `is_being_written` in another process locks it for a moment
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except (BlockingIOError, PermissionError):
                time.sleep(0.02)
            except OSError as error:
                if error.errno not in UNSUPPORTED_ERRNOS or not allow_unlocked:
                    raise
                return file
    except OSError as error:
        file.close()
        if error.errno in UNSUPPORTED_ERRNOS:
            raise _no_locks_error(path.parent, error) from None
        raise
    file.close()
    raise BusyError(f"another run is writing {path}: wait for it, or choose another folder")


def check_locks(folder: Path) -> None:
    """Raise NoLocksError if the file system of a folder has no locks, which concurrent sweeps need."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".locks-") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _no_locks_error(folder, error) from None


def is_being_written(path: Path) -> bool:
    """Return True if a process has locked the unfinished record, False without a record or without locks.

    Args:
        path: The path of the closed record.
    """
    try:
        with open(get_part_path(path), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError as error:
        return error.errno not in UNSUPPORTED_ERRNOS  # False on file systems without locks
    return False


def _no_locks_error(folder: Path, error: OSError) -> NoLocksError:
    return NoLocksError(
        f"the file system of {folder} has no locks ({error.strerror}), so two sweeps could do the same run: "
        "give each its own part, --part 1/2 and --part 2/2, or --part 1/1 if there is only one"
    )
