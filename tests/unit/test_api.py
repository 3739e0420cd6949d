"""From Python one can run, record, go on, read, compare, draw and export."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import feddrift as fd

PUBLIC = [
    "Algorithm", "Conditions", "ConfigError", "DataError", "Event", "FeddriftError", "Federation", "Local", "Models",
    "Net", "Record", "State", "Step", "Stream", "Worker", "algorithm", "events", "export", "load", "mlp", "option",
    "plot", "read", "record", "report", "rows", "run", "stream", "summary",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, two seeds each."""
    out = tmp_path_factory.mktemp("runs")
    for algorithm in ("FedDrift", "Oblivious"):
        for seed in (0, 1):
            made = fd.record("sine-2", algorithm, out=out, seed=seed, rounds=3)
            assert made.status == "complete" and made.header["seed"] == seed
    return out


def test_the_public_names_are_these_and_each_has_a_docstring() -> None:
    assert sorted(fd.__all__) == PUBLIC
    assert dir(fd) == sorted([*PUBLIC, "__version__"])
    for name in PUBLIC:
        value = getattr(fd, name)
        assert value.__doc__ and not value.__doc__.startswith(f"{name}("), name


def test_names_run_as_what_they_stand_for() -> None:
    local = fd.Local(rounds=1)
    stream = fd.stream("sine-2", seed=3)
    by_name = list(fd.run("sine-2", "FedDrift", seed=3, local=local))
    by_hand = list(fd.run(stream, fd.algorithm("FedDrift", stream), seed=3, local=local))
    for a, b in zip(by_name, by_hand, strict=True):
        np.testing.assert_array_equal(a.accuracy, b.accuracy)
    with pytest.raises(fd.ConfigError, match="unknown stream 'sine'"):
        next(fd.run("sine", "FedDrift"))
    with pytest.raises(fd.ConfigError, match="unknown algorithm 'Fedrift'"):
        next(fd.run("sine-2", "Fedrift"))


def test_a_finished_run_is_read_where_it_may_go_on(folder: Path) -> None:
    paths = {path: path.stat().st_mtime_ns for path in folder.glob("*.jsonl")}
    again = fd.record("sine-2", "FedDrift", out=folder, seed=0, rounds=3, resume=True)
    assert again.status == "complete" and set(folder.glob("*.jsonl")) == set(paths)
    with pytest.raises(fd.ConfigError, match="rounds"):
        fd.record("sine-2", "FedDrift", out=folder, rounds=0)


def test_columns_are_what_the_records_say(folder: Path) -> None:
    records = fd.read(folder)
    assert len(records) == 4
    rows, first = fd.rows(records), records[0]
    assert {len(column) for column in rows.values()} == {4 * 10 * 10}
    at = 3 * 10 + 7  # time 3, client 7 of the first
    assert (rows["t"][at], rows["client"][at], rows["seed"][at]) == (3, "7", 0)
    assert rows["accuracy"][at] == first.rows.accuracy[3, 7] and rows["model"][at] == first.rows.model[3, 7]
    events = fd.events(first)
    assert set(events["event"]) >= {"created"} and {len(column) for column in events.values()} == {len(first.events)}
    assert "rose from" in events["why"][0] and events["cause"][0]["delta"] == 0.1
    table = fd.summary(records, against="Oblivious")
    assert table["algorithm"] == ["FedDrift", "Oblivious"] and table["seeds"] == [2, 2]
    assert table["omitting_drifts"][0] > table["omitting_drifts"][1] + 5
    gap = table["omitting_drifts"][0] - table["omitting_drifts"][1]
    assert table["over_mean"] == [pytest.approx(gap), 0.0] and table["over_low"][0] < gap < table["over_high"][0]
    assert fd.rows([]) == {name: [] for name in rows}


def test_pandas_takes_the_columns(folder: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame(fd.rows(fd.read(folder)))
    assert len(frame) == 400 and frame.groupby("algorithm").accuracy.mean().FedDrift > 0.5


def test_pictures_show_inline_and_pages_are_written(folder: Path, tmp_path: Path) -> None:
    records = fd.read(folder)
    for kind in ("clusters", "accuracy", "patterns"):
        shown = fd.plot(records, kind)
        assert shown._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    with pytest.raises(fd.ConfigError, match="kind must be one of clusters, accuracy"):
        fd.plot(records, "cluster")  # type: ignore[arg-type]
    with pytest.raises(fd.ConfigError, match="expected records"):
        fd.plot([folder])  # type: ignore[list-item]
    assert fd.report(folder, tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert fd.report(records[0], tmp_path / "b.html").exists()


def test_models_are_taken_away(folder: Path, tmp_path: Path) -> None:
    written = fd.export(folder, tmp_path / "models")
    assert len(written) == 4
    stream = fd.stream("sine-2", seed=0)
    models = fd.load(next(path for path in written if "FedDrift" in path.name and path.name.endswith("seed0")))
    x, y = stream.cell(10, 0)
    assert (models.predict("0", x) == y).mean() > 0.5
    with pytest.raises(fd.DataError, match="neither a folder of records nor a record|no folder of records"):
        fd.export(tmp_path / "nowhere")


def test_reprs_are_short(folder: Path) -> None:
    stream = fd.stream("sine-2")
    step = next(fd.run(stream, "FedDrift", local=fd.Local(rounds=1)))
    (record, *_) = fd.read(folder)
    told = [repr(value) for value in (stream, step, step.state, step.state.models, record, record.rows)]
    assert all(len(text) < 160 and "array" not in text for text in told), told
    assert told[0] == (
        "Stream('sine-2': 10 clients, 10 time steps + 1 to test, 55,000 examples of 2 features, 2 classes)"
    )
    assert told[1].startswith("Step(tau=0, accuracy=0.") and told[3] == "Models(ids=(0,))"
    assert told[4] == "Record(sine-2, FedDrift, seed 0: complete, 10 of 10 time steps, 10 clients)"
