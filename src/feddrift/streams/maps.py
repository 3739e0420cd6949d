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
    "keep": "does not change rows",
    "swap(a,b)": "exchanges the labels of classes a and b",
    "reverse": "y -> k - 1 - y, of k classes",
    "add(j)": "y -> (y + j) mod k, of k classes",
    "noise(p)": "replaces the share p of the labels by random ones",
    "show(a,b,...)": "draws only rows of these classes",
    "turn(d)": "turns pictures by 0, 90, 180 or 270 degrees, counterclockwise",
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
    for map_ in maps:
        _check_map(map_, base, n_classes)
    return tuple(maps)


def _check_map(map_: Map, base: str, n_classes: int) -> None:
    legal = {form.partition("(")[0]: form for form in MAP_FORMS}
    if map_.kind not in legal:
        raise unknown_name_error("map", map_.kind, MAP_FORMS)
    kind = map_.kind
    if not _has_legal_arguments(map_, n_classes):
        meaning = MAP_FORMS[legal[kind]]
        if kind in ("swap", "show"):
            meaning += f"; classes are 0 to {n_classes - 1}"
        raise ConfigError(f"expected {legal[kind]} ({meaning}), got '{map_}'")
    if base == "sea" and kind in ("turn", "negate", "corrupt", "show"):
        raise ConfigError(f"{kind} is for pictures, and the base sea has points, got '{map_}'")
    if base != "sea" and kind == "plane":
        raise ConfigError(f"plane is for the points of the base sea, and {base} has pictures, got '{map_}'")


def _has_legal_arguments(map_: Map, n_classes: int) -> bool:
    """Return True if the arguments are legal for this kind of map."""
    words = map_.args[:1] if map_.kind == "corrupt" else ()
    try:
        numbers = [float(arg) for arg in map_.args[len(words) :]]
    except ValueError:
        return False
    are_classes = all(number in range(n_classes) for number in numbers)
    if map_.kind in ("swap", "show"):
        return are_classes and len(set(numbers)) == len(numbers) > 0 and (len(numbers) == 2 or map_.kind == "show")
    if map_.kind in ("keep", "reverse", "negate"):
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
    return legal[map_.kind]


def normalize_maps(maps: tuple[Map, ...]) -> tuple[tuple[str | float, ...], ...]:
    """Return a normal form of the maps of a concept, which is equal for maps with the same effect.

    >>> maps = parse_maps("keep swap(2,1.0)", "mnist", 10)
    >>> normalize_maps(maps) == normalize_maps(parse_maps("turn(0) swap(1,2)", "mnist", 10))
    True
    """
    normal_form = list[tuple[str | float, ...]]()
    for map_ in maps:
        numbers = sorted(map_.numbers) if map_.kind in ("swap", "show") else list(map_.numbers)
        if map_.kind != "keep" and not (map_.kind in ("add", "noise", "turn") and numbers == [0]):
            normal_form.append((map_.kind, *(arg for arg in map_.args if arg in CORRUPTIONS), *numbers))
    return tuple(normal_form)


def find_shown_classes(maps: tuple[Map, ...]) -> tuple[int, ...]:
    """Return the classes that a concept shows, sorted; empty if it shows all."""
    return next((tuple(sorted(map(int, map_.numbers))) for map_ in maps if map_.kind == "show"), ())


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
    for i, map_ in enumerate(maps):
        numbers = map_.numbers
        if map_.kind == "swap":
            a, b = map(int, numbers)
            y = np.where(y == a, b, np.where(y == b, a, y))
        elif map_.kind == "reverse":
            y = k - 1 - y
        elif map_.kind == "add":
            y = (y + int(numbers[0])) % k
        elif map_.kind == "noise":
            u = rng.uniform(key(i), (2, len(y)))
            y = np.where(u[0] < numbers[0], (u[1] * k).astype(np.int64), y)
        elif map_.kind == "turn":
            x = np.rot90(x, int(numbers[0]) // 90, axes=(1, 2))
        elif map_.kind == "negate":
            x = -x
        elif map_.kind == "corrupt":
            x = _corrupt_pictures(x, map_.args[0], int(numbers[0]), key(i))
        elif map_.kind == "plane":  # y: 1 to flip the label
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
