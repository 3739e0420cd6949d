"""Long work in a thread, so that Ctrl-C is heard at once and never strikes inside compiled code."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")
NAME = "feddrift-work"


def in_background(items: Iterator[T], ahead: int = 2) -> Iterator[T]:
    """Run an iterator in a thread, at most `ahead` items in advance, so that Ctrl-C reaches this one at once.

    >>> list(in_background(iter([1, 2])))
    [1, 2]
    """
    results: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue()
    stopped, asked = threading.Event(), threading.Semaphore(ahead)

    def work() -> None:
        try:
            while asked.acquire() and not stopped.is_set():
                results.put((next(items), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=work, name=NAME, daemon=True).start()
    try:
        while True:
            asked.release()
            item, error = results.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # type: ignore[misc]  # an item, since there is no error
    finally:
        stopped.set()
        asked.release()


def busy() -> bool:
    """Whether a thread of `in_background` is still at work."""
    return any(thread.name == NAME for thread in threading.enumerate())
