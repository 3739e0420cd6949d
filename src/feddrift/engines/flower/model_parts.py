"""Models in parts, a trunk and a head each, named by a digest of their content: who has one is not sent it again."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift import rng
from feddrift._internal.device_arrays import SHARED_ROWS, Resident
from feddrift.trees import leaves, split, trunk_of, unsplit
from feddrift.types import Models, Net, Params

Part = list[npt.NDArray[Any]]
Body = dict[str, Any]
Shapes = Sequence[tuple[tuple[int, ...], np.dtype[Any]]]

PRIVATE = "private-"  # how names of parts begin that never leave their client


def shapes(part: Iterable[Any]) -> Shapes:
    """What `messages.arrays` must find where a part like this one is expected."""
    return [(tuple(np.shape(array)), np.asarray(array).dtype) for array in part]


def digest(part: Part) -> str:
    """A part's name: the same for the same numbers."""
    checksum = hashlib.sha256()
    for array in part:
        checksum.update(f"{array.dtype.str} {array.shape};".encode())
        checksum.update(np.ascontiguousarray(array).tobytes())
    return checksum.hexdigest()[:32]


def like(net: Net) -> Params:
    """Parameters of this net, for their shapes."""
    return net.init(rng.derive(0, "init", 0))


def described(net: Net, models: Models) -> tuple[list[Body], dict[str, Part]]:
    """Each model as the names of its parts, and all parts by name but those that only the model's owner has."""
    specs: list[Body] = []
    parts: dict[str, Part] = {}
    names: dict[tuple[Any, ...], str] = {}  # of parts that several models have, by where they are stored
    arrays = dict(zip(("trunk", "head"), split(models.params, trunk_of(net, models.params)), strict=True))
    for m in range(len(models)):
        spec: Body = {"id": models.ids[m], "family": models.family[m]}
        for kind, row in (("trunk", int(models.trunk_index[m])), ("head", m)):
            if not arrays[kind]:
                spec[kind] = ""
            elif models.held[m]:
                spec[kind] = private_name(models.ids[m], models.held[m], kind)
            else:
                stored = kind, *(_storage(array, row) for array in arrays[kind])
                if stored not in names:
                    part = [np.array(array[row], order="C") for array in arrays[kind]]
                    names[stored] = digest(part)
                    parts[names[stored]] = part
                spec[kind] = names[stored]
        mask = [] if models.mask is None else [np.array(models.mask[m], dtype=np.float32, order="C")]
        spec["mask"] = digest(mask) if mask else ""
        parts |= {spec["mask"]: mask} if mask else {}
        specs.append(spec)
    return specs, parts


def _storage(array: Any, row: int) -> tuple[int, int]:
    """Where a row is stored: the same for rows that are known to be equal."""
    if isinstance(array, Resident) and array.place is SHARED_ROWS:
        return id(array.stack), int(array.rows[row])
    return id(array), row


def private_name(model_id: int, label: int, kind: str) -> str:
    """What a client calls a part of its private model in the version of this label."""
    return f"{PRIVATE}{model_id}-{label}-{kind}"


def label_of(tau: int, round: int) -> int:
    """The name of what a private model was after this round of a time step; later ones are larger."""
    return tau * 10**7 + round + 1


def older_private(names: Iterable[str], keep: int = 3) -> set[str]:
    """Of these parts of private models all but those of each model's newest versions.

    A server may go back to the checkpoint before its last, and an answer may be under way: these are three.

    >>> sorted(older_private([f"private-3-{label}-head" for label in (9, 10, 11, 12)] + ["0123abcd"]))
    ['private-3-9-head']
    """
    versions: dict[int, dict[int, list[str]]] = {}
    for name, model_id, label in _private(names):
        versions.setdefault(model_id, {}).setdefault(label, []).append(name)
    return {name for labels in versions.values() for label in sorted(labels)[:-keep] for name in labels[label]}


def later_private(names: Iterable[str], ids: set[int], label: int) -> set[str]:
    """The parts of these private models that are of a later version: of a course of events that was given up."""
    return {name for name, model_id, version in _private(names) if model_id in ids and version > label}


def _private(names: Iterable[str]) -> Iterator[tuple[str, int, int]]:
    """Of names that are those of private models also the model and the version."""
    for name in names:
        if match := re.fullmatch(PRIVATE + "([0-9]+)-([0-9]+)-(trunk|head)", name):
            yield name, int(match[1]), int(match[2])


def named(specs: Iterable[Body]) -> set[str]:
    """The parts that these models are made of."""
    return {spec[kind] for spec in specs for kind in ("trunk", "head", "mask")} - {""}


def expected(net: Net, specs: Iterable[Body], features: Sequence[int]) -> dict[str, Shapes]:
    """The shapes of every part that these models are made of."""
    params = like(net)
    trunk, head = split(params, trunk_of(net, params))
    of_kind = {
        "trunk": shapes(trunk),
        "head": shapes(head),
        "mask": [(tuple(features), np.dtype(np.float32))],
    }
    return {spec[kind]: part_shapes for spec in specs for kind, part_shapes in of_kind.items() if spec[kind]}


def assembled(net: Net, specs: Sequence[Body], part: Callable[[str], Part]) -> Models:
    """The models whose description this is."""
    shape = trunk_of(net, like(net))
    ids, family = tuple(spec["id"] for spec in specs), tuple(spec["family"] for spec in specs)
    founders = [specs[family.index(name)] for name in dict.fromkeys(family)]
    stacked = {
        kind: [np.stack(rows) for rows in zip(*(part(s[kind]) if s[kind] else [] for s in sources), strict=True)]
        for kind, sources in (("trunk", founders), ("head", specs))
    }
    mask = np.stack([part(spec["mask"])[0] for spec in specs]) if specs[0]["mask"] else None
    assert len(leaves(shape)) == len(stacked["trunk"]) + len(stacked["head"])
    return Models(unsplit(stacked["trunk"], stacked["head"], shape), ids, mask, family, shape)
