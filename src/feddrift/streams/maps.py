"""Concept maps: changes of the rows of a cell, such as ``swap(1,2)`` or ``negate turn(90)``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from feddrift import rng
from feddrift.errors import ConfigError, unknown_name_error
from feddrift.streams.bases import Base, Values

Labels = npt.NDArray[np.int64]
CORRUPTIONS = ("shot", "blur", "brightness", "stripes")
PHOTONS_PER_PIXEL = (60, 25, 12, 5, 3)  # of full brightness, for severity 1 to 5
MAP_FORMS = {
    "keep": "leaves rows as they are",
    "swap(a,b)": "exchanges the labels of classes a and b",
    "reverse": "y -> k - 1 - y, of k classes",
    "add(j)": "y -> (y + j) mod k, of k classes",
    "noise(p)": "replaces the share p of the labels by random ones",
    "show(a,b,...)": "has rows of these classes only",
    "turn(d)": "turns pictures by 0, 90, 180 or 270 degrees, against the clock",
    "negate": "x -> -x, of pictures from 0 to 1",
    "corrupt(kind,s)": f"{', '.join(CORRUPTIONS)}, of severity s from 1 to 5",
    "plane(theta)": "labels points of sea: 1 if x2 + x3 > theta",
}

_MAP = re.compile(r"([a-z]+)(?:\(([^()]*)\))?")


@dataclass(frozen=True)
class Map:
    """One map with its arguments as text."""

    kind: str
    args: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}({','.join(self.args)})" if self.args else self.kind

    @property
    def numbers(self) -> tuple[float, ...]:
        """The arguments that are numbers."""
        return tuple(float(arg) for arg in self.args if arg not in CORRUPTIONS)


def parse_maps(text: str, base: str, n_classes: int) -> tuple[Map, ...]:
    """Parse the maps of a concept.

    Args:
        text: The maps, in the order in which they are applied.
        base: The name of the base data.
        n_classes: The number of classes of the base data.

    Raises:
        ConfigError: A map is unknown, has illegal arguments, or is not for this base.

    >>> parse_maps("negate turn(90)", "mnist", 10)
    (Map(kind='negate', args=()), Map(kind='turn', args=('90',)))
    """
    words = re.sub(r"\s*([(),])\s*", r"\1", text).replace(")", ") ").split()
    matches = [_MAP.fullmatch(word) for word in words]
    maps = [
        Map(match[1], tuple(match[2].split(",")) if match[2] is not None else ())
        for match in matches
        if match is not None
    ]
    if not maps or None in matches:
        raise ConfigError(f"a concept is one map or several, such as swap(1,2) or negate turn(90), got '{text}'")
    for one in maps:
        _check_map(one, base, n_classes)
    return tuple(maps)


def _check_map(one: Map, base: str, n_classes: int) -> None:
    legal = {form.partition("(")[0]: form for form in MAP_FORMS}
    if one.kind not in legal:
        raise unknown_name_error("map", one.kind, MAP_FORMS)
    kind = one.kind
    if not _has_legal_arguments(one, n_classes):
        meaning = MAP_FORMS[legal[kind]]
        if kind in ("swap", "show"):
            meaning += f"; classes are 0 to {n_classes - 1}"
        raise ConfigError(f"expected {legal[kind]} ({meaning}), got '{one}'")
    if base == "sea" and kind in ("turn", "negate", "corrupt", "show"):
        raise ConfigError(f"{kind} is for pictures, and the base sea has points, got '{one}'")
    if base != "sea" and kind == "plane":
        raise ConfigError(f"plane is for the points of the base sea, and {base} has pictures, got '{one}'")


def _has_legal_arguments(one: Map, n_classes: int) -> bool:
    """Return True if the arguments are legal for this kind of map."""
    words = one.args[:1] if one.kind == "corrupt" else ()
    try:
        numbers = [float(arg) for arg in one.args[len(words) :]]
    except ValueError:
        return False
    are_classes = all(number in range(n_classes) for number in numbers)
    if one.kind in ("swap", "show"):
        return are_classes and len(set(numbers)) == len(numbers) > 0 and (len(numbers) == 2 or one.kind == "show")
    if one.kind in ("keep", "reverse", "negate"):
        return not numbers
    if len(numbers) != 1:
        return False
    legal = {
        "add": are_classes,
        "noise": 0 <= numbers[0] <= 1,
        "turn": numbers[0] in (0, 90, 180, 270),
        "corrupt": bool(words) and words[0] in CORRUPTIONS and numbers[0] in range(1, 6),
        "plane": bool(np.isfinite(numbers[0])),
    }
    return legal[one.kind]


def normalize_maps(maps: tuple[Map, ...]) -> tuple[tuple[str | float, ...], ...]:
    """Return a normal form of the maps of a concept, which is equal for different spellings.

    >>> maps = parse_maps("keep swap(2,1.0)", "mnist", 10)
    >>> normalize_maps(maps) == normalize_maps(parse_maps("turn(0) swap(1,2)", "mnist", 10))
    True
    """
    normal_form = list[tuple[str | float, ...]]()
    for one in maps:
        numbers = sorted(one.numbers) if one.kind in ("swap", "show") else list(one.numbers)
        if one.kind != "keep" and not (one.kind in ("add", "noise", "turn") and numbers == [0]):
            normal_form.append((one.kind, *(arg for arg in one.args if arg in CORRUPTIONS), *numbers))
    return tuple(normal_form)


def find_shown_classes(maps: tuple[Map, ...]) -> tuple[int, ...]:
    """Return the classes that a concept shows, sorted; empty if it shows all."""
    return next((tuple(sorted(map(int, one.numbers))) for one in maps if one.kind == "show"), ())


def apply_maps(
    maps: tuple[Map, ...], x: Values, y: Labels, base: Base, key: Callable[[int], rng.Words]
) -> tuple[Values, Labels]:
    """Apply the maps to rows, one after the other.

    Args:
        maps: The maps.
        x: The inputs of the rows.
        y: The labels of the rows; for points, 1 if the label from the plane is flipped.
        base: The base data of the rows.
        key: Returns the random key of the i-th map.

    Returns:
        The new inputs and labels.
    """
    k = base.n_classes
    for i, one in enumerate(maps):
        numbers = one.numbers
        if one.kind == "swap":
            a, b = map(int, numbers)
            y = np.where(y == a, b, np.where(y == b, a, y))
        elif one.kind == "reverse":
            y = k - 1 - y
        elif one.kind == "add":
            y = (y + int(numbers[0])) % k
        elif one.kind == "noise":
            u = rng.uniform(key(i), (2, len(y)))
            y = np.where(u[0] < numbers[0], (u[1] * k).astype(np.int64), y)
        elif one.kind == "turn":
            x = np.rot90(x, int(numbers[0]) // 90, axes=(1, 2))
        elif one.kind == "negate":
            x = -x
        elif one.kind == "corrupt":
            x = _corrupt_pictures(x, one.args[0], int(numbers[0]), key(i))
        elif one.kind == "plane":  # y: 1 to flip the label
            y = (x[:, 1] + x[:, 2] > np.float32(numbers[0])) ^ y
    return x, y


def _corrupt_pictures(x: Values, kind: str, severity: int, key: rng.Words) -> Values:
    """Corrupt pictures with values from 0 to 1, or from -1 to 0 if they are negated."""
    if kind == "shot":
        x = np.asarray(
            x + np.sqrt(np.abs(x) / PHOTONS_PER_PIXEL[severity - 1]) * rng.normal(key, x.shape), dtype=np.float32
        )
    elif kind == "blur":
        for axis in (1, 2) * severity:  # the mean of three neighbours, `severity` times along each axis
            ends = np.concatenate([x.take([0], axis), x, x.take([-1], axis)], axis)
            neighbours = [ends.take(range(k, k + x.shape[axis]), axis) for k in range(3)]
            x = np.mean(neighbours, axis=0, dtype=np.float32)
    elif kind == "brightness":
        x = x + np.float32(0.1 * severity)
    elif kind == "stripes":
        x = x.copy()
        x[:, :: 7 - severity] = 1
    return np.clip(x, -1, 1)
