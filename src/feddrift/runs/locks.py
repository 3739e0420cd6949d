"""One writer for each record, on one machine or several that share a folder: locks that end with their process."""

from __future__ import annotations

import errno
import fcntl
import io
import tempfile
import time
from pathlib import Path

from feddrift.errors import BusyError, DataError
from feddrift.runs.record import LOOKS, part_of

NONE = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # what file systems without locks answer


class NoLocksError(DataError):
    """A file system that cannot keep two processes apart."""


def lock(path: Path, alone: bool = True) -> io.FileIO:
    """The file, open and locked; where there are no locks only somebody who is `alone` gets it, as it is."""
    # Unbuffered, so that a time step is one system call, which Ctrl-C cannot cut in two.
    file = open(path, "ab", buffering=0)  # noqa: SIM115
    try:
        for _ in range(LOOKS):  # who asks whether it is being written holds it for a moment
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except (BlockingIOError, PermissionError):
                time.sleep(0.02)
            except OSError as error:
                if error.errno not in NONE or not alone:
                    raise
                return file
    except OSError as error:
        file.close()
        if error.errno in NONE:
            raise _without(path.parent, error) from None
        raise
    file.close()
    raise BusyError(f"another run is writing {path}: wait for it, or choose another folder")


def check_locks(folder: Path) -> None:
    """Say it where a file system cannot keep several sweeps apart."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".locks-") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _without(folder, error) from None


def is_being_written(path: Path) -> bool:
    """Whether a run is at work on the record of this name."""
    try:
        with open(part_of(path), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError as error:
        return error.errno not in NONE  # where there are no locks nobody has one
    return False


def _without(folder: Path, error: OSError) -> NoLocksError:
    return NoLocksError(
        f"the file system of {folder} has no locks ({error.strerror}), so two sweeps could do the same run: "
        "give each its own part, --part 1/2 and --part 2/2, or --part 1/1 where there is only one"
    )
