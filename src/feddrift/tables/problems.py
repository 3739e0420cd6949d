"""Problems of a table, which are reported together, so that the user can correct all of them at once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from feddrift.errors import MAX_MESSAGE_LENGTH, DataError, to_one_line

MAX_REPORTED_PROBLEMS = 10

_log = logging.getLogger("feddrift")


class Problems:
    """Problems of one table, as sentences with the expected and the actual value, and often with a hint.

    Warnings are logged at once. They are stored too, because a table that is read from the cache repeats them.
    """

    def __init__(self, table: str) -> None:
        self.table = table
        self.sentences: list[str] = []
        self.warnings: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.sentences)

    def add(self, sentence: str) -> None:
        """Add a problem."""
        self.sentences.append(to_one_line(sentence))

    def warn(self, sentence: str) -> None:
        """Log and store a warning, which begins with the name of the table or file."""
        self.warnings.append(sentence)
        _log.warning("%s", sentence)

    @contextmanager
    def collect(self, prefix: str) -> Iterator[None]:
        """Catch a DataError in the block, and add it as a problem with this prefix."""
        try:
            yield
        except DataError as error:
            self.add(f"{prefix}{error}")

    def raise_if_any(self) -> None:
        """Raise a DataError with as many problems as fit into a message of one line."""
        if not self.sentences:
            return
        if len(self.sentences) == 1:
            raise DataError(f"{self.table}: {self.sentences[0]}")
        line = f"{self.table} has {len(self.sentences)} problems"
        n_reported = 0
        for number, sentence in enumerate(self.sentences[:MAX_REPORTED_PROBLEMS], start=1):
            if n_reported and len(line) + len(sentence) > MAX_MESSAGE_LENGTH - 30:
                break
            line += f"{';' if n_reported else ':'} ({number}) {sentence}"
            n_reported = number
        rest = len(self.sentences) - n_reported
        raise DataError(line + (f"; and {rest} more" if rest else ""))


def join_first(values: Iterable[object], limit: int = 3) -> str:
    """Join the first values, and count the others.

    >>> join_first([5, 6, 7, 8, 9])
    '5, 6, 7 and 2 more'
    """
    names = [str(value) for value in values]
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")
