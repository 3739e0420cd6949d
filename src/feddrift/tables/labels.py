"""Labels as they are written, and the classes that they stand for."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import median_low
from typing import NamedTuple

from feddrift.errors import DataError
from feddrift.tables.columns import read_number

_WHOLE = re.compile(r"([+-]?[0-9]+)(\.0*)?")  # many programs write 3 as 3.0 in a column with gaps

MANY = 50  # classes; more are perhaps a measurement

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
        raise DataError(f"{place}: labels are whole numbers or words, got {text}: of a measurement, make classes")
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
    """Say so where classes differ in upper and lower case only, or may be no classes."""
    alike = Counter(str(name).lower() for name in classes)
    if len(alike) < len(classes):
        same = [str(name) for name in classes if alike[str(name).lower()] > 1]
        _log.warning("%s: the labels %s differ in upper and lower case only, and are classes of their own", where, same)
    if len(classes) > MANY and isinstance(classes[0], int):
        _log.warning("%s: %d different numbers are a class each; of a measurement, make classes", where, len(classes))


def check_several(classes: Sequence[int | str], where: str = "") -> None:
    """Refuse a single class."""
    if len(classes) == 1:
        raise DataError(
            f"{where}every row has the label {str(classes[0])!r}, and at least 2 classes are needed to learn from"
        )


def check_not_measured(column: str, texts: Sequence[str]) -> None:
    """Refuse what is measured and not a class: many numbers, of which some are negative or no whole ones, or which
    hardly repeat."""
    numbers = sorted({read_number(text) for text in set(texts)})
    if len(numbers) <= MANY or any(map(math.isnan, numbers)):
        return
    if numbers[0] < 0 or any(number % 1 for number in numbers) or 2 * len(numbers) > len(texts):
        many = f"{len(numbers)} different numbers from {numbers[0]:g} to {numbers[-1]:g}"
        cure = f"make classes of it, such as {column} > {median_low(map(read_number, texts)):g}"
        raise DataError(f"which has {many}, is a measurement, and labels are classes: {cure}")
