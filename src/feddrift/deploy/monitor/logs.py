"""Logs of bounded size: what the server writes itself, and what nginx writes for it."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

MAX_LOG_BYTES, MAX_OLD_LOGS = (
    10_000_000,
    5,
)  # bytes of a log, and how many older ones are kept beside it: NAME.1 is the last of them
CHECK_INTERVAL_SECONDS = 60.0  # seconds


def create_log_handler(path: Path) -> logging.Handler:
    """What writes the server's log, and moves it aside when it is long."""
    made = RotatingFileHandler(
        path, maxBytes=MAX_LOG_BYTES, backupCount=MAX_OLD_LOGS, encoding="utf-8", errors="backslashreplace"
    )
    made.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    return made


def read_last_line(path: Path) -> str:
    """What a log ends with."""
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1] if lines else "it wrote no log"


def read_stop_reason(path: Path) -> str:
    """The reason in a log's last line; one that only tells of work has none: somebody else ended it."""
    last = read_last_line(path)
    return "it was ended while it was at work, `feddrift deploy run` goes on with it" if " INFO " in last else last


def rotate_if_large(path: Path) -> None:
    """Empty a log that another process has open, for appending, once it is long; what it had goes to NAME.1."""
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
    """Keep a log bounded meanwhile; what goes wrong stops nothing, and is tried again."""
    ended = threading.Event()

    def look() -> None:
        while True:
            with suppress(OSError):
                rotate_if_large(path)
            if ended.wait(interval_seconds):
                return

    looking = threading.Thread(target=look, name="logs", daemon=True)
    looking.start()
    try:
        yield
    finally:
        ended.set()
        looking.join()
