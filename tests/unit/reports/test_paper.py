"""Our results beside those of the paper."""

from __future__ import annotations

from pathlib import Path

import pytest

from feddrift import algorithms, streams
from feddrift.reports import paper, tables
from feddrift.reports import summary as report
from tests.support.records import make_header, write_record


@pytest.mark.parametrize(
    ("accuracy", "within"),
    [(0.9845, True), (0.9750, True), (0.9744, False), (0.9995, False)],  # the paper's Oracle: 98.45 +- 0.03 on SINE-2
)
def test_the_band_is_one_point_or_twice_the_deviation(tmp_path: Path, accuracy: float, within: bool) -> None:
    head = make_header(2, 2, algorithm="Oracle", settings={}, concepts=[[0, 0]] * 3)
    record = write_record(tmp_path, head, {"accuracy": [[accuracy] * 2] * 2})
    summaries = report.summarise([record])
    (cell,) = cells = [paper.find_published_result(summary) for summary in summaries]
    assert cell is not None and cell.omitting_drifts == report.Spread(98.45, 0.03)
    assert cell.within["omitting_drifts"] is within
    (told,) = tables.to_json(summaries, paper=cells)
    assert told["paper"]["omitting_drifts"] == {"mean": 98.45, "std": 0.03} and told["paper"]["including_drifts"]
    assert told["within"] == {"omitting_drifts": within, "including_drifts": False}


def test_a_wide_deviation_widens_the_band(tmp_path: Path) -> None:
    head = make_header(2, 2, algorithm="Adaptive-FedAvg", settings={}, concepts=[[0, 0]] * 3)  # 74.10 +- 10.03
    (summary,) = report.summarise([write_record(tmp_path, head, {"accuracy": [[0.93] * 2] * 2})])
    cell = paper.find_published_result(summary)
    assert cell is not None and cell.within["omitting_drifts"]


@pytest.mark.parametrize(
    "changes", [{"algorithm": "FedDrift-Trunk"}, {"overrides": {"rounds": 5}}, {"stream": "folder:x"}]
)
def test_other_runs_have_no_cell(tmp_path: Path, changes: dict[str, object]) -> None:
    (summary,) = report.summarise([write_record(tmp_path, make_header(2, 2, **changes), {})])
    assert paper.find_published_result(summary) is None
    assert tables.to_json([summary], paper=[None])[0]["paper"] is None
    assert tables.build_summary_table([summary], paper=[None]).row_count == 1


def test_every_cell_of_the_paper_belongs_to_something_we_have() -> None:
    tables = paper._load_tables()
    for accuracy in paper.ACCURACIES:
        assert len(tables[accuracy]) == 22 and set(tables[accuracy]) <= set(algorithms.ALGORITHMS)
        assert {s for cells in tables[accuracy].values() for s in cells} - {"fmow"} <= set(streams.STREAMS)
        assert sum(len(cells) for cells in tables[accuracy].values()) == 22 * 9 - 2  # no Oracle on FMoW
