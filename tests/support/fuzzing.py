"""Strategies for invalid input, and the check of its refusal.

A few examples each by default; FEDDRIFT_FUZZ=long tries many times as many.
"""

from __future__ import annotations

import datetime
import io
import os
import zipfile
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from feddrift.data import Stream
from feddrift.errors import MAX_MESSAGE_LENGTH, FeddriftError

LONG_SEARCH = os.environ.get("FEDDRIFT_FUZZ") == "long"
T = TypeVar("T")


def limit_examples(n: int, long: int = 20) -> settings:
    """Return settings with n examples, and `long` times as many in a long run."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=n * (long if LONG_SEARCH else 1), suppress_health_check=checks)


def call_or_refuse(call: Callable[[], T]) -> T | None:
    """Return the result of the call, or None after an error of feddrift with one sentence; raise other errors."""
    try:
        return call()
    except FeddriftError as error:
        sentence = str(error)
        assert sentence.strip() and sentence.isprintable() and len(sentence) <= MAX_MESSAGE_LENGTH, repr(sentence)
        return None


ODD_WORDS = [
    "", " ", "nan", "NaN", "inf", "-inf", "1e999", "-1e999", "1e-320", "-1", "-0", "0", "00", "1", "+1", "1.0", "1_0",
    "0x10", "1e3", "٣", "²", "½", "9" * 19, "9" * 20, "9" * 5000, "-" + "9" * 5000, "0" * 5000 + "1",
    "0." + "9" * 5000, "none", "None", "null", "true", "True", "a\nb", "a\r\n", "\t", "\x00", "a\x00b", "\x1b[31m",
    "\x85", "\u2028", "\ud800", "\udcff", "\ufeff0.1", "~", "~nobody-of-this-name", "/", ".", "..", "a" * 300,
    "a/" * 3000, "a" * 100_000, "é", "😀", "[bold]", "{}", "[]", "{0}", "%s", "%", "=", ",", "-", "--", "--help", "#",
    ":", "'", '"', "\\", "name", "stream",
]  # fmt: skip
words = st.sampled_from(ODD_WORDS) | st.text(max_size=20)
numbers = (
    st.sampled_from([0, 1, 2, -1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400, -(10**400)])
    | st.integers()
    | st.floats()
)
values = st.recursive(
    st.none() | st.booleans() | numbers | words | st.binary(max_size=8) | st.just(datetime.date(2020, 1, 1)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)

TOKENS = [
    b"", b"\x00", b"\xff", b"\xef\xbb\xbf", b"\n", b"\r", b"\r\n", b"\n\n", b" ", b",", b";", b"#", b'"', b"'", b"\\",
    b":", b"NaN", b"nan", b"Infinity", b"-Infinity", b"null", b"true", b"-1", b"0", b"1.5", b"1e999", b"1e-999",
    b"9" * 30, b"9" * 5000, b"0x" + b"f" * 5000, b"[" * 2000, b"{" * 10, b'{"a":' * 2000, b"]", b"}", b"[]", b"{}",
    b'""', b'"\\ud800"', b"\\u0000", b"\xe2\x80\xa8", b"\xd9\xa3", b"a" * 140_000, b"\x1b[31m",
]  # fmt: skip


@st.composite
def mutations(draw: st.DrawFn, whole: bytes, edits: int = 4) -> bytes:
    """Damage a valid file: flip, cut, double or insert bytes; lose, double or swap lines."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, edits))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["flip", "set", "cut", "end", "token", "over", "double", "lose", "again", "swap"]))
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "set" and at < len(data):
            data[at] = draw(st.integers(0, 255))
        elif kind == "cut":
            del data[at : at + draw(st.integers(1, 40))]
        elif kind == "end":
            del data[at:]
        elif kind == "token":
            data[at:at] = draw(st.sampled_from(TOKENS) | st.binary(max_size=8))
        elif kind == "over":  # a token in place of a number or a word
            end = at
            while end < len(data) and (data[end : end + 1].isalnum() or data[end] in b".-"):
                end += 1
            data[at:end] = draw(st.sampled_from(TOKENS))
        elif kind == "double":
            data[at:at] = data[at : at + draw(st.integers(1, 200))]
        else:
            lines = bytes(data).split(b"\n")
            i, j = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
            if kind == "lose":
                del lines[i]
            elif kind == "again":
                lines.insert(j, lines[i])
            else:
                lines[i], lines[j] = lines[j], lines[i]
            data = bytearray(b"\n".join(lines))
    return bytes(data)


def list_paths(tree: Any) -> list[tuple[Any, ...]]:
    """Return the paths to all branches and leaves of a JSON value."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [(), *((key, *path) for key, inner in items for path in list_paths(inner))]


def replace_at_path(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return the tree with another value at the end of a path."""
    if not path:
        return value
    copy = tree.copy()
    copy[path[0]] = replace_at_path(tree[path[0]], path[1:], value)
    return copy


def check_stream(load: Callable[[], Stream]) -> None:
    """Check that a stream is refused or can be trained on."""
    s = call_or_refuse(load)
    if s is not None:
        assert s.x.size and np.isfinite(s.x).all() and s.counts.sum() == len(s.x) == len(s.y)
        assert s.n_classes >= 1 and s.y.min() >= 0 and s.y.max() < s.n_classes
        assert len(s.clients) == s.n_clients == len(set(s.clients))


def pack_npz(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def pack_npy(header: bytes, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


def pack_zip(**files: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"{name}.npy", content)
    return out.getvalue()


npy_descriptions = st.sampled_from(
    ["'<f4'", "'|O'", "'<f999999999999'", "'<U99999999999'", "[" * 500, "'<M8[zz]'", "[('a', '<f4')]", "5"]
)

npy_headers = st.builds(
    lambda d, s, end: pack_npy(f"{{'descr': {d}, 'fortran_order': False, 'shape': {s}, }}{end}\n".encode()),
    npy_descriptions,
    st.sampled_from(
        ["(4, 2)", "(99999999999,)", "(10**9,)", "(-1,)", "()", "(4.5,)", "(" * 500, "(9999999999999999999999, 2)", "4"]
    ),
    st.sampled_from(["", " " * 20, "#", "\x00", "x"]),
)

FEATURE_SHIFTS = {
    "since": 0,
    "rows": [9, 9],
    "moved": [
        {"what": "mean", "name": "age", "before": 1.5, "after": 2.0, "distance": 0.5, "within": "1"},
        {"what": "class", "name": "1", "before": 0.1, "after": 0.5, "distance": 0.4},
    ],
    "more": 1,
}

ODD_VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**53, 2**63 - 1, 2**63, 10**400, -0.5, 0.5, 1e308, float("nan"), float("inf"), "",
    "0", "1", "9" * 5000, "²", "a\nb\x1b", "0001-01-01", "9999-12-31T23:59:59", "é" * 999, [], [0], [[]], {}, {"0": 0},
    {"1": 2**63 - 1}, {"9" * 5000: 0},
]  # fmt: skip

json_values = st.sampled_from(ODD_VALUES) | st.recursive(
    st.none() | st.booleans() | st.integers(-2, 5) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.just("0"), inner, max_size=3),
    max_leaves=4,
)
