"""Tables in Parquet, Arrow, Feather and compressed CSV files, folders of them, and the cache of tables."""

from __future__ import annotations

import datetime
import decimal
import gzip
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, feather, ipc
from pyarrow import parquet as pq

import feddrift as fd
from feddrift.data import Stream
from feddrift.errors import DataError, FeddriftError
from feddrift.streams import stream, table_cache
from feddrift.streams.csv_table import read_csv
from feddrift.streams.table import load_table, read_table
from feddrift.tables.arrange import TableOptions

KEYS: dict[str, Any] = {"client": "shop", "time": "day", "label": "sold"}
N = 240


def make_table(n: int = N) -> pa.Table:
    draw = np.random.default_rng(0)
    columns: dict[str, Any] = {
        "shop": [f"shop {k}" for k in draw.integers(0, 3, n)],
        "day": [datetime.date(2026, 1 + k * 6 // n, 1 + k % 28) for k in range(n)],
        "age": draw.normal(40, 10, n),
        "items": draw.integers(0, 9, n),
        "price": [None if k % 11 == 5 else float(value) for k, value in enumerate(draw.normal(0, 1e-7, n))],
        "wind": [None if k % 13 == 7 else ("N", "E", "S")[k % 3] for k in range(n)],
        "sold": [("no", "yes")[k] for k in draw.integers(0, 2, n)],
    }
    return pa.table(columns)


def write_stream(table: pa.Table, path: Path) -> None:
    with ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=50)


WRITERS: dict[str, Callable[[pa.Table, Path], Any]] = {
    "x.csv": csv.write_csv,
    "x.csv.gz": lambda table, path: path.write_bytes(gzip.compress(write_text(table))),
    "x.parquet": lambda table, path: pq.write_table(table, path, row_group_size=70),
    "dictionary.parquet": lambda table, path: pq.write_table(
        table.set_column(0, "shop", table["shop"].dictionary_encode()), path
    ),
    "x.feather": lambda table, path: feather.write_feather(table, path, compression="lz4", chunksize=100),
    "plain.arrow": lambda table, path: feather.write_feather(table, path, compression="uncompressed"),
    "stream.arrow": write_stream,
}


def write_text(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    csv.write_csv(table, sink)
    return bytes(sink.getvalue())


def load(path: Path | str, **options: Any) -> Stream:
    return stream(str(path), **{**KEYS, "every": "month", **options})


def assert_equal_streams(a: Stream, b: Stream) -> None:
    assert a.x.tobytes() == b.x.tobytes() and a.y.tobytes() == b.y.tobytes() and (a.counts == b.counts).all()
    assert (a.clients, a.times, a.classes, a.columns) == (b.clients, b.times, b.classes, b.columns)
    assert a.recipe == b.recipe


@pytest.mark.parametrize("name", WRITERS)
def test_all_formats_give_the_stream_of_the_csv_file(tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {"missing": "indicator", "categories": "onehot"}
    csv.write_csv(make_table(), tmp_path / "expected.csv")
    expected = read_csv(tmp_path / "expected.csv", TableOptions("shop", "day", "sold"), use_arrow=False)
    assert expected.lines == list(range(2, N + 2))
    WRITERS[name](make_table(), tmp_path / name)
    s = load(tmp_path / name, **options)
    assert s.name == f"table:{name}" and s.columns[:3] == ("age", "items", "price") and s.n_steps == 5
    assert_equal_streams(s, load(tmp_path / "expected.csv", **options))
    assert_equal_streams(s, Stream.from_frame(make_table(), **KEYS, every="month", **options))


def test_the_two_readers_of_csv_files_agree(tmp_path: Path) -> None:
    cells = [
        "1",
        " 2.5",
        "+3",
        "-0",
        "1e400",
        "1e-400",
        "nan",
        "Nan",
        "NA",
        "",
        "?",
        '"a,b"',
        '"say ""x"""',
        "1_0",
        "٣",
    ]
    lines = [f"{'ab'[k % 2]},{k % 3},{k % 2},{cells[k % len(cells)]},{k / 7!r}" for k in range(90)]
    lines[10:10] = ["", ",,,,", " ,,,,1"]
    for end in ("\n", "\r\n"):
        (tmp_path / "t.csv").write_bytes(end.join(["c,t,y,a,b", *lines]).encode())
        tables = [read_csv(tmp_path / "t.csv", TableOptions("c", "t", "y"), use_arrow=fast) for fast in (True, False)]
        assert not isinstance(tables[0].lines, list) and isinstance(tables[1].lines, list)  # which reader it was
        assert list(tables[0].lines) == tables[1].lines
        for name in "cyab":
            fast, slow = (table.columns[name] for table in tables)
            assert fast.encode_texts().texts == slow.encode_texts().texts
            for one, other in zip(fast.parse_numbers(), slow.parse_numbers(), strict=True):
                assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    "odd", ['x "y"', '"x"y', ' "x"', '"two\nlines"', "a\rb", "x" * 140_000, '"' + "x" * 140_000 + '"']
)
def test_irregular_values_are_left_to_the_slow_reader(tmp_path: Path, odd: str) -> None:
    lines = [f"{'ab'[k % 2]},{k % 3},{k % 2},N" for k in range(9)]
    (tmp_path / "t.csv").write_bytes("\n".join(["c,t,y,w", *lines, f"a,1,1,{odd}"]).encode())
    options = TableOptions("c", "t", "y", categories="onehot")
    found = [describe_table(tmp_path / "t.csv", options, use_arrow) for use_arrow in (True, False)]
    assert found[0] == found[1] and not str(found[0]).startswith("range")


def describe_table(path: Path, options: TableOptions, use_arrow: bool) -> object:
    """Return the lines and the words of a file, or its problem."""
    try:
        table = read_csv(path, options, use_arrow)
    except DataError as error:
        return str(error)
    return str(table.lines), table.columns["w"].encode_texts().texts


def test_types_of_parquet_files(tmp_path: Path) -> None:
    n = 12
    times = [datetime.datetime(2026, 1, 1 + k, 23, 30, tzinfo=datetime.UTC) for k in range(n)]
    columns = {
        "shop": pa.array([7, 8] * 6, pa.uint16()),
        "day": pa.array(times, pa.timestamp("ns", "Europe/Oslo")),
        "sold": pa.array([False, True, True] * 4),
        "decimal": pa.array([decimal.Decimal(k).scaleb(-2) for k in range(n)], pa.decimal128(9, 2)),
        "float": pa.array([k / 3 for k in range(n)], pa.float32()),
        "large": pa.array([2**53 + 1] * n, pa.int64()),
        "text": pa.array([f" {k}.5 " for k in range(n)], pa.large_string()),
        "day off": pa.array([k % 2 == 0 for k in range(n)]),
        "opens": pa.array([datetime.time(8 + k % 2, 30) for k in range(n)], pa.time32("s")),
        "since": pa.array([datetime.date(2020, 1, 1 + k % 2) for k in range(n)], pa.date32()),
    }
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    s = load(tmp_path / "x.parquet", every=6, categories="onehot", scale=False)
    assert s.clients == ("7", "8") and s.classes == ("False", "True")
    assert s.times == ("2026-01-01", "2026-01-07")  # times are in UTC
    assert s.columns == (
        *("decimal", "float", "large", "text", "day off", "opens=08:30:00.000", "opens=09:30:00.000"),
        *("since=2020-01-01", "since=2020-01-02"),
    )
    expected = [0.02, 2 / 3, 2**53, 2.5, 1, 1, 0, 1, 0]
    assert s.cell(0, 0)[0][1].tolist() == np.array(expected, dtype=np.float32).tolist()


def test_a_folder_is_one_table(tmp_path: Path) -> None:
    table = make_table()
    csv.write_csv(table, tmp_path / "all.csv")
    folder = tmp_path / "sales.parquet"
    folder.mkdir()
    for k, start in enumerate(range(0, N, 24)):  # part 10 comes after part 9
        part = table.slice(start, 24)
        pq.write_table(part, folder / f"part-{k}.parquet")
    (folder / "_SUCCESS").touch()
    options = {"missing": "mean", "categories": "onehot"}
    expected = load(tmp_path / "all.csv", **options)
    for name in (str(folder), f"table:{folder}"):
        s = load(name, **options)
        assert s.name == "table:sales.parquet"
        assert_equal_streams(s, expected)
    csv.write_csv(table.slice(0, 24), folder / "part-0.csv")
    (folder / "part-0.parquet").unlink()
    assert_equal_streams(load(folder, **options), expected)  # also of several formats
    pq.write_table(table.set_column(2, "age", pa.array(["x", "1"] + ["2"] * (N - 2))), folder / "part-99.parquet")
    with pytest.raises(DataError, match=r"column 'age' must have finite numbers, got 'x' \(line part-99.parquet:0\)"):
        load(folder, **options)
    pq.write_table(table.drop_columns(["age"]), folder / "part-99.parquet")
    with pytest.raises(DataError, match="part-99.parquet must have the columns of .*part-0.csv, got age in one only"):
        load(folder, **options)
    assert load(folder, **options, drop="age").counts.sum() == 2 * N


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.parquet", b"a,b\n1,2\n", r"x.parquet is not a Parquet file: its first bytes are b'a,b"),
        ("x.parquet", b"", "is not a Parquet file"),
        ("x.parquet", b"PAR1" + b"\0" * 40, "x.parquet cannot be read as a Parquet file: .*; write or copy it again"),
        ("x.csv", b"PAR1PAR1", "cannot be read as a Parquet file"),
        ("x.arrow", b"ARROW1\0\0" + b"\1" * 40, "cannot be read as an Arrow file"),
        ("x.arrow", b"\xff\xff\xff\xff\x10\0\0\0abc", "cannot be read as an Arrow stream"),
        ("x.feather", b"FEA1....", "is a Feather file of version 1, expected a table: save it as"),
        ("x.csv.gz", b"\x1f\x8b\x08\0....", "is compressed and cannot be decompressed"),
        ("x.csv.gz", gzip.compress(b"shop,day\n" * 99, mtime=0)[:-9], "cannot be decompressed: .*; copy it again"),
        ("x.xlsx", b"PK\x03\x04", "is an Excel file or an archive"),
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FeddriftError, match=said) as error:
        load(tmp_path / name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array([[1]] * N), "column 'odd' must have numbers, words or dates, got list<.*>: leave it out with --drop"),
        (pa.array([{"a": 1}] * N), "must have numbers, words or dates, got struct"),
        (pa.array([b"x"] * N), "must have numbers, words or dates, got binary"),
        (pa.array([datetime.timedelta(1)] * N), "must have numbers, words or dates, got duration"),
        (pa.nulls(N), "column 'odd' is empty: leave it out with --drop odd"),
        (pa.array([1.0] * (N - 1) + [float("inf")]), r"'odd' must have finite numbers, got 'inf' \(row 239\)"),
        (pa.array([1.0] * (N - 1) + [None]), r"no value in .*'odd' \(1: row 239\)"),
        (pa.array(["1"] * (N - 1) + ["many"]), r"'odd' must have finite numbers, got 'many' \(row 239\)"),
    ],
)
def test_a_column_that_cannot_be_used_is_one_sentence(tmp_path: Path, column: pa.Array, said: str) -> None:
    table = make_table().drop_columns(["price", "wind"])
    pq.write_table(table.append_column("odd", column), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=said):
        load(tmp_path / "x.parquet")
    assert_equal_streams(load(tmp_path / "x.parquet", drop=["odd"]), Stream.from_frame(table, **KEYS, every="month"))


def test_wrong_tables_of_several_files(tmp_path: Path) -> None:
    pq.write_table(make_table().rename_columns(["shop", "day", "age", "age", "p", "w", "sold"]), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="every column needs a name of its own, got 'age' more than once"):
        load(tmp_path / "x.parquet")
    pq.write_table(make_table().slice(0, 0), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="expected rows below the names of the columns, got none"):
        load(tmp_path / "x.parquet", missing="mean", categories="onehot")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="the folder .*empty has no tables, expected files that end in .csv, "):
        load(f"table:{tmp_path / 'empty'}")
    (tmp_path / "empty" / "client_a").mkdir()
    with pytest.raises(DataError, match="has client_a, expected files .* did you mean 'folder:"):
        load(f"table:{tmp_path / 'empty'}")
    with pytest.raises(FeddriftError, match=r"it is a folder: did you mean 'folder:.*empty'"):
        stream(str(tmp_path / "empty"))
    pq.write_table(make_table(), tmp_path / "x.parquet")
    with pytest.raises(FeddriftError, match=r"it is a folder: did you mean 'table:"):
        stream(str(tmp_path))
    with pytest.raises(DataError, match=r"'nowhere.parquet' is not a file"):
        load("nowhere.parquet")
    with pytest.raises(DataError, match=r"client must name a column, got 'shopp', did you mean 'shop'"):
        load(tmp_path / "x.parquet", client="shopp")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(table_cache.CACHE_VARIABLE, raising=False)
    monkeypatch.setattr(table_cache, "MIN_TABLE_BYTES", 1)
    return tmp_path / "cache" / "feddrift" / "tables"


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    read: list[Path] = []

    def read_and_count(path: Path, options: TableOptions) -> Any:
        read.append(path)
        return read_table(path, options)

    monkeypatch.setattr("feddrift.streams.table.read_table", read_and_count)
    return read


def test_a_table_is_read_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(make_table(), path)
    read = count_reads(monkeypatch)
    options = {"missing": "drop", "categories": "onehot"}
    first = load(path, **options)
    warnings = caplog.messages.copy()
    assert warnings and len(read) == 1
    caplog.clear()
    again = load(path, **options)
    assert len(read) == 1 and caplog.messages == warnings
    assert_equal_streams(first, again)
    again.x[:] = 0  # changes no file
    assert_equal_streams(first, load(path, **options))
    load(path, **options, label="age > 40")  # other options
    pq.write_table(make_table().slice(0, N - 1), path)  # other content
    assert load(path, **options).counts.sum() == first.counts.sum() - 1 and len(read) == 3
    for file in cache.iterdir():
        file.write_bytes(file.read_bytes()[:-7])  # damaged
    assert load(path, **options).counts.sum() == first.counts.sum() - 1 and len(read) == 4
    monkeypatch.setenv(table_cache.CACHE_VARIABLE, "false")
    load(path, **options)
    assert len(read) == 5


def test_the_cache_is_limited(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(make_table(), tmp_path / "x.parquet")
    options: dict[str, Any] = {"missing": "mean", "categories": "onehot"}
    load(tmp_path / "x.parquet", **options)
    (first,) = cache.iterdir()
    os.utime(first, (1, 1))
    monkeypatch.setattr(table_cache, "MAX_CACHE_BYTES", int(first.stat().st_size * 2.5))
    load(tmp_path / "x.parquet", **options, drop="items")
    load(tmp_path / "x.parquet", **options)  # it was used, so the other entry is older now
    assert first.stat().st_mtime > 1
    for k, file in enumerate(sorted(cache.iterdir(), key=lambda file: file == first)):
        os.utime(file, (k + 1, k + 1))
    load(tmp_path / "x.parquet", **options, drop="age")
    assert len([*cache.iterdir()]) == 2 and first.exists()
    monkeypatch.setattr(table_cache, "MAX_CACHE_BYTES", 1000)
    load(tmp_path / "x.parquet", **options, drop="price")  # too large
    assert len([*cache.iterdir()]) == 2


def test_small_tables_and_read_only_folders_have_no_entries(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(make_table(), tmp_path / "x.parquet")
    (tmp_path / "cache").write_text("a file in place of the folder")
    assert load(tmp_path / "x.parquet", missing="mean", categories="onehot").n_steps == 5
    (tmp_path / "cache").unlink()
    monkeypatch.setattr(table_cache, "MIN_TABLE_BYTES", 10**6)
    load(tmp_path / "x.parquet", missing="mean", categories="onehot")
    assert not cache.exists()


def test_a_run_on_parquet_is_updated_and_exported(tmp_path: Path) -> None:
    table = make_table().drop_columns(["price", "wind"])
    pq.write_table(table.slice(0, 200), tmp_path / "june.parquet")  # five months
    pq.write_table(table.slice(200, 40).append_column("new", pa.array([1] * 40)), tmp_path / "july.parquet")
    options: dict[str, Any] = {**KEYS, "every": "month", "rounds": 1, "steps": 2}
    run = fd.record(str(tmp_path / "june.parquet"), "Oblivious", out=tmp_path / "runs", **options)
    with pytest.raises(DataError, match="july.parquet must have the columns of .*june.parquet, got new in one only"):
        fd.update(tmp_path / "runs", append=tmp_path / "july.parquet")
    assert len(fd.read(tmp_path / "runs")) == 1
    (longer,) = fd.update(tmp_path / "runs", append=tmp_path / "july.parquet", drop="new")
    assert (run.rows.steps, longer.rows.steps) == (4, 5) and longer.header["overrides"]["drop"] == "new"
    with pytest.raises(DataError, match=r"july.parquet is part of the run already"):
        fd.update(tmp_path / "runs", append=tmp_path / "july.parquet")
    (folder,) = fd.export(tmp_path / "runs", tmp_path / "models")
    models = fd.load_models(folder)
    assert models.columns == ("age", "items")
    assert len(models.predict("shop 0", table.to_pandas().head())) == 5


def test_a_table_larger_than_the_kept_columns_gives_the_same_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(make_table(), tmp_path / "x.parquet")
    expected = load(tmp_path / "x.parquet", missing="indicator", categories="onehot")
    monkeypatch.setattr("feddrift.tables.arrange.MAX_KEPT_VALUES", 0)
    monkeypatch.setattr("feddrift.tables.arrange.ROWS_PER_BLOCK", 7)
    assert_equal_streams(load(tmp_path / "x.parquet", missing="indicator", categories="onehot"), expected)


def test_pandas_is_not_imported(tmp_path: Path) -> None:
    table = make_table()
    csv.write_csv(table, tmp_path / "x.csv")
    pq.write_table(table, tmp_path / "x.parquet")
    code = (
        "import sys; from feddrift import stream\n"
        "for name in sys.argv[1:]:\n"
        f"    stream(name, **{KEYS}, every='month', missing='mean', categories='onehot')\n"
        "print('pandas' in sys.modules)"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "x.csv"), str(tmp_path / "x.parquet")]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "False\n"


def test_good_files_give_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pq.write_table(make_table().drop_columns(["price", "wind"]), tmp_path / "x.parquet")
    load_table(str(tmp_path / "x.parquet"), TableOptions("shop", "day", "sold", "month"))
    assert not caplog.records
