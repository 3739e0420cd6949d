"""Caveats of comparisons, and comparisons by other scores than accuracy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from feddrift import cli
from feddrift.errors import DataError
from feddrift.reports import metrics
from feddrift.reports.caveats import find_caveats
from feddrift.reports.page.data import collect_page_data
from feddrift.reports.summary import compare, summarise
from feddrift.runs.record import Record, read_all, select_score
from tests.support.records import make_header, write_record


def columns(accuracy: float, **more: Any) -> dict[str, Any]:
    """Two clients, two time steps, the same everywhere unless given."""
    given = {"accuracy": accuracy, "log_loss": 0.5, "brier": 0.2, "auc": 0.8, "f1": 0.6, "majority": 0.55, **more}
    return {name: value if isinstance(value, list) else [[value, value]] * 2 for name, value in given.items()}


def run(out: Path, algorithm: str, cells: dict[str, Any], seed: int = 0) -> Record:
    return write_record(out, make_header(algorithm=algorithm, seed=seed, settings={}), cells)


def test_what_a_higher_accuracy_hides(tmp_path: Path) -> None:
    records = [
        run(tmp_path, "Oblivious", columns(0.7)),
        run(tmp_path, "FedDrift", columns(0.72, log_loss=0.9, n_models=9)),
        run(tmp_path, "IFCA", columns(0.701, models_sent=25)),
        run(tmp_path, "AUE", columns(0.5)),
        run(tmp_path, "CFL", columns(0.75, log_loss=0.4, model=[[0, 1], [0, 1]], n_models=2)),
    ]
    assert find_caveats(records) == [
        "sine-2, FedDrift: 2.00 points more accurate than Oblivious in one seed, but its probabilities are worse: "
        "log loss 0.9000, Oblivious 0.5000.",
        "sine-2, FedDrift: 8 of its 9 models are used by no client at the end.",
        "sine-2, IFCA: all clients use one model all the time, as Oblivious does, for 2.5 times its traffic.",
        "sine-2, AUE: 20.00 points less accurate than Oblivious in one seed.",
        "sine-2, AUE: 50.00 % right in one seed, less than always naming the client's most frequent class (55.00 %).",
    ]
    assert find_caveats(records[:1] + records[-1:]) == []
    ensemble = [records[0], run(tmp_path / "vote", "KUE", columns(0.7, n_models=10, models_sent=99))]
    assert find_caveats(ensemble) == []  # its record names the heaviest vote only
    assert find_caveats([write_record(tmp_path / "older", make_header())]) == []  # a record that has no scores
    assert collect_page_data(records, "all")["streams"][0]["remarks"][0].startswith("FedDrift: 2.00 points")


def test_a_difference_that_seeds_do_not_agree_on_is_not_claimed(tmp_path: Path) -> None:
    """Three seeds of each: IFCA's interval contains 0, Window's does not; FedDrift's accuracy is clear, its log loss
    is not, and Local's is; KUE is below the majority class in the mean only."""
    seeds: dict[str, list[dict[str, Any]]] = {
        "Oblivious": [columns(0.7), columns(0.7), columns(0.7)],
        "IFCA": [columns(0.68), columns(0.705), columns(0.695)],
        "Window": [columns(0.68), columns(0.681), columns(0.682)],
        "FedDrift": [columns(0.75, log_loss=x) for x in (0.2, 0.5, 1.1)],
        "Local": [columns(0.75, log_loss=x) for x in (0.6, 0.61, 0.62)],
        "KUE": [columns(x, majority=0.7) for x in (0.65, 0.71, 0.73)],
        "AUE": [columns(x, log_loss=0.8) for x in (0.69, 0.72, 0.73)],
    }
    records = [run(tmp_path, name, cells, seed) for name, runs in seeds.items() for seed, cells in enumerate(runs)]
    assert find_caveats(records, name_streams=False) == [
        "Window: 1.90 points less accurate than Oblivious.",
        "Local: 5.00 points more accurate than Oblivious, but its probabilities are worse: "
        "log loss 0.6100, Oblivious 0.5000.",
        "AUE: neither clearly more nor less accurate than Oblivious, and its probabilities are worse: "
        "log loss 0.8000, Oblivious 0.5000.",
    ]
    first = [record for record in records if record.header["seed"] == 0]
    assert "IFCA: 2.00 points less accurate than Oblivious in one seed." in find_caveats(first, name_streams=False)


def test_remarks_are_on_accuracy_whatever_score_is_shown(tmp_path: Path) -> None:
    run(tmp_path, "Oblivious", columns(0.7))
    run(tmp_path, "AUE", columns(0.6))
    sentence = "AUE: 10.00 points less accurate than Oblivious in one seed."
    page = collect_page_data(select_score(read_all(tmp_path), "log_loss"), "losses")
    assert page["streams"][0]["remarks"] == [sentence]
    shown = CliRunner().invoke(cli.app, ["report", str(tmp_path), "--score", "auc"])
    assert sentence in " ".join(shown.output.split())


def test_caveats_name_the_differing_settings_of_one_algorithm(tmp_path: Path) -> None:
    for net, accuracy in (("linear", 0.6), ("mlp:8", 0.65)):
        for name, level in (("Oblivious", 0.7), ("AUE", accuracy)):
            write_record(
                tmp_path,
                make_header(algorithm=name, settings={}, overrides={"label": "late", "net": net}),
                columns(level),
            )
    assert find_caveats(read_all(tmp_path), name_streams=False) == [
        "AUE (net=linear): 10.00 points less accurate than Oblivious in one seed.",
        "AUE (net=mlp:8): 5.00 points less accurate than Oblivious in one seed.",
    ]


def test_clients_with_few_rows_are_reported(tmp_path: Path) -> None:
    flights = write_record(tmp_path / "a", make_header(), {"tested": [[3, 5259], [5, 5259]]})
    told = (
        "1 of 2 clients has fewer than 10 rows a step to test on, the largest 5259, and every mean counts all clients "
        "alike; `feddrift report --weigh rows` counts rows alike."
    )
    assert find_caveats([flights]) == [f"sine-2: {told}"]
    assert collect_page_data([flights], "flights")["streams"][0]["remarks"] == [told]
    assert find_caveats([replace(flights, weigh="rows")]) == []
    for name, tested in {"all few": [[3, 9]] * 2, "one never": [[0, 5259]] * 2, "enough": [[10, 5259]] * 2}.items():
        assert find_caveats([write_record(tmp_path / name, make_header(), {"tested": tested})]) == []


def test_another_score_takes_the_place_of_accuracy(tmp_path: Path) -> None:
    losses = {"Oblivious": 0.5, "FedDrift": [[0.2, 0.4], [0.4, 0.6]]}
    for name, loss in losses.items():
        run(tmp_path, name, columns(0.9, log_loss=loss))
    records = select_score(read_all(tmp_path), "log_loss")
    drifting = next(k for k, group in enumerate(summarise(records)) if group.algorithm == "FedDrift")
    summary, gap = summarise(records)[drifting], compare(records, "Oblivious")[drifting]
    assert summary.including_drifts is not None and summary.including_drifts.mean == pytest.approx(0.4)  # no percent
    assert gap is not None and gap.mean == pytest.approx(-0.1)
    worst = metrics.compute_metrics(next(r for r in records if r.header["algorithm"] == "FedDrift")).worst
    assert worst == pytest.approx(0.5)  # client 1: the highest loss is the worst
    page = collect_page_data(records, "losses")
    assert page["score"]["title"] == "log loss" and page["streams"][0]["remarks"] == []
    group = next(g for g in page["streams"][0]["groups"] if g["algorithm"] == "FedDrift")
    assert group["runs"][0]["worst"][0] == [1, 0.5, 1] and group["numbers"]["auc"][0] == pytest.approx(0.8)
    (shares,) = select_score([records[0]], "auc")
    assert summarise([shares])[0].including_drifts == summarise(select_score([records[0]], "auc"))[0].including_drifts
    with pytest.raises(DataError, match="no AUC: an older version"):
        select_score([write_record(tmp_path / "older", make_header())], "auc")


def test_alarms_are_counted_over_seeds(tmp_path: Path) -> None:
    for seed, drift in enumerate([[[False, False], [True, True]], [[False, False], [True, False]]]):
        run(tmp_path, "FedDrift", columns(0.9, drift=drift), seed)
    (group,) = collect_page_data(read_all(tmp_path), "two")["streams"][0]["groups"]
    assert group["alarms"] == {"1,0": 2, "1,1": 1}
    (alone,) = collect_page_data(read_all(tmp_path)[:1], "one")["streams"][0]["groups"]
    assert alone["alarms"] is None


def test_the_command_takes_a_score(tmp_path: Path) -> None:
    run(tmp_path, "Oblivious", columns(0.9, auc=0.75))
    runner = CliRunner()
    shown = runner.invoke(cli.app, ["report", str(tmp_path), "--score", "auc"])
    assert shown.exit_code == 0 and "AUC" in shown.output and "75.00" in shown.output
    (group,) = json.loads(runner.invoke(cli.app, ["report", str(tmp_path), "--score", "brier", "--json"]).output)
    assert group["score"] == "brier" and group["including_drifts"]["mean"] == pytest.approx(0.2)
    assert "75.00" in runner.invoke(cli.app, ["report", str(tmp_path), "--score", "auc", "--metrics"]).output
    page = tmp_path / "page.html"
    assert runner.invoke(cli.app, ["report", str(tmp_path), "--score", "auc", "--html", str(page)]).exit_code == 0
    assert page.exists()
    for wrong in (["--score", "acc"], ["--score", "auc", "--paper"]):
        failed = runner.invoke(cli.app, ["report", str(tmp_path), *wrong])
        assert failed.exit_code != 0 and failed.exception is not None


def test_a_level_says_that_it_includes_drifts(tmp_path: Path) -> None:
    """Where drifts are known, the verdict's numbers leave them out; those of this sentence do not."""
    head = make_header(algorithm="FedDrift", settings={}, concepts=[[0, 0], [0, 1], [0, 1]])
    (sentence,) = find_caveats([write_record(tmp_path, head, columns(0.5))])
    assert sentence == (
        "sine-2, FedDrift: including drifts, 50.00 % right in one seed, less than always naming the client's most "
        "frequent class (55.00 %)."
    )
