"""Models exported from a run predict as the run itself does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import feddrift as fd
from feddrift import rng
from feddrift.errors import ConfigError, DataError
from feddrift.models import get_params
from feddrift.nets import resnet
from feddrift.nets.perceptron import mlp
from feddrift.runs.config import RunConfig
from feddrift.runs.export import export
from feddrift.runs.recorded_run import RecordedRun
from tests.support.cli import run_feddrift


def record_run(folder: Path, algorithm: str, **more: Any) -> tuple[RecordedRun, Any]:
    config = RunConfig.from_values(stream="sine-2", algorithm=algorithm, rounds=5, **more)
    run = RecordedRun(config, folder / "runs")
    *_, last = run
    return run, last


@pytest.mark.parametrize("algorithm", ["FedDrift", "FedDrift-Trunk", "KUE", "AUE-PC", "IFCA"])
def test_each_client_predicts_as_in_the_run(tmp_path: Path, algorithm: str) -> None:
    run, last = record_run(tmp_path, algorithm)
    assert export(run, tmp_path / "models") == 10
    models = fd.load_models(tmp_path / "models")
    for c, name in enumerate(run.stream.clients):
        x, y = run.stream.cell(10, c)
        assert (models.predict(name, x) == y).mean() == pytest.approx(last.accuracy[c], abs=0.003)  # ties of floats


def test_used_models_and_the_lineage_are_reported(tmp_path: Path) -> None:
    run, last = record_run(tmp_path, "FedDrift")
    export(run, tmp_path / "models")
    about = json.loads((tmp_path / "models" / "models.json").read_text())
    assert {name: [int(i) for i in votes] for name, votes in about["clients"].items()} == {
        str(c): [int(i)] for c, i in enumerate(last.model)
    }
    assert about["time_steps"] == 10 and about["net"] == {
        "kind": "perceptron", "features": [2], "hidden": 4, "classes": 2,
    }  # fmt: skip
    assert {event["event"] for event in about["lineage"]} >= {"created", "merged"}
    first = next(event for event in about["lineage"] if event["event"] == "created")
    assert first["time"] == 4 and first["cause"]["clients"] == ["1"]  # client 1 is the first that drifts
    arrays = load_file(tmp_path / "models" / "models.safetensors")
    assert {name.split("/")[0] for name in arrays} == {str(i) for i in last.state.models.ids}


def test_a_stopped_run_exports_its_last_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = RunConfig.from_values(stream="sine-2", algorithm="Oblivious", rounds=1)
    steps = iter(RecordedRun(config, tmp_path / "runs"))
    next(steps), next(steps)
    steps.close()  # type: ignore[attr-defined]
    code, told, _ = run_feddrift(capsys, "export", str(tmp_path / "runs"), "--out", str(tmp_path / "models"))
    assert code == 0 and "the models after 2 time steps" in told
    assert len(fd.load_models(tmp_path / "models").predict("3", np.zeros((7, 2)))) == 7


def test_invalid_inputs_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = record_run(tmp_path, "Oblivious")
    export(run, tmp_path / "models")
    models = fd.load_models(tmp_path / "models")
    with pytest.raises(ConfigError, match="unknown client 'x'"):
        models.predict("x", np.zeros((1, 2)))
    with pytest.raises(DataError, match=r"shape \[n, 2\], got \(3, 5\)"):
        models.predict("0", np.zeros((3, 5)))
    with pytest.raises(DataError, match="cannot read the models in"):
        fd.load_models(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"the net needs \(2, 9\)"):
        fd.load_models(tmp_path / "models", net=mlp(2, 9, 2))
    (tmp_path / "models" / "models.json").write_text("[]")
    with pytest.raises(DataError, match="does not describe exported models: it must be an object"):
        fd.load_models(tmp_path / "models")
    code, _, told = run_feddrift(capsys, "export", str(tmp_path / "nothing"))
    assert code == 2 and "nothing is not a folder of records" in told
    code, _, told = run_feddrift(capsys, "export", str(tmp_path / "models"))
    assert code == 2 and "has checkpoints" in told


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        (("clients", "0", "0"), None, r"clients\.0\.0 must be"),
        (("clients", "0", "0"), float("nan"), r"clients\.0\.0 must be"),
        (("clients", "0", "0"), 10**400, r"clients\.0\.0 must be"),  # more than a float holds
        (("ballot",), "x", "ballot must be 'hard' or 'soft', got 'x'"),
        (("net", "hidden"), 2**40, "a net with layers of .* does not fit"),  # a MemoryError before
        (("net", "features"), [2.0], r"net\.features\.0 must be a whole number, got 2\.0"),
        (("clients", "0"), {"9": 1.0}, "a client uses a model that is missing in models"),
    ],
)
def test_words_that_do_not_fit_the_models_are_reported(
    tmp_path: Path, where: tuple[str, ...], value: Any, said: str
) -> None:
    run, _ = record_run(
        tmp_path, "Oblivious", engine="reference", pattern="random:every=1,concepts=2,clients=2,steps=2"
    )
    export(run, tmp_path / "models")
    about = json.loads((tmp_path / "models" / "models.json").read_text())
    inner = about
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    (tmp_path / "models" / "models.json").write_text(json.dumps(about))
    with pytest.raises(DataError, match=said):
        fd.load_models(tmp_path / "models")


def test_classes_have_the_names_of_the_data(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for client in ("a", "b"):
        (tmp_path / "data" / f"client_{client}").mkdir(parents=True)
        for t in range(3):
            x = draw.random((60, 2))
            rows = "".join(f"{p},{q},{'good' if p > q else 'bad'}\n" for p, q in x)
            (tmp_path / "data" / f"client_{client}" / f"step_{t}.csv").write_text("p,q,label\n" + rows)
    run = RecordedRun(
        RunConfig.from_values(stream=f"folder:{tmp_path / 'data'}", algorithm="Oblivious"), tmp_path / "runs"
    )
    list(run)
    export(run, tmp_path / "models")
    models = fd.load_models(tmp_path / "models")
    assert models.predict("a", [[0.9, 0.1], [0.1, 0.9]]).tolist() == ["good", "bad"]
    with pytest.raises(DataError, match="finite"):
        models.predict("a", [[np.nan, 0.1]])


@pytest.mark.slow
def test_a_resnets_statistics_travel_with_it(tmp_path: Path) -> None:
    net = resnet.resnet18(3)
    params = net.init(rng.derive_key(0, "init", 0))
    save_file(resnet.convert_to_torchvision(net, params), tmp_path / "w.safetensors")
    again = resnet.resnet18(3, tmp_path / "w.safetensors")
    x = np.random.default_rng(0).integers(0, 255, (2, 32, 32, 3)).astype(np.uint8)
    np.testing.assert_array_equal(net.apply(params, x), again.apply(again.init(rng.derive_key(9, "init", 0)), x))


def test_inputs_go_by_name_whatever_their_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = np.random.default_rng(0)
    for client, header in (("a", "traffic,label,price"), ("b", "price,traffic,label")):
        (tmp_path / "shops" / f"client_{client}").mkdir(parents=True)
        for t in range(3):
            rows = [
                {"price": p, "traffic": q, "label": "yes" if p > 0 else "no"} for p, q in draw.normal(size=(100, 2))
            ]
            lines = [",".join(str(row[name]) for name in header.split(",")) for row in rows]
            (tmp_path / "shops" / f"client_{client}" / f"step_{t}.csv").write_text("\n".join([header, *lines]))
    runs, models = str(tmp_path / "runs"), str(tmp_path / "models")
    words = ["--stream", f"folder:{tmp_path / 'shops'}", "--rounds", "5", "--out", runs]
    assert run_feddrift(capsys, "run", *words, "--algorithm", "Oblivious", "--algorithm", "FedDrift")[0] == 0
    (one,) = Path(runs).glob("*FedDrift*.jsonl")
    assert run_feddrift(capsys, "export", str(one), "--out", models)[0] == 0
    found = fd.load_models(models)
    assert found.columns == ("traffic", "price") and found.about["algorithm"] == "FedDrift"
    x = draw.normal(size=(200, 2))
    told = found.predict("b", {"price": x[:, 1], "colour": ["red"] * 200, "traffic": x[:, 0]})
    assert (told == found.predict("b", x)).all() and ((told == "yes") == (x[:, 1] > 0)).mean() > 0.9
    assert found.classes == ("no", "yes")
    most_probable = np.array(found.classes)[found.predict_proba("b", x).argmax(axis=1)]
    assert (most_probable == told).all()
    for wrong, why in (
        ({"price": [1.0]}, "no column 'traffic'"),
        ({"price": [1.0], "traffic": [1.0, 2.0]}, "same length"),
        ([["a", "b"]], "must be numbers"),
        ([[1.0], [1.0, 2.0]], "must have shape"),
    ):
        with pytest.raises(DataError, match=why):
            found.predict("b", wrong)


@pytest.mark.parametrize("algorithm", ["KUE", "AUE"])
def test_probabilities_are_those_that_earlier_versions_gave(tmp_path: Path, algorithm: str) -> None:
    """They made a softmax of each model and added up; now it is the engines' softmax, in the engines' order."""
    run, _ = record_run(tmp_path, algorithm)
    export(run, tmp_path / "models")
    models, x = fd.load_models(tmp_path / "models"), run.stream.cell(10, 0)[0]
    for client in run.stream.clients[:3]:
        found, before = models.of(client), np.zeros((len(x), 2))
        for m in np.flatnonzero(found.votes).tolist():
            mask = 1 if found.models.mask is None else found.models.mask[m]
            logits = np.asarray(models.net.apply(get_params(found.models, m), x * mask), dtype=np.float64)
            shares = np.exp(logits - logits.max(axis=1, keepdims=True))
            hard = np.eye(2)[logits.argmax(axis=1)]
            before += found.votes[m] * (hard if found.ballot == "hard" else shares / shares.sum(axis=1, keepdims=True))
        np.testing.assert_allclose(found.scores(x), before / found.votes.sum(), rtol=0, atol=1e-12)
        assert (found.predict(x) == before.argmax(axis=1)).all()
        np.testing.assert_allclose(found.scores(x).sum(axis=1), 1)
