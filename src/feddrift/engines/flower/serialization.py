"""Serialization of messages: a body as plain JSON, and parts of models as arrays. All content is checked first."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from feddrift.averaging import MAX_PARAMETER
from feddrift.engines.flower.model_parts import Body, Part, Shapes
from feddrift.errors import FeddriftError

MAX_BODY_LENGTH = 1 << 25  # characters of JSON
MAX_HEADER_BYTES = 1 << 12  # per array, in addition to its numbers
MAX_INLINE_BYTES = 1 << 18  # bytes of arrays up to which a message is one record


class InvalidMessageError(FeddriftError):
    """A message whose content is not valid."""


def pack_message(body: Mapping[str, Any], parts: Mapping[str, Part] | None = None) -> RecordDict:
    """Build a message from a body, stored as JSON, and named parts of models, stored as arrays."""
    records = {
        name: ArrayRecord([np.array(array, order="C") for array in part]) for name, part in (parts or {}).items()
    }
    return RecordDict({"body": ConfigRecord({"json": json.dumps(body, allow_nan=False)}), **records})


def pack_inline(content: RecordDict) -> RecordDict:
    """Move small arrays into the record of the body, since Flower sends several requests for each array and record."""
    records = content.array_records
    index = {name: [len(array.data) for array in record.values()] for name, record in records.items()}
    if not index or sum(map(sum, index.values())) > MAX_INLINE_BYTES:
        return content
    text = str(content.config_records["body"]["json"])
    blob = b"".join(array.data for record in records.values() for array in record.values())
    return RecordDict({"body": ConfigRecord({"json": text, "index": json.dumps(index), "blob": blob})})


def unpack_inline(content: RecordDict) -> RecordDict:
    """Undo `pack_inline`.

    Returns:
        The message with its arrays in separate records. A message that is not packed inline is returned unchanged.
        An invalid one becomes an empty message, which every reader refuses.
    """
    body = content.config_records.get("body")
    if body is None or "blob" not in body:
        return content
    text = body.get("json")
    index = body.get("index")
    blob = body["blob"]
    records: dict[str, ArrayRecord] = {}
    position = 0
    try:
        if not isinstance(text, str) or not isinstance(index, str) or not isinstance(blob, bytes):
            raise ValueError("invalid types")
        if max(len(index), len(blob)) > MAX_INLINE_BYTES:
            raise ValueError("too large")
        for name, sizes in json.loads(index).items():
            arrays = {}
            for k, n_bytes in enumerate(sizes):
                if type(n_bytes) is not int or not 0 <= n_bytes <= len(blob) - position:
                    raise ValueError(n_bytes)
                arrays[str(k)] = Array("", (), "numpy.ndarray", blob[position : position + n_bytes])
                position += n_bytes
            records[name] = ArrayRecord(arrays)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return RecordDict()
    return RecordDict({**records, "body": ConfigRecord({"json": text})})


def count_bytes(content: RecordDict) -> int:
    """Count the bytes of a message: its body, and the numbers of its parts."""
    bodies = (record.get("json") for record in content.config_records.values())
    arrays = (array for record in content.array_records.values() for array in record.values())
    return sum(len(str(body).encode(errors="replace")) for body in bodies) + sum(len(array.data) for array in arrays)


def unpack_message(content: RecordDict) -> tuple[Body, dict[str, list[Array]]]:
    """Parse the body of a message; its parts are returned unread (see `read_arrays`)."""
    text = content.config_records["body"].get("json") if "body" in content.config_records else None
    if not isinstance(text, str) or len(content.config_records) != 1 or len(content.metric_records):
        raise InvalidMessageError("it does not have the format of feddrift messages")
    if len(text) > MAX_BODY_LENGTH:
        raise InvalidMessageError(f"it has {len(text)} characters, at most {MAX_BODY_LENGTH} are allowed")
    try:
        body = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        raise InvalidMessageError("its body is not JSON of finite numbers") from None
    if not isinstance(body, dict):
        raise InvalidMessageError("its body is not a JSON object")
    return body, {name: list(record.values()) for name, record in content.array_records.items()}


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(name)


def read_arrays(part: Sequence[Array], shapes: Shapes, description: str) -> Part:
    """Read the arrays of a part of a model.

    Args:
        part: The arrays as they were received.
        shapes: The shape and type that each of them must have; an array with more bytes is not read at all.
        description: The part's name in error messages.

    Raises:
        InvalidMessageError: An array has another shape, type or number format, or values out of bounds.
    """
    if len(part) != len(shapes):
        raise InvalidMessageError(f"{description} has {len(part)} arrays, expected {len(shapes)}")
    checked = []
    for array, (shape, dtype) in zip(part, shapes, strict=True):
        max_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize + MAX_HEADER_BYTES
        if len(array.data) > max_bytes:
            raise InvalidMessageError(
                f"{description} has {len(array.data)} bytes where at most {max_bytes} are allowed"
            )
        if array.stype != "numpy.ndarray":
            raise InvalidMessageError(f"{description} is of kind {array.stype!r}, expected numpy.ndarray")
        try:
            value = np.load(io.BytesIO(array.data), allow_pickle=False)
        except Exception:  # NumPy raises errors of many types for invalid data, also MemoryError
            raise InvalidMessageError(f"{description} is not a plain array (pickles are never read)") from None
        if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype != dtype:
            received = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else "an archive"
            raise InvalidMessageError(f"{description} is {received}, expected {dtype} {shape}")
        if not (np.abs(value) <= MAX_PARAMETER).all():  # also false for NaN
            raise InvalidMessageError(f"{description} has numbers that are not finite, or beyond {MAX_PARAMETER:g}")
        checked.append(value)
    return checked


def check_int(value: Any, minimum: int, maximum: int) -> int:
    """Return the value if it is a whole number in minimum..maximum, else raise InvalidMessageError."""
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise InvalidMessageError(f"expected a whole number in {minimum}..{maximum}, got {str(value)[:40]}")
    return value


def check_numbers(values: Any, length: int, maximum: float, whole: bool) -> list[float]:
    """Check a list of numbers.

    Args:
        values: The list as it was received.
        length: The number of values that it must have.
        maximum: The largest value allowed; the smallest is 0.
        whole: True if the values are counts.

    Raises:
        InvalidMessageError: It is not such a list.
    """
    if not isinstance(values, list) or len(values) != length:
        raise InvalidMessageError(f"expected {length} numbers")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= maximum:
            raise InvalidMessageError(f"expected a number in 0..{maximum:g}, got {str(value)[:40]}")
        if whole and value != int(value):
            raise InvalidMessageError(f"expected a count of mistakes, got {value}")
    return [float(value) for value in values]
