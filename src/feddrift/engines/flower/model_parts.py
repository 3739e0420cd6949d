"""Parts of models, named by a digest of their content: a trunk, a head, and perhaps a mask for each model.

A part that a client has already is not sent to it again.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift import rng
from feddrift._internal.device_arrays import SHARED_ROWS, StackView
from feddrift.trees import join_trunk_and_head, mark_trunk, split_trunk_and_head, tree_leaves
from feddrift.types import Models, Net, Params

Part = list[npt.NDArray[Any]]
Body = dict[str, Any]
Shapes = Sequence[tuple[tuple[int, ...], np.dtype[Any]]]

PRIVATE_PREFIX = "private-"  # of the names of parts that never leave their client


def list_shapes(part: Iterable[Any]) -> Shapes:
    """List the shape and type of each array, as `serialization.read_arrays` expects them."""
    return [(tuple(np.shape(array)), np.asarray(array).dtype) for array in part]


def compute_digest(part: Part) -> str:
    """Compute the name of a part: equal numbers have equal names."""
    checksum = hashlib.sha256()
    for array in part:
        checksum.update(f"{array.dtype.str} {array.shape};".encode())
        checksum.update(np.ascontiguousarray(array).tobytes())
    return checksum.hexdigest()[:32]


def init_template(net: Net) -> Params:
    """Return initial parameters of this net; callers use their shapes only."""
    return net.init(rng.derive_key(0, "init", 0))


def describe_models(net: Net, models: Models) -> tuple[list[Body], dict[str, Part]]:
    """Describe models for a message.

    Returns:
        For each model its id, its family and the names of its parts; and all parts by name. Parts of private models
        have a name only: the model's owner has their arrays.
    """
    specs: list[Body] = []
    parts: dict[str, Part] = {}
    names: dict[tuple[Any, ...], str] = {}  # by the storage of a part that several models share
    arrays = dict(
        zip(("trunk", "head"), split_trunk_and_head(models.params, mark_trunk(net, models.params)), strict=True)
    )
    for m in range(len(models)):
        spec: Body = {"id": models.ids[m], "family": models.family[m]}
        for kind, row in (("trunk", int(models.trunk_index[m])), ("head", m)):
            if not arrays[kind]:
                spec[kind] = ""
            elif models.held[m]:
                spec[kind] = name_private_part(models.ids[m], models.held[m], kind)
            else:
                storage = kind, *(_identify_storage(array, row) for array in arrays[kind])
                if storage not in names:
                    part = [np.array(array[row], order="C") for array in arrays[kind]]
                    names[storage] = compute_digest(part)
                    parts[names[storage]] = part
                spec[kind] = names[storage]
        mask = [] if models.mask is None else [np.array(models.mask[m], dtype=np.float32, order="C")]
        spec["mask"] = compute_digest(mask) if mask else ""
        parts |= {spec["mask"]: mask} if mask else {}
        specs.append(spec)
    return specs, parts


def _identify_storage(array: Any, row: int) -> tuple[int, int]:
    """Identify the storage of a row: the same for rows that are known to be equal."""
    if isinstance(array, StackView) and array.storage is SHARED_ROWS:
        return id(array.stack), int(array.rows[row])
    return id(array), row


def name_private_part(model_id: int, label: int, kind: str) -> str:
    """Return the client's name of a part of its private model in the version of this label."""
    return f"{PRIVATE_PREFIX}{model_id}-{label}-{kind}"


def make_version_label(tau: int, round: int) -> int:
    """Return the version label of a private model after this round of a time step; labels increase with time."""
    return tau * 10**7 + round + 1


def find_old_private_parts(names: Iterable[str], keep: int = 3) -> set[str]:
    """Find the parts of old versions of private models: all but the newest versions of each model.

    Three versions are needed: the server may restart from the checkpoint before its last, and a reply may be under way.

    >>> sorted(find_old_private_parts([f"private-3-{label}-head" for label in (9, 10, 11, 12)] + ["0123abcd"]))
    ['private-3-9-head']
    """
    versions: dict[int, dict[int, list[str]]] = {}
    for name, model_id, label in _parse_private_names(names):
        versions.setdefault(model_id, {}).setdefault(label, []).append(name)
    return {name for labels in versions.values() for label in sorted(labels)[:-keep] for name in labels[label]}


def find_later_private_parts(names: Iterable[str], ids: set[int], label: int) -> set[str]:
    """Find the parts of these private models with later versions than this label.

    There are some if the server restarted from an older checkpoint.
    """
    return {name for name, model_id, version in _parse_private_names(names) if model_id in ids and version > label}


def _parse_private_names(names: Iterable[str]) -> Iterator[tuple[str, int, int]]:
    """Yield the names that belong to private models, with the model's id and the version."""
    for name in names:
        if match := re.fullmatch(PRIVATE_PREFIX + "([0-9]+)-([0-9]+)-(trunk|head)", name):
            yield name, int(match[1]), int(match[2])


def describe_net(net: Net) -> str:
    """Describe a net by the shapes of its arrays, as a setting that clients pin."""
    shapes = [tuple(np.shape(leaf)) for leaf in tree_leaves(init_template(net))]
    return f"{sum(math.prod(shape) for shape in shapes)} weights in arrays {', '.join(map(str, shapes))}"


def collect_part_names(specs: Iterable[Body]) -> set[str]:
    """Collect the names of the parts of these models."""
    return {spec[kind] for spec in specs for kind in ("trunk", "head", "mask")} - {""}


def collect_part_shapes(net: Net, specs: Iterable[Body], features: Sequence[int]) -> dict[str, Shapes]:
    """Collect the shapes of all parts of these models, by name."""
    params = init_template(net)
    trunk, head = split_trunk_and_head(params, mark_trunk(net, params))
    shapes_by_kind = {
        "trunk": list_shapes(trunk),
        "head": list_shapes(head),
        "mask": [(tuple(features), np.dtype(np.float32))],
    }
    return {spec[kind]: shapes for spec in specs for kind, shapes in shapes_by_kind.items() if spec[kind]}


def assemble_models(net: Net, specs: Sequence[Body], get_part: Callable[[str], Part]) -> Models:
    """Build the models that `describe_models` described, from parts by name."""
    trunk = mark_trunk(net, init_template(net))
    family = tuple(spec["family"] for spec in specs)
    founders = [specs[family.index(name)] for name in dict.fromkeys(family)]
    stacked = {
        kind: [np.stack(rows) for rows in zip(*(get_part(s[kind]) if s[kind] else [] for s in sources), strict=True)]
        for kind, sources in (("trunk", founders), ("head", specs))
    }
    mask = np.stack([get_part(spec["mask"])[0] for spec in specs]) if specs[0]["mask"] else None
    assert len(tree_leaves(trunk)) == len(stacked["trunk"]) + len(stacked["head"])
    params = join_trunk_and_head(stacked["trunk"], stacked["head"], trunk)
    return Models(params, tuple(spec["id"] for spec in specs), mask, family, trunk)
