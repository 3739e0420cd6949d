"""Records: bytes at random, true records with accidents, and true records with a value replaced."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from feddrift.reports import metrics, page, paper, pictures, summary, tables
from feddrift.reports.page import data
from feddrift.runs import record
from feddrift.runs import writer as writer_module
from tests.property.fuzz import LONG, TOKENS, accepted, mutated, paths, placed, tries
from tests.unit.fake_records import federation, header, make, merged

CONCEPTS = [[0, 0, 1], [0, 1, 1], [1, 1, 0]]
SHIFTS = {
    "since": 0,
    "rows": [9, 9],
    "moved": [
        {"what": "mean", "name": "age", "before": 1.5, "after": 2.0, "distance": 0.5, "within": "1"},
        {"what": "class", "name": "1", "before": 0.1, "after": 0.5, "distance": 0.4},
    ],
    "more": 1,
}


def true_record(folder: Path, many: int = 100, **changes: Any) -> bytes:
    """A record of two time steps with drifts and a merge, as the writer has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module, "MAX_CLIENTS_IN_ROWS", many)
        head = header(2, 3, concepts=CONCEPTS, same={"1": 0}, **changes)
        columns: dict[str, Any] = {"model": [[0, 0, 1], [0, 2, 2]], "drift": [[False] * 3, [False, True, True]]}
        columns["shifts"] = [[None] * 3, [None, SHIFTS, None]]
        make(folder, head, columns, [merged(1, 1, into=0)])
    (path,) = folder.glob("*.jsonl")
    return path.read_bytes()


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    going_on = tmp_path_factory.mktemp("federation")
    federation(going_on)
    (part,) = going_on.glob("*.part")
    return [*(true_record(tmp_path_factory.mktemp("records"), many) for many in (100, 0)), part.read_bytes()]


ODD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**53, 2**63 - 1, 2**63, 10**400, -0.5, 0.5, 1e308, float("nan"), float("inf"), "",
    "0", "1", "9" * 5000, "²", "a\nb\x1b", "0001-01-01", "9999-12-31T23:59:59", "é" * 999, [], [0], [[]], {}, {"0": 0},
    {"1": 2**63 - 1}, {"9" * 5000: 0},
]  # fmt: skip
json_values = st.sampled_from(ODD) | st.recursive(
    st.none() | st.booleans() | st.integers(-2, 5) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.just("0"), inner, max_size=3),
    max_leaves=4,
)


def joined(lines: list[Any]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


@st.composite
def replaced(draw: st.DrawFn, whole: bytes) -> bytes:
    """A record whose lines are JSON and nearly right: some values or keys are others."""
    lines = [json.loads(line) for line in whole.splitlines()]
    for _ in range(draw(st.integers(1, 3))):
        i = draw(st.integers(0, len(lines) - 1))
        kind = draw(st.sampled_from(["value", "key", "without", "all"]))
        at = draw(st.sampled_from([path for path in paths(lines[i]) if path]))
        if kind == "value":
            lines[i] = placed(lines[i], at, draw(json_values))
        elif kind == "key":
            lines[i] = {**lines[i], draw(st.text(max_size=3)): draw(json_values)}
        elif kind == "without":
            lines[i] = {k: v for k, v in lines[i].items() if k != at[0]}
        else:  # the same in all lines of a kind
            value = draw(json_values)
            alike = [j for j, line in enumerate(lines) if line.keys() == lines[i].keys()]
            lines = [{**line, at[0]: value} if j in alike else line for j, line in enumerate(lines)]
    return joined(lines)


def check(path: Path, content: bytes, draw_plots: bool = False) -> bool:
    """Whether it is a record; if so, all that can be asked of one has an answer."""
    path.write_bytes(content)
    found = accepted(lambda: record.read(path))
    if found is None:
        return False
    rows, head = found.rows, found.header
    assert found.runs_on or rows.steps <= head["n_steps"]
    assert rows.model.shape == (rows.steps, head["n_clients"]) and len(head["clients"]) == head["n_clients"]
    assert (rows.model >= 0).all() and (rows.tested >= 0).all() and np.isfinite(rows.models_sent).all()
    assert (np.isnan(rows.accuracy) | ((rows.accuracy >= 0) & (rows.accuracy <= 1))).all()
    assert found.status != "complete" or found.runs_on or rows.steps == head["n_steps"]
    assert all(event["t"] < rows.steps for event in found.events)
    records = [found, *record.read_all(path)]
    summaries = summary.summarise(records)
    assert bool(summaries) == (found.status == "complete" or (found.runs_on and rows.steps > 0))
    measured = metrics.summarise_metrics(records)
    json.dumps(tables.to_json(summaries, metrics=measured), allow_nan=False)
    gaps = accepted(lambda: summary.compare(records, head["algorithm"]))
    theirs = [paper.find_published_result(summary) for summary in summaries]
    Console(file=io.StringIO(), width=100).print(tables.build_summary_table(summaries, gaps or [], theirs))
    Console(file=io.StringIO(), width=100).print(*tables.build_metrics_tables(summaries, measured))
    if summaries:
        page.build_page(data.collect_page_data(records, path.name))
    if draw_plots:
        for draw in (
            pictures.draw_clusters,
            pictures.draw_accuracy,
            pictures.draw_patterns,
            pictures.draw_threshold,
            pictures.draw_traffic,
        ):
            _draw(draw, records, path)
    return True


def _draw(draw: Any, records: list[record.Record], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a glyph that no font has, an axis without width
        warnings.simplefilter("ignore", RuntimeWarning)
        accepted(lambda: pictures.save_picture(draw(records), path.with_suffix(".png")))


@tries(200)
@given(st.binary(max_size=80) | st.lists(st.sampled_from(TOKENS), max_size=4).map(b"".join))
def test_bytes_at_random(tmp_path: Path, content: bytes) -> None:
    assert not check(tmp_path / "a.jsonl", content)


@tries(300)
@given(data=st.data())
def test_accidents(tmp_path: Path, wholes: list[bytes], data: st.DataObject) -> None:
    check(tmp_path / "a.jsonl", data.draw(mutated(data.draw(st.sampled_from(wholes)))))


@tries(300)
@given(data=st.data())
def test_values_replaced(tmp_path: Path, wholes: list[bytes], data: st.DataObject) -> None:
    check(tmp_path / "a.jsonl", data.draw(replaced(data.draw(st.sampled_from(wholes)))))


@tries(3)
@given(data=st.data())
def test_pictures_of_values_replaced(tmp_path: Path, wholes: list[bytes], data: st.DataObject) -> None:
    check(tmp_path / "a.jsonl", data.draw(replaced(wholes[0])), draw_plots=True)


@pytest.mark.slow
def test_cut_anywhere(tmp_path: Path, wholes: list[bytes]) -> None:
    """A part of a record is read as far as its time steps are whole, and never taken for complete."""
    path = tmp_path / "a.jsonl"
    for whole in wholes:
        for end in range(len(whole) - 1):
            path.write_bytes(whole[:end])
            found = accepted(lambda: record.read(path))
            assert found is None or found.status == "unfinished"
            assert (found is None) == (end < whole.index(b"\n"))


@pytest.mark.slow
def test_every_value_in_turn(tmp_path: Path, wholes: list[bytes]) -> None:
    for whole in wholes if LONG else wholes[::2]:
        lines = [json.loads(line) for line in whole.splitlines()]
        kinds = [line["kind"] for line in lines]
        for i in sorted({kinds.index(kind) for kind in kinds}):  # one line of each kind
            for path in paths(lines[i])[1:]:
                for value in ODD if LONG else ODD[len(path) :: 3]:
                    check(tmp_path / "a.jsonl", joined([*lines[:i], placed(lines[i], path, value), *lines[i + 1 :]]))
