"""Iterators that run in a thread, so that Ctrl-C interrupts the main thread at once and never inside compiled code."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")
THREAD_NAME = "feddrift-work"


def iterate_in_background(items: Iterator[T], prefetch: int = 2) -> Iterator[T]:
    """Run an iterator in a thread, so that Ctrl-C interrupts the calling thread at once.

    Args:
        items: The iterator; it is advanced in the thread only.
        prefetch: The number of items that may be computed in advance.

    >>> list(iterate_in_background(iter([1, 2])))
    [1, 2]
    """
    results: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue()
    stopped = threading.Event()
    requests = threading.Semaphore(prefetch)

    def produce_items() -> None:
        try:
            while requests.acquire() and not stopped.is_set():
                results.put((next(items), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=produce_items, name=THREAD_NAME, daemon=True).start()
    try:
        while True:
            requests.release()
            item, error = results.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # type: ignore[misc]  # not None, since the error is None
    finally:
        stopped.set()
        requests.release()


def has_running_thread() -> bool:
    """Return True while a thread of `iterate_in_background` is running."""
    return any(thread.name == THREAD_NAME for thread in threading.enumerate())
