"""Models of other frameworks in simulation: init, logits and fit, one client after another."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift.engines import engine as find_engine
from feddrift.engines.simulator.simulator import Simulator
from feddrift.nets import named_net
from feddrift.nets.external import ExternalNet
from tests.support.cli import run_feddrift

MODELS = """
import numpy as np


class Logistic:
    \"\"\"Gradient descent on the cross-entropy of a linear net, in NumPy.\"\"\"

    def init(self, seed):
        return [np.random.default_rng(seed).normal(size=(2, 2)).astype(np.float32), np.zeros(2, dtype=np.float32)]

    def logits(self, params, x):
        return x @ params[0] + params[1]

    def fit(self, params, batches, lr):
        W, b = params
        for x, y in batches:
            logits = self.logits((W, b), x)
            p = np.exp(logits - logits.max(axis=1, keepdims=True))
            wrong = (p / p.sum(axis=1, keepdims=True) - np.eye(2)[y]) / len(y)
            W, b = W - lr * x.T @ wrong, b - lr * wrong.sum(axis=0)
        return [W.astype(np.float32), b.astype(np.float32)]


class Failing(Logistic):
    def fit(self, params, batches, lr):
        raise ValueError("no such optimiser")


class Shrinking(Logistic):
    def fit(self, params, batches, lr):
        return [params[0][:1], params[1]]


class Deaf(Logistic):
    def logits(self, params, x):
        return x[:, :3] @ np.ones((3, 2))


def of_stream(stream):
    return Logistic()


class Sized(Logistic):
    def __init__(self, n_in, n_out):
        self.shape = n_in, n_out


class Wide(Logistic):
    def __init__(self, width):
        self.weights = np.zeros(int(width))


model = Logistic()
"""
LOCAL = fd.Local(rounds=2, steps=10, lr=0.5, optimizer="sgd", weight_decay=0.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "numpy_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["FedDrift", "KUE"])  # KUE shows each model a part of the inputs
@pytest.mark.parametrize("balance", [False, True])
def test_it_trains_as_the_same_net_in_jax(folder: Path, algorithm: str, balance: bool) -> None:
    stream = fd.stream("circle-2", pattern="random:every=2,concepts=2,clients=4,steps=5")
    net = named_net("numpy_models:model", stream)
    jax_net = fd.Net(net.init, lambda params, x: x @ params[0] + params[1])
    runs = [fd.run(stream, algorithm, net=each, local=replace(LOCAL, balance=balance)) for each in (net, jax_net)]
    for a, b in zip(*runs, strict=True):
        assert a.model.tolist() == b.model.tolist()
        np.testing.assert_allclose(a.accuracy, b.accuracy, atol=0.005)


def test_an_object_its_class_or_a_function_may_be_named(folder: Path) -> None:
    for name in ("model", "Logistic", "of_stream"):
        assert isinstance(named_net(f"numpy_models:{name}", fd.stream("circle-2")), ExternalNet)


def test_it_is_recorded_and_exported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--stream",
        "circle-2",
        "--algorithm",
        "FedDrift",
        "--net",
        "numpy_models:model",
        "--rounds",
        "1",
        "--steps",
        "5",
    ]
    code, told, err = run_feddrift(capsys, "run", *words, "--dry-run")
    assert code == 0 and "about" in told
    code, _, err = run_feddrift(capsys, "run", *words, "--out", "runs")
    (record,) = fd.read("runs")
    assert (code, err) == (0, "") and record.header["overrides"]["net"] == "numpy_models:model"
    again = fd.record("circle-2", "FedDrift", net="numpy_models:model", rounds=1, steps=5, out="again")
    np.testing.assert_array_equal(again.rows.accuracy, record.rows.accuracy)
    fd.export("runs", "models")
    stream = fd.stream("circle-2")
    loaded = fd.load_models("models", net=named_net("numpy_models:model", stream))
    x, y = stream.cell(10, 0)
    assert (loaded.predict("0", x) == y).mean() == pytest.approx(record.rows.accuracy[-1, 0])


@pytest.mark.parametrize(
    ("name", "engine", "sentence"),
    [
        ("Failing", "simulator", "the model's fit at client 0, tau=0, failed: ValueError: no such optimiser"),
        ("Shrinking", "simulator", "tau=0, must give arrays of the shapes that it was given"),
        ("Deaf", "simulator", "the net does not take inputs of shape (2,): ValueError"),
        ("model", "reference", "trains itself: only the engine simulator supports it"),
        ("MODEL", "simulator", "numpy_models has no 'MODEL', did you mean 'model'?"),
        ("Sized", "simulator", "Sized' needs the arguments n_in, n_out: write a function of the stream that makes it"),
        ("Wide", "simulator", "it was given the stream as its argument 'width': write a function of the stream"),
        ("np", "simulator", "must be a Net, a PyTorch module's class, a model with init, logits and fit, or"),
    ],
)
def test_problems_of_a_custom_model_are_one_sentence(folder: Path, name: str, engine: str, sentence: str) -> None:
    with pytest.raises(fd.ConfigError, match=re.escape(sentence)):
        list(fd.run("circle-2", "FedDrift", net=f"numpy_models:{name}", engine=engine, local=LOCAL))


def test_scikit_learn_and_clients_out_of_reach(folder: Path) -> None:
    pytest.importorskip("sklearn")
    example = (Path(__file__).parents[3] / "examples" / "own_model.py").read_text()
    (folder / "learned.py").write_text(example.split("def load(")[0])
    pytest.importorskip("flwr", reason="the example needs the extra 'flower'")
    stream = fd.stream("sine-2")
    conditions: Any = fd.Conditions(participation=0.5, dropout=0.2)
    steps = list(
        fd.run(stream, "Oracle", net="learned:Logistic", local=fd.Local(rounds=2, steps=10), conditions=conditions)
    )
    assert len(steps) == 10 and np.nanmean(steps[-1].accuracy) > 0.7


def test_other_nets_are_the_simulators() -> None:
    stream = fd.stream("sine-2")
    assert isinstance(find_engine("simulator")(stream, fd.mlp(2, 4, 2), fd.Local(), 0), Simulator)
