"""What crosses the network: a body of plain JSON, and parts of models as arrays. Nothing is used unchecked.

A model travels as two parts, its trunk and its head, each called by a digest of its content: who has a part of that
name already is not sent it again.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from feddrift import __version__, rng
from feddrift.errors import FeddriftError
from feddrift.models import leaves, one, split, trunk_of, unsplit
from feddrift.types import Models, Net, Params

PROTOCOL = 1
VERSION = f"{__version__}/{PROTOCOL}"
KINDS = {
    "hello": "query.hello", "evaluate": "evaluate.models", "train": "train.round", "tournament": "train.tournament",
}  # fmt: skip
MAX_BODY = 1 << 25  # characters of JSON
HEADER = 1 << 12  # bytes that an array may need beyond its numbers

Part = list[npt.NDArray[Any]]
Body = dict[str, Any]
Shapes = Sequence[tuple[tuple[int, ...], np.dtype[Any]]]


class Refused(FeddriftError):
    """A message that is not what it should be."""


def pack(body: Mapping[str, Any], parts: Mapping[str, Part] | None = None) -> RecordDict:
    """A message's content."""
    records = {name: ArrayRecord(list(map(_plain, part))) for name, part in (parts or {}).items()}
    return RecordDict({"body": ConfigRecord({"json": json.dumps(body, allow_nan=False)}), **records})


def _plain(array: Any) -> npt.NDArray[Any]:
    return np.array(array, order="C")


def unpack(content: RecordDict) -> tuple[Body, dict[str, list[Array]]]:
    """The body, and the parts as they came: `arrays` reads one."""
    text = content.config_records["body"].get("json") if "body" in content.config_records else None
    if not isinstance(text, str) or len(content.config_records) != 1 or len(content.metric_records):
        raise Refused("it is not of the form that this program writes")
    if len(text) > MAX_BODY:
        raise Refused(f"it has {len(text)} characters, at most {MAX_BODY} are legal")
    try:
        body = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise Refused("its body is no JSON of finite numbers") from None
    if not isinstance(body, dict):
        raise Refused("its body is no JSON object")
    return body, {name: list(record.values()) for name, record in content.array_records.items()}


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def arrays(part: Sequence[Array], shapes: Shapes, what: str) -> Part:
    """The arrays of a part, which must have these shapes and be finite; nothing larger is even read."""
    if len(part) != len(shapes):
        raise Refused(f"{what} has {len(part)} arrays, expected {len(shapes)}")
    found = []
    for array, (shape, dtype) in zip(part, shapes, strict=True):
        most = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize + HEADER
        if len(array.data) > most:
            raise Refused(f"{what} has {len(array.data)} bytes where at most {most} are legal")
        if array.stype != "numpy.ndarray":
            raise Refused(f"{what} is of kind {array.stype!r}, expected numpy.ndarray")
        try:
            value = np.load(io.BytesIO(array.data), allow_pickle=False)
        except (ValueError, EOFError, OSError, KeyError, TypeError, SyntaxError):
            raise Refused(f"{what} is no plain array (pickles are never read)") from None
        if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype != dtype:
            got = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else "an archive"
            raise Refused(f"{what} is {got}, expected {dtype} {shape}")
        if not np.isfinite(value).all():
            raise Refused(f"{what} has numbers that are not finite")
        found.append(value)
    return found


def shapes(part: Iterable[Any]) -> Shapes:
    """What `arrays` must find where a part like this one is expected."""
    return [(tuple(np.shape(array)), np.asarray(array).dtype) for array in part]


def digest(part: Part) -> str:
    """A part's name: the same for the same numbers."""
    found = hashlib.sha256()
    for array in part:
        found.update(f"{array.dtype.str} {array.shape};".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:32]


def like(net: Net) -> Params:
    """Parameters of this net, for their shapes."""
    return net.init(rng.derive(0, "init", 0))


def described(net: Net, models: Models) -> tuple[list[Body], dict[str, Part]]:
    """Each model as the names of its parts, and all parts by name."""
    specs: list[Body] = []
    parts: dict[str, Part] = {}
    for m in range(len(models)):
        params = one(models, m)
        trunk, head = split(params, trunk_of(net, params))
        mask = [] if models.mask is None else [np.asarray(models.mask[m], dtype=np.float32)]
        spec: Body = {"id": models.ids[m], "family": models.family[m]}
        for kind, part in (("trunk", trunk), ("head", head), ("mask", mask)):
            part = [_plain(array) for array in part]
            spec[kind] = digest(part) if part else ""
            if part:
                parts[spec[kind]] = part
        specs.append(spec)
    return specs, parts


def named(specs: Iterable[Body]) -> set[str]:
    """The parts that these models are made of."""
    return {spec[kind] for spec in specs for kind in ("trunk", "head", "mask")} - {""}


def expected(net: Net, specs: Iterable[Body], features: Sequence[int]) -> dict[str, Shapes]:
    """The shapes of every part that these models are made of."""
    params = like(net)
    trunk, head = split(params, trunk_of(net, params))
    of_kind = {
        "trunk": shapes(trunk), "head": shapes(head), "mask": [(tuple(features), np.dtype(np.float32))],
    }  # fmt: skip
    return {spec[kind]: found for spec in specs for kind, found in of_kind.items() if spec[kind]}


def assembled(net: Net, specs: Sequence[Body], part: Callable[[str], Part]) -> Models:
    """The models whose description this is."""
    shape = trunk_of(net, like(net))
    ids, family = tuple(spec["id"] for spec in specs), tuple(spec["family"] for spec in specs)
    founders = [specs[family.index(name)] for name in dict.fromkeys(family)]
    stacked = {
        kind: [np.stack(rows) for rows in zip(*(part(s[kind]) if s[kind] else [] for s in some), strict=True)]
        for kind, some in (("trunk", founders), ("head", specs))
    }
    mask = np.stack([part(spec["mask"])[0] for spec in specs]) if specs[0]["mask"] else None
    assert len(leaves(shape)) == len(stacked["trunk"]) + len(stacked["head"])
    return Models(unsplit(stacked["trunk"], stacked["head"], shape), ids, mask, family, shape)
