"""Logs of bounded size: the server's own log, and the log of its nginx."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

MAX_LOG_BYTES = 10_000_000
MAX_OLD_LOGS = 5  # beside the log: NAME.1 is the newest of them
CHECK_INTERVAL_SECONDS = 60.0


def create_log_handler(path: Path) -> logging.Handler:
    """Return a handler that writes the server's log, and starts a new file when it is full."""
    handler = RotatingFileHandler(
        path, maxBytes=MAX_LOG_BYTES, backupCount=MAX_OLD_LOGS, encoding="utf-8", errors="backslashreplace"
    )
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    return handler


def read_last_line(path: Path) -> str:
    """Return the last line of a log, or a sentence if the log is empty."""
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1] if lines else f"{path} has no lines"


def read_stop_reason(path: Path) -> str:
    """Return the last line of a log as the reason why the server stopped.

    If that line only reports progress, the server has logged no error: another process has ended it.
    """
    last = read_last_line(path)
    return "it was terminated without an error, `feddrift deploy run` continues it" if " INFO " in last else last


def rotate_if_large(path: Path) -> None:
    """Copy a large log to NAME.1 and empty the file, which another process keeps open for appending."""
    if not path.exists() or path.stat().st_size <= MAX_LOG_BYTES:
        return
    names = [path.with_name(f"{path.name}.{k}") for k in range(1, MAX_OLD_LOGS + 1)]
    for newer, older in zip(names[-2::-1], names[:0:-1], strict=True):
        with suppress(FileNotFoundError):
            os.replace(newer, older)
    shutil.copyfile(path, names[0])
    os.truncate(path, 0)


@contextmanager
def rotate_in_background(path: Path, interval_seconds: float = CHECK_INTERVAL_SECONDS) -> Iterator[None]:
    """Rotate a log at regular intervals during the block; after an error the next check tries again."""
    ended = threading.Event()

    def rotate_regularly() -> None:
        while True:
            with suppress(OSError):
                rotate_if_large(path)
            if ended.wait(interval_seconds):
                return

    thread = threading.Thread(target=rotate_regularly, name="logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
