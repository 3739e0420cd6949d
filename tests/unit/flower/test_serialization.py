"""Messages with small models are one piece; malformed messages are refused in one sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from flwr.app import ConfigRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from hypothesis import given
from hypothesis import strategies as st

from feddrift.engines.flower import serialization
from feddrift.engines.flower.messages import VERSION

HEAD = [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(3, dtype=np.float32)]
SHAPES = [(array.shape, array.dtype) for array in HEAD]


def message(version: str = VERSION, size: int = 2) -> RecordDict:
    return serialization.pack_message(
        {"version": version, "x": 1}, {"head-0": HEAD, "head-1": [np.zeros(size, dtype=np.float32)]}
    )


def test_a_sealed_message_is_three_objects_and_opens_to_what_it_was() -> None:
    content = message()
    sealed = serialization.pack_inline(content)
    assert len(get_all_nested_objects(content)) == 10 and len(get_all_nested_objects(sealed)) == 2  # and the message
    (body, raw), (other, other_raw) = (
        serialization.unpack_message(content),
        serialization.unpack_message(serialization.unpack_inline(sealed)),
    )
    assert body == other and list(raw) == list(other_raw)
    for ours, theirs in zip(serialization.read_arrays(raw["head-0"], SHAPES, "it"), HEAD, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(serialization.read_arrays(other_raw["head-0"], SHAPES, "it"), HEAD, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert serialization.count_bytes(content) == serialization.count_bytes(serialization.unpack_inline(sealed))


@pytest.mark.parametrize(
    "content", [message(size=serialization.MAX_INLINE_BYTES), serialization.pack_message({"version": VERSION})]
)
def test_large_messages_and_those_without_arrays_are_unchanged(content: RecordDict) -> None:
    assert serialization.pack_inline(content) is content and serialization.unpack_inline(content) is content


BAD: dict[str, dict[str, Any]] = {
    "no index": {"blob": b"x"},
    "an index that is no JSON": {"blob": b"x", "index": "{"},
    "an index of another kind": {"blob": b"x", "index": "[1]"},
    "sizes of another kind": {"blob": b"x", "index": '{"head-0": 1}'},
    "true": {"blob": b"x", "index": '{"head-0": [true]}'},
    "less than nothing": {"blob": b"x", "index": '{"head-0": [-1]}'},
    "more than there is": {"blob": b"x", "index": '{"head-0": [1, 1]}'},
    "text": {"blob": "x", "index": '{"head-0": [1]}'},
    "too many": {"blob": b"", "index": '{"head-0": [' + "0," * serialization.MAX_INLINE_BYTES + "0]}"},
    "too much": {"blob": b"x" * (serialization.MAX_INLINE_BYTES + 1), "index": "{}"},
}


@pytest.mark.parametrize("what", BAD)
def test_messages_that_cannot_be_opened_are_refused(what: str) -> None:
    content = RecordDict({"body": ConfigRecord({"json": "{}"} | BAD[what])})
    with pytest.raises(serialization.InvalidMessageError, match="does not have the format"):
        serialization.unpack_message(serialization.unpack_inline(content))


@given(index=st.text(max_size=40), blob=st.binary(max_size=40))
def test_nothing_but_a_refusal_comes_of_anything(index: str, blob: bytes) -> None:
    opened = serialization.unpack_inline(
        RecordDict({"body": ConfigRecord({"json": "{}", "index": index, "blob": blob})})
    )
    try:
        _, raw = serialization.unpack_message(opened)
    except serialization.InvalidMessageError:
        return
    assert sum(len(array.data) for part in raw.values() for array in part) <= len(blob)
