"""Options of tables on the command line: wrong ones are one sentence with exit code 2, and nothing is written."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from feddrift.runs import record
from tests.support.cli import run_feddrift

ROLES = ["--client", "shop", "--time", "day"]


def write_files(folder: Path) -> None:
    draw = np.random.default_rng(0)
    columns = {
        "shop": [f"s{k % 2}" for k in range(60)],
        "day": [k // 20 for k in range(60)],
        "delay": draw.normal(15, 9, 60),
        "temp": draw.normal(size=60),
        "carrier": ["AA", "DL", "B 6"] * 20,
        "tags": [[k] for k in range(60)],
    }
    pq.write_table(pa.table(columns), folder / "good.parquet")
    content = (folder / "good.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(content[:-100])
    (folder / "text.parquet").write_text("shop,day\n")
    (folder / "old.feather").write_bytes(b"FEA1" + content)
    (folder / "cut.csv.gz").write_bytes(gzip.compress(content)[:-20])
    (folder / "book.xlsx").write_bytes(b"PK\x03\x04")
    (folder / "mixed").mkdir()
    (folder / "mixed" / "part.parquet").write_bytes(content)
    (folder / "mixed" / "notes.txt").touch()
    pq.write_table(pa.table(columns).drop_columns(["temp"]), folder / "less.parquet")


GOOD = ["--stream", "good.parquet", "--drop", "tags,carrier"]
LATE = ["--label", "delay > 15"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--stream", "cut.parquet", *LATE], "cut.parquet cannot be read as a Parquet file"),
        (["--stream", "text.parquet", *LATE], "text.parquet is not a Parquet file: its first bytes are"),
        (["--stream", "none.parquet", *LATE], "'none.parquet' is not a file, expected a table"),
        (["--stream", "old.feather", *LATE], "old.feather is a Feather file of version 1"),
        (["--stream", "cut.csv.gz", *LATE], "cut.csv.gz is compressed and cannot be decompressed"),
        (["--stream", "table:book.xlsx", *LATE], "book.xlsx is an Excel file or an archive"),
        (["--stream", "table:mixed", *LATE], "the folder mixed has notes.txt, expected files that end in"),
        (["--stream", "mixed", *LATE], "did you mean 'table:mixed'?"),
        (["--stream", "good.parquet+less.parquet", *LATE], "less.parquet must have the columns of good.parquet"),
        (["--stream", "good.parquet", "--drop", "carrier", *LATE], "column 'tags' must have numbers, words or dates"),
        ([*GOOD, "--label", "delay"], 'such as --label "delay > '),
        ([*GOOD, "--label", "delay >"], "needs a value, got the end"),
        ([*GOOD, "--label", "delay = 3"], "did you mean '=='?"),
        ([*GOOD, "--label", "delay > late"], "needs a number, got 'late'"),
        ([*GOOD, "--label", "delay in 3"], "label must name a column, got 'delay in 3'"),
        ([*GOOD, "--label", "delay in (3"], "needs ',' or ')', got the end"),
        ([*GOOD, "--label", "carrier > 3"], "must name columns of features, got 'carrier', which is the label column"),
        (
            ["--stream", "good.parquet", "--features", "temp", "--label", "carrier > 3"],
            "'>' compares numbers, got 'AA'",
        ),
        ([*GOOD, "--label", "delay > 999"], "every row has the label 'no'"),
        ([*GOOD, "--drop", "tmp", *LATE], "drop must name columns of the table, got 'tmp', did you mean 'temp'"),
        ([*GOOD, "--drop", "a,,b", *LATE], "drop must be names of columns"),
        ([*GOOD, "--features", "temp", *LATE], "give either drop or features"),
        (["--stream", "good.parquet", "--features", "", *LATE], "features must be names of columns"),
        (["--stream", "sine-2", "--drop", "a"], "drop is for tables, FILE.csv, so it must be left out for sine-2"),
    ],
)
def test_a_wrong_table_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    roles = [] if "sine-2" in words else ROLES
    code, _, err = run_feddrift(capsys, "run", *words, *roles, "--out", "runs")
    (sentence,) = (line for line in err.strip().splitlines() if line.startswith("Error:"))
    assert code == 2 and said in sentence
    assert sorted(tmp_path.rglob("*")) == before


def test_a_label_expression_and_dropped_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    words = ["run", *GOOD, *LATE, *ROLES, "--algorithm", "Oblivious", "--rounds", "1", "--out", "runs"]
    assert run_feddrift(capsys, *words)[0] == 0
    (run,) = record.read_all("runs")
    assert run.header["overrides"]["drop"] == "tags,carrier"
    assert run_feddrift(capsys, "export", "runs", "--out", "models")[0] == 0
    about = json.loads(Path("models/models.json").read_text())
    assert about["columns"] == ["temp"] and about["classes"] == ["no", "yes"]
