"""Columns of tables: label expressions, columns that are left out, ids, and clients that disappear."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

import feddrift as fd
from feddrift.data import Stream
from feddrift.errors import ConfigError, DataError, FeddriftError
from feddrift.reports.event_text import build_run_command
from feddrift.runs.config import RunConfig
from feddrift.runs.sweep import read_grid
from feddrift.streams import stream
from feddrift.tables.expressions import looks_like_expression, parse_expression

KEYS: dict[str, Any] = {"client": "shop", "time": "day", "label": "late"}


def frame(**columns: Any) -> dict[str, Any]:
    """Two clients at two times."""
    keys = {"shop": ["a", "b", "a", "b"], "day": [1, 1, 2, 2], "late": [0, 1, 1, 0]}
    return {**keys, "temp": [1.0, 2.0, 3.0, 4.0], **columns}


def of(table: object, **options: Any) -> Stream:
    return Stream.from_frame(table, **{**KEYS, **options})


DELAYS = [12, "15.0", 16.5, 15]
CARRIERS = ["AA", "B 6", "DL", "AA"]


@pytest.mark.parametrize(
    ("label", "labels"),
    [
        ("delay > 15", "nnyn"),
        ("delay>=15", "nyyy"),
        ("delay <15", "ynnn"),
        ("'delay' <= 1.5e1", "yyny"),
        ("delay > -3 ", None),
        ("delay == 15", "nyny"),
        ('delay != "15"', "ynyn"),
        ("carrier == AA", "ynny"),
        ("carrier == 'B 6'", "nynn"),
        ("carrier in (AA, 'B 6')", "yyny"),
        ("carrier in(DL)", "nnyn"),
        ("carrier != DL", "yyny"),
        ("delay in (12, 16.50)", "ynyn"),
    ],
)
def test_label_expressions(label: str, labels: str | None) -> None:
    table = frame(delay=DELAYS, carrier=CARRIERS)
    if labels is None:
        with pytest.raises(DataError, match="column 'delay > -3 ', every row has the label 'yes'"):
            of(table, label=label, features="temp")
        return
    s = of(table, label=label, features=["temp"], scale=False)
    assert s.classes == ("no", "yes") and s.columns == ("temp",)
    found = ["ny"[s.cell(t, c)[1][0]] for t in (0, 1) for c in (0, 1)]
    assert "".join(found) == labels


def test_the_column_of_an_expression_is_not_a_feature() -> None:
    s = of(frame(delay=DELAYS), label="delay > 15")
    assert s.columns == ("late", "temp")
    table = {**frame(), "a > b": [0, 1, 1, 0]}
    assert of(table, label="a > b").classes == (0, 1)  # a column of this name


def test_labels_of_gaps_are_missing() -> None:
    table = frame(delay=[12, None, 30, "NA"], temp=[1.0, 2.0, 3.0, 4.0])
    for label in ("delay > 15", "delay == 12"):
        with pytest.raises(DataError, match=r"2 rows have no value in 'delay' \(2: rows 1, 3\)"):
            of(table, label=label)
        assert of(table, label=label, missing="drop").counts.tolist() == [[1], [1]]


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ("delay >", "the label 'delay >' needs a value, got the end: allowed is COLUMN < NUMBER"),
        ("> 15", "needs the name of a column, got '>'"),
        ("delay = 15", "needs <, <=, >, >=, == , !=|needs <, .* after 'delay', got '=', did you mean '=='"),
        ("delay > fifteen", "'>' in the label 'delay > fifteen' needs a number, got 'fifteen': use =="),
        ("delay > nan", "needs a number, got 'nan'"),
        ("delay > 15 and temp > 3", "needs the end, got 'and'"),
        ("delay > 10 < 20", "needs the end, got '<'"),
        (
            "departure delay > 15",
            "needs <, .* after 'departure', got 'delay'.* names and values with spaces need quotes",
        ),
        ("'delay > 15", "has an open quote"),
        ("carrier in (AA", r"needs ',' or '\)', got the end"),
        ("carrier in ()", r"needs a value, got '\)'"),
        ("carrier in (AA,)", r"needs a value, got '\)'"),
        ("carrier in (AA B6)", r"needs ',' or '\)', got 'B6'"),
        ("carrier in (AA) or 3", "needs the end, got 'or'"),
        ("'carrier' in", r"needs '\(' after in, got the end"),
        ("__import__('os') == 3", "needs <, .* after '__import__', got '\\('"),
        ("dely > 15", "label must name a column, got 'dely', did you mean 'delay'"),
        ("carrier > 15", "column 'carrier': '>' compares numbers, got 'AA' in 4 of 4 rows; == or in"),
        ("day > 1", "client, time and label must be three columns, got shop, day, day"),
        ("'' > 1", "needs the name of a column, got ''"),
    ],
)
def test_a_wrong_expression_is_one_sentence(label: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        of(frame(delay=DELAYS, carrier=CARRIERS), label=label, features="temp")


def test_what_looks_like_an_expression() -> None:
    for label in ("a > 1", "a==b", "a in (b)", "'a b' in (c)", "a !b", "x="):
        assert looks_like_expression(label), label
    for label in ("rain", "rain in oslo", "dep_delay", "weather (in)", "inside", "50 %"):
        assert not looks_like_expression(label), label
    assert parse_expression("a in (b,'c, d')").values == ("b", "c, d")


def test_columns_are_chosen() -> None:
    table = frame(id=[1, 2, 3, 4], wind=["N", "S", "N", "S"], broken=[[1]] * 4)
    assert of(frame(id=[1, 2, 3, 4]), drop="temp").columns == ("id",)
    assert of({**table, "broken": ["x", "", "y", 3]}, drop=["broken", "wind"]).columns == ("temp", "id")
    assert of({**table, "broken": ["x", "", "y", 3]}, features="id, temp").columns == ("temp", "id")
    assert of({**frame(), "a, b": [1, 2, 3, 4]}, features='"a, b"').columns == ("a, b",)
    assert of({**frame(), "a, b": [1, 2, 3, 4]}, features=["a, b"]).columns == ("a, b",)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"drop": "tmp"}, "drop must name columns of the table, got 'tmp', did you mean 'temp'.*there are: shop, day"),
        ({"drop": "temp,delay"}, "no column is left for features"),
        ({"drop": "shop"}, "drop must name columns of features, got 'shop', which is the client column"),
        ({"drop": "delay", "label": "delay > 15"}, "got 'delay', which is the label column"),
        ({"drop": "a,,b"}, "drop must be names of columns such as \"id,day\", got 'a,,b'"),
        ({"drop": '"a'}, "drop must be names of columns"),
        ({"drop": 3}, 'drop must be names of columns such as "id,day", got 3'),
        ({"drop": [1]}, "drop must be names of columns"),
        ({"features": ""}, "features must be names of columns"),
        ({"features": []}, "features must name at least one column, got none"),
        ({"features": {"temp": 1}}, "features must be names of columns"),
        ({"features": "temp,wind speed"}, "features must name columns of the table, got 'wind speed'"),
        ({"features": "temp,late"}, "features must name columns of features, got 'late', which is the label column"),
        ({"features": "temp", "drop": "delay"}, "give either drop or features"),
    ],
)
def test_a_wrong_choice_of_columns_is_one_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(FeddriftError, match=said):
        of(frame(delay=[1, 2, 30, 40]), **options)


def test_options_of_columns_are_for_tables() -> None:
    for options in ({"drop": ["id"]}, {"features": "id"}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))} is for tables, FILE.csv"):
            stream("sine-2", **options)


def make_rows(n: int = 200) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    return {
        "shop": [f"s{k % 3}" for k in range(n)],
        "day": [k * 4 // n for k in range(n)],
        "late": draw.integers(0, 2, n),
        "temp": draw.normal(size=n),
        "age": draw.integers(18, 90, n),
    }


@pytest.mark.parametrize(
    ("ids", "is_id"),
    [
        (range(200), True),
        ([7 * k + k % 5 for k in range(200)], True),  # it increases
        (np.random.default_rng(1).permutation(200), True),  # each value once
        ([*np.random.default_rng(1).permutation(199), 3], True),
        ([k // 2 for k in range(200)], False),
        (np.random.default_rng(1).normal(size=200), False),  # a measurement
        (np.sort(np.random.default_rng(1).normal(size=200)), False),
        ([k % 100 for k in range(200)], False),
        ([f"customer {k}" for k in range(200)], True),
        ([f"customer {k % 20}" for k in range(200)], False),
    ],
)
def test_a_column_that_looks_like_an_id_is_named(ids: Any, is_id: bool, caplog: pytest.LogCaptureFixture) -> None:
    of(make_rows() | {"flight no": list(ids)}, categories="onehot")
    warned = "column 'flight no' looks like an id" in caplog.text and "--drop 'flight no' leaves it out" in caplog.text
    assert warned == is_id
    caplog.clear()
    of(make_rows() | {"flight no": list(ids)}, drop="flight no")
    assert not caplog.records


def test_clients_that_disappear_are_named(caplog: pytest.LogCaptureFixture) -> None:
    table = make_rows()
    table["late"] = [
        None if shop == "s1" else int(label) for shop, label in zip(table["shop"], table["late"], strict=True)
    ]
    assert of(table, missing="mean").clients == ("s0", "s2")
    assert "frame: left out client s1: no row has a label in 'late'" in caplog.text
    caplog.clear()
    table = make_rows()
    table["temp"] = [None if shop != "s1" else 1.0 + k % 3 for k, shop in enumerate(table["shop"])]
    assert of(table, missing="drop").clients == ("s1",)
    assert "frame: left out clients s0, s2: every row lacks a value in some column" in caplog.text


def write_flights(folder: Path) -> str:
    table = make_rows()
    columns = {**table, "delay": [k % 40 for k in range(200)], "tail number": [f"N{k}" for k in range(200)]}
    pq.write_table(pa.table(columns).drop_columns(["late"]), folder / "flights.parquet")
    return str(folder / "flights.parquet")


def test_options_of_columns_are_recorded_only_where_given(tmp_path: Path) -> None:
    options: dict[str, Any] = {"client": "shop", "time": "day", "label": "delay > 15", "rounds": 1, "steps": 2}
    path = write_flights(tmp_path)
    run = fd.record(path, "Oblivious", out=tmp_path / "runs", **options, drop=["tail number"])
    overrides = run.header["overrides"]
    assert overrides["drop"] == "tail number" and overrides["label"] == "delay > 15" and "features" not in overrides
    command, _ = build_run_command(run.header)
    assert "--label 'delay > 15'" in command and "--drop 'tail number'" in command
    other = fd.record(path, "Oblivious", out=tmp_path / "runs", **options, features="temp, age")
    assert other.header["overrides"]["features"] == "temp,age" and len(fd.read(tmp_path / "runs")) == 2
    assert (other.rows.accuracy == run.rows.accuracy).all()  # the same features
    folders = fd.export(tmp_path / "runs", tmp_path / "models")
    for folder in folders:
        models = fd.load_models(folder)
        assert models.columns == ("temp", "age")
        rows: dict[str, Any] = {"temp": [0.5, -1.0], "age": [20, 70], "tail number": ["N1", "N2"], "delay": [3, 99]}
        assert set(models.predict("s0", rows)) <= {"no", "yes"}
    config = RunConfig.from_values(stream=path, **{**options, "label": "delay"})
    assert not {"drop", "features"} & config.model_dump().keys()
    assert RunConfig.from_values(**json.loads(config.model_dump_json())) == config
    given = RunConfig.from_values(stream=path, drop="a,b", **options)
    assert RunConfig.from_values(**given.model_dump(mode="json")).drop == ("a", "b")


def test_columns_in_a_sweep(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    grid = 'stream = "x.csv"\nclient = "c"\ntime = "t"\nlabel = ["y > 1", "y > 2"]\n'
    plan.write_text(f'[[runs]]\n{grid}drop = "id, day"\n')
    assert [(config.label, config.drop) for config in read_grid(plan)] == [
        ("y > 1", ("id", "day")),
        ("y > 2", ("id", "day")),
    ]
    plan.write_text(f'[[runs]]\n{grid}features = ["a,b", "a"]\n')
    assert [config.features for config in read_grid(plan)][:2] == [("a", "b"), ("a",)]
    plan.write_text(f"[[runs]]\n{grid}drop = 3\n")
    with pytest.raises(ConfigError, match='runs 1: drop must be names of columns such as "id,day", got 3'):
        read_grid(plan)


def test_a_measurement_as_label_suggests_an_expression() -> None:
    table = make_rows() | {"arrival delay": [k / 3 for k in range(200)]}
    with pytest.raises(
        DataError, match=r"""such as --label "'arrival delay' > 33.*in Python label="'arrival delay' > 33"""
    ):
        of(table, label="arrival delay")
    with pytest.raises(DataError, match=r'got 0.5: make classes of a measurement, such as --label "COLUMN > 0.5"'):
        of(frame(late=[0, 1, 0.5, 1]))
