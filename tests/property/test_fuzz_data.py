"""Data files (folders, archives, metadata, pictures, weights): random and damaged content."""

from __future__ import annotations

import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet as pq

from feddrift.data import Stream
from feddrift.nets import resnet
from feddrift.streams import air, fmow, folder, mnist, table
from feddrift.tables.arrange import TableOptions
from feddrift.tables.columns import ArrayColumn
from feddrift.tables.expressions import COMPARISONS, looks_like_expression, parse_expression
from tests.support.fuzzing import (
    ODD_WORDS,
    call_or_refuse,
    check_stream,
    limit_examples,
    mutations,
    npy_headers,
    pack_npy,
    pack_npz,
    pack_zip,
    words,
)

AIR = tuple(partial(make, "air") for make in (air.load_five_cities, air.load_beijing))
CSV = 'a,"b, c",label\n1,2,cat\n-3.5,4e1,dog\n\n"5",6,cat\n'


def write_file(root: Path, name: str, content: bytes) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(content)


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR", logger="feddrift")


cells = words | st.sampled_from(
    ["1", "2.5", "-3e4", "1e39", "cat", "nan", "inf", "1,5", "٣", "0x1p3", "1e5", "7.0", "+2"]
)
tables = st.lists(st.lists(cells.map(lambda c: c.replace(",", " ")), min_size=1, max_size=4).map(",".join), max_size=4)


@limit_examples(250)
@given(
    st.binary(max_size=60)
    | mutations(CSV.encode())
    | tables.map(lambda rows: "\n".join(["a,b,label", *rows]).encode(errors="surrogatepass")),
    words,
)
def test_csv(tmp_path: Path, quiet: None, content: bytes, label: str) -> None:
    write_file(tmp_path, "client_a/step_0.csv", content)
    write_file(tmp_path, "client_a/step_1.csv", CSV.encode())
    check_stream(lambda: folder.load_folder(tmp_path))
    write_file(tmp_path, "client_a/step_1.csv", content)
    check_stream(lambda: folder.load_folder(tmp_path))
    call_or_refuse(lambda: folder.load_folder(tmp_path, label=label))


TABLE = 'shop,day,age,mood,sold\nb,2009-01-31,1,good,cat\na,31.01.2009,?,"bad",dog\nb,2009-02-01 13:30,"5",,cat\n'
choice = st.sampled_from
times = choice(
    ["1", "2", "2009H1", "2009-01-31", "1/2/2009", "13/2/2009", "20090131", "2009", "9999-12-31", "0001-1-1"]
)
lines = st.tuples(choice("ab") | cells, times | cells, cells, cells, choice(["cat", "dog", "1"]) | cells)


def write_csv(rows: list[tuple[str, ...]], delimiter: str) -> bytes:
    text = "\n".join(["shop,day,age,mood,sold", *map(",".join, rows)])
    return text.replace(",", delimiter).encode(errors="surrogatepass")


@limit_examples(400)
@given(
    content=st.binary(max_size=60)
    | mutations(TABLE.encode())
    | mutations(TABLE.replace(",", ";").encode("utf-16"))
    | st.builds(write_csv, st.lists(lines, min_size=2, max_size=5), choice(",;\t")),
    every=choice([None, "year", "quarter", "month", "week", 1, 0.3, 1e-300, 1e300]),
    missing=choice([None, "drop", "mean", "indicator"]),
    categories=choice([None, "onehot"]),
    scale=st.booleans(),
    client=st.just("shop") | words,
)
def test_table(tmp_path: Path, quiet: None, content: bytes, client: str, **options: Any) -> None:
    write_file(tmp_path, "table.csv", content)
    check_stream(lambda: table.load_table(str(tmp_path / "table.csv"), TableOptions(client, "day", "sold", **options)))


expression_parts = choice(
    ["age", "day", "<", ">=", "==", "!=", "=", " in ", "(", ")", ",", "5", "'", '"', "1e999", " "]
)
expressions = st.lists(expression_parts | words, max_size=8).map("".join)


@limit_examples(300)
@given(expressions)
def test_expressions(text: str) -> None:
    parsed = call_or_refuse(lambda: parse_expression(text))
    if parsed is not None:
        assert parsed.column.strip() and parsed.values and looks_like_expression(text)
        assert call_or_refuse(lambda: parsed.compute_labels(ArrayColumn(np.array(["1", "", "x"], dtype=object)))) or (
            parsed.operator in COMPARISONS
        )


@limit_examples(100)
@given(expressions | st.just("age > 3"), words | st.lists(words, max_size=2), words | st.none())
def test_choice_of_columns(quiet: None, label: str, drop: Any, features: Any) -> None:
    usual = {"shop": ["a", "b"] * 2, "day": [1, 1, 2, 2], "age": [1, 2, 5, 3], "x": [1, 2, 3, 4], "z": ["1", 2, 3, 4]}
    options = {"drop": drop, "features": features}
    check_stream(lambda: Stream.from_frame(usual, client="shop", time="day", label=label, **options))


def pack_parquet() -> bytes:
    sink = pa.BufferOutputStream()
    columns = {"shop": ["b", "a"] * 3, "day": [1, 1, 1, 2, 2, 2], "age": [1.0, None] * 3, "sold": ["x", "y", "y"] * 2}
    pq.write_table(pa.table(columns), sink, compression="none")
    return bytes(sink.getvalue())


@limit_examples(150)
@given(mutations(pack_parquet()), choice([None, "drop"]))
def test_parquet(tmp_path: Path, quiet: None, content: bytes, missing: str | None) -> None:
    write_file(tmp_path, "table.parquet", content)
    options = TableOptions("shop", "day", "sold", missing=missing)
    check_stream(lambda: table.load_table(str(tmp_path / "table.parquet"), options))


odd = choice([None, 1, 2.5, float("nan"), True, 10**400, [1], object()])
kinds = choice(["f4", "i8", "?", "c8", "U3", "S3", "M8[s]", "m8[s]", "O"])
columns = st.dictionaries(
    choice(["shop", "day", "sold", "x", "z"]) | words,
    st.lists(cells | odd, min_size=3, max_size=3) | st.builds(np.zeros, st.just((3,)), kinds),
)


@limit_examples(300)
@given(columns, choice([None, "month", 1]), choice([None, "drop", "indicator"]), choice([None, "onehot"]))
def test_frames(
    quiet: None, frame: dict[str, Any], every: str | None, missing: str | None, categories: str | None
) -> None:
    usual = {"shop": ["a", "b", "a"], "day": ["2009-01-01", "2009-01-01", "2009-02-01"], "sold": [0, 1, 1]}
    options: dict[str, Any] = {"every": every, "missing": missing, "categories": categories}
    check_stream(lambda: Stream.from_frame(usual | frame, client="shop", time="day", label="sold", **options))


@limit_examples(80)
@given(
    st.binary(max_size=30)
    | mutations(b"dog\ncat\nemu\n")
    | st.lists(words).map(lambda w: "\n".join(w).encode(errors="ignore"))
)
def test_classes(tmp_path: Path, quiet: None, content: bytes) -> None:
    for t in range(2):
        write_file(tmp_path, f"client_a/step_{t}.csv", CSV.encode())
    write_file(tmp_path, "classes.txt", content)
    check_stream(lambda: folder.load_folder(tmp_path))


class Bomb:
    """What must never be unpickled."""

    def __reduce__(self) -> Any:
        return os._exit, (77,)


X, Y = np.arange(8, dtype=np.float32).reshape(4, 2), np.array([0, 1, 1, 0])
dtypes = st.sampled_from(["f4", "f8", "f2", "i8", "u1", "?", "c8", "U3", "S3", "M8[s]", "O", ">f4", "i4,f4", "f16"])
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple) | st.sampled_from([(4, 2), (4,), (4, 0), (0, 2), (4, 2, 2)])
arrays = st.builds(np.zeros, shapes, dtypes)
labels = st.sampled_from(
    [Y, Y.astype(str), Y / 2, Y * np.nan, Y * 1e300, Y > 0, np.array(["", "a", "1", "b"]), Y * (2**62)]
)
archives = st.builds(lambda x, y: pack_npz(x=x, y=y), arrays | st.just(X), arrays | labels)


@limit_examples(250)
@given(
    st.binary(max_size=60)
    | mutations(pack_npz(x=X, y=Y))
    | archives
    | st.builds(lambda h: pack_zip(x=h, y=pack_npy(b"")), npy_headers)
    | npy_headers
    | st.sampled_from(
        [
            pickle.dumps(Bomb()),
            pack_npz(x=np.array([[Bomb()]]), y=np.array([0])),
            pack_npz(x=X, y=np.array([Bomb()] * 4)),
            pack_npz(x=X),
            b"",
        ]
    )
)
def test_npz(tmp_path: Path, quiet: None, content: bytes) -> None:
    write_file(tmp_path, "client_a/step_0.npz", pack_npz(x=X, y=Y))
    write_file(tmp_path, "client_a/step_1.npz", content)
    check_stream(lambda: folder.load_folder(tmp_path))
    write_file(tmp_path, "client_a/step_0.npz", content)
    check_stream(lambda: folder.load_folder(tmp_path))


@pytest.mark.parametrize(
    "name",
    ["x.csv", "step_0.txt", "step_-1.csv", "step_" + "9" * 200 + ".csv", "step_00.csv", "step_٣.csv", "step_.npz"],
)
def test_names_of_steps(tmp_path: Path, quiet: None, name: str) -> None:
    write_file(tmp_path, "client_a/step_0.csv", CSV.encode())
    write_file(tmp_path, f"client_a/{name}", CSV.encode())
    check_stream(lambda: folder.load_folder(tmp_path))


@limit_examples(60)
@given(
    st.lists(
        words.filter(lambda w: not set(w) & {"/", "\x00"} and 0 < len(w.encode(errors="replace")) < 200), max_size=3
    )
)
def test_names_of_clients(tmp_path_factory: pytest.TempPathFactory, quiet: None, names: list[str]) -> None:
    root = tmp_path_factory.mktemp("folder")
    for name in names:
        for t in range(2):
            write_file(root, os.fsdecode(f"client_{name}".encode("utf-8", "replace")) + f"/step_{t}.csv", CSV.encode())
    check_stream(lambda: folder.load_folder(root))


@pytest.mark.parametrize("where", ["client_a", "client_a/step_1.csv", "classes.txt", "client_b"])
@pytest.mark.parametrize("kind", ["loop", "nowhere", "folder", "pipe", "zero"])
def test_no_files(tmp_path: Path, quiet: None, where: str, kind: str) -> None:
    """Links that lead nowhere or round in circles, folders in the place of files, pipes that nobody writes to."""
    path = tmp_path / where
    if where != "client_a":
        write_file(tmp_path, "client_a/step_0.csv", CSV.encode())
    if kind == "folder":
        path.mkdir(parents=True)
    elif kind == "pipe":
        path.parent.mkdir(exist_ok=True)
        os.mkfifo(path)
    else:
        path.symlink_to({"loop": path.name, "nowhere": "nowhere", "zero": "/dev/zero"}[kind])
    if "step_1" not in where:
        call_or_refuse(lambda: write_file(tmp_path, "client_c/step_1.csv", CSV.encode()))
    call_or_refuse(lambda: folder.load_folder(tmp_path))


@pytest.mark.parametrize("word", ODD_WORDS, ids=range(len(ODD_WORDS)))
def test_names_of_folders(word: str) -> None:
    for name in (word, f"table:{word}", f"{word}.csv"):
        assert call_or_refuse(lambda name=name: table.load_table(name, TableOptions("a", "b", "c"))) is None  # type: ignore[misc]
    for load in (folder.load_folder, mnist.load_mnist, fmow.load_fashion, fmow.read_folder, *AIR):
        if word or load is folder.load_folder:  # without a name the others look elsewhere
            assert call_or_refuse(lambda load=load: load(word)) is None  # type: ignore[misc]
    call_or_refuse(lambda: resnet.read_weights(Path(word)))
    call_or_refuse(lambda: resnet.read_weights(Path(word + ".npz")))
    call_or_refuse(lambda: resnet.read_weights(Path(word + ".safetensors")))
