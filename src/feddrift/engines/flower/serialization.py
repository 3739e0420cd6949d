"""How messages cross the network: a body of plain JSON, and parts of models as arrays. Nothing is used unchecked."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from feddrift.averaging import MAX_PARAMETER
from feddrift.engines.flower.model_parts import Body, Part, Shapes
from feddrift.errors import FeddriftError

MAX_BODY = 1 << 25  # characters of JSON
HEADER = 1 << 12  # bytes that an array may need beyond its numbers
SEALED = 1 << 18  # bytes of arrays up to which a message travels in one piece


class Refused(FeddriftError):
    """A message that is not what it should be."""


def pack(body: Mapping[str, Any], parts: Mapping[str, Part] | None = None) -> RecordDict:
    """A message of a body, as JSON, and named parts of models, as arrays."""
    records = {name: ArrayRecord(list(map(_plain, part))) for name, part in (parts or {}).items()}
    return RecordDict({"body": ConfigRecord({"json": json.dumps(body, allow_nan=False)}), **records})


def sealed(content: RecordDict) -> RecordDict:
    """The message with small arrays in its body's record: Flower makes requests, several, for each array and record."""
    text, records = str(content.config_records["body"]["json"]), content.array_records
    index = {name: [len(array.data) for array in record.values()] for name, record in records.items()}
    if not index or sum(map(sum, index.values())) > SEALED:
        return content
    blob = b"".join(array.data for record in records.values() for array in record.values())
    return RecordDict({"body": ConfigRecord({"json": text, "index": json.dumps(index), "blob": blob})})


def opened(content: RecordDict) -> RecordDict:
    """The message as it was before it was sealed, if it was; an empty one, which all refuse, if that cannot be."""
    body = content.config_records.get("body")
    if body is None or "blob" not in body:
        return content
    text, index, blob, records, at = body.get("json"), body.get("index"), body["blob"], dict[str, ArrayRecord](), 0
    try:
        if not isinstance(text, str) or not isinstance(index, str) or not isinstance(blob, bytes):
            raise ValueError("of other types")
        if max(len(index), len(blob)) > SEALED:
            raise ValueError("too large")
        for name, sizes in json.loads(index).items():
            arrays = {}
            for k, n in enumerate(sizes):
                if type(n) is not int or not 0 <= n <= len(blob) - at:
                    raise ValueError(n)
                arrays[str(k)] = Array("", (), "numpy.ndarray", blob[at : at + n])
                at += n
            records[name] = ArrayRecord(arrays)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return RecordDict()
    return RecordDict({**records, "body": ConfigRecord({"json": text})})


def size(content: RecordDict) -> int:
    """The bytes of a message: its body, and the numbers of its parts."""
    bodies = (record.get("json") for record in content.config_records.values())
    arrays = (array for record in content.array_records.values() for array in record.values())
    return sum(len(str(body).encode(errors="replace")) for body in bodies) + sum(len(array.data) for array in arrays)


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
    """The arrays of a part, which must have these shapes and sound numbers; nothing larger is even read."""
    if len(part) != len(shapes):
        raise Refused(f"{what} has {len(part)} arrays, expected {len(shapes)}")
    checked = []
    for array, (shape, dtype) in zip(part, shapes, strict=True):
        most = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize + HEADER
        if len(array.data) > most:
            raise Refused(f"{what} has {len(array.data)} bytes where at most {most} are legal")
        if array.stype != "numpy.ndarray":
            raise Refused(f"{what} is of kind {array.stype!r}, expected numpy.ndarray")
        try:
            value = np.load(io.BytesIO(array.data), allow_pickle=False)
        except Exception:  # whatever NumPy says of what is no array, or one that claims to be endless
            raise Refused(f"{what} is no plain array (pickles are never read)") from None
        if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype != dtype:
            got = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else "an archive"
            raise Refused(f"{what} is {got}, expected {dtype} {shape}")
        if not (np.abs(value) <= MAX_PARAMETER).all():  # NaN is not
            raise Refused(f"{what} has numbers that are not finite, or beyond {MAX_PARAMETER:g}")
        checked.append(value)
    return checked


def whole(number: Any, least: int, most: int) -> int:
    """A whole number in least..most."""
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        raise Refused(f"expected a whole number in {least}..{most}, got {str(number)[:40]}")
    return number


def numbers(values: Any, n: int, most: float, counts: bool) -> list[float]:
    """n numbers in 0..most."""
    if not isinstance(values, list) or len(values) != n:
        raise Refused(f"expected {n} numbers")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise Refused(f"expected a number in 0..{most:g}, got {str(value)[:40]}")
        if counts and value != int(value):
            raise Refused(f"expected a count of mistakes, got {value}")
    return [float(value) for value in values]
