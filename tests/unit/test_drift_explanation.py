"""Explanations of alarms: changes of one kind each, in simulation, over Flower, in records and in text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import ks_2samp

import feddrift as fd
from feddrift.data import Stream
from feddrift.drift_explanation import (
    MIN_SAMPLED_ROWS,
    Shift,
    Shifts,
    _test_shares,
    _test_values,
    choose_reporting_clients,
    find_shifts,
    mark_common_shifts,
)
from feddrift.reports.event_text import explain_alarm
from feddrift.reports.page.data import collect_page_data
from feddrift.simulation import Step
from feddrift.testing import small_stream
from feddrift.types import Local

N = 400
LEARN = Local(rounds=10, steps=20, batch=20, lr=0.05)
FEDDRIFT = fd.algorithm("FedDrift", delta=0.1)


def cell(seed: int, *, mean: float = 0.0, spread: float = 1.0, share: float = 0.5, swap: bool = False) -> Any:
    """Two normal inputs and a class that the second one decides; the first has this mean and deviation."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(N, 2))
    y = (x[:, 1] > np.quantile(x[:, 1], 1 - share)) ^ swap
    return x * [spread, 1] + [mean, 0], y.astype(int)


def find_moves(before: Any, after: Any, **fields: Any) -> Shifts:
    stream = replace(Stream.from_arrays([[before], [after], [after]], n_classes=2), **fields)
    found = find_shifts(stream, 1, 0, stream.counts[:, 0])
    assert found is not None
    return mark_common_shifts({0: found}, [0], 0)[0]


def test_distances_are_those_of_kolmogorov_and_smirnov() -> None:
    draw = np.random.default_rng(0)
    a, b = draw.normal(size=(60, 3)), draw.normal(0.4, 1.5, size=(85, 3))
    a[:, 1], b[:, 1] = a[:, 1].round(), b[:, 1].round()  # with ties
    a[::3, 2], b[::4, 2] = np.nan, np.nan
    distance, _ = _test_values(a, b, 0.01)
    whole = [(x[~np.isnan(x)], y[~np.isnan(y)]) for x, y in zip(a.T, b.T, strict=True)]
    np.testing.assert_allclose(distance, [ks_2samp(x, y).statistic for x, y in whole], atol=1e-12)


@pytest.mark.parametrize("test", [_test_values, _test_shares])
def test_chance_alone_seldom_moves_anything(test: Any) -> None:
    draw = np.random.default_rng(1)
    x0, x1 = ((draw.random((size, 4000)) < 0.3) * 1.0 for size in (50, 80))
    if test is _test_values:
        x0, x1 = x0 + draw.random(x0.shape), x1 + draw.random(x1.shape)
    assert 0 < test(x0, x1, 0.05)[1].mean() < 0.05


def test_a_mean_that_moved() -> None:
    found = find_moves(cell(0, mean=12.0), cell(1, mean=21.3), columns=("temperature", "wind"))
    (shift,) = found.moved
    assert (found.since, found.rows, found.more) == (0, (N, N), 0)
    assert (shift.what, shift.name, shift.within) == ("mean", "temperature", None) and shift.distance == 1
    assert shift.before == pytest.approx(12.0, abs=0.2) and shift.after == pytest.approx(21.3, abs=0.2)


def test_a_deviation_that_moved() -> None:
    (shift,) = find_moves(cell(0), cell(1, spread=3)).moved
    assert (shift.what, shift.name) == ("deviation", "input 0") and shift.after == pytest.approx(3, abs=0.3)


def test_the_farthest_three_of_many_inputs_by_their_place() -> None:
    draw = np.random.default_rng(0)
    before, after = draw.normal(size=(2, 100, 3, 4))
    for k in range(5):
        after[:, k % 3, 3] += 4 - k if k < 3 else 0
    after[:, 0, 0] += 1
    y = np.arange(100) % 2
    found = find_moves((before, y), (after, y))
    assert [shift.name for shift in found.moved] == ["input (0, 3)", "input (1, 3)", "input (2, 3)"]
    assert found.more == 1


def test_class_shares_that_moved() -> None:
    draw = np.random.default_rng(0)
    before, after = draw.normal(size=(2, N, 1))
    y0, y1 = (draw.random(N) < 0.12) * 1, (draw.random(N) < 0.4) * 1
    found = find_moves((before, y0), (after, y1), classes=("dry", "rain"))
    assert [(s.what, s.name) for s in found.moved] == [("class", "rain")]
    assert "as before: what changed is which class they belong to (class rain: " in explain_alarm(found.to_dict(), 1)
    three = Stream.from_arrays([[(before, y0)], [(after, 2 * y1)], [(after, y1)]], n_classes=3)
    found_three = find_shifts(three, 1, 0, three.counts[:, 0])
    assert found_three is not None and {s.name for s in found_three.moved} == {"0", "1", "2"}


def test_labels_that_swap() -> None:
    found = find_moves(cell(0), cell(1, swap=True))
    assert {(s.name, s.within) for s in found.moved} == {("input 1", "0"), ("input 1", "1")}
    text = explain_alarm(found.to_dict(), 1)
    assert text.startswith("the inputs and the class shares are as before: what changed is which class they belong to")
    assert "input 1 within class 0: mean 0.773, before -0.776; input 1 within class 1: mean -0.810" in text


def test_nothing_that_moved() -> None:
    found = find_moves(cell(0), cell(1))
    assert found.moved == () and found.more == 0
    assert explain_alarm(found.to_dict(), 1).startswith("neither the inputs nor the class shares differ")


def test_the_last_data_before_count() -> None:
    stream = Stream.from_arrays([[cell(0)], [cell(1, mean=5)], [None], [cell(2, mean=5)], [cell(3)], [cell(4)]])
    counts = stream.counts[:, 0]
    assert find_shifts(stream, 0, 0, counts) is None and find_shifts(stream, 2, 0, counts) is None
    found = find_shifts(stream, 3, 0, counts)
    assert found is not None and found.since == 1 and not found.moved
    assert explain_alarm(found.to_dict(), 3).endswith("; before is time 2")
    out_of_reach = np.where(np.arange(6) == 1, 0, counts)
    found = find_shifts(stream, 3, 0, out_of_reach)
    assert found is not None and found.since == 0 and found.moved[0].name == "input 0"


def test_of_a_large_cell_a_part_of_the_rows_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("feddrift.drift_explanation.MAX_SAMPLED_VALUES", 300)
    found = find_moves(cell(0, mean=1), cell(1, mean=3))
    assert found.moved[0].before == pytest.approx(1, abs=0.3) and found.rows == (N, N)
    swapped = find_moves(cell(0), cell(1, swap=True))
    assert {(s.name, s.within) for s in swapped.moved} == {("input 1", "0"), ("input 1", "1")}


def test_of_a_large_picture_a_part_of_the_inputs_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "feddrift.drift_explanation.MAX_SAMPLED_VALUES", 5 * MIN_SAMPLED_ROWS
    )  # five of the nine inputs
    draw = np.random.default_rng(0)
    before, after = draw.normal(size=(2, 200, 3, 3))
    after[:, 1, 1:] += 9  # of these two the first is looked at
    found = find_moves(*((x, np.arange(200) % 2) for x in (before, after)))
    assert [(s.name, round(s.after)) for s in found.moved] == [("input (1, 1)", 9)] and not found.more


def test_a_client_with_few_rows_is_not_called_unchanged() -> None:
    few = find_moves(*((np.full((n, 2), 1.0 * n), np.arange(n) % 2) for n in (9, 30)))
    assert explain_alarm(few.to_dict(), 1) == "fewer than 10 rows are not enough to find what changed"


def test_a_few_rows_give_no_explanation() -> None:
    x, y = cell(0)
    x[:, 0] = 0
    for n, is_told in ((9, False), (10, True)):
        few = np.ones((n, 2)), np.ones(n, dtype=int)
        assert bool(find_moves((x, y), few).moved) == is_told == bool(find_moves(few, (x, y)).moved)


def test_numbers_beyond_all_bounds_are_not_reported() -> None:
    found = find_moves(cell(0), cell(1, mean=1e20))
    assert found.moved == () and found.more == 1 and explain_alarm(found.to_dict(), 1) == "1 input more"


def make_seasonal_cells(c: int, *, share: float = 0.5, warmer: float = 9.0, extra: float = 0.0) -> tuple[Any, Any]:
    """Two cells of client c: everywhere it gets warmer, and by this much more here."""
    before, after = cell(2 * c, mean=12), cell(2 * c + 1, mean=12 + warmer, share=share)
    after[0][:, 1] += extra
    return before, after


def find_client_shifts(*cells: tuple[Any, Any], alarmed: int = 0) -> Shifts:
    columns = [[of_client[t] for of_client in cells] for t in (0, 1, 1)]
    stream = replace(Stream.from_arrays(columns, n_classes=2), columns=("warmth", "wind"), classes=("no", "yes"))
    answers = {c: find_shifts(stream, 1, c, stream.counts[:, c]) for c in range(len(cells))}
    reports = {c: answer for c, answer in answers.items() if answer is not None}
    return mark_common_shifts(reports, [alarmed], len(cells) - 1)[alarmed]


def test_changes_of_most_clients_are_listed_last_and_marked() -> None:
    here = find_client_shifts(
        make_seasonal_cells(0, extra=0.5), make_seasonal_cells(1), make_seasonal_cells(2), make_seasonal_cells(3)
    )
    assert [(s.name, s.common) for s in here.moved] == [("wind", False), ("warmth", True)]
    text = explain_alarm(here.to_dict(), 1)
    assert text == "wind: mean 0.482, before 0.019; warmth: mean 20.9, before 11.9, as at most clients"
    season = explain_alarm(find_client_shifts(*map(make_seasonal_cells, range(4))).to_dict(), 1)
    assert season.startswith("everything that changed also changed at most clients: warmth: mean 2")


def test_what_moved_at_half_of_the_others_or_the_other_way_or_farther_did_not_move_everywhere() -> None:
    still = cell(8, mean=12), cell(9, mean=12)
    cold = cell(10, mean=12), cell(11, mean=3)
    little = [(cell(20 + k, mean=12), cell(30 + k, mean=12.4)) for k in range(3)]
    assert not find_client_shifts(make_seasonal_cells(0), make_seasonal_cells(1), still).moved[0].common
    assert not find_client_shifts(make_seasonal_cells(0), cold, cold, cold).moved[0].common
    assert (
        find_client_shifts(*little).moved[0].common
        and not find_client_shifts(make_seasonal_cells(0), *little).moved[0].common
    )
    assert (
        find_client_shifts(make_seasonal_cells(0), make_seasonal_cells(1), make_seasonal_cells(2), still)
        .moved[0]
        .common
    )
    assert not find_client_shifts(make_seasonal_cells(0)).moved[0].common


def test_classes_come_before_a_season() -> None:
    here = find_client_shifts(make_seasonal_cells(0, share=0.83), make_seasonal_cells(1), make_seasonal_cells(2))
    assert [(s.what, s.name, s.common) for s in here.moved] == [
        ("class", "yes", False), ("mean", "wind", False), ("mean", "warmth", True),
    ]  # fmt: skip
    assert explain_alarm(here.to_dict(), 1).startswith("class yes: 83 %, before 50 %; wind within class ")
    older = {**here.to_dict(), "moved": here.to_dict()["moved"][::-1]}  # inputs first
    assert explain_alarm(older, 1) == explain_alarm(here.to_dict(), 1)


def test_a_move_is_common_where_most_others_moved_half_as_far() -> None:
    """Against the definition, one by one, for many clients that compare with two time steps and two directions."""
    draw = np.random.default_rng(0)
    answers = {}
    for c in range(60):
        since, up, distance = int(draw.integers(2)), bool(draw.random() < 0.9), float(draw.integers(1, 9) / 8)
        shift = Shift("mean", "x", 0.0, 1.0 if up else -1.0, distance)
        answers[c] = Shifts(since, (50, 50 if c % 7 else 5), (shift,) if c % 5 else ())
    marked = mark_common_shifts(answers, list(answers), 0)
    for c, own in answers.items():
        for shift in own.moved:
            others = [other for k, other in answers.items() if k != c and other.since == own.since]
            alike = sum(
                2 * s.distance >= shift.distance and s.after == shift.after for other in others for s in other.moved
            )
            comparable = sum(min(other.rows) >= 10 for other in [*others, own]) - 1
            assert marked[c].moved == (replace(shift, common=2 * alike > comparable),)
    assert {shift.common for own in marked.values() for shift in own.moved} == {True, False}


@pytest.mark.parametrize(
    ("n_others", "n_moved", "is_common"), [(900, 0, False), (900, 8, False), (900, 11, True), (20, 1, True)]
)
def test_a_sample_of_the_others_counts_for_all_of_them(n_others: int, n_moved: int, is_common: bool) -> None:
    """Of a thousand clients, 100 raise an alarm at once: their own changes are not those of most clients."""
    moved = Shifts(0, (50, 50), (Shift("mean", "x", 0.0, 1.0, 0.5),))
    alarmed = list(range(100))
    sampled = range(100, 120)
    reports = {
        c: moved if c in alarmed or c < 100 + n_moved else replace(moved, moved=()) for c in (*alarmed, *sampled)
    }
    marked = mark_common_shifts(reports, alarmed, n_others)
    assert {shift.common for own in marked.values() for shift in own.moved} == {is_common}


def test_labels_that_swap_in_a_season_are_explained_within_a_class() -> None:
    before, (x, y) = make_seasonal_cells(0)
    here = find_client_shifts(
        (before, (x, 1 - y)), make_seasonal_cells(1), make_seasonal_cells(2)
    )  # as many of each class as before
    assert [(s.name, s.within is None, s.common) for s in here.moved] == [
        ("wind", False, False),
        ("warmth", True, True),
    ]
    text = explain_alarm(here.to_dict(), 1)
    assert text.startswith("wind within class ") and "as before: what changed" not in text


def test_inputs_that_moved_here_only_are_not_crowded_out() -> None:
    draw, y = np.random.default_rng(0), np.arange(N) % 2
    season = np.array([9.0, 8, 7, 6, 0])
    cells = [(draw.normal(size=(N, 5)), draw.normal(size=(N, 5)) + season) for _ in range(4)]
    cells[0][1][:, 4] += 0.8
    stream = Stream.from_arrays([[(pair[t], y) for pair in cells] for t in (0, 1, 1)], n_classes=2)
    answers = {c: found for c in range(4) if (found := find_shifts(stream, 1, c, stream.counts[:, c]))}
    here = mark_common_shifts(answers, [0], 3)[0]
    assert here.moved[0].name == "input 4" and [s.common for s in here.moved] == [False, True, True]
    assert here.more == 2 and explain_alarm(here.to_dict(), 1).endswith("; 2 inputs more")


def test_some_of_many_clients_are_chosen_to_report() -> None:
    assert choose_reporting_clients([3], range(5)) == [0, 1, 2, 3, 4]
    many = choose_reporting_clients([7, 500], range(1000))
    assert len(many) == 22 and {7, 500} < set(many) and many[0] == 0 and many[-1] == 999


def weather(*, late: int, gap: float) -> dict[str, list[Any]]:
    """Two stations over six months; in Rome from `late` on it is warm, and this share of humidity is missing."""
    draw, table = np.random.default_rng(0), dict[str, list[Any]]()
    for month in range(6):
        for station in ("oslo", "rome"):
            for _ in range(200):
                changed = station == "rome" and month >= late
                humidity, wind = draw.normal(60, 10), "N" if draw.random() < 0.5 else "S"
                shown = None if draw.random() < (gap if changed else 0.04) else round(humidity, 1)
                row = {"station": station, "month": month, "humidity": shown, "wind": wind}
                row |= {"warmth": draw.normal(21.3 if changed else 12.0, 3), "rain": "yes" if humidity > 60 else "no"}
                for name, value in row.items():
                    table.setdefault(name, []).append(value)
    return table


def test_a_table_is_explained_in_its_own_units_and_gaps_as_gaps() -> None:
    kinds = {"client": "station", "time": "month", "label": "rain", "missing": "indicator", "categories": "onehot"}
    stream = Stream.from_frame(weather(late=3, gap=0.7), **kinds)  # type: ignore[arg-type]
    assert stream.columns == ("humidity", "humidity missing", "wind=N", "wind=S", "warmth")
    found = find_shifts(stream, 3, 1, stream.counts[:, 1])
    assert found is not None
    assert {(s.what, s.name) for s in found.moved} == {
        ("missing", "humidity"),
        ("mean", "warmth"),
    }  # not its filled mean
    text = explain_alarm(found.to_dict(), 3)
    assert "humidity: 7" in text and " % missing, before " in text and "warmth: mean 21." in text
    plain = replace(stream, recipe=())  # as a folder has it: names only
    named = find_shifts(plain, 3, 1, plain.counts[:, 1])
    assert named is not None and {(s.what, s.name) for s in named.moved} == {
        ("missing", "humidity"),
        ("mean", "warmth"),
    }


def test_a_run_on_a_table_with_a_planted_change(tmp_path: Path) -> None:
    table = weather(late=3, gap=0.7)
    lines = [
        ",".join("" if value is None else str(value) for value in row) for row in zip(*table.values(), strict=True)
    ]
    (tmp_path / "weather.csv").write_text("\n".join([",".join(table), *lines]))
    options: dict[str, Any] = {"client": "station", "time": "month", "label": "rain", "rounds": 10}
    options |= {"missing": "indicator", "categories": "onehot"}
    run = fd.record(str(tmp_path / "weather.csv"), "FedDrift", out=tmp_path / "runs", **options)
    alarms = fd.alarms(run)
    assert (3, "rome") in list(zip(alarms["t"], alarms["client"], strict=True))
    why = alarms["why"][alarms["t"].index(3)]
    assert "% missing, before" in why and "warmth: mean 21." in why
    shown = collect_page_data([run], "weather")["streams"][0]["groups"][0]["runs"][0]
    assert shown["shifts"]["3,1"] == why


def test_records_have_it_at_alarms_only_and_give_it_back(tmp_path: Path) -> None:
    run = fd.record("sine-2", "FedDrift", out=tmp_path, rounds=5)
    (path,) = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    written = {(line["t"], line["c"]): line["shifts"] for line in lines if "shifts" in line}
    assert set(written) == {(t, c) for t, c in np.argwhere(run.rows.drift).tolist()} and written == run.shifts
    as_before = "as before: what changed is which class they belong to"
    assert written and all(as_before in why for why in fd.alarms(run)["why"])
    silent = fd.record("sine-2", "Oblivious", out=tmp_path / "silent", rounds=1)
    assert silent.shifts == {} and fd.alarms(silent)["why"] == []


def test_many_clients_have_it_in_a_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row_by_row = fd.record("sine-2", "FedDrift", out=tmp_path / "rows", rounds=5)
    monkeypatch.setattr("feddrift.runs.writer.MAX_CLIENTS_IN_ROWS", 2)
    in_columns = fd.record("sine-2", "FedDrift", out=tmp_path / "columns", rounds=5)
    assert in_columns.shifts == row_by_row.shifts and row_by_row.shifts


def run_over_flower(stream: Stream, folder: Path, **changes: Any) -> tuple[list[Step], Any]:
    pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    from feddrift.deploy.server.loop import federate
    from feddrift.nets import default_net
    from tests.support.flower import InProcessFlower

    engine = InProcessFlower(stream, default_net(stream), LEARN, 0)
    engine.n_steps = stream.n_steps
    for name, value in changes.items():
        setattr(engine, name, value)
    return list(federate(engine, FEDDRIFT, folder)), engine


def test_over_flower_explanations_equal_the_simulator(tmp_path: Path) -> None:
    stream = small_stream(size=120)
    here = [dict(step.shifts) for step in fd.run(stream, FEDDRIFT, local=LEARN)]
    there, engine = run_over_flower(stream, tmp_path)
    assert [dict(step.shifts) for step in there] == here and any(here)
    kinds = [kind for _, kind, _ in engine.local_grid.log]
    n_alarms = [int(step.drifted.sum()) for step in there]
    assert kinds.count("explain") == stream.n_clients * sum(n > 0 for n in n_alarms) > sum(n_alarms) > 0


@pytest.mark.slow
def test_who_forbids_it_is_not_asked_or_does_not_say(tmp_path: Path) -> None:
    stream = small_stream(size=120)
    silent, engine = run_over_flower(stream, tmp_path / "server", explain=False)
    assert any(step.drifted.any() for step in silent) and not any(step.shifts for step in silent)
    assert "explain" not in {kind for _, kind, _ in engine.local_grid.log}
    from feddrift.nets import default_net
    from tests.support.flower import InProcessFlower

    engine = InProcessFlower(stream, default_net(stream), LEARN, 0)
    engine.n_steps = stream.n_steps
    engine.local_grid.clients["0"].explain = False
    steps = [step for step in fd_steps(engine, tmp_path / "client") if step.drifted.any()]
    assert steps[0].drifted.tolist() == [True, True, False, False] and set(steps[0].shifts) == {1}


def fd_steps(engine: Any, folder: Path) -> list[Step]:
    from feddrift.deploy.server.loop import federate

    return list(federate(engine, FEDDRIFT, folder))


GOOD = Shifts(0, (9, 9), (Shift("mean", "age", 1.0, 2.0, 0.5),), 0).to_dict()
SHIFT: dict[str, Any] = GOOD["moved"][0]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (GOOD | {"since": 2}, "whole number in 0..1"),
        (GOOD | {"rows": [0, 9]}, "whole number in 1.."),
        (GOOD | {"more": -1}, "whole number in 0.."),
        (GOOD | {"moved": [SHIFT] * 17}, "names 17 inputs and classes, at most 16"),
        (GOOD | {"moved": [SHIFT | {"what": "median"}]}, "'median', legal are mean"),
        (GOOD | {"moved": [SHIFT | {"name": "x" * 101}]}, "at most 100 characters"),
        (GOOD | {"moved": [SHIFT | {"within": 3}]}, "at most 100 characters"),
        (GOOD | {"moved": [SHIFT | {"before": 1e16}]}, "a number in 0..1e"),
        (GOOD | {"moved": [SHIFT | {"what": "share"}]}, "a number in 0..1,"),
        (GOOD | {"moved": [SHIFT | {"distance": 1.5}]}, "a number in 0..1,"),
    ],
)
def test_the_server_refuses_what_cannot_be(answer: Any, reason: str) -> None:
    pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    from feddrift.engines.flower.messages import read_shifts
    from feddrift.engines.flower.serialization import InvalidMessageError

    assert read_shifts({"shifts": GOOD}, 2) == Shifts(0, (9, 9), (Shift("mean", "age", 1.0, 2.0, 0.5),), 0)
    assert read_shifts({"shifts": None}, 2) is None
    with pytest.raises(InvalidMessageError, match=reason):
        read_shifts({"shifts": answer}, 2)


@pytest.mark.slow
def test_an_invalid_reply_leaves_an_alarm_unexplained_and_the_client_continues(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    from feddrift.nets import default_net
    from feddrift.reports.exchanges import find_missing_replies
    from feddrift.runs.record import read
    from tests.support.federation import edit_body
    from tests.support.flower import InProcessFlower

    stream = small_stream(size=120)
    engine = InProcessFlower(stream, default_net(stream), LEARN, 0)
    engine.n_steps = stream.n_steps
    engine.local_grid.tamper["0", "explain"] = edit_body(lambda body: body.update(shifts=7))
    steps = fd_steps(engine, tmp_path)
    here = list(fd.run(stream, FEDDRIFT, local=LEARN))
    (first, *_) = [step for step in steps if step.drifted.any()]
    assert set(first.shifts) == {1}
    np.testing.assert_array_equal(steps[-1].model, here[-1].model)
    assert list(find_missing_replies(read(tmp_path / "test.jsonl"))) == []


def test_a_deployed_client_names_its_columns_and_classes(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    from feddrift.engines.flower import serialization
    from feddrift.engines.flower.client.client import load_client
    from feddrift.engines.flower.messages import VERSION, RequestContext, read_shifts
    from feddrift.errors import ConfigError

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "classes.txt").write_text("no\nyes\n")
    for t, mean in enumerate((12.0, 21.3)):
        x, y = cell(t, mean=mean)
        rows = [f"{a:.3f},{b:.3f},{'yes' if k else 'no'}" for (a, b), k in zip(x, y, strict=True)]
        (tmp_path / "data" / f"step_{t}.csv").write_text("\n".join(["age,income,sold", *rows]))
    (tmp_path / "client.toml").write_text('name = "a"\nlabel = "sold"\n')

    def answer(kind: str, tau: int = 1) -> Any:
        asked = {
            "version": VERSION,
            "about": RequestContext("first", "a", 0, 1, 2, (2,), 0, tau).__dict__,
            "seen": tau - 1,
        }
        return serialization.unpack_message(
            load_client(tmp_path).handle_message(kind, serialization.pack_message(asked))
        )[0]

    answer("hello", 0)
    answer("hello")
    found = read_shifts(answer("explain"), 1)
    assert found is not None and [s.name for s in found.moved] == ["age"]
    (tmp_path / "client.toml").write_text('name = "a"\nlabel = "sold"\nexplain = false\n')
    assert answer("explain")["shifts"] is None
    (tmp_path / "client.toml").write_text('name = "a"\nexplain = "no"\n')
    with pytest.raises(ConfigError, match="explain must be true or false, got 'no'"):
        load_client(tmp_path)
