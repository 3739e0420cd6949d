"""Labels as they are written, and the classes that they stand for."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from feddrift.errors import DataError
from feddrift.tables.columns import read_number

_WHOLE = re.compile(r"([+-]?[0-9]+)(\.0*)?")  # many programs write 3 as 3.0 in a column with gaps

_log = logging.getLogger("feddrift")


class Label(NamedTuple):
    """A label, what it means, and where it first stands."""

    text: str
    value: int | str
    place: str


def distinct(texts: Iterable[str], place: Callable[[int], str]) -> list[Label]:
    """Every label once, with the place where it first stands."""
    first: dict[str, int] = {}
    for i, text in enumerate(texts):
        first.setdefault(text, i)
    return [Label(text, _value(text, place(i)), place(i)) for text, i in first.items()]


def _value(text: str, place: str) -> int | str:
    whole = _WHOLE.fullmatch(text)
    if whole:
        if len(whole[1]) >= 20:
            raise DataError(f"{place}: a label that is a number has less than 20 digits, got {text}")
        return int(whole[1])
    if "\0" in text:
        raise DataError(f"{place}: a label is text without NUL bytes, got {text!r}")
    if text.lower() in ("", "nan"):
        raise DataError(f"{place}: the label is empty")
    if not math.isnan(read_number(text)):
        raise DataError(f"{place}: labels are whole numbers or words, got {text}")
    return text


def in_order(labels: Sequence[Label]) -> list[int | str]:
    """The classes, sorted; labels are whole numbers or words, not both."""
    check_kind(labels)
    return sorted({label.value for label in labels})


def check_kind(labels: Sequence[Label]) -> None:
    """Refuse numbers among words, and words among numbers."""
    words = [label for label in labels if isinstance(label.value, str)]
    numbers = [label for label in labels if isinstance(label.value, int)]
    if words and numbers:
        odd, kind, other_kind = (
            (words[0], "a word", "whole numbers")
            if len(words) < len(numbers)
            else (numbers[0], "a whole number", "words")
        )
        raise DataError(f"{odd.place}: label {odd.text!r} is {kind}, but other labels are {other_kind}")


def warn_of_odd_classes(where: object, classes: Sequence[int | str]) -> None:
    """Say so where classes differ in upper and lower case only, or there is but one."""
    alike = Counter(str(name).lower() for name in classes)
    if len(alike) < len(classes):
        same = [str(name) for name in classes if alike[str(name).lower()] > 1]
        _log.warning("%s: the labels %s differ in upper and lower case only, and are classes of their own", where, same)
    if len(classes) < 2:
        _log.warning("%s: all labels are the same, there is nothing to learn", where)
