"""All that is wrong with a table, told at once: whoever mends a file should not learn of it one line at a time."""

from __future__ import annotations

from collections.abc import Iterable

from feddrift.errors import LONGEST, DataError, one_line

MOST = 10  # problems that are told


class Problems:
    """Sentences about one table, each with what was expected, what was got, and where it helps the cure."""

    def __init__(self, table: str) -> None:
        self.table = table
        self.sentences: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.sentences)

    def add(self, sentence: str) -> None:
        """One more."""
        self.sentences.append(one_line(sentence))

    def stop(self) -> None:
        """Refuse the table if anything is wrong with it, in one line that is not longer than others may be."""
        if not self.sentences:
            return
        if len(self.sentences) == 1:
            raise DataError(f"{self.table}: {self.sentences[0]}")
        line = f"{self.table} has {len(self.sentences)} problems"
        n_told = 0
        for number, sentence in enumerate(self.sentences[:MOST], start=1):
            if n_told and len(line) + len(sentence) > LONGEST - 30:
                break
            line += f"{';' if n_told else ':'} ({number}) {sentence}"
            n_told = number
        rest = len(self.sentences) - n_told
        raise DataError(line + (f"; and {rest} more" if rest else ""))


def listed(values: Iterable[object], most: int = 3) -> str:
    """The first few, and how many more there are.

    >>> listed([5, 6, 7, 8, 9])
    '5, 6, 7 and 2 more'
    """
    names = [str(value) for value in values]
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
