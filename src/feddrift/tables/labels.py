"""Labels of examples, and their classes."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from feddrift.errors import DataError
from feddrift.tables.columns import parse_number

_WHOLE = re.compile(r"([+-]?[0-9]+)(\.0*)?")  # many programs write 3 as 3.0 in a column with gaps

MAX_USUAL_CLASSES = 50  # more numbers are perhaps a measurement

_log = logging.getLogger("feddrift")


class Label(NamedTuple):
    """A label as text, its class, and its first position for messages."""

    text: str
    value: int | str
    place: str


def list_distinct_labels(texts: Iterable[str], place: Callable[[int], str]) -> list[Label]:
    """Return each label once, with its first position.

    Args:
        texts: The labels of all rows.
        place: Names the position of a row, for messages.

    Raises:
        DataError: A text is not a label.
    """
    first: dict[str, int] = {}
    for i, text in enumerate(texts):
        first.setdefault(text, i)
    return [Label(text, _parse_label(text, place(i)), place(i)) for text, i in first.items()]


def _parse_label(text: str, place: str) -> int | str:
    whole = _WHOLE.fullmatch(text)
    if whole:
        if len(whole[1]) >= 20:
            raise DataError(f"{place}: a label that is a number has less than 20 digits, got {text}")
        return int(whole[1])
    if "\0" in text:
        raise DataError(f"{place}: a label is text without NUL bytes, got {text!r}")
    if text.lower() in ("", "nan"):
        raise DataError(f"{place}: the label is empty")
    if not math.isnan(parse_number(text)):
        raise DataError(
            f"{place}: labels are whole numbers or words, got {text}: make classes of a measurement, such as --label "
            f'"COLUMN > {text}"'
        )
    return text


def sort_classes(labels: Sequence[Label]) -> list[int | str]:
    """Return the classes in order; labels must be whole numbers or words, not both."""
    check_label_kinds(labels)
    return sorted({label.value for label in labels})


def check_label_kinds(labels: Sequence[Label]) -> None:
    """Raise DataError if some labels are numbers and others are words."""
    words = [label for label in labels if isinstance(label.value, str)]
    numbers = [label for label in labels if isinstance(label.value, int)]
    if words and numbers:
        words_are_rare = len(words) < len(numbers)
        rare = words[0] if words_are_rare else numbers[0]
        kinds = "a word, but other labels are whole numbers", "a whole number, but other labels are words"
        raise DataError(f"{rare.place}: label {rare.text!r} is {kinds[0 if words_are_rare else 1]}")


def list_class_warnings(classes: Sequence[int | str]) -> list[str]:
    """Return a sentence if classes differ only in case, and one if they are many numbers, perhaps a measurement."""
    sentences = []
    alike = Counter(str(name).lower() for name in classes)
    if len(alike) < len(classes):
        same = [str(name) for name in classes if alike[str(name).lower()] > 1]
        sentences.append(f"the labels {same} differ in upper and lower case only, each is its own class")
    if len(classes) > MAX_USUAL_CLASSES and isinstance(classes[0], int):
        sentences.append(f"{len(classes)} different numbers are a class each; divide a measurement into classes")
    return sentences


def check_class_count(classes: Sequence[int | str], prefix: str = "") -> None:
    """Raise DataError, with this prefix, if there is only one class."""
    if len(classes) == 1:
        raise DataError(
            f"{prefix}every row has the label {str(classes[0])!r}, and at least 2 classes are needed to learn from"
        )


def check_not_measurement(column: str, counts: Mapping[str, int]) -> None:
    """Raise DataError if labels look like a measurement: many numbers, negative, fractional or hardly repeated.

    Args:
        column: The name of the label column.
        counts: The number of rows of each label.
    """
    n_rows = sum(counts.values())
    counted = sorted((parse_number(text), n) for text, n in counts.items())
    numbers = sorted({number for number, _ in counted})
    if len(numbers) <= MAX_USUAL_CLASSES or any(map(math.isnan, numbers)):
        return
    if numbers[0] < 0 or any(number % 1 for number in numbers) or 2 * len(numbers) > n_rows:
        span = f"{len(numbers)} different numbers from {numbers[0]:g} to {numbers[-1]:g}"
        middle = int(np.searchsorted(np.cumsum([n for _, n in counted]), (n_rows - 1) // 2, side="right"))
        hint = suggest_label_expression(column, counted[middle][0])
        raise DataError(f"which has {span}, is a measurement, and labels are classes: {hint}")


def suggest_label_expression(column: str, limit: float) -> str:
    """Return advice to make classes of a measurement.

    >>> suggest_label_expression("delay", 15)
    'make classes of it, such as --label "delay > 15" (in Python label="delay > 15")'
    """
    name = column if re.fullmatch(r"[\w.-]+", column) else f"'{column}'"
    return f'make classes of it, such as --label "{name} > {limit:g}" (in Python label="{name} > {limit:g}")'
