"""Streams from tables: a CSV file or a data frame."""

from __future__ import annotations

import datetime
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pytest

import feddrift as fd
from feddrift.data import Stream
from feddrift.errors import ConfigError, DataError, FeddriftError
from feddrift.reports.event_text import build_run_command
from feddrift.runs.config import RunConfig
from feddrift.runs.recorded_run import RecordedRun, load_stopped_run
from feddrift.streams import stream
from feddrift.tables.features import compute_mean_and_std
from feddrift.tables.times import build_time_steps, parse_every

KEYS: dict[str, Any] = {"client": "station", "time": "date", "label": "rain"}
HEADER = "station,date,temp,wind,rain\n"
ROWS = [
    f"{s},2009-{m:02}-{s[1]}3,{m}.5,{s[1]}{m},{'yes' if m % 2 else 'no'}" for m in range(1, 5) for s in ("s1", "s0")
]
TABLE = HEADER + "\n".join(ROWS) + "\n"


@pytest.fixture
def put(tmp_path: Path) -> Any:
    def write(content: str | bytes = TABLE, name: str = "weather.csv") -> str:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(tmp_path / name)

    return write


def frame(**columns: Any) -> dict[str, Any]:
    """Two clients at two times, with these features."""
    keys = {"station": ["a", "b", "a", "b"], "date": [1, 1, 2, 2], "rain": [0, 1, 1, 0]}
    return {**keys, **(columns or {"temp": [1.0, 2.0, 3.0, 4.0]})}


def of(table: object, **options: Any) -> Stream:
    return Stream.from_frame(table, **{**KEYS, **options})


def test_a_small_table(put: Any) -> None:
    s = stream(put(), **KEYS, scale=False)
    assert (s.name, s.family, s.clients, s.classes) == ("table:weather.csv", "table", ("s0", "s1"), ("no", "yes"))
    assert s.times == ("2009-01-03", "2009-01-13", "2009-02-03", "2009-02-13", "2009-03-03", "2009-03-13",
                       "2009-04-03", "2009-04-13")  # fmt: skip
    assert s.counts.tolist() == [[1, 0], [0, 1]] * 4 and s.columns == ("temp", "wind")
    s = stream(put(), **KEYS, scale=False, every="month")
    assert s.times == ("2009-01", "2009-02", "2009-03", "2009-04") and (s.counts == 1).all() and s.concepts is None
    assert s.cell(1, 1)[0].tolist() == [[2.5, 12.0]] and s.cell(1, 1)[1].tolist() == [0]


def test_rows_of_a_cell_stay_in_their_order_and_clients_in_theirs() -> None:
    table = {
        "c": ["c10", "c2", "c10", "c2", "c10"],
        "t": [2, 1, 1, 2, 1],
        "x": [1.0, 2.0, 3.0, 4.0, 5.0],
        "y": [0, 1] * 2 + [0],
    }
    s = Stream.from_frame(table, client="c", time="t", label="y", scale=False, name="mine")
    assert s.clients == ("c2", "c10") and s.counts.tolist() == [[1, 2], [1, 1]] and s.name == "mine"
    assert s.x[:, 0].tolist() == [2, 3, 5, 4, 1] and s.y.tolist() == [1, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("written", "every", "names"),
    [
        (["2009H2", "2009H10", "2009H1"], None, ("2009H1", "2009H2", "2009H10")),
        (["10", "9", "9.0"], None, ("9", "10")),
        (["1.10", "1.9"], None, ("1.10", "1.9")),  # numbers
        (["01.02.2010", "31.01.2009", "02.01.2010"], None, ("31.01.2009", "02.01.2010", "01.02.2010")),
        (["20100101", "20091231"], "year", ("2009", "2010")),
        (["2009", "2011"], "year", ("2009", "2011")),  # a year without anything is no time step
        (["2009-3", "2009-04"], "quarter", ("2009Q1", "2009Q2")),
        (["2009/3/31", "2009/12/01"], "quarter", ("2009Q1", "2009Q4")),
        (["13/01/2009", "02/03/2009"], "month", ("2009-01", "2009-03")),  # the first tells that days come first
        (["01/13/2009 11:30 PM", "02/03/2009 1:00 am"], "month", ("2009-01", "2009-02")),
        (["2008-12-29", "2009-01-04T23:59:59Z", "2009-02-09 01:00+01:00"], "week", ("2009-W01", "2009-W07")),
        (["2009-01-30", "2009-02-05", "2009-02-06 00:00"], 7, ("2009-01-30", "2009-02-06")),
        (["20090130", "20090206"], 7, ("2009-01-30", "2009-02-06")),
        (["3", "12.9", "13", "43"], 10, ("3", "13", "43")),
        (["0", "0.1", "0.2", "0.3"], 0.1, ("0", "0.1", "0.2", "0.3")),
        (["0", "0.29", "0.3"], 0.1, ("0", "0.2", "0.3")),
    ],
)  # fmt: skip
def test_times(written: list[str], every: str | float | None, names: tuple[str, ...]) -> None:
    found = build_time_steps(written, every)
    assert found.names == names and set(found.step_by_text) == set(written)


def test_times_of_the_same_step_are_one() -> None:
    found = build_time_steps(["2009-01-31 23:00", "31.01.2009", "2009-02-01"], "month")
    assert found.step_by_text == {"2009-01-31 23:00": 0, "31.01.2009": 0, "2009-02-01": 1}


@pytest.mark.parametrize(
    ("written", "every", "said"),
    [
        (["01/02/2009", "03/04/2009"], "month", "'01/02/2009' may have the day or the month first"),
        (["01/02/2009", "03/04/2009"], None, "may have the day or the month first"),
        (["13/02/2009", "03/14/2009"], "year", "'13/02/2009' has the day first and '03/14/2009' the month"),
        (["2009-02-30", "2009H1"], "month", "'2009-02-30': day is out of range for month, '2009H1': not a date"),
        (["2009", "2010"], "month", "'2009': it has no month"),
        (["2009-01", "2009-02"], "week", "'2009-01': it has no day"),
        (["2009-01-01 13:00 PM"], "week", "hour must be"),
        (["2009-01-01", "2009-01-02"], 0.5, "a whole one"),
        (["0", "1e300"], 1, "too small for times from 0 to 1e\\+300"),
        (["a", "b"], 1, "every=1 needs dates"),
    ],
)
def test_bad_times_are_one_sentence(written: list[str], every: str | float | None, said: str) -> None:
    with pytest.raises(DataError, match=said):
        build_time_steps(written, every)


@pytest.mark.parametrize(
    "every", ["fortnight", "0", -1, "nan", "inf", "1_0", True, [], "Month", pytest.param(10**5000, id="huge")]
)
def test_an_unknown_length_of_time_is_one_sentence(every: Any) -> None:
    with pytest.raises(ConfigError, match="legal are year, quarter, month, week, or a number above 0"):
        parse_every(every)


def test_numbers_are_scaled_by_the_first_time_step() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal([5, 1e6, 0], [2, 3e-1, 1], size=(600, 3))
    table = {"station": draw.integers(0, 4, 600), "date": np.repeat([1, 2, 3], 200), "rain": draw.integers(0, 2, 600)}
    s = of({**table, "a": x[:, 0], "b": x[:, 1], "c": np.full(600, 0.1)})
    first, order = x[:200], np.lexsort((table["station"], table["date"]))
    expected = (x - first.mean(0)) / first.std(0)
    assert np.allclose(s.x[:, :2], expected[order, :2], atol=1e-4) and np.allclose(s.x[:, 2], 0, atol=1e-12)
    a, b, c = s.recipe
    assert np.isclose(a.mean, first[:, 0].mean()) and np.isclose(b.std, first[:, 1].std(), rtol=1e-9) and c.std == 1.0
    unscaled = of({**table, "a": x[:, 0], "b": x[:, 1], "c": x[:, 2]}, scale=False)
    assert np.allclose(unscaled.x, x[order].astype(np.float32))


def test_what_is_the_same_in_the_first_time_step_only_is_not_lost() -> None:
    assert of(frame(temp=[5, 5, 6, 4])).x[:, 0].tolist() == [0, 0, 1, -1]


def test_moments_are_those_of_all_clients_together() -> None:
    draw = np.random.default_rng(1)
    values, client = draw.normal(1e6, 0.01, 500), draw.integers(0, 9, 500) * 3  # some numbers nobody has
    mean, std = compute_mean_and_std(values, client)
    assert np.isclose(mean, values.mean(), rtol=1e-14) and np.isclose(std, values.std(), rtol=1e-6)


def test_missing_values(caplog: pytest.LogCaptureFixture) -> None:
    table = frame(temp=["1", "3", "NA", "?"], wind=[1.0, 2.0, float("nan"), 4.0])
    with pytest.raises(
        DataError,
        match=r"2 rows have no value in 'temp' \(2: rows 2, 3\), 'wind' \(1: row 2\): --missing drop \(in Python ",
    ):
        of(table)
    filled = of(table, missing="mean", scale=False)
    assert filled.x.tolist() == [[1, 1], [3, 2], [2, 1.5], [2, 4]]
    assert of(table, missing="mean").x[2].tolist() == [0, 0]
    told = of(table, missing="indicator", scale=False)
    assert told.columns == ("temp", "temp missing", "wind", "wind missing")
    assert told.x.tolist() == [[1, 0, 1, 0], [3, 0, 2, 0], [2, 1, 1.5, 1], [2, 1, 4, 0]]
    with pytest.raises(DataError, match="at least 2 time steps are needed"):
        of(table, missing="drop")
    table["temp"][3] = "7"
    assert of(table, missing="drop").counts.tolist() == [[1, 1], [0, 1]]
    assert "left out 1 of 4 rows without a value in 'temp' (1: row 2), 'wind' (1: row 2)" in caplog.text


@pytest.mark.parametrize("missing", ["drop", "mean", "indicator"])
def test_rows_without_client_time_or_label_cannot_be_filled(missing: str, caplog: pytest.LogCaptureFixture) -> None:
    table = pd.DataFrame(frame(temp=[1.0, 2.0, 3.0, 4.0]))
    table = pd.concat([table, table.tail(3)], ignore_index=True).astype({"date": "Int64", "rain": "Int64"})
    table.loc[4, "station"], table.loc[5, "date"], table.loc[6, "rain"] = None, pd.NA, pd.NA
    with pytest.raises(DataError, match=r"3 rows have no value in 'station' \(1: row 4\), 'date' .*, 'rain'"):
        of(table)
    assert of(table, missing=missing).counts.tolist() == [[1, 1], [1, 1]] and "left out 3 of 7" in caplog.text


def test_one_class_is_refused() -> None:
    with pytest.raises(
        DataError, match="column 'rain', every row has the label '1', and at least 2 classes are needed"
    ):
        of(frame(temp=[1, 2, 3, 4]) | {"rain": [1, 1, 1, 1]})


def make_measurements(labels: list[Any]) -> dict[str, Any]:
    n = len(labels)
    return {
        "station": ["a"] * n,
        "date": [k % 2 for k in range(n)],
        "temp": [float(k % 7) for k in range(n)],
        "rain": labels,
    }


@pytest.mark.parametrize(
    ("labels", "limit"), [([k % 60 - 20 for k in range(600)], 9), ([k / 10 for k in range(60)], 2.9), (range(100), 49)]
)
def test_a_measurement_is_refused_as_a_label(labels: Any, limit: float) -> None:
    sentence = rf"'rain', which has \d+ different numbers .* is a measurement.* such as --label \"rain > {limit}\" \(in"
    with pytest.raises(DataError, match=sentence):
        of(make_measurements([*labels]))


def test_many_classes_are_legal(caplog: pytest.LogCaptureFixture) -> None:
    assert of(make_measurements([k % 60 for k in range(600)])).n_classes == 60
    assert "60 different numbers are a class each; divide a measurement into classes" in caplog.text
    caplog.clear()
    assert of(make_measurements([f"word {k % 60}" for k in range(600)])).n_classes == 60 and not caplog.text


def test_words_become_features(caplog: pytest.LogCaptureFixture) -> None:
    table = frame(temp=[1, 2, 3, 4], wind=["NW", "S", "W", "S"])
    with pytest.raises(
        DataError, match=r"'wind' has words, but features are numbers: --categories onehot \(in Python categories="
    ):
        of(table)
    s = of(table, categories="onehot", scale=False)
    assert s.columns == ("temp", "wind=NW", "wind=S")
    assert s.x.tolist() == [[1, 1, 0], [2, 0, 1], [3, 0, 0], [4, 0, 1]]  # W is new at the second time
    assert "words that the first time step does not have, and which are not features: W" in caplog.text
    table["wind"][3] = None
    s = of(table, categories="onehot", missing="indicator", scale=False)
    assert s.columns == ("temp", "wind=NW", "wind=S", "wind missing") and s.x[3].tolist() == [4, 0, 0, 1]


def test_too_many_words_are_refused() -> None:
    n = 1001
    table = {
        "station": ["a"] * 2 * n,
        "date": [1] * n + [2] * n,
        "rain": [0, 1] * n,
        "id": [f"x{i}" for i in range(2 * n)],
    }
    with pytest.raises(
        DataError, match="column 'id' has 1001 different words in the first time step, expected 1 to 1000"
    ):
        of(table, categories="onehot")


def test_data_frames() -> None:
    days = [
        datetime.date(2009, 1, 31),
        datetime.date(2009, 1, 31),
        datetime.date(2010, 2, 1),
        datetime.date(2010, 2, 1),
    ]
    plain = frame(temp=[1.5, 2, 3, 4], wet=[True, False, True, True])
    expected = of(plain | {"date": days}, every="year")
    assert expected.times == ("2009", "2010") and expected.columns == ("temp", "wet")
    table = pd.DataFrame(plain)
    stamps = pd.to_datetime(pd.Series(days))
    for date in (days, stamps, stamps.dt.tz_localize("Europe/Oslo"), stamps.dt.to_period("D"), stamps.astype(str)):
        s = of(table.assign(date=date), every="year")
        assert (s.x == expected.x).all() and s.times == expected.times
    s = of(table.assign(date=stamps, station=pd.Categorical(plain["station"]), rain=pd.Series([0.0, 1, 1, 0])))
    assert s.times == ("2009-01-31", "2010-02-01") and s.clients == ("a", "b") and s.classes == (0, 1)
    arrow_like = type("Frame", (), {"column_names": [*plain], "__getitem__": lambda _, name: np.array(plain[name])})
    assert (of(arrow_like()).x == of(plain).x).all()


def test_polars_and_arrow() -> None:
    polars = pytest.importorskip("polars", reason="polars is not installed")
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    table = frame(temp=[1.5, None, 3.0, 4.0], wind=["N", "S", None, "N"])
    table["date"] = [datetime.date(2009, month, 1) for month in (1, 1, 2, 2)]
    expected = of(table, missing="indicator", categories="onehot", every="month")
    for made in (polars.DataFrame(table), arrow.table(table)):
        s = of(made, missing="indicator", categories="onehot", every="month")
        assert (s.x == expected.x).all() and (s.times, s.columns) == (expected.times, expected.columns)


@pytest.mark.parametrize(
    ("table", "options", "said"),
    [
        (3, {}, "a frame is a dictionary of columns or a data frame, got a int"),
        ([[1, 2]], {}, "got a list"),
        ({}, {}, "client must name a column, got 'station'"),
        (frame(temp=[1, 2]), {}, "columns must be of the same length"),
        (frame(temp=[[1, 2]] * 4), {}, "column 'temp' must be one value per row, got an array of shape \\(4, 2\\)"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), {}, "(same name|one value per row)"),
        (frame(), {"client": "staton"}, "client must name a column, got 'staton', did you mean 'station'"),
        (frame(), {"client": 3}, "client must be the name of a column, got 3"),
        (frame(), {"scale": None}, "scale must be True or False, got None"),
        (frame(), {"client": "date"}, "must be three columns, got date, date, rain"),
        ({k: v for k, v in frame().items() if k != "temp"}, {}, "no column is left for features"),
        (frame(temp=[]) | {k: [] for k in KEYS.values()}, {}, "expected rows below the names of the columns, got none"),
        (frame(), {"missing": "mean_"}, "unknown missing 'mean_', did you mean 'mean'"),
        (frame(), {"categories": "hot"}, "unknown categories 'hot', did you mean 'onehot'"),
        (frame(temp=[None] * 4), {"missing": "mean"}, "column 'temp' is empty: leave it out"),
        (frame(temp=[None] * 4), {"missing": "drop"}, "every row lacks a value"),
        (frame(temp=[None, None, 1, 2]), {"missing": "mean"}, "'temp' has no value in the first time step"),
        (frame(temp=[1, 2, 3, float("inf")]), {}, "column 'temp' must have finite numbers, got 'inf' \\(row 3\\)"),
        (frame(temp=["1", "2", "x", "4"]), {}, "must have finite numbers, got 'x' \\(row 2\\)"),
        (frame(temp=["1", "2", "3", "1,234.5"]), {}, "got '1,234.5' .*decimals have a point"),
        (frame(temp=[0, 1e-30, 1e30, 1]), {}, "leaves the scale of the first time step"),
        (frame() | {"date": [1] * 4}, {}, "column 'date': at least 2 time steps are needed, .* got 1"),
        (frame() | {"date": ["2009-01-01"] * 4}, {"every": "year"}, "got 2009; a shorter every gives more"),
        (frame() | {"rain": [0, 1, "wet", 0]}, {}, "column 'rain', row 2: label 'wet' is a word"),
        (frame() | {"rain": [0, 1, 0.5, 0]}, {}, "labels are whole numbers or words, got 0.5"),
    ],
)  # fmt: skip
def test_a_bad_frame_is_one_sentence(table: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(FeddriftError, match=said):
        of(table, **options)


def test_separators_decimal_commas_and_encodings_are_found(put: Any, caplog: pytest.LogCaptureFixture) -> None:
    expected = stream(put(), **KEYS)
    for content, said in {
        TABLE.replace(",", ";").encode(): "columns are separated by semicolons",
        TABLE.replace(",", ";").replace(".", ",").encode(): "column 'temp' has decimal commas",
        TABLE.replace(",", "\t").encode(): "columns are separated by tabs",
        TABLE.replace("wind", "Wärme").encode("cp1252"): "line 1: not UTF-8, read as Windows-1252",
        b"\xef\xbb\xbf" + TABLE.replace("\n", "\r\n").encode(): "",
        TABLE.encode("utf-16"): "",
        TABLE.replace("\n", ",\n").encode(): "",  # each line ends with a separator
        (TABLE + "\n,,,,\n").encode(): "",  # a spreadsheet's empty line
        TABLE.replace("temp", '"temp"').replace("yes", ' "yes"').replace(' "', '"').encode(): "",
    }.items():
        caplog.clear()
        s = stream(put(content), **KEYS)
        assert (s.x == expected.x).all() and (s.y == expected.y).all(), content
        assert said in caplog.text and bool(said) == bool(caplog.records), content
    assert (stream(f"table:{put(TABLE, 'weather.txt')}", **KEYS).x == expected.x).all()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty, expected a header line"),
        (HEADER, "expected rows below"),
        (HEADER + '"s0,2009', "line 2: cannot be read as CSV"),
        (TABLE.replace("temp", ""), "every column needs a name, got none for column 3"),
        ("".join(f",{line}\n" if "temp" in line else f"0,{line}\n" for line in TABLE.splitlines()), "index=False"),
        (TABLE.replace("wind", "temp"), "a name of its own, got 'temp' more than once"),
        (b"PK\x03\x04", "is an Excel file or an archive"),
        (b"\x1f\x8b\x08", "is compressed"),
        (b"a\x00b", "is not text in UTF-8"),
        (b"\x81\xff", "is not text in UTF-8"),
        (b"\xff\xfea", "is not text in UTF-8"),
        (TABLE.replace(",", ";").replace("1.5", "1,500").replace("2.5", "999"), "temp.* has words|must have finite"),
        ("station;date;temp;rain\na;1;1,500;0\nb;2;999;1\n", "'1,500' may have a decimal comma or"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_sentence(put: Any, content: str | bytes, said: str) -> None:
    with pytest.raises(DataError, match=said):
        stream(put(content), **KEYS)


def test_all_problems_are_reported_together(put: Any) -> None:
    more = (
        's0,2009-05-01,warm,3,yes\ns0,2009-13-02,3,4\ns1,2009-13-02,"1,234",4,no\ns0,soon,3,inf,3\n,2009-05-01,1,1,no\n'
    )
    with pytest.raises(DataError) as error:
        stream(put(TABLE + more), **KEYS, every="month")
    told = str(error.value)
    for said in (
        "has 6 problems: (1) every line must have 5 values as the header has, got line 11 (4)",
        "(2) 1 rows have no value in 'station' (1: line 14)",
        "(3) column 'temp' must have finite numbers, got 'warm' (lines 10, 12)",
        "(4) column 'wind' must have finite numbers, got 'inf' (line 13)",
        "'2009-13-02' (line 12): month must be in 1..12, 'soon' (line 13): not a date",
        "(6) column 'rain', line 13: label '3' is a whole number, but other labels are words",
    ):
        assert said in told
    assert "\n" not in told and len(told) <= 1000


def test_the_first_of_very_many_problems_are_reported(put: Any) -> None:
    names = [f"column_{k}" for k in range(40)]
    lines = [",".join(["s", str(t), str(t % 2), *["x" if t == 3 else "1"] * 40]) for t in range(5)]
    with pytest.raises(DataError, match=r"has 40 problems: \(1\) column 'column_0' .*; and \d\d more$") as error:
        stream(put(",".join(["station", "date", "rain", *names]) + "\n" + "\n".join(lines)), **KEYS)
    assert len(str(error.value)) <= 1000


def test_all_wrong_names_are_reported(put: Any) -> None:
    said = (
        r"has 3 problems: .* client must name a column; .*'Date', did you mean 'date'\?; .*'label' \(there are: station"
    )
    with pytest.raises(DataError, match=said):
        stream(put(), time="Date")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("sine-2", {"client": "a"}, "client is for tables, FILE.csv, so it must be left out for sine-2, got 'a'"),
        ("folder:x", {"every": 3}, "every is for tables"),
        ("sine-2", {"scale": False}, "scale is for tables"),
        ("sin-2", {"scale": False}, "did you mean 'sine-2'"),
        ("nowhere.csv", KEYS, "'nowhere.csv' is not a file, expected a table such as weather.csv"),
        ("table:", KEYS, "'table:' names no file, expected one with a table such as table:weather.csv"),
    ],
)
def test_options_without_a_table(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(FeddriftError, match=said):
        stream(name, **options)


def test_other_files_are_meant_by_name(put: Any) -> None:
    path = put(TABLE, "weather.txt")
    for options in ({}, KEYS):
        with pytest.raises(ConfigError, match=r"it is a file: did you mean 'table:"):
            stream(path, **options)
    with pytest.raises(ConfigError, match="pattern must be left out"):
        stream(put(), **KEYS, pattern="Y")


def test_a_large_feature_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    of(frame(temp=[1, 2, 3, 1e6]))
    of(frame(temp=[1, 2, 3, 1e6]), scale=False)
    assert "in standard deviations of the first time step" in caplog.text and "nothing is scaled" in caplog.text


def test_a_run_of_a_table_is_recorded_resumed_and_exported(put: Any, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    lines = ["shop,month,age,mood,sold"]
    for t, c, _ in np.ndindex(4, 2, 60):
        age, mood = draw.normal(40, 10), ("good", "bad")[int(draw.integers(2))]
        lines.append(f"shop{c},2009-0{t + 1},{age:.2f},{mood},{'yes' if age > 40 else 'no'}")
    path, out = put("\n".join(lines)), tmp_path / "runs"
    config = RunConfig.from_values(
        stream=path,
        algorithm="Oblivious",
        rounds=20,
        client="shop",
        time="month",
        label="sold",
        categories="onehot",
        every="month",
    )
    run = RecordedRun(config, out)
    for step in run:
        if step.tau == 1:
            break  # a run that was stopped
    again = load_stopped_run(run.checkpoints.path)
    assert [step.tau for step in again] == [2]
    header = fd.read(out)[0].header
    told = {"client": "shop", "time": "month", "label": "sold", "categories": "onehot", "every": "month"}
    assert header["overrides"].items() >= told.items() and header["times"][0] == "2009-01"
    assert not {"missing", "scale"} & header["overrides"].keys()
    rerun, _ = build_run_command(header)
    assert "--client shop --time month --every month --categories onehot" in rerun and "scale" not in rerun
    assert "--no-scale" in build_run_command(header | {"overrides": {"scale": False}})[0]
    (folder,) = fd.export(out, tmp_path / "models")
    models = fd.load_models(folder)
    assert models.columns == ("age", "mood=bad", "mood=good")
    people: dict[str, Any] = {"mood": ["good", "bad", "new"], "age": [70, "10", 75.0], "more": [0, 0, 0]}
    assert models.predict("shop0", people).tolist() == ["yes", "no", "yes"]
    assert models.predict("shop1", pd.DataFrame(people)).tolist() == ["yes", "no", "yes"]
    s = config.load_stream()
    assert (models.predict("shop0", s.cell(3, 0)[0]) == np.array(s.classes)[s.cell(3, 0)[1]]).mean() > 0.8
    for wrong, said in {
        "x": "column 'age' must have numbers, got 'x'",
        None: "column 'age' has 1 gaps, the models were trained without gaps",
    }.items():
        with pytest.raises(DataError, match=said):
            models.predict("shop0", pd.DataFrame({"age": [wrong], "mood": ["good"]}))
    with pytest.raises(DataError, match="need the columns age, mood: got no column 'mood'"):
        models.predict("shop0", {"age": [1]})
    about = json.loads((folder / "models.json").read_text())
    about["recipe"].pop()
    (folder / "models.json").write_text(json.dumps(about))
    with pytest.raises(DataError, match="the names in recipe must be those in columns"):
        fd.load_models(folder)


def test_each_differing_configuration_has_its_own_record(put: Any) -> None:
    given = {"stream": put(), "algorithm": "Oblivious", **KEYS}
    found = []
    for more in ({}, {"every": "month"}, {"every": 30}, {"every": "30"}, {"missing": "drop"}, {"scale": False}):
        config = RunConfig.from_values(**given, **more)
        found.append(config.list_overrides(config.load_stream()))
    assert found[2] == found[3] and len({json.dumps(overrides) for overrides in found}) == 5


def test_a_model_that_filled_gaps_fills_them_again(put: Any, tmp_path: Path) -> None:
    table = TABLE + "s0,2009-04-09,,1,yes\n"
    options: dict[str, Any] = {**KEYS, "every": "month", "missing": "indicator", "rounds": 1}
    fd.record(put(table), "Oblivious", out=tmp_path / "runs", **options)
    (folder,) = fd.export(tmp_path / "runs", tmp_path / "models")
    models = fd.load_models(folder).of("s0")
    assert models.columns == ("temp", "temp missing", "wind")
    x = stream(put(table), **KEYS, every="month", missing="indicator").x
    raw = {"temp": [None, 1.5], "wind": ["1", 13]}
    prepared = models._stack_columns(raw)
    assert prepared[0, 1] == 1 and prepared[1, 1] == 0 and prepared[0].tolist() in x.tolist()


def test_the_meaning_of_every_in_version_0_2(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="use checkpoint_every"):
        fd.record("sine-2", "Oblivious", out=tmp_path, rounds=1, steps=1, every=1)


def test_very_many_time_steps_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    n = 1002
    of({"station": ["a"] * n, "date": range(n), "rain": [0, 1] * (n // 2), "x": range(n)})
    assert "1002 time steps, from 0 to 1001; --every month, or a number, makes fewer" in caplog.text


def test_a_good_table_gives_no_warning(put: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stream(put(), **KEYS)
    assert not caplog.records


def test_times_of_other_zones_are_put_in_order() -> None:
    times = ["2019-12-31T23:00:00Z", "2020-01-01T00:00:00+02:00", "2020-01-01T00:00:00-02:00"]
    assert [build_time_steps(times, None).step_by_text[time] for time in times] == [1, 0, 2]


def test_numbers_of_eight_digits_are_dates_only_if_all_are() -> None:
    table = {"c": ["a"] * 4, "t": [26297280, 26297290, 26297280, 26297290], "x": [0.0, 1, 2, 3], "y": [0, 1, 0, 1]}
    assert Stream.from_frame(table, client="c", time="t", label="y").times == ("26297280", "26297290")


def test_masked_values_are_missing() -> None:
    x = np.ma.masked_array([0.0, 1, 2, 99], mask=[False, False, False, True])
    table = {"c": ["a"] * 4, "t": [1, 1, 2, 2], "x": x, "y": [0, 1, 0, 1]}
    with pytest.raises(DataError, match="missing"):
        Stream.from_frame(table, client="c", time="t", label="y")
    assert len(Stream.from_frame(table, client="c", time="t", label="y", missing="drop").y) == 3
