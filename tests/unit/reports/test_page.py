"""The HTML report: its numbers, its size, and the escaping of names."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddrift.errors import DataError
from feddrift.reports import page
from feddrift.reports.page import data
from feddrift.reports.page.data import collect_page_data
from feddrift.runs.record import Record, select_score
from tests.support.records import make_header, make_merge_event, write_record

CONCEPTS = [[0, 0, 0], [0, 0, 0], [1, 0, 1], [1, 0, 1], [1, 1, 1]]
RISE = {"error": 0.9, "reference": 0.1, "delta": 0.1, "from": 0}
EVENTS: list[dict[str, Any]] = [
    {"t": 2, "event": "created", "model": 1, "cause": {"clients": [0], **RISE}},
    {"t": 2, "event": "created", "model": 2, "cause": {"clients": [1], **RISE}},
    make_merge_event(3, 2, 0),
]
COLUMNS: dict[str, Any] = {
    "model": [[0, 0, 0], [0, 0, 0], [1, 2, 0], [1, 0, 1]],
    "drift": [[False] * 3, [False] * 3, [True, True, False], [False] * 3],
    "accuracy": [[0.9, 0.9, 0.9], [0.1, 0.9, 0.1], [0.8, 0.7, None], [0.9, 0.1, 0.9]],
    "tested": [[5, 5, 5], [5, 5, 5], [5, 5, 0], [5, 5, 5]],
    "n_models": [[1] * 3, [1] * 3, [3] * 3, [2] * 3],
}


def one(out: Path, **changes: Any) -> Record:
    """Client 0 is noticed at once, client 1 falsely; client 2 moves a step late, when it has no data."""
    return write_record(out, make_header(4, 3, concepts=CONCEPTS, **changes), COLUMNS, EVENTS)


def only(records: list[Record]) -> dict[str, Any]:
    (stream,) = collect_page_data(records, "runs")["streams"]
    (group,) = stream["groups"]
    (run,) = group["runs"]
    found: dict[str, Any] = run
    return found


def test_drifts_and_false_moves(tmp_path: Path) -> None:
    run = only([one(tmp_path)])
    assert run["drifts"] == [[2, 0, 0, 1, 0, 3], [2, 2, 0, 1, -1, 0]]
    assert run["false"] == [[2, 1, 3]]
    assert run["by_time"] == {"at once": [0, 0, 1, 0], "late": [0] * 4, "missed": [0, 0, 1, 0], "false": [0, 0, 1, 0]}
    assert run["detection"]["noticed"]["recall"] == 0.5 and run["detection"]["noticed"]["precision"] == 0.5
    assert run["detection"]["always"]["recall"] == 1.0 and run["detection"]["never"]["hits"] == 0
    assert run["concepts"] == [1, 1, 2, 2] and run["used"] == [1, 1, 3, 2] and run["exist"] == [1, 1, 3, 2]
    assert run["worst"][0] == [2, 0.6333, 1]


def test_cells_and_events_of_the_page(tmp_path: Path) -> None:
    cells = only([one(tmp_path)])["cells"]
    assert cells["model"][6:9] == [1, 2, 0] and cells["accuracy"][8] == -1 and cells["accuracy"][6] == 800
    assert cells["alarms"] == [6, 7] and cells["switches"] == [6, 7, 11] and cells["changes"] == [6, 8]
    assert cells["roots"] == {"2": 0} and cells["concepts"] == {0: "A", 1: "B"}
    events = only([one(tmp_path)])["events"]
    assert events[0]["clients"] == [0] and events[0]["from"] == 0 and "rose from 0.100 to 0.900" in events[0]["why"]
    assert events[2] == {"t": 3, "kind": "merged", "model": 2, "into": 0, "why": events[2]["why"]}


def test_without_truth_all_moves_are_listed(tmp_path: Path) -> None:
    run = only([write_record(tmp_path, make_header(4, 3), COLUMNS, EVENTS)])
    assert run["drifts"] is None and not run["truth"] and run["detection"] == {} and run["concepts"] is None
    assert run["false"] == [[2, 0, 3], [2, 1, 3], [3, 2, 2]] and "concept" not in run["cells"]


def run_in_node(script: str, *files: str) -> Any:
    """What the page's scripts compute, where Node is there to run them."""
    if (node := shutil.which("node")) is None:
        pytest.skip("Node is not installed")
    folder = Path(page.__file__).parent
    code = "".join((folder / f"{name}.js").read_text() for name in files)
    made = subprocess.run([node, "-e", f"{code}\n;{script}"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-2000:]
    return json.loads(made.stdout)


def test_the_summary_names_alarms_and_other_moves(tmp_path: Path) -> None:
    run = only(
        [
            write_record(
                tmp_path, make_header(4, 3, times=["May", "June", "July", "August", "September"]), COLUMNS, EVENTS
            )
        ]
    )
    group = {"algorithm": "FedDrift", "runs": [run]}
    view = {"run": run, "group": group, "stream": {"clients": ["DL", "WN", "MQ"], "groups": [group]}}
    says = f"""Object.assign(score, {{name: "accuracy", title: "accuracy", share: true, higher_is_better: true}});
        console.log(JSON.stringify(summariseRun({json.dumps(view)})))"""
    summary = run_in_node(says, "tools", "words", "tables")
    assert summary.startswith(
        "2 alarms were raised and both were acted on: DL at time 3 (July), WN at time 3 (July). "
        "1 switch to another model without an alarm: MQ at time 4 (August). The true concepts are unknown."
    )


@pytest.mark.parametrize(
    ("counts", "sentences"),
    [
        ({}, ["No alarm was raised."]),
        ({"raised": 1}, ["1 alarm was raised but not acted on."]),
        ({"raised": 33}, ["33 alarms were raised but none was acted on."]),
        ({"raised": 5, "acted_on": 1}, ["5 alarms were raised and 1 was acted on."]),
        (
            {"raised": 5, "acted_on": 5, "common": 5, "reviewed": 3, "confirmed": 2, "contradicted": 1},
            [
                "5 alarms were raised and all were acted on.",
                "At all of them the data changed as at most clients, for example with a season.",
                "Later data confirmed 2 and contradicted 1; 2 alarms were not compared with later data.",
            ],
        ),
        (
            {"raised": 9, "acted_on": 9, "common": 1, "reviewed": 8, "confirmed": 5},
            [
                "9 alarms were raised and all were acted on.",
                "At 1 of them the data changed as at most clients, for example with a season.",
                "Later data confirmed 5, contradicted 0 and left 3 undecided; "
                "1 alarm was not compared with later data.",
            ],
        ),
        (
            {"raised": 1, "acted_on": 1, "common": 1, "reviewed": 1, "confirmed": 1},
            [
                "1 alarm was raised and acted on.",
                "At this alarm the data changed as at most clients, for example with a season.",
                "Later data confirmed 1 and contradicted 0.",
            ],
        ),
    ],
)
def test_the_summary_counts_alarms(counts: dict[str, int], sentences: list[str]) -> None:
    names = ("raised", "acted_on", "common", "reviewed", "confirmed", "contradicted")
    run = {"alarms": {name: counts.get(name, 0) for name in names}}
    script = f"console.log(JSON.stringify(describeAlarms({json.dumps(run)}, {{}}, false)))"
    assert run_in_node(script, "tools", "words") == sentences


def test_decisions_stand_at_their_cells(tmp_path: Path) -> None:
    causes = [
        {"clients": [0, 1], "reason": "the last alarm did not pay"},
        {"clients": [1], "reason": "new data contradict the old ones", "rows": 250},
        {"clients": [2], "reason": "goes back to model 0", "rows": 9},
        {"clients": [], "reason": "own models vote"},
    ]
    decided = [{"t": 2, "event": "decided", "model": 0, "cause": cause} for cause in causes]
    run = only([write_record(tmp_path, make_header(4, 3), COLUMNS, [*decided, EVENTS[0], EVENTS[2]])])
    says = f"""const run = {json.dumps(run)}, cellIndex = (t, c) => 3 * t + c;
        const maps = {{run, cellIndex, cells: run.cells, alarms: new Set(run.cells.alarms), switches: new Set()}};
        console.log(JSON.stringify([[0, 1, 2].map((c) => reasons(maps, 2, c)), eventsOf(run, 2, 2)]))"""
    cells, listed = run_in_node(says, "tools", "words", "tables")
    past, everybody = "Decision: the last alarm did not pay.", "Decision for all clients: own models vote."
    assert cells[0][0] == past and cells[0][1].startswith("Alarm: the best model's error rose")
    assert cells[0][-1] == everybody
    assert cells[1] == [past, "Alarm: new data contradict the old ones (rows=250).", everybody]
    assert cells[2] == ["Decision: goes back to model 0 (rows=9).", everybody]
    assert listed == "Goes back to model 0 (rows=9). Own models vote."


COMMON = data.ALARM | data.COMMON_CAUSE


@pytest.mark.parametrize(
    ("alarms", "rows"),
    [
        # One alarm is not grouped: it has its own numbers, and its own reason.
        ([[1, 0, COMMON | data.SWITCH]], [[[0], "alarm and switch", "2 of 2", "60.0", "90.0", "why 1,0"]]),
        (
            [[1, 0, COMMON], [1, 1, COMMON | data.SWITCH], [1, 2, data.ALARM], [2, 0, COMMON]],
            [
                [
                    [0, 1],
                    "alarms",
                    "1 to 2 of 2",
                    "40.0 to 60.0",
                    "80.0 to 90.0",
                    "2 alarms: the data changed as at most clients",
                ],
                [[2], "alarm", "1 of 2", "80.0", "70.0", "why 1,2"],
                [[0], "alarm", "1 of 2", "90.0", "50.0", "why 2,0"],
            ],
        ),
    ],
)
def test_several_alarms_as_at_most_clients_share_a_row_with_their_scores(
    alarms: list[list[int]], rows: list[list[Any]]
) -> None:
    accuracy = [600, 400, 800, 900, 800, 700, 500, 0, 0]
    run = {
        "false": alarms,
        "drifts": None,
        "causes": {"1": "mean of price rose", "2": "mean of price rose"},
        "metric": "loss",
    }
    counts = {"1,0": 2, "1,1": 1, "1,2": 1, "2,0": 1}
    script = f"""Object.assign(score, {{name: "accuracy", title: "accuracy", share: true, higher_is_better: true}});
        reasons = (maps, t, c) => [`why ${{t}},${{c}}`];
        const maps = {{cells: {{accuracy: {accuracy}}}, cellIndex: (t, c) => 3 * t + c}};
        const view = {{run: {json.dumps(run)}, maps, group: {{alarms: {json.dumps(counts)}, runs: [0, 1]}}}};
        console.log(JSON.stringify(driftRows(view).map((r) => [r.clients || [r.c], ...r.values()])))"""
    shown = run_in_node(script, "tools", "words", "tables")
    assert [row[:-1] for row in shown] == [row[:-1] for row in rows]
    assert all(row[-1].startswith(expected[-1]) for row, expected in zip(shown, rows, strict=True))
    if len(alarms) > 1:
        assert "for example with a season (mean of price rose)" in shown[0][-1]
        assert shown[0][-1].endswith("1 client changed to another model.")


@pytest.mark.parametrize(
    ("names", "length", "expected"),
    [
        (["Basel", "Bern"], 13, ["Basel", "Bern"]),
        ([f"Kantonsspital, Medizin {k}" for k in (0, 1, 44)], 13, ["…0", "…1", "…44"]),
        (["hospital North West", "hospital North East"], 13, ["…West", "…East"]),
        (["Northern hospital of the city 12", "b"], 13, ["Nort…city 12", "b"]),
        (["a-very-long-single-name"], 13, ["a-ve…gle-name"]),
        (["", "a name that is too long"], 13, ["", "a na…too long"]),
    ],
)
def test_long_names_stay_different_when_they_are_shortened(names: list[str], length: int, expected: list[str]) -> None:
    script = f"console.log(JSON.stringify(shortenNames({json.dumps(names)}, {length})))"
    assert run_in_node(script, "tools", "words") == expected


def test_no_line_ends_between_a_number_and_its_percent_sign() -> None:
    script = """console.log(JSON.stringify(["99.1 % and 5 %", "accuracy, %", "a % b", 5].map(joinPercent)))"""
    assert run_in_node(script, "tools") == ["99.1\u00a0% and 5\u00a0%", "accuracy, %", "a % b", 5]


def test_a_score_below_the_scale_is_drawn_at_its_edge() -> None:
    script = """const made = [];
        var document = {createElementNS: (space, tag) => {
          const node = {tag, setAttribute: (key, value) => { node[key] = value; }, append: () => {}};
          made.push(node);
          return node;
        }};
        const maps = {T: 3, low: 900, high: 1000, cells: {accuracy: [1000, 100, 950]}, cellIndex: (t) => t};
        spark(maps, 0, 150, 22);
        console.log(JSON.stringify(made.find((part) => part.tag === "path").d))"""
    assert run_in_node(script, "tools", "charts", "words") == "M2.0,3.0L75.0,19.0L148.0,11.0"


def test_terms_of_reasons_are_explained_where_they_occur() -> None:
    script = """const explain = (...reasons) => explainTerms({events: reasons.map((why) => ({why}))});
        console.log(JSON.stringify([explain(), explain("model 1 starts as a copy of model 0 on trunk 0"),
          explain("of 30 new rows, 2 are predicted correctly only by a model of the new data alone")]))"""
    nothing, trunk, evidence = run_in_node(script, "tools", "words", "tables", "sections")
    assert nothing == "" and trunk == " A trunk is the first layers of a model, which several models may share."
    assert evidence.startswith(" In a reason, p is the probability that chance alone gives such evidence")


def test_names_in_the_map_have_the_room_that_they_need() -> None:
    wide = """const innerWidth = 1440;
        const canvas = {getContext: () => ({measureText: (text) => ({width: 11 * text.length})})};
        var document = {createElement: () => canvas};
        var getComputedStyle = () => ({fontFamily: "serif"});
        const maps = Object.create(Maps.prototype);
        Object.assign(maps, {n: 2, stream: {clients: ["WN", "MQ"]}, cells: {}, sortClients: () => [0, 1]});
        try { maps.draw(null, {}); } catch {}  // the rest of it needs a page
        console.log(maps.nameWidth)"""
    assert run_in_node(wide, "tools", "map", "words") == 14 + 2 * 11


def test_accuracy_is_shown_beside_another_score(tmp_path: Path) -> None:
    columns = COLUMNS | {"log_loss": [[0.5] * 3] * 4}
    record = write_record(tmp_path, make_header(4, 3), columns, EVENTS)
    (by_loss,) = select_score([record], "log_loss")
    numbers = only([by_loss])["numbers"]
    assert numbers["mean"] == 0.5 and numbers["accuracy"] == pytest.approx(np.nanmean(record.rows.accuracy))
    assert only([record])["numbers"]["accuracy"] == pytest.approx(np.nanmean(record.rows.accuracy))
    assert '"accuracy, %", "accuracy"' in (Path(page.__file__).parent / "tables.js").read_text()


def test_seeds_settings_and_streams_are_kept_apart(tmp_path: Path) -> None:
    runs = [one(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    runs += [one(tmp_path / "b", settings={"delta": 0.2, "init": "warm"}), one(tmp_path / "c", overrides={"rounds": 9})]
    runs += [one(tmp_path / name, algorithm=name) for name in ("Oracle", "Oblivious", "KUE")]
    sine, other = sorted(collect_page_data(runs, "runs")["streams"], key=lambda s: len(s["groups"]), reverse=True)
    labels = [group["label"] for group in sine["groups"]]
    assert labels == ["FedDrift (delta=0.1)", "FedDrift (delta=0.2)", "KUE", "Oblivious", "Oracle"]
    assert other["name"] == "sine-2 (rounds=9)" and [run["seed"] for run in sine["groups"][0]["runs"]] == [0, 1]
    assert sine["groups"][0]["mean"][0] == pytest.approx(0.9) and sine["groups"][0]["std"] == [0.0] * 4
    assert sine["groups"][0]["numbers"]["lost_to_oracle"] == [0.0, None]  # Oracle has seed 0 only
    assert sine["groups"][1]["std"] is None and other["groups"][0]["numbers"]["lost_to_oracle"][0] is None


def test_another_net_on_the_same_data_is_the_same_stream(tmp_path: Path) -> None:
    """It is part of the algorithm's name, and a run has the Oracle of its own net beside it."""
    table = {"data": "0123abcd", "label": "late"}
    better = {**COLUMNS, "accuracy": [[1.0] * 3] * 4}
    head = make_header(4, 3, concepts=CONCEPTS)
    runs = [one(tmp_path, overrides=table), one(tmp_path, overrides=table | {"net": "linear"})]
    runs.append(write_record(tmp_path, head | {"algorithm": "Oracle", "overrides": table | {"net": "linear"}}, better))
    (stream,) = collect_page_data(runs, "nets")["streams"]
    assert stream["name"] == "sine-2"  # options that all streams of the page have are not part of the name
    assert stream["groups"][0]["runs"][0]["config"]["option label"] == "late"
    labels = ["FedDrift", "FedDrift (net=linear)", "Oracle (net=linear)"]
    assert [group["label"] for group in stream["groups"]] == labels
    own, linear, _ = (group["numbers"]["lost_to_oracle"][0] for group in stream["groups"])
    assert own is None and linear > 0
    assert [group["runs"][0]["net"] for group in stream["groups"]] == [None, "linear", "linear"]  # peers share it
    (alone,) = collect_page_data(runs[1:], "net")["streams"]
    assert alone["name"] == "sine-2" and alone["groups"][0]["label"] == "FedDrift"
    two = collect_page_data([*runs, one(tmp_path, overrides=table | {"data": "other"})], "data")["streams"]
    assert sorted(len(stream["groups"]) for stream in two) == [1, 3]
    assert {stream["name"] for stream in two} == {"sine-2 (data=0123abcd)", "sine-2 (data=other)"}


def test_the_newest_run_counts_but_a_complete_one_first(tmp_path: Path) -> None:
    old = one(tmp_path / "old")
    new = replace(old, header=old.header | {"started": "2026-02-01T00:00:00+00:00"})
    broken = replace(new, header=new.header | {"started": "2026-03-01T00:00:00+00:00"}, status="unfinished")
    assert data.select_newest([new, old, broken]) == [new] and data.select_newest([broken]) == [broken]


def test_unfinished_runs_are_shown(tmp_path: Path) -> None:
    head = make_header(4, 3, concepts=CONCEPTS)
    run = only(
        [write_record(tmp_path / "a", head, {name: rows[:3] for name, rows in COLUMNS.items()}, EVENTS[:2], steps=3)]
    )
    assert (run["status"], run["steps"], run["n_steps"]) == ("interrupted", 3, 4) and len(run["drifts"]) == 2
    assert only([write_record(tmp_path / "b", head, steps=0)])["steps"] == 0


def test_cells_beyond_the_budget_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [one(tmp_path / f"{name}{seed}", algorithm=name, seed=seed) for name in ("KUE", "AUE") for seed in (0, 1)]
    monkeypatch.setattr(data, "MAX_SHOWN_CELLS", 30)  # two runs of twelve: the first seed of each
    (stream,) = collect_page_data(runs, "runs")["streams"]
    assert [[bool(run["cells"]) for run in group["runs"]] for group in stream["groups"]] == [[True, False]] * 2
    monkeypatch.setattr(data, "MAX_SHOWN_CELLS", 5)
    (stream,) = collect_page_data(runs[:1], "runs")["streams"]
    assert stream["groups"][0]["runs"][0]["cells"]  # one always is


def many(out: Path, known: bool, **changes: Any) -> Record:
    """Eleven clients of whom every second drifts at time 2; the odd ones are decided for."""
    n, odd = 11, np.arange(11) % 2
    concepts = np.stack([0 * odd, 0 * odd, odd, odd, odd])
    columns = {
        "model": concepts[1:], "drift": concepts[:-1] * (np.arange(4) == 2)[:, None] > 0,
        "accuracy": np.linspace(0.1, 0.9, 4 * n).reshape(4, n), "models_sent": np.arange(4 * n).reshape(4, n),
    }  # fmt: skip
    events = [{"t": 2, "event": "created", "model": 1, "cause": {"clients": np.flatnonzero(odd).tolist(), **RISE}}]
    for clients in ([], *([c] for c in range(n))):
        events.append({"t": 3, "event": "decided", "model": 0, "cause": {"clients": clients, "reason": f"{clients}"}})
    head = make_header(4, n, concepts=concepts.tolist() if known else None, **changes)
    return write_record(out, head, {name: values.tolist() for name, values in columns.items()}, events)


@pytest.mark.parametrize("known", [True, False])
def test_of_many_clients_a_sample_is_shown_and_all_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    runs = [many(tmp_path / str(seed), known, seed=seed) for seed in (0, 1)]
    (whole,) = collect_page_data(runs, "runs")["streams"]
    monkeypatch.setattr(data, "MAX_SHOWN_CLIENTS", 4)
    monkeypatch.setattr(data, "MAX_SHOWN_CELLS", 32)  # both runs, with four clients each
    (part,) = collect_page_data(runs, "runs")["streams"]
    shown = [int(name) for name in part["clients"]]
    assert (part["n_clients"], len(shown)) == (11, 4) and len(whole["clients"]) == 11
    assert [c * 4 // 11 for c in shown] == [0, 1, 2, 3]  # one of every quarter
    for run, all_of_it in zip(part["groups"][0]["runs"], whole["groups"][0]["runs"], strict=True):
        same = ("numbers", "detection", "used", "exist", "concepts", "sent", *(["by_time"] if known else ["n_moves"]))
        assert {key: run[key] for key in same} == {key: all_of_it[key] for key in same}
        for name in ("model", "accuracy", *(["concept"] if known else [])):
            cells = np.reshape(all_of_it["cells"][name], (4, 11))[:, shown]
            assert run["cells"][name] == cells.reshape(-1).tolist()
        odd = [k for k, c in enumerate(shown) if c % 2]
        assert [c for t, c, *_ in run["drifts"] or run["false"] if t == 2] == odd == run["events"][0]["clients"]
        decided = [(event["clients"], event["why"]) for event in run["events"][1:]]
        assert decided == [([], "[]"), *(([k], f"[{c}]") for k, c in enumerate(shown))]
    mean = ("mean", "std", "numbers", "around")
    assert all(part["groups"][0][key] == whole["groups"][0][key] for key in mean)
    agreed = {tuple(map(int, key.split(","))): n for key, n in whole["groups"][0]["alarms"].items()}
    assert part["groups"][0]["alarms"] == {f"2,{k}": agreed[2, c] for k, c in enumerate(shown) if c % 2}


def test_the_sample_goes_by_the_number_of_clients_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MAX_SHOWN_CLIENTS", 7)
    records = [many(tmp_path / name, True, algorithm=name, seed=seed) for seed, name in enumerate(("AUE", "KUE"))]
    first, second = (data.select_shown_clients(record).tolist() for record in records)
    assert first == second == sorted(set(first)) and len(first) == 7
    monkeypatch.setattr(data, "MAX_SHOWN_CLIENTS", 11)
    assert (
        data.select_shown_clients(records[0]).tolist() == list(range(11))
        and data.restrict_to_shown_clients(records[0]) is records[0]
    )


@given(st.data(), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_any_record_becomes_data_without_gaps_in_json(data: st.DataObject, steps: int, n: int, known: bool) -> None:
    def cells(kind: st.SearchStrategy[Any], length: int = steps) -> Any:
        return data.draw(st.lists(st.lists(kind, min_size=n, max_size=n), min_size=length, max_size=length))

    tested, columns = cells(st.integers(0, 2)), {"model": cells(st.integers(0, 3)), "drift": cells(st.booleans())}
    accuracy = [[None if not k else data.draw(st.floats(0, 1)) for k in row] for row in tested]
    merges = [make_merge_event(t, 3, 1) for t in data.draw(st.sets(st.integers(0, steps - 1)))]
    head = make_header(steps, n, concepts=cells(st.integers(0, 2), steps + 1) if known else None, same={"2": 0})
    with tempfile.TemporaryDirectory() as out:
        record = write_record(Path(out), head, columns | {"tested": tested, "accuracy": accuracy}, merges)
    run = only([record])
    json.dumps(run, allow_nan=False)
    assert run["truth"] == known and len(run["cells"]["model"]) == steps * n
    if known:
        noticed = run["detection"]["noticed"]
        assert noticed["alarms"] - noticed["hits"] == run["n_false"] and noticed["changes"] == run["n_drifts"]
        assert sum(delay >= 0 for _, _, _, _, delay, _ in run["drifts"]) == noticed["hits"]
        assert all(old != new for _, _, old, new, _, _ in run["drifts"])


def unpack_page_data(text: str) -> dict[str, Any]:
    (packed,) = re.findall(r'<script type="application/octet-stream" id="data">([^<]*)</script>', text)
    found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed)))
    return found


def test_the_page_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    page.write_page([one(tmp_path)], tmp_path / "deep" / "report.html", "runs")
    text = (tmp_path / "deep" / "report.html").read_text()
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}  # the name of SVG
    assert "default-src 'none'" in text and "<!--" not in text and not re.search(r"<(link|img|iframe)\b", text)
    assert unpack_page_data(text)["streams"][0]["name"] == "sine-2"
    assert not list((tmp_path / "deep").glob("*.part"))


def test_no_name_becomes_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    record = one(tmp_path, clients=[evil, "<b>", "&"], stream=f"folder:{evil}", algorithm=evil)
    text = page.build_page(collect_page_data([record], evil))
    assert evil not in text and "&lt;/script&gt;" in text  # the title
    assert text.count("<script") == 2 and text.count("</script>") == 2
    (stream,) = unpack_page_data(text)["streams"]
    assert stream["clients"][0] == evil and stream["groups"][0]["algorithm"] == evil  # whole, as data


def test_scripts_write_text_never_markup() -> None:
    for name in page.SCRIPTS:
        source = page._read_file(name)
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|fetch\(|XMLHttp", source
        ), name


def test_a_page_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot write"):
        page.write_page([one(tmp_path / "runs")], tmp_path / "file" / "report.html", "runs")


def test_present_clients_and_scores_of_models_are_reported(tmp_path: Path) -> None:
    columns = {
        "received": [[5, 0], [5, 5], [0, 5]], "tested": [[5, 5], [0, 5], [5, 5]],
        "loss": [[None, None], [0.25, None], [None, 0.1234]], "sent_scoring": [[0, 0]] * 3,
    }  # fmt: skip
    record = write_record(tmp_path, make_header(3, 2, times=["a", "b", "c", "d"], model_bytes=8), columns)
    (stream,) = collect_page_data([record], "runs")["streams"]
    run = stream["groups"][0]["runs"][0]
    assert run["times"] == ["a", "b", "c", "d"] and run["numbers"]["bytes training"] == 480
    assert run["cells"]["absent"] == [1] and run["cells"]["nothing"] == [1, 4]
    assert run["cells"]["loss"] == [None, None, 0.25, None, None, 0.123]
