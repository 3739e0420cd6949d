"""Summaries of records: accuracy, adjusted Rand index, comparisons, ranks and tables."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from feddrift import cli
from feddrift.errors import ConfigError, DataError
from feddrift.reports import metrics, summary, tables
from feddrift.reports.labels import find_differing_settings
from feddrift.reports.ranks import rank_methods
from feddrift.reports.summary import Spread, adjusted_rand, resolve_merges, summarise, summarise_run
from feddrift.runs.record import Record, read_all, select_score
from feddrift.scores import ACCURACY, SCORES
from tests.support.records import make_header, make_merge_event, write_record

CONCEPTS = [[0, 0], [0, 1], [1, 1]]


def test_the_numbers_of_a_tiny_record_by_hand(tmp_path: Path) -> None:
    columns = {
        "accuracy": [[0.9, 0.1], [0.2, 0.7]],  # drifts: (0, 1) and (1, 0)
        "model": [[0, 0], [0, 2]],
        "n_models": [[1, 1], [3, 3]],
        "models_sent": [[10, 10], [11, 13]],
    }
    got = summarise_run(write_record(tmp_path, make_header(concepts=CONCEPTS), columns))
    assert got.including_drifts == pytest.approx(100 * (0.9 + 0.1 + 0.2 + 0.7) / 4)
    assert got.omitting_drifts == pytest.approx(100 * (0.9 + 0.7) / 2)
    assert got.models_sent == 44
    assert got.models_sent_ratio == pytest.approx(44 / (2 * 5 * 2 * 2))  # 2 R P T
    assert got.models_final == 3
    assert got.ari == 1.0


def test_cells_without_test_data_are_left_out(tmp_path: Path) -> None:
    columns = {"accuracy": [[0.9, None], [0.2, None]], "tested": [[9, 0], [1, 0]]}
    got = summarise_run(write_record(tmp_path, make_header(concepts=CONCEPTS), columns))
    assert got.including_drifts == pytest.approx(55)
    assert got.omitting_drifts == pytest.approx(90)


def test_means_by_rows(tmp_path: Path) -> None:
    """A client of 3 rows counts like 3 rows: in both means, in differences, and in the metrics of clients."""
    cells = {"accuracy": [[0.5, 0.9], [1.0, None]], "tested": [[3, 97], [1, 0]]}
    record = write_record(tmp_path, make_header(concepts=[[0, 0], [0, 0], [1, 1]]), cells)
    by_rows = replace(record, weigh="rows")
    assert summarise_run(record).including_drifts == pytest.approx(80) and summarise_run(
        record
    ).omitting_drifts == pytest.approx(70)
    got, measured = summarise_run(by_rows), metrics.compute_metrics(by_rows)
    assert got.including_drifts == pytest.approx(100 * (3 * 0.5 + 97 * 0.9 + 1) / 101)
    assert got.omitting_drifts == pytest.approx(100 * (3 * 0.5 + 97 * 0.9) / 100)
    assert measured.mean == pytest.approx((3 * 0.5 + 97 * 0.9 + 1) / 101)
    assert measured.worst == pytest.approx((3 * 0.5 + 1) / 4)
    runner = CliRunner()
    (group,) = json.loads(runner.invoke(cli.app, ["report", str(tmp_path), "--weigh", "rows", "--json"]).output)
    assert group["weigh"] == "rows" and group["omitting_drifts"]["mean"] == pytest.approx(got.omitting_drifts)
    shown = runner.invoke(cli.app, ["report", str(tmp_path), "--weigh", "rows"]).output
    assert "88.80" in shown and "all tested rows count equally" in shown
    page = runner.invoke(cli.app, ["report", str(tmp_path), "--weigh", "rows", "--html", str(tmp_path / "page.html")])
    assert isinstance(page.exception, ConfigError)


def test_no_caveat_without_test_data_or_truth(tmp_path: Path) -> None:
    untested = summarise_run(
        write_record(tmp_path / "a", make_header(concepts=CONCEPTS), {"accuracy": [[None, None], [None, None]]})
    )
    assert (untested.including_drifts, untested.omitting_drifts) == (None, None)
    untold = summarise_run(write_record(tmp_path / "b", make_header()))
    assert untold.including_drifts == pytest.approx(90)
    assert (untold.omitting_drifts, untold.ari) == (None, None)


def test_a_run_stopped_before_its_first_step_has_no_numbers(tmp_path: Path) -> None:
    got = summarise_run(write_record(tmp_path, make_header(), steps=0))
    assert got == summary.Scores(None, None, 0, None, None, None, None)


def test_an_alarm_is_false_where_the_concept_stayed(tmp_path: Path) -> None:
    """Also where the concept changed to one that is equal; an alarm at the first time step is none."""
    truth = {"concepts": [[0, 0, 1], [0, 1, 3], [0, 1, 3], [0, 0, 0]], "same": {"3": 1}}
    alarms = [[True, False, False], [True, True, True], [False, True, False]]
    record = write_record(tmp_path, {**make_header(3, 3), **truth}, {"drift": alarms})
    assert summarise_run(record).false_alarms == 3


def test_an_alarm_compares_with_the_last_data_seen(tmp_path: Path) -> None:
    """Concept 1 came while the client had no data: its alarm one step later is no false one."""
    truth = {"concepts": [[0], [1], [1], [1], [1]], "same": {}}
    columns = {"drift": [[False], [False], [True], [True]], "tested": [[0], [9], [9], [9]]}
    record = write_record(tmp_path, {**make_header(4, 1), **truth}, columns)
    assert summarise_run(record).false_alarms == 1


def test_merged_models_are_resolved_through_their_heirs(tmp_path: Path) -> None:
    head = make_header(4, 3)
    models = [[0, 1, 2], [0, 1, 2], [0, 1, 1], [0, 0, 0]]
    record = write_record(
        tmp_path, head, {"model": models}, [make_merge_event(2, 2, into=1), make_merge_event(3, 1, into=0)]
    )
    assert resolve_merges(record).tolist() == [[0, 0, 0]] * 4
    assert record.rows.model.tolist() == models, "the record itself is left alone"


def test_a_merge_affects_the_past_only(tmp_path: Path) -> None:
    record = write_record(tmp_path, make_header(3, 1), {"model": [[1], [0], [1]]}, [make_merge_event(1, 1, into=0)])
    assert resolve_merges(record).tolist() == [[0], [0], [1]], "model 1 was made anew at time 2"


def test_the_rand_index_counts_merged_models_and_equal_concepts_as_one(tmp_path: Path) -> None:
    concepts = [[1, 3], [1, 3], [0, 0], [0, 0]]
    models = {"model": [[5, 6], [5, 5], [2, 2]]}
    merge = [make_merge_event(1, 6, into=5)]
    ari = [
        summarise_run(write_record(tmp_path / "plain", make_header(3, concepts=concepts), models)).ari,
        summarise_run(write_record(tmp_path / "merge", make_header(3, concepts=concepts), models, merge)).ari,
        summarise_run(
            write_record(tmp_path / "both", make_header(3, concepts=concepts, same={"3": 1}), models, merge)
        ).ari,
        summarise_run(
            write_record(tmp_path / "chain", make_header(3, concepts=concepts, same={"1": 0, "3": 1}), models, merge)
        ).ari,
    ]
    assert ari[2] == 1.0
    assert ari[0] is not None
    assert ari[0] < 1
    assert ari[1] == pytest.approx(4 / 9)  # of 15 pairs 7 and 3 are together, 3 in both: (3 - 7/5) / (5 - 7/5)
    assert ari[3] == 0.0, "one concept, two models"


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([0, 0, 1, 1], [0, 0, 1, 2], 4 / 7),
        ([0, 0, 1, 1], [0, 1, 0, 1], -0.5),
        ([0, 0, 0, 0], [0, 1, 2, 3], 0.0),
        ([0, 0, 0], [4, 4, 4], 1.0),
        ([0, 1, 2], [2, 1, 0], 1.0),
        ([3], [5], 1.0),
    ],
)
def test_adjusted_rand_by_hand(a: list[int], b: list[int], expected: float) -> None:
    assert adjusted_rand(a, b) == pytest.approx(expected)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=25))
def test_adjusted_rand_counts_pairs(cells: list[tuple[int, int]]) -> None:
    pairs = [(p[0] == q[0], p[1] == q[1]) for p, q in combinations(cells, 2)]
    together, only_a, only_b = pairs.count((True, True)), pairs.count((True, False)), pairs.count((False, True))
    apart = pairs.count((False, False))
    below = (together + only_a) * (only_a + apart) + (together + only_b) * (only_b + apart)
    expected = 2 * (together * apart - only_a * only_b) / below if below else 1.0
    a, b = zip(*cells, strict=True)
    assert adjusted_rand(a, b) == pytest.approx(expected)
    assert adjusted_rand(b, [7 - i for i in a]) == pytest.approx(expected), "symmetric, and names mean nothing"


def runs(out: Path, accuracies: dict[int, float], **changes: Any) -> list[Record]:
    return [
        write_record(out, make_header(concepts=CONCEPTS, seed=seed, **changes), {"accuracy": [[a, a], [a, a]]})
        for seed, a in accuracies.items()
    ]


def test_mean_and_sample_deviation_over_seeds(tmp_path: Path) -> None:
    (summary,) = summarise(runs(tmp_path, {2: 0.9, 0: 0.8, 1: 0.7}))
    assert summary.seeds == (0, 1, 2)
    assert summary.omitting_drifts is not None
    assert summary.omitting_drifts.mean == pytest.approx(80)
    assert summary.omitting_drifts.std == pytest.approx(10)  # sqrt((100 + 0 + 100) / 2)
    assert summary.models_sent == 40


def test_one_seed_has_no_deviation(tmp_path: Path) -> None:
    (summary,) = summarise(runs(tmp_path, {0: 0.75}))
    assert summary.including_drifts == Spread(75, None)


def test_groups_are_streams_algorithms_settings_and_overrides(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"stream": "circle-2"},
        {"algorithm": "Eager"},
        {"settings": {"delta": 0.2}},
        {"overrides": {"rounds": 3}},
    ]
    for change in changes:
        runs(tmp_path, {0: 0.9, 1: 0.8}, **change)
    summaries = summarise(read_all(tmp_path))
    assert [s.seeds for s in summaries] == [(0, 1)] * 5
    assert [s.stream for s in summaries] == ["circle-2"] + ["sine-2"] * 4
    assert [s.algorithm for s in summaries].count("FedDrift") == 4


def test_the_same_run_twice_counts_once(tmp_path: Path) -> None:
    old = runs(tmp_path / "old", {0: 0.5, 1: 0.5}, started="2026-01-01T01:00:00+00:00")
    new = runs(tmp_path / "new", {0: 0.9}, started="2026-01-01T03:30:00+02:00")  # later, though 3:30 there is 1:30
    for records in (old + new, new + old):
        (summary,) = summarise(records)
        assert summary.seeds == (0, 1)
        assert summary.including_drifts is not None
        assert summary.including_drifts.mean == pytest.approx(70)


def test_unfinished_runs_are_left_out_and_listed(tmp_path: Path) -> None:
    runs(tmp_path, {0: 0.9})
    stopped = write_record(tmp_path, make_header(concepts=CONCEPTS, seed=1), steps=1)
    records = read_all(tmp_path)
    assert [s.seeds for s in summarise(records)] == [(0,)]
    assert [r.header["seed"] for r in summary.select_unreportable(records)] == [stopped.header["seed"]]
    assert summarise([stopped]) == []


def test_json_has_the_promised_keys(tmp_path: Path) -> None:
    (summary,) = tables.to_json(summarise(runs(tmp_path, {0: 0.5, 1: 0.75}, overrides={"rounds": 3})))
    assert json.loads(json.dumps(summary)) == {
        "stream": "sine-2",
        "algorithm": "FedDrift",
        "settings": {"delta": 0.1, "init": "warm", "rounds": 3},
        "seeds": [0, 1],
        "omitting_drifts": {"mean": 62.5, "std": pytest.approx(25 / 2**0.5)},
        "including_drifts": {"mean": 62.5, "std": pytest.approx(25 / 2**0.5)},
        "models_sent": 40,
        "models_sent_ratio": 1,
        "models_final": 1,
        "false_alarms": 0,
        "ari": 0,
    }


def test_json_without_truth_is_null(tmp_path: Path) -> None:
    (summary,) = tables.to_json(summarise([write_record(tmp_path, make_header())]))
    assert summary["omitting_drifts"] is None
    assert summary["ari"] is None and summary["false_alarms"] is None
    assert summary["including_drifts"] == {"mean": pytest.approx(90), "std": None}


def text(records: list[Record], width: int = 120, against: str | None = None) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(
            tables.build_summary_table(summarise(records), summary.compare(records, against) if against else [])
        )
    return capture.get()


def test_the_table_reads_well(tmp_path: Path) -> None:
    runs(tmp_path, dict.fromkeys(range(5), 0.9))
    runs(tmp_path, {0: 0.9712, 2: 0.9774}, settings={"delta": 0.1, "init": "fresh"})
    runs(tmp_path, {0: 0.5}, algorithm="Oblivious", settings={"memory": "all"}, overrides={"rounds": 3})
    write_record(tmp_path, make_header(stream="folder:[data]"))
    own, *sine = text(read_all(tmp_path)).splitlines()[3:]  # after the names of the columns and a rule
    fresh, warm, oblivious = sine
    assert "delta=0.1, init=warm" in warm
    assert " 0-4 " in warm
    assert " 90.00 ± 0.00 " in warm
    assert "delta=0.1, init=fresh" in fresh
    assert " 0, 2 " in fresh
    assert " 97.43 ± 0.44 " in fresh
    assert "rounds=3" in oblivious
    assert "memory" not in oblivious, "a setting that nothing is compared by"
    assert " 50.00 " in oblivious
    assert "±" not in oblivious
    assert " 1.00x " in oblivious
    assert own.startswith("folder:[data] FedDrift ")
    assert own.count(" - ") + own.rstrip().endswith(" -") == 3, (
        "no truth: no accuracy omitting drifts, no false alarms, no ARI"
    )


def test_values_that_all_rows_of_a_stream_share_are_shown_once(tmp_path: Path) -> None:
    options = {"data": "0123abcd", "label": "late", "every": "month"}
    for algorithm, own in (("Window", {}), ("Oblivious", {"net": "linear"}), ("Oblivious", {"net": "mlp:8"})):
        runs(tmp_path, {0: 0.9}, stream="flights.csv", algorithm=algorithm, settings={}, overrides=options | own)
    runs(tmp_path, {0: 0.9}, algorithm="Window", settings={})  # on another stream, which has no options
    records = read_all(tmp_path)
    summaries, numbers = summarise(records), metrics.summarise_metrics(records)
    shown = [[tables.build_summary_table(summaries)], tables.build_metrics_tables(summaries, numbers)]
    for together in shown:
        console = Console(width=120, file=io.StringIO())
        with console.capture() as capture:
            console.print(*together)
        assert capture.get().count("flights.csv: data=0123abcd, label=late, every=month") == 1
        assert capture.get().count("0123abcd") == 1
        names = sorted(str(cell) for cell in together[0].columns[1].cells)
        assert names == ["Oblivious net=linear", "Oblivious net=mlp:8", "Window", "Window"]
    assert tables.build_summary_table(summarise(runs(tmp_path / "plain", {0: 0.9}))).caption is None


def test_the_best_of_each_stream_is_first_by_the_chosen_score(tmp_path: Path) -> None:
    for name, accuracy, loss in (
        ("Window", 0.7, 0.9),
        ("FedDrift", 0.8, 0.4),
        ("Oblivious", 0.9, 0.5),
        ("IFCA", None, None),
    ):
        columns = {"accuracy": [[accuracy] * 2] * 2, "log_loss": [[loss] * 2] * 2}
        write_record(tmp_path, make_header(algorithm=name, settings={}), columns)
    write_record(tmp_path, make_header(stream="elec", algorithm="Window"), {"log_loss": [[0.1] * 2] * 2})
    for score, best_first in (
        ("accuracy", ["Window", "Oblivious", "FedDrift", "Window", "IFCA"]),
        ("log_loss", ["Window", "FedDrift", "Oblivious", "Window", "IFCA"]),  # the lowest first
    ):
        records = select_score(read_all(tmp_path), score)
        summaries, numbers = summarise(records), metrics.summarise_metrics(records)
        shown = [tables.build_summary_table(summaries, score=SCORES.get(score, ACCURACY))]
        shown += tables.build_metrics_tables(summaries, numbers, SCORES.get(score, ACCURACY))
        for table in shown:
            assert [str(cell).split()[0] for cell in table.columns[1].cells] == best_first
            assert [str(cell) for cell in table.columns[0].cells] == ["elec"] + ["sine-2"] * 4


def test_metrics_that_need_the_truth_are_shown_if_it_is_known(tmp_path: Path) -> None:
    names = [
        str(column.header)
        for column in tables.build_summary_table(summarise([write_record(tmp_path / "a", make_header())])).columns
    ]
    assert names == ["stream", "algorithm", "seeds", "accuracy, %", "sent", "models"]
    names = [
        str(column.header) for column in tables.build_summary_table(summarise(runs(tmp_path / "b", {0: 0.9}))).columns
    ]
    assert names[3:] == ["omitting\ndrifts, %", "including\ndrifts, %", "sent", "models", "false\nalarm", "ARI"]


def test_the_table_fits_a_narrow_terminal(tmp_path: Path) -> None:
    table = text(runs(tmp_path, dict.fromkeys(range(5), 0.9)), width=80)
    assert "…" not in table
    assert "90.00 ± 0.00" in table


def test_settings_that_only_some_have_are_differences() -> None:
    found = find_differing_settings([("s", "A", {"x": 1, "y": 2}), ("s", "A", {"x": 1}), ("s", "B", {"x": 3})])
    assert found == [{"y": 2}, {}, {}]


def test_reports_leave_the_records_alone(tmp_path: Path) -> None:
    (record,) = runs(tmp_path, {0: 0.9}, same={"1": 0})
    before = record.rows.concept.copy(), json.dumps(record.header)
    tables.to_json(summarise([record]))
    np.testing.assert_array_equal(record.rows.concept, before[0])
    assert json.dumps(record.header) == before[1]


def compare_methods(tmp_path: Path, name: str = "FedDrift") -> dict[str, summary.Difference | None]:
    records = read_all(tmp_path)
    names = [f"{s.algorithm} {s.settings.get('init', '')}".strip() for s in summarise(records)]
    return dict(zip(names, summary.compare(records, name), strict=True))


def test_a_comparison_is_paired_by_seed(tmp_path: Path) -> None:
    runs(tmp_path, {0: 0.80, 1: 0.50, 2: 0.60})
    runs(tmp_path, {1: 0.53, 0: 0.82, 7: 0.10}, algorithm="Oblivious", settings={})
    found = compare_methods(tmp_path)
    gap = found["Oblivious"]
    assert gap is not None and gap.seeds == (0, 1) and gap.mean == pytest.approx(2.5)
    # Student's t at 97.5 % with one degree of freedom is 12.706
    assert gap.low == pytest.approx(2.5 - 12.7062 * 0.5) and gap.high == pytest.approx(2.5 + 12.7062 * 0.5)
    own = found["FedDrift warm"]
    assert own is not None and (own.mean, own.low, own.high) == (0, 0, 0)


def test_one_common_seed_has_no_interval_and_none_no_difference(tmp_path: Path) -> None:
    runs(tmp_path, {0: 0.8, 1: 0.5})
    runs(tmp_path, {1: 0.6}, algorithm="Oblivious", settings={})
    runs(tmp_path, {9: 0.6}, algorithm="Window", settings={})
    runs(tmp_path, {1: 0.6}, algorithm="Oracle", settings={}, overrides={"rounds": 3})  # trained otherwise
    found = compare_methods(tmp_path)
    one = found["Oblivious"]
    assert one is not None and one.mean == pytest.approx(10) and one.low is None and one.high is None
    assert found["Window"] is None and found["Oracle"] is None
    shown = text(read_all(tmp_path), against="FedDrift")
    assert "over FedDrift," in shown and "+10.00" in shown and "+0.00 [+0.00, +0.00]" in shown
    objects = tables.to_json(summarise(read_all(tmp_path)), summary.compare(read_all(tmp_path), "FedDrift"))
    gaps = {o["algorithm"]: o["against"] for o in objects}
    assert gaps["Window"] is None
    assert gaps["Oblivious"] == {
        "baseline": "FedDrift", "seeds": [1], "mean": pytest.approx(10), "low": None, "high": None,
    }  # fmt: skip


def test_of_several_configurations_the_plain_one_is_the_baseline(tmp_path: Path) -> None:
    runs(tmp_path, {0: 0.8})
    runs(tmp_path, {0: 0.9}, settings={"delta": 0.1, "init": "fresh"})
    fresh = compare_methods(tmp_path)["FedDrift fresh"]
    assert fresh is not None and fresh.mean == pytest.approx(10)
    runs(tmp_path, {0: 0.7}, settings={"delta": 0.2, "init": "warm"})
    with pytest.raises(ConfigError, match="3 configurations of 'FedDrift' on sine-2: which .* such as 'FedDrift delta"):
        compare_methods(tmp_path)
    named = compare_methods(tmp_path, "FedDrift delta=0.2")["FedDrift fresh"]
    assert named is not None and named.mean == pytest.approx(20)
    with pytest.raises(ConfigError, match="no finished runs of 'FedDrift' have the settings detla=0.2"):
        compare_methods(tmp_path, "FedDrift detla=0.2")


def test_a_baseline_that_did_not_run(tmp_path: Path) -> None:
    runs(tmp_path, {0: 0.8})
    with pytest.raises(ConfigError, match=r"no finished runs of 'Oracle' to compare with \(there are: FedDrift\)"):
        compare_methods(tmp_path, "Oracle")


def test_ranks_compare_methods_of_all_streams_on_common_seeds(tmp_path: Path) -> None:
    for stream, level in {"sine-2": 0.9, "sea-4": 0.6}.items():
        runs(tmp_path, {0: level, 1: level}, stream=stream)
        runs(tmp_path, {0: level - 0.1, 1: level - 0.1, 2: 1.0}, stream=stream, algorithm="Oblivious", settings={})
    runs(tmp_path, {0: 0.95, 1: 0.95}, stream="sine-2", algorithm="Local", settings={})
    runs(tmp_path, {0: 0.6, 1: 0.6}, stream="sea-4", algorithm="Local", settings={})
    runs(tmp_path, {0: 1.0}, stream="sea-4", algorithm="Oracle", settings={})
    found = rank_methods(read_all(tmp_path))
    assert found.methods == ("Local", "FedDrift", "Oblivious") and found.streams == ("sea-4", "sine-2")
    assert found.ranks.tolist() == [[1.5, 1], [1.5, 2], [3, 3]] and found.left_out == ("Oracle",)
    shown = CliRunner().invoke(cli.app, ["report", str(tmp_path), "--ranks"])
    assert (
        shown.exit_code == 0
        and "Local" in shown.output.splitlines()[1]
        and "or with too few seeds: Oracle" in " ".join(shown.output.split())
    )
    told = json.loads(CliRunner().invoke(cli.app, ["report", str(tmp_path), "--ranks", "--json"]).output)
    assert told[0] == {"method": "Local", "mean_rank": 1.25, "ranks": {"sea-4": 1.5, "sine-2": 1.0}}
    picture = CliRunner().invoke(cli.app, ["plot", str(tmp_path), "ranks", "--out", str(tmp_path / "ranks.png")])
    assert picture.exit_code == 0 and (tmp_path / "ranks.png").stat().st_size


def test_ranks_omit_methods_with_the_fewest_seeds_if_none_is_common(tmp_path: Path) -> None:
    for stream in ("sine-2", "sea-4"):
        runs(tmp_path, {2: 0.9, 3: 0.9}, stream=stream)
        runs(tmp_path, {0: 0.8, 2: 0.8, 3: 0.8}, stream=stream, algorithm="Oblivious", settings={})
        runs(tmp_path, {0: 0.99}, stream=stream, settings={"delta": 0.2, "init": "warm"})
    runs(tmp_path, {3: 0.7}, stream="sea-4", settings={"delta": 0.3, "init": "warm"})
    found = rank_methods(read_all(tmp_path))
    assert found.methods == ("FedDrift (delta=0.1)", "Oblivious")  # also on sine-2, where 0.3 has not run
    assert found.left_out == ("FedDrift (delta=0.2)", "FedDrift (delta=0.3)")
    assert found.left_out_text.endswith("too few seeds: FedDrift (delta=0.2), FedDrift (delta=0.3)")
    assert replace(found, left_out=tuple("abcdefghijklm")).left_out_text.endswith("h, i, j and 3 more")


def test_several_folders_and_some_of_their_runs(tmp_path: Path) -> None:
    for folder, algorithm, level in (("mine", "Local", 0.9), ("theirs", "Oblivious", 0.6)):
        (tmp_path / folder).mkdir()
        for stream in ("sine-2", "sea-4"):
            runs(tmp_path / folder, {0: level, 1: level}, stream=stream, algorithm=algorithm, settings={})

    def told(*words: str) -> Any:
        given = ["report", str(tmp_path / "mine"), str(tmp_path / "theirs"), *words, "--json"]
        return json.loads(CliRunner().invoke(cli.app, given).output)

    assert [row["algorithm"] for row in told("--stream", "sea-4", "--seeds", "1")] == ["Local", "Oblivious"]
    assert {tuple(row["seeds"]) for row in told("--stream", "sea-4", "--seeds", "1")} == {(1,)}
    assert [row["method"] for row in told("--ranks")] == ["Local", "Oblivious"]
    assert {row["algorithm"] for row in told("--algorithm", "Local")} == {"Local"}
    wrong = CliRunner().invoke(cli.app, ["report", str(tmp_path), "--stream", "sae-4", "--seeds", "7"])
    assert wrong.exit_code != 0 and f"no records of sae-4, seeds 7 in {tmp_path}" in str(wrong.exception)
    picture = ["plot", str(tmp_path / "mine"), str(tmp_path / "theirs"), "accuracy", "--stream", "sea-4"]
    assert CliRunner().invoke(cli.app, [*picture, "--out", str(tmp_path / "a.png")]).exit_code == 0


def test_methods_that_cannot_be_ranked_are_reported(tmp_path: Path) -> None:
    runs(tmp_path, {0: 0.9})
    runs(tmp_path, {0: 0.8}, algorithm="Oblivious", settings={})
    with pytest.raises(DataError, match="two or more streams, there are 2 on all of 1"):
        rank_methods(read_all(tmp_path))
    runs(tmp_path, {0: 0.9}, stream="sea-4")
    runs(tmp_path, {1: 0.9}, stream="sea-4", algorithm="Oblivious", settings={})
    with pytest.raises(DataError, match="on sea-4 have no seed in common"):
        rank_methods(read_all(tmp_path))
