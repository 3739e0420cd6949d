"""Records: random bytes, valid records with random damage, and valid records with a replaced value."""

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
from tests.support.fuzzing import (
    FEATURE_SHIFTS,
    LONG_SEARCH,
    ODD_VALUES,
    TOKENS,
    call_or_refuse,
    json_values,
    limit_examples,
    list_paths,
    mutations,
    replace_at_path,
)
from tests.support.records import make_header, make_merge_event, write_federation_record, write_record

CONCEPTS = [[0, 0, 1], [0, 1, 1], [1, 1, 0]]


def make_valid_record(folder: Path, many: int = 100, **changes: Any) -> bytes:
    """A record of two time steps with drifts and a merge, as the writer has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module, "MAX_CLIENTS_IN_ROWS", many)
        head = make_header(2, 3, concepts=CONCEPTS, same={"1": 0}, **changes)
        columns: dict[str, Any] = {"model": [[0, 0, 1], [0, 2, 2]], "drift": [[False] * 3, [False, True, True]]}
        columns["shifts"] = [[None] * 3, [None, FEATURE_SHIFTS, None]]
        write_record(folder, head, columns, [make_merge_event(1, 1, into=0)])
    (path,) = folder.glob("*.jsonl")
    return path.read_bytes()


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    going_on = tmp_path_factory.mktemp("federation")
    write_federation_record(going_on)
    (part,) = going_on.glob("*.part")
    return [*(make_valid_record(tmp_path_factory.mktemp("records"), many) for many in (100, 0)), part.read_bytes()]


def join_lines(lines: list[Any]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


@st.composite
def replace_values(draw: st.DrawFn, whole: bytes) -> bytes:
    """A record whose lines are JSON and nearly right: some values or keys are others."""
    lines = [json.loads(line) for line in whole.splitlines()]
    for _ in range(draw(st.integers(1, 3))):
        i = draw(st.integers(0, len(lines) - 1))
        kind = draw(st.sampled_from(["value", "key", "without", "all"]))
        at = draw(st.sampled_from([path for path in list_paths(lines[i]) if path]))
        if kind == "value":
            lines[i] = replace_at_path(lines[i], at, draw(json_values))
        elif kind == "key":
            lines[i] = {**lines[i], draw(st.text(max_size=3)): draw(json_values)}
        elif kind == "without":
            lines[i] = {k: v for k, v in lines[i].items() if k != at[0]}
        else:  # the same in all lines of a kind
            value = draw(json_values)
            alike = [j for j, line in enumerate(lines) if line.keys() == lines[i].keys()]
            lines = [{**line, at[0]: value} if j in alike else line for j, line in enumerate(lines)]
    return join_lines(lines)


def check(path: Path, content: bytes, draw_plots: bool = False) -> bool:
    """Whether it is a record; if so, all that can be asked of one has an answer."""
    path.write_bytes(content)
    found = call_or_refuse(lambda: record.read(path))
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
    gaps = call_or_refuse(lambda: summary.compare(records, head["algorithm"]))
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
            _draw_pictures(draw, records, path)
    return True


def _draw_pictures(draw: Any, records: list[record.Record], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a glyph that no font has, an axis without width
        warnings.simplefilter("ignore", RuntimeWarning)
        call_or_refuse(lambda: pictures.save_picture(draw(records), path.with_suffix(".png")))


@limit_examples(200)
@given(st.binary(max_size=80) | st.lists(st.sampled_from(TOKENS), max_size=4).map(b"".join))
def test_bytes_at_random(tmp_path: Path, content: bytes) -> None:
    assert not check(tmp_path / "a.jsonl", content)


@limit_examples(300)
@given(data=st.data())
def test_accidents(tmp_path: Path, wholes: list[bytes], data: st.DataObject) -> None:
    check(tmp_path / "a.jsonl", data.draw(mutations(data.draw(st.sampled_from(wholes)))))


@limit_examples(300)
@given(data=st.data())
def test_values_replaced(tmp_path: Path, wholes: list[bytes], data: st.DataObject) -> None:
    check(tmp_path / "a.jsonl", data.draw(replace_values(data.draw(st.sampled_from(wholes)))))


@limit_examples(3)
@given(data=st.data())
def test_pictures_of_values_replaced(tmp_path: Path, wholes: list[bytes], data: st.DataObject) -> None:
    check(tmp_path / "a.jsonl", data.draw(replace_values(wholes[0])), draw_plots=True)


@pytest.mark.slow
def test_cut_anywhere(tmp_path: Path, wholes: list[bytes]) -> None:
    """A part of a record is read as far as its time steps are whole, and never taken for complete."""
    path = tmp_path / "a.jsonl"
    for whole in wholes:
        for end in range(len(whole) - 1):
            path.write_bytes(whole[:end])
            found = call_or_refuse(lambda: record.read(path))
            assert found is None or found.status == "unfinished"
            assert (found is None) == (end < whole.index(b"\n"))


@pytest.mark.slow
def test_every_value_in_turn(tmp_path: Path, wholes: list[bytes]) -> None:
    for whole in wholes if LONG_SEARCH else wholes[::2]:
        lines = [json.loads(line) for line in whole.splitlines()]
        kinds = [line["kind"] for line in lines]
        for i in sorted({kinds.index(kind) for kind in kinds}):  # one line of each kind
            for path in list_paths(lines[i])[1:]:
                for value in ODD_VALUES if LONG_SEARCH else ODD_VALUES[len(path) :: 3]:
                    check(
                        tmp_path / "a.jsonl",
                        join_lines([*lines[:i], replace_at_path(lines[i], path, value), *lines[i + 1 :]]),
                    )
