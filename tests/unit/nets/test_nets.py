"""Nets by name, and errors of nets that fail."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift import rng
from feddrift.engines import engine as find_engine
from feddrift.nets import build_built_in_net, build_client_net, import_model
from feddrift.runs.config import RunConfig
from feddrift.testing import check_net
from feddrift.trees import mark_trunk, tree_leaves
from tests.support.cli import run_feddrift
from tests.support.engines import mark_slow
from tests.support.lazy_imports import COMMAND_CODE, find_loaded_libraries


@pytest.mark.parametrize("hidden", [0, -1, 2.5, (4, 0), "44"])
def test_sizes_are_whole_numbers(hidden: Any) -> None:
    with pytest.raises(fd.ConfigError, match="must be whole numbers above 0"):
        fd.mlp(2, hidden, 2)


def test_names_stand_for_perceptrons() -> None:
    assert build_built_in_net("mlp:4", (2,), 2) is fd.mlp(2, 4, 2) is fd.mlp(2, (4,), 2)
    assert build_built_in_net("mlp:8,4", (2, 3), 5) is fd.mlp(6, (8, 4), 5)
    assert build_built_in_net("linear", (2, 3), 5) is fd.mlp(6, (), 5)
    assert (
        build_built_in_net("mlp:make", (2,), 2) is None and build_built_in_net("mlp", (2,), 2) is None
    )  # may be a module of yours


@pytest.mark.parametrize("name", mark_slow(["linear", "mlp:5", "mlp:6,5", "mlp:3,3,3"], "mlp:3,3,3"))
def test_they_keep_the_contract(name: str) -> None:
    net = build_built_in_net(name, (3,), 2)
    assert net is not None
    check_net(net, [3], 2)
    params = net.init(rng.derive_key(0, "init", 0))
    shared = mark_trunk(net, params)
    assert [k for k, is_shared in shared.items() if not is_shared] == list(params)[-2:]  # all but the last layer
    assert max(np.abs(leaf).max() for leaf in tree_leaves(params)) <= 3**-0.5


def test_a_linear_net_runs_by_name_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = list(fd.run("sine-2", "Oracle", net="linear", local=fd.Local(rounds=3)))
    assert [leaf.shape[1:] for leaf in tree_leaves(steps[-1].state.models.params)] == [(2, 2), (2,)]
    code, _, err = run_feddrift(
        capsys, "run", "--stream", "sine-2", "--algorithm", "Oracle", "--net", "linear", "--rounds", "3",
        "--out", str(tmp_path / "runs"),
    )  # fmt: skip
    (record,) = fd.read(tmp_path / "runs")
    assert (code, err) == (0, "") and record.header["overrides"] == {"rounds": 3, "net": "linear"}
    np.testing.assert_array_equal(record.rows.accuracy, np.stack([step.accuracy for step in steps]))
    with pytest.raises(fd.ConfigError, match="needs a net with a trunk and a head, this one names no trunk"):
        list(fd.run("sine-2", "FedDrift-Trunk", net="linear"))


@pytest.mark.parametrize(("name", "hidden"), [("linear", []), ("mlp:3", 3), ("mlp:3,4", [3, 4])])
def test_exported_models_know_their_net(tmp_path: Path, name: str, hidden: object) -> None:
    record = fd.record("sine-2", "Oblivious", net=name, rounds=2, out=tmp_path / "runs")
    fd.export(tmp_path / "runs", tmp_path / "models")
    assert json.loads((tmp_path / "models" / "models.json").read_text())["net"]["hidden"] == hidden
    x, y = fd.stream("sine-2").cell(10, 0)
    accuracy = (fd.load_models(tmp_path / "models").predict("0", x) == y).mean()
    assert accuracy == pytest.approx(record.rows.accuracy[-1, 0], abs=0.003)


def test_no_name_is_the_name_of_no_net(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--stream", "sine-2", "--algorithm", "Oblivious", "--net", "", "--out", str(tmp_path / "runs")]
    code, _, said = run_feddrift(capsys, *words)
    assert code == 2 and said.startswith("Error: unknown net '' (one of: linear, mlp:") and said.count("\n") == 1
    with pytest.raises(fd.ConfigError, match="unknown net ''"):
        fd.run("sine-2", "Oblivious", net="")
    assert not (tmp_path / "runs").exists()


def test_a_linear_net_loads_no_jax(tmp_path: Path) -> None:
    words = ["run", "--stream", "sine-2", "--algorithm", "FedDrift", "--net", "linear", "--rounds", "2"]
    assert "jax" not in find_loaded_libraries(
        COMMAND_CODE.format(words=[*words, "--out", str(tmp_path)]), JAX_PLATFORMS="cpu"
    )


BROKEN = """
import feddrift as fd
import numpy as np

def init(key):
    return {"w": np.zeros((2, 2), dtype=np.float32)}

def broken_init(key):
    return {"w": {}["gone"]}

def broken_apply(params, x):
    return x @ params["v"]

start = fd.Net(broken_init, broken_apply)
forward = fd.Net(init, broken_apply)
numbers = fd.Net(lambda key: {"w": [1.5, 2.5]}, broken_apply)
sound = fd.Net(init, lambda params, x: x @ params["w"])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "broken_nets.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("engine", ["simulator", "reference"])
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("start", "the net's init failed: KeyError: 'gone'"),
        ("forward", "the net does not take inputs of shape (2,): KeyError: 'v'"),
        ("numbers", "the net's init must give arrays in dicts, lists or tuples, got float at 'w/0'"),
    ],
)
def test_a_net_that_fails_is_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, sentence: str, engine: str
) -> None:
    words = ["--stream", "sine-2", "--algorithm", "FedDrift", "--net", f"broken_nets:{name}", "--engine", engine]
    code, _, err = run_feddrift(capsys, "run", *words)
    assert (code, err) == (2, f"Error: {sentence}\n")
    with pytest.raises(fd.ConfigError, match=re.escape(sentence)):
        fd.run("sine-2", "FedDrift", net=f"broken_nets:{name}", engine=engine)


def test_compilation_of_a_net_is_logged_once(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    caplog.set_level("INFO", "feddrift.engines.simulator.simulator")
    for _ in range(2):
        fd.run("sine-2", "FedDrift", net="broken_nets:sound")
        fd.run("sine-2", "FedDrift", net="linear")
    (line,) = caplog.messages
    assert line.startswith("compiling the net for sine-2: seconds")


def test_a_deployment_names_its_net(tmp_path: Path) -> None:
    """As federation.toml and client.toml do."""
    assert build_client_net(import_model(None, tmp_path), (2, 3), 2) is fd.mlp(6, 12, 2)
    assert build_client_net(import_model("linear", tmp_path), (2, 3), 2) is fd.mlp(6, (), 2)
    assert build_client_net(import_model("mlp:5,4", tmp_path), (2,), 3) is fd.mlp(2, (5, 4), 3)
    (tmp_path / "deployed_nets.py").write_text("import feddrift as fd\nnet = fd.mlp(2, 3, 2)\nmake = lambda: net\n")
    for name in ("deployed_nets:net", "deployed_nets:make"):
        assert build_client_net(import_model(name, tmp_path), (2,), 2) is fd.mlp(2, 3, 2)
    with pytest.raises(fd.ConfigError, match="unknown model 'liner', did you mean 'linear'"):
        import_model("liner", tmp_path)


def test_clients_behind_flower_train_a_linear_net() -> None:
    pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    from tests.support.flower import InProcessFlower

    stream, local, net = fd.stream("sine-2"), fd.Local(rounds=1, steps=5), fd.mlp(2, (), 2)
    fed, simulated = InProcessFlower(stream, net, local, 0).at(0), find_engine("simulator")(stream, net, local, 0).at(0)
    w = np.ones((1, stream.n_clients, 1))
    for a, b in zip(*(tree_leaves(each.train(each.fresh(), w).params) for each in (fed, simulated)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_weights_and_a_net_exclude_each_other() -> None:
    config = RunConfig(stream="sine-2", algorithm="Oracle", net="linear", weights=Path("resnet18.pth"))
    with pytest.raises(fd.ConfigError, match="leave out net=linear"):
        config.find_net(fd.stream("sine-2"))


def test_parameters_are_floating_point_numbers() -> None:
    net = fd.Net(lambda key: {"n": np.zeros(2, dtype=np.int64)}, lambda params, x: x)
    with pytest.raises(fd.ConfigError, match="floating point numbers, got int64 at 'n'"):
        next(fd.run("sine-2", "Oblivious", net=net))
