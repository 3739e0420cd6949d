"""The Python API: run, record, resume, read, compare, draw and export."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import feddrift as fd

PUBLIC = [
    "Algorithm", "Conditions", "ConfigError", "DataError", "Event", "FeddriftError", "Federation", "Local", "Models",
    "Net", "Pull", "Record", "State", "Step", "Stream", "Worker", "alarms", "algorithm", "events", "export",
    "load_models", "mlp", "option", "plot", "read", "record", "report", "rows", "run", "stream", "summary", "update",
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
        assert ">>> " in value.__doc__, f"{name} has no example"
        if not isinstance(value, type) and len(inspect.signature(value).parameters) > 1:
            assert "Args:" in value.__doc__ or "Parameters:" in value.__doc__, f"{name} does not explain its parameters"


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: fd.stream(cast(Any, None)), "a stream's name must be text, got None"),
        (lambda: fd.stream("sine-2", seed=cast(Any, "a")), "seed must be a whole number"),
        (lambda: fd.stream("sine-2", pattern=cast(Any, [[0]])), "pattern must be a name, a file or random"),
        (lambda: fd.algorithm("FedDrift", cast(Any, "sea-4")), "must be a Stream, as fd.stream gives it, got str"),
        (lambda: fd.Conditions(dropout=cast(Any, "a")), "dropout must be a number, got 'a'"),
        (lambda: fd.Conditions(trace=cast(Any, [1, 0])), "trace must be a table"),
        (lambda: fd.Conditions(garbage=cast(Any, ("a",))), "garbage must be numbers of clients"),
        (lambda: next(fd.run("sine-2", "FedDrift", conditions=fd.Conditions(garbage=(99,)))), "clients are 0 to 9"),
        (lambda: fd.Stream.from_arrays(cast(Any, [None, 3])), "cells must be a list of time steps"),
        (lambda: fd.Stream.from_arrays(cast(Any, [[3], [4]])), "a cell is a pair"),
        (lambda: fd.Stream.from_arrays([[None, None]] * 2, clients=["a", "a"]), "distinct names"),
        (lambda: fd.record("sine-2", "FedDrift", checkpoint_every=-1), "every must be a whole number"),
        (lambda: fd.record("sine-2", "FedDrift", resume=cast(Any, "no")), "resume must be True or False"),
        (lambda: fd.plot([], cast(Any, ["clusters"])), "kind must be one of"),
        (lambda: fd.read(cast(Any, 3)), "expected a folder of records"),
        (lambda: fd.export(cast(Any, [])), "export takes the folder of the records"),
        (lambda: fd.load_models("models", net=cast(Any, "mine:net")), "net must be a Net, got str"),
    ],
)
def test_a_value_of_the_wrong_type_gives_a_one_sentence_error(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(fd.FeddriftError, match=sentence):
        call()


def test_models_of_several_runs_do_not_go_where_those_of_one_are(folder: Path, tmp_path: Path) -> None:
    one = next(folder.glob("*FedDrift*seed0.jsonl"))
    fd.export(one, tmp_path / "models")
    with pytest.raises(fd.DataError, match="has the models of one run"):
        fd.export(folder, tmp_path / "models")
    broken = tmp_path / "runs"
    shutil.copytree(folder, broken)
    for state in next(path for path in broken.iterdir() if path.is_dir()).iterdir():
        state.write_bytes(b"nothing")
    with pytest.raises(fd.DataError, match="not exported: .*seed"):
        fd.export(broken, tmp_path / "several")
    assert len(list((tmp_path / "several").glob("*/models.json"))) == 3


def test_names_give_the_same_run_as_objects() -> None:
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


def test_without_a_name_the_method_without_settings_runs(tmp_path: Path) -> None:
    local = fd.Local(rounds=1, steps=1)
    left_out, named = next(fd.run("sine-2", local=local)), next(fd.run("sine-2", "FedDrift-Auto", local=local))
    assert (left_out.accuracy == named.accuracy).all() and type(left_out.state) is type(named.state)
    pattern = "random:clients=2,steps=1,every=1,concepts=2"
    record = fd.record("sine-2", out=tmp_path, rounds=1, steps=1, pattern=pattern)
    assert record.header["algorithm"] == "FedDrift-Auto"


def test_a_finished_run_is_read_where_it_may_go_on(folder: Path) -> None:
    paths = {path: path.stat().st_mtime_ns for path in folder.glob("*.jsonl")}
    again = fd.record("sine-2", "FedDrift", out=folder, seed=0, rounds=3, resume=True)
    assert again.status == "complete" and set(folder.glob("*.jsonl")) == set(paths)
    with pytest.raises(fd.ConfigError, match="rounds"):
        fd.record("sine-2", "FedDrift", out=folder, rounds=0)


def test_columns_have_the_values_of_the_records(folder: Path) -> None:
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
    models = fd.load_models(next(path for path in written if "FedDrift" in path.name and path.name.endswith("seed0")))
    x, y = stream.cell(10, 0)
    assert (models.predict("0", x) == y).mean() > 0.5
    with pytest.raises(fd.DataError, match="neither a folder of records nor a record|not a folder of records"):
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


WRONG_NETS: dict[str, Any] = {
    "the net gives 1 logits for an input, the stream has 2 classes": lambda: fd.mlp(2, 4, 1),
    "the net gives 5 logits for an input": lambda: fd.mlp(2, 4, 5),
    "the net takes 3 features, the stream has 2": lambda: fd.mlp(3, 4, 2),
    "a net must be a Net": lambda: 3,
    "there is no module 'no_such_module'": lambda: "no_such_module:net",
    "unknown net 'liner', did you mean 'linear'": lambda: "liner",
    "such as mlp:64 or mlp:64,64, got 'mlp:64,'": lambda: "mlp:64,",
    "got 'mlp:0'": lambda: "mlp:0",
    "got 'mlp:'": lambda: "mlp:",
    "the net does not take inputs of shape": lambda: fd.Net(
        lambda key: {"w": np.ones((3, 2))}, lambda p, x: x @ p["w"]
    ),
    "a row of logits for each input": lambda: fd.Net(lambda key: {"w": np.ones(2)}, lambda p, x: x @ p["w"]),
}


@pytest.mark.parametrize("sentence", WRONG_NETS)
@pytest.mark.parametrize("engine", ["simulator", "reference"])
def test_a_net_that_does_not_fit_is_refused_before_anything_trains(engine: str, sentence: str) -> None:
    with pytest.raises(fd.ConfigError, match=sentence):
        fd.run("sine-2", "FedDrift", net=WRONG_NETS[sentence](), engine=engine, local=fd.Local(rounds=1))


def test_invalid_input_is_refused_at_once_in_one_sentence(folder: Path, tmp_path: Path) -> None:
    records, wrong = fd.read(folder), cast(Any, fd)
    for call, sentence in (
        (lambda: wrong.run(3, "FedDrift"), "stream must be a Stream"),
        (lambda: wrong.run("sine-2", fd.State), "algorithm must be an object with init and step"),
        (lambda: wrong.run("sine-2", None), "algorithm must be an object"),
        (lambda: wrong.run("sine-2", "FedDrift", seed="0"), "seed must be a whole number"),
        (lambda: wrong.run("sine-2", "FedDrift", seed=-1), "seed must be a whole number"),
        (lambda: wrong.run("sine-2", "FedDrift", local=3), "local must be a Local"),
        (lambda: wrong.run("sine-2", "FedDrift", conditions={}), "conditions must be a Conditions"),
        (lambda: wrong.Local(rounds=1.5), "rounds must be a whole number"),
        (lambda: wrong.Local(lr="a"), "lr must be a number"),
        (lambda: wrong.algorithm(None), "the name of an algorithm must be text"),
        (
            lambda: wrong.record("sine-2", fd.algorithm("FedDrift"), out=tmp_path),
            "in a notebook '__main__:Name'; got FedDrift",
        ),
        (lambda: wrong.record("sine-2", "FedDrift", delta=0.1, out=tmp_path), r"go into settings=\{'delta'"),
        (lambda: wrong.record("sine-2", "FedDrift", round=1, out=tmp_path), "unknown option 'round'"),
        (lambda: wrong.rows("runs"), "expected records"),
        (lambda: wrong.rows(Path("runs")), "expected records"),
        (lambda: wrong.plot(None), "expected records"),
    ):
        with pytest.raises(fd.ConfigError, match=sentence):
            call()  # type: ignore[no-untyped-call]
    page = tmp_path / "page.html"
    fd.report(records[0], page)
    before = page.read_bytes()
    with pytest.raises(fd.DataError, match="no records to report"):
        fd.report([], page)
    assert page.read_bytes() == before


def test_settings_distinguish_runs(tmp_path: Path) -> None:
    for delta in (0.05, 0.3):
        fd.record("sine-2", "FedDrift", out=tmp_path, rounds=1, settings={"delta": delta})
    rows = fd.rows(fd.read(tmp_path))
    assert set(rows["settings"]) == {"delta=0.05, rounds=1", "delta=0.3, rounds=1"}
    assert set(fd.summary(fd.read(tmp_path))["settings"]) == set(rows["settings"])


def test_a_drift_test_must_answer_for_every_client() -> None:
    algorithm = fd.algorithm("FedDrift", test="tests.unit.test_api:one_answer")
    with pytest.raises(fd.ConfigError, match="an array of 10 truth values, 'tests.unit.test_api:one_answer' gave bool"):
        list(fd.run("sine-2", algorithm, local=fd.Local(rounds=1)))


def one_answer(seen: object) -> bool:
    """A wrong drift test."""
    return True
