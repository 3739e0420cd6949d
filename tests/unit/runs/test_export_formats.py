"""Exported models outside feddrift: predict.py and ONNX predict as `Predictor`; clients that were not in training."""

from __future__ import annotations

import builtins
import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift.deploy.operate.export import _drop_private_models
from feddrift.errors import ConfigError, DataError
from feddrift.exported_models import Exported, Predictor, choose_most_used
from feddrift.models import init_models
from feddrift.nets.perceptron import mlp
from feddrift.router import Router
from feddrift.runs import predict
from feddrift.runs.export import ExportSource, describe_net, write_models
from feddrift.tables import columns
from feddrift.types import Projection, State
from tests.support.cli import run_feddrift
from tests.unit.test_router import CONCEPTS, make_shifted_stream, run_method

N_ROWS = 1000
QUICK: dict[str, Any] = {"rounds": 2, "steps": 2, "engine": "reference"}
PATTERN = "random:every=1,concepts=2,clients=4,steps=3"
NET = mlp(3, 4, 2)


def write_table(path: Path) -> None:
    """Write a table with words, gaps, and numbers of very different sizes."""
    draw = np.random.default_rng(1)
    with open(path, "w") as file:
        file.write("shop,day,stamp,wind,price,label\n")
        for day in range(6):
            for shop in ("rome", "oslo"):
                for _ in range(40):
                    price = draw.normal()
                    wind = draw.choice(["N", "S", "", " E"])
                    label = "yes" if price > 0 else "no"
                    value = "" if draw.random() < 0.1 else f"{price:.4f}"
                    file.write(f"{shop},{day},{1.7e9 + draw.integers(0, 10**6):.0f},{wind},{value},{label}\n")


def make_columns(n: int = N_ROWS) -> dict[str, list[Any]]:
    """Make rows of that table as texts, with gaps and with a word that was not in training."""
    draw = np.random.default_rng(2)
    price = [("NA" if draw.random() < 0.1 else f"{value:.4f}") for value in draw.normal(size=n)]
    return {
        "price": price,
        "further": ["x"] * n,
        "wind": draw.choice(["N", "S ", "", "W", "E"], size=n).tolist(),
        "stamp": [str(1_700_000_000 + k * 997) for k in range(n)],
    }


def write_csv(path: Path, header: Iterable[str] | None, rows: Iterable[Iterable[Any]]) -> Path:
    with open(path, "w", newline="") as file:
        out = csv.writer(file)
        if header is not None:
            out.writerow(header)
        out.writerows(rows)
    return path


@pytest.fixture(scope="module")
def table_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("table")
    write_table(folder / "shops.csv")
    fd.record(
        str(folder / "shops.csv"), "FedDrift", out=folder / "runs", client="shop", time="day", missing="indicator",
        categories="onehot", **QUICK,
    )  # fmt: skip
    fd.export(folder / "runs", folder / "models")
    return folder / "models"


def run_predict(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run predict.py in a Python that has NumPy but refuses to import feddrift and safetensors."""
    code = (
        "import runpy, sys; sys.modules['feddrift'] = sys.modules['safetensors'] = None; "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", code, str(folder / "predict.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def read_output(text: str) -> tuple[list[str], Any]:
    _, *rows = csv.reader(io.StringIO(text))
    return [row[0] for row in rows], np.array([row[1:] for row in rows], dtype=float)


def export_method(folder: Path, algorithm: str, *, format: str = "safetensors", **more: Any) -> tuple[Exported, Path]:
    fd.record("sine-2", algorithm, out=folder / "runs", pattern=PATTERN, **QUICK | more)
    fd.export(folder / "runs", folder / "models", format=format)  # type: ignore[arg-type]
    return fd.load_models(folder / "models"), folder / "models"


def test_predict_py_equals_the_predictor_on_a_table(table_models: Path, tmp_path: Path) -> None:
    columns = make_columns()
    rows = write_csv(tmp_path / "rows.csv", columns, zip(*columns.values(), strict=True))
    models = fd.load_models(table_models)
    plain = run_predict(table_models, "--client", "oslo", str(rows))
    assert plain.returncode == 0 and not plain.stderr
    assert plain.stdout.splitlines() == models.predict("oslo", columns).tolist()
    detailed = run_predict(table_models, "--client", "oslo", str(rows), "--probabilities")
    classes, probabilities = read_output(detailed.stdout)
    assert detailed.stdout.splitlines()[0] == "class,no,yes" and classes == plain.stdout.splitlines()
    np.testing.assert_allclose(probabilities, models.predict_proba("oslo", columns), rtol=0, atol=1e-5)
    assert len(set(classes)) == 2


@pytest.mark.parametrize(("algorithm", "net"), [("KUE", None), ("FedDrift", "linear"), ("AUE-PC", "mlp:3,4")])
def test_predict_py_equals_the_predictor_for_all_perceptrons(algorithm: str, net: str | None, tmp_path: Path) -> None:
    models, folder = export_method(tmp_path, algorithm, net=net)
    x = np.random.default_rng(0).random((N_ROWS, 2)).astype(np.float32)
    rows = write_csv(tmp_path / "rows.csv", None, x.tolist())
    found = run_predict(folder, "--client", "3", str(rows), "--probabilities")
    assert found.returncode == 0, found.stderr
    classes, probabilities = read_output(found.stdout)
    np.testing.assert_allclose(probabilities, models.predict_proba("3", x), rtol=0, atol=1e-5)
    assert classes == [str(k) for k in models.predict("3", x)]
    new = run_predict(folder, "--new-client", str(rows))
    assert new.stdout.split() == [str(k) for k in models.choose(x).classes]
    assert new.stderr.strip() == models.choose(x).reason


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.pop("wind"), "the file has no column 'wind', it has price, further, stamp"),
        (lambda c: c.update(price=["warm"] * 3), "column 'price' must have finite numbers, got 'warm' in row 1"),
        (lambda c: c.update(price=["1", "inf", "2"]), "column 'price' must have finite numbers, got 'inf' in row 2"),
        (lambda c: c.update({name: [] for name in c}), "the file has no rows"),
    ],
)
def test_predict_py_reports_a_wrong_table_in_one_sentence(
    table_models: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    columns = make_columns(3)
    change(columns)
    rows = write_csv(tmp_path / "rows.csv", columns, zip(*columns.values(), strict=True))
    found = run_predict(table_models, "--client", "oslo", str(rows))
    assert (found.returncode, found.stdout, found.stderr) == (2, "", f"Error: {said}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--client", "bonn", "rows.csv"], "unknown client 'bonn': choose one of oslo, rome, or --new-client"),
        (["--client", "oslo", "nothing.csv"], "cannot read nothing.csv"),
        (["--client", "oslo", "torn.csv"], "torn.csv: every line must have 2 values, got 1 in row 2"),
        (["rows.csv"], "one of the arguments --client --new-client is required"),
    ],
)
def test_predict_py_reports_wrong_arguments_in_one_sentence(
    table_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    columns = make_columns(3)
    write_csv(tmp_path / "rows.csv", columns, zip(*columns.values(), strict=True))
    (tmp_path / "torn.csv").write_text("a,b\n1\n")
    found = run_predict(table_models, *words)
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (2, "", 1)
    assert found.stderr.startswith(f"Error: {said}")


def test_predict_py_reports_damaged_models_in_one_sentence(tmp_path: Path) -> None:
    write_models(make_source(make_state()), tmp_path)
    (tmp_path / "rows.csv").write_text("1,2,3\n")
    words = ["--client", "0", str(tmp_path / "rows.csv")]
    assert run_predict(tmp_path, *words).returncode == 0
    for name in ("models.safetensors", "models.json"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) // 2])
        found = run_predict(tmp_path, *words)
        assert (found.returncode, found.stdout, found.stderr.count("\n")) == (2, "", 1)
        assert "has no intact models" in found.stderr
        (tmp_path / name).unlink()
        found = run_predict(tmp_path, *words)
        assert found.returncode == 2 and "No such file" in found.stderr
        (tmp_path / name).write_bytes(content)


def run_onnx(path: Path, **inputs: Any) -> tuple[Any, Any]:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    classes, probabilities = runtime.InferenceSession(path).run(["class", "probabilities"], inputs)
    return classes, probabilities


def test_onnx_equals_the_predictor_on_a_table(table_models: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="the extra 'onnx' is not installed")
    fd.export(table_models.parent / "runs", tmp_path / "models", format="onnx")
    models = fd.load_models(tmp_path / "models")
    columns = make_columns()
    stripped = {name: [text.strip() for text in texts] for name, texts in columns.items()}
    inputs = []
    for feature in models.of("oslo").recipe:  # as docs/export.md says: numbers, 0 or 1 for words and gaps
        texts = stripped[feature.column]
        if feature.kind == "number":
            inputs.append([float("nan") if text == "NA" else float(text) for text in texts])
        else:
            inputs.append([text == feature.word if feature.kind == "word" else text in ("", "NA") for text in texts])
    x = np.array(inputs, dtype=np.float64).T
    assert np.isnan(x).any() and models.columns == tuple(feature.name for feature in models.of("oslo").recipe)
    ((model, _),) = models.about["clients"]["oslo"].items()
    classes, probabilities = run_onnx(tmp_path / "models" / f"model-{model}.onnx", x=x)
    np.testing.assert_allclose(probabilities, models.predict_proba("oslo", columns), rtol=0, atol=1e-5)
    assert list(classes) == models.predict("oslo", columns).tolist()


@pytest.mark.parametrize("net", [None, "linear", "mlp:3,4"])
def test_onnx_equals_the_predictor_for_all_perceptrons(net: str | None, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="the extra 'onnx' is not installed")
    models, folder = export_method(tmp_path, "FedDrift", net=net, format="onnx")
    x = np.random.default_rng(0).random((N_ROWS, 2)).astype(np.float32)
    ids = {i for votes in models.about["clients"].values() for i in votes}
    client = {next(iter(votes)): name for name, votes in models.about["clients"].items()}
    for i in ids:
        classes, probabilities = run_onnx(folder / f"model-{i}.onnx", x=x)
        np.testing.assert_allclose(probabilities, models.predict_proba(client[i], x), rtol=0, atol=1e-5)
        assert (classes == models.predict(client[i], x)).all()
    assert not (folder / "votes.onnx").exists()
    about = {entry.key: json.loads(entry.value) for entry in onnx.load(folder / f"model-{i}.onnx").metadata_props}
    assert about == {"models": [int(i)], "classes": [0, 1], "columns": list(models.columns)}


@pytest.mark.parametrize("algorithm", ["KUE", "AUE-PC"])
def test_onnx_with_votes_equals_the_predictor(algorithm: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="the extra 'onnx' is not installed")
    models, folder = export_method(tmp_path, algorithm, format="onnx")
    x = np.random.default_rng(0).random((N_ROWS, 2)).astype(np.float32)
    votes = models.of("3").votes
    assert (votes > 0).sum() > 1
    classes, probabilities = run_onnx(folder / "votes.onnx", x=x, votes=votes.astype(np.float32))
    np.testing.assert_allclose(probabilities, models.predict_proba("3", x), rtol=0, atol=1e-5)
    assert (classes == models.predict("3", x)).mean() > 0.999  # sums of hard votes may tie


def test_a_new_export_leaves_no_onnx_file_of_an_earlier_one(tmp_path: Path) -> None:
    _, folder = export_method(tmp_path, "Oblivious")
    for name in ("model-7.onnx", "votes.onnx", "mine.onnx"):
        (folder / name).write_text("an earlier file")
    fd.export(tmp_path / "runs", folder)
    assert [path.name for path in folder.glob("*.onnx")] == ["mine.onnx"]


def test_a_wrong_format_is_one_sentence_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fd.record("sine-2", "Oblivious", out="runs", pattern=PATTERN, **QUICK)
    code, _, error = run_feddrift(capsys, "export", "runs", "--format", "onx")
    assert (
        code == 2 and error.startswith("Error: unknown format 'onx', did you mean 'onnx'?") and error.count("\n") == 1
    )
    with pytest.raises(ConfigError, match="unknown format 'pickle'"):
        fd.export("runs", format="pickle")  # type: ignore[arg-type]
    real_import = builtins.__import__

    def refuse_onnx(name: str, *args: Any, **more: Any) -> Any:
        if name == "onnx":
            raise ModuleNotFoundError(name)
        return real_import(name, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", refuse_onnx)
        code, _, error = run_feddrift(capsys, "export", "runs", "--format", "onnx")
    assert (code, error) == (2, "Error: ONNX files need the package onnx: pip install 'feddrift[onnx]'\n")
    assert not Path("models").exists()


OWN_NET = """
import feddrift as fd
import numpy as np

def init(key):
    return {"w": np.ones((2, 2), dtype=np.float32)}

net = fd.Net(init, lambda params, x: x @ params["w"])
"""


@pytest.mark.slow
def test_a_net_of_ones_own_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnx", reason="the extra 'onnx' is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("net_for_export.py").write_text(OWN_NET)
    fd.record("sine-2", "Oblivious", out="runs", pattern=PATTERN, rounds=1, steps=1, net="net_for_export:net")
    code, _, error = run_feddrift(capsys, "export", "runs", "--format", "onnx")
    assert code == 2 and error.count("\n") == 1 and not Path("models").exists()
    said = "--format onnx exports perceptrons and linear nets, these models are of the net 'net_for_export:net'"
    assert error.startswith(f"Error: {said}")


def make_source(state: State, **more: Any) -> ExportSource:
    clients = [str(c) for c in range(len(state.votes))]
    values: dict[str, Any] = {
        "state": state, "steps": 1, "net": NET, "net_description": describe_net(NET, None, [3], 2), "stream": "s",
        "algorithm": "a", "seed": 0, "clients": clients, "classes": [0, 1], "columns": (), "events": (),
    }  # fmt: skip
    return ExportSource(**values | more)


def make_state(router: Router | None = None, votes: Any = ((0.0, 1.0), (0.0, 1.0), (1.0, 0.0)), **more: Any) -> State:
    models = replace(init_models(NET, 0, 2, distinct=True), ids=(3, 8), **more)
    return State(models, np.zeros((0, len(votes), 2)), np.array(votes), router=router)


def test_nets_that_are_not_perceptrons_are_refused(tmp_path: Path) -> None:
    source = make_source(make_state(), net_description={"kind": "own", "name": "nets:mine", "features": [3]})
    with pytest.raises(
        ConfigError, match="exports perceptrons and linear nets, these models are of the net 'nets:mine'"
    ):
        write_models(source, tmp_path / "models", "onnx")
    assert not (tmp_path / "models").exists()


def test_a_new_client_gets_the_model_of_most_clients(tmp_path: Path) -> None:
    write_models(make_source(make_state()), tmp_path)
    models = fd.load_models(tmp_path)
    x = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    choice = models.choose(x)
    assert choice.reason == "model 8 has the most clients: 2 of 3" and choice.models.tolist() == [8] * 20
    np.testing.assert_array_equal(choice.classes, models.predict("0", x))
    np.testing.assert_array_equal(choice.predictor.predict_proba(x), models.predict_proba("1", x))
    with pytest.raises(
        ConfigError, match=r"unknown client 'new-shop'.*; choose\(x\) predicts for a client that was not"
    ):
        models.predict("new-shop", x)
    with pytest.raises(DataError, match=r"shape \[n, 3\]"):
        models.choose(x[:, :2])


def test_private_models_do_not_predict_for_other_clients(tmp_path: Path) -> None:
    write_models(make_source(make_state(owner=(-1, 0), votes=((0.0, 1.0), (0.0, 1.0)))), tmp_path / "one")
    choice = fd.load_models(tmp_path / "one").choose(np.zeros((1, 3)))
    assert choice.models.tolist() == [3] and choice.reason == "model 3 is shared, all clients use private models"
    write_models(make_source(make_state(owner=(0, 1), votes=((1.0, 0.0), (0.0, 1.0)))), tmp_path / "none")
    with pytest.raises(ConfigError, match="all models are private to their clients"):
        fd.load_models(tmp_path / "none").choose(np.zeros((1, 3)))
    (tmp_path / "rows.csv").write_text("1,2,3\n")
    found = run_predict(tmp_path / "none", "--new-client", str(tmp_path / "rows.csv"))
    assert found.returncode == 2 and found.stderr.startswith("Error: all models are private to their clients")


def test_an_export_of_an_earlier_version_also_predicts_for_new_clients(tmp_path: Path) -> None:
    write_models(make_source(make_state()), tmp_path)
    x = np.zeros((1, 3))
    before = fd.load_models(tmp_path).choose(x)
    about = json.loads((tmp_path / "models.json").read_text())
    del about["new_client"]
    (tmp_path / "models.json").write_text(json.dumps(about))
    after = fd.load_models(tmp_path).choose(x)
    assert (after.reason, after.models.tolist()) == (before.reason, before.models.tolist())
    for votes in ({"9": 1.0}, {"8": 0.0}, {}):
        about["new_client"] = {"votes": votes, "reason": "it is not possible"}
        (tmp_path / "models.json").write_text(json.dumps(about))
        with pytest.raises(DataError, match="a new client must use models that are in models"):
            fd.load_models(tmp_path)


def test_clients_that_only_get_a_shared_model_in_the_export_do_not_count(tmp_path: Path) -> None:
    state = make_state(votes=((1.0, 0.0), (1.0, 0.0), (0.0, 1.0)))
    write_models(make_source(state, clients_without_model=["0", "1"]), tmp_path)
    assert fd.load_models(tmp_path).choose(np.zeros((1, 3))).reason == "model 8 has the most clients: 1 of 3"


def test_the_votes_of_ensembles_are_averaged() -> None:
    clients = {"a": {"0": 2.0, "1": 6.0}, "b": {"1": 1.0}, "c": {"0": 1.0}}
    votes, reason = choose_most_used(clients, ["0", "1"]) or ({}, "")
    assert votes == {"0": 0.125, "1": 0.875} and reason == "model 1 has the most clients: 2 of 3"


ROUTERS = [
    Router("row", np.array([[0.0, 0.0, 0.0], [0.0, 0.0, 4.0]]), np.eye(2), project=Projection((1, 2), 3), margin=2.0),
    Router("running", np.zeros((2, 2)) + [[0], [3]], np.eye(2), project=np.eye(3)[:, :2], low=np.ones(2), scale=2.0),
    Router("batch", np.zeros((1, 4)), np.array([[1.0, 0.0]]), "moments", model=init_models(NET, 1), layer="logits"),
]


@pytest.mark.parametrize("router", ROUTERS, ids=["row", "running", "batch"])
def test_a_router_chooses_as_before_the_export(router: Router, tmp_path: Path) -> None:
    state = make_state(router)
    write_models(make_source(state), tmp_path)
    x = (
        np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
        + np.linspace(0, 4, 50, dtype=np.float32)[:, None]
    )
    choice = fd.load_models(tmp_path).choose(x)
    before = Predictor(NET, state.models, np.array([0.0, 1.0]), state.ballot, (3,), (0, 1), router=router)
    np.testing.assert_array_equal(choice.classes, before.predict(x))
    np.testing.assert_array_equal(choice.predictor.predict_proba(x), before.predict_proba(x))
    assert choice.reason.startswith("the inputs choose model 3 for ") and 3 in choice.models


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"per": "day"}, "router.per must be"),
        ({"project": {"key": [1], "size": 3}}, "router.project.key must"),
        ({"of": "moments"}, "must be per batch"),
        ({"project": {"key": [1, 2], "size": 2}}, "does not contain exported models"),
        ({"layer": "logits"}, "does not contain exported models"),
    ],
)
def test_a_router_that_does_not_fit_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_models(make_source(make_state(ROUTERS[0])), tmp_path)
    about = json.loads((tmp_path / "models.json").read_text())
    about["router"] |= change
    (tmp_path / "models.json").write_text(json.dumps(about))
    with pytest.raises(DataError, match=said):
        fd.load_models(tmp_path)


def test_inputs_choose_where_routing_has_paid(tmp_path: Path) -> None:
    """The inputs of the two concepts differ, so those of a new client find the model of its concept."""
    stream = make_shifted_stream(3.0)
    step = run_method(stream, "batch", fd.algorithm("Oracle"))[-1]
    assert step.state.router is not None
    write_models(make_source(step.state, net=stream_net(stream), net_description=describe_stream_net(stream)), tmp_path)
    models = fd.load_models(tmp_path)
    chosen = []
    for c in range(stream.n_clients):
        x, y = stream.cell(5, c)
        choice = models.choose(x)
        assert "the inputs" in choice.reason and (choice.classes == y).mean() > 0.8
        chosen.append(set(choice.models.tolist()))
    by_concept = [{i for c in np.flatnonzero(CONCEPTS[5] == k) for i in chosen[c]} for k in (0, 1)]
    assert len(by_concept[0]) == len(by_concept[1]) == 1 and by_concept[0] != by_concept[1]


def stream_net(stream: fd.Stream) -> Any:
    from feddrift.nets import default_net

    return default_net(stream)


def describe_stream_net(stream: fd.Stream) -> dict[str, Any]:
    return describe_net(stream_net(stream), None, list(stream.features), stream.n_classes)


def test_a_federation_exports_its_router_without_private_models() -> None:
    router = Router("row", np.zeros((1, 3)), np.array([[1.0, 0.0]]))
    shared = _drop_private_models(make_state(router, owner=(-1, 0)))
    assert shared.models.ids == (3,) and shared.router is not None and shared.router.votes.tolist() == [[1.0]]


def test_the_program_reads_values_as_tables_do() -> None:
    """The program is a copy that imports nothing of the package, so it repeats these values."""
    assert predict.MISSING_TEXTS == columns.MISSING_TEXTS
    assert predict.MAX_TABLE_VALUE == columns.MAX_TABLE_VALUE
