"""PyTorch modules as nets: the same numbers as in JAX, and errors for unsupported modules."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feddrift as fd
from feddrift import rng
from feddrift.nets import build_client_net, named_net
from feddrift.nets import torch as bridges
from feddrift.testing import check_net
from feddrift.trees import mark_trunk, tree_leaves, tree_paths
from feddrift.types import Net

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")
if importlib.util.find_spec("torchax") is None:  # it may not import by itself
    pytest.skip("the extra 'torch' is not installed", allow_module_level=True)

MODULES = """
import torch
from torch import nn


class Perceptron(nn.Module):
    trunk = ("first",)

    def __init__(self, hidden=4):
        super().__init__()
        self.first, self.last = nn.Linear(2, hidden), nn.Linear(hidden, 2)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def of_stream(stream):
    return nn.Sequential(nn.Linear(stream.x.shape[1], 4), nn.ReLU(), nn.Linear(4, stream.n_classes))


def frozen():
    module = Perceptron()
    module.first.requires_grad_(False)
    module.trunk = ()
    module.register_buffer("shift", torch.ones(2))
    return module


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Sequential(nn.Linear(2, 4), nn.Tanh()), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.trunk(x))


class Odd(Perceptron):
    trunk = 3


def dropout():
    return nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 2))


class Functional(Perceptron):
    def forward(self, x):
        return self.last(nn.functional.dropout(self.first(x), 0.1, self.training))


def batch_norm():
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def no_dropout():
    return nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.0), nn.LayerNorm(4), nn.Linear(4, 2))


class Counting(Perceptron):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def lazy():
    return nn.LazyLinear(2)


def wide():
    return nn.Linear(3, 2)


def classes():
    return nn.Linear(2, 5)


made = Perceptron()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "torch_nets.py").write_text(MODULES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ours(net: Net) -> Net:
    """Our perceptron that starts where this module does."""

    def init(key: rng.Words) -> Any:
        theirs = net.init(key)
        first, last = theirs["first"], theirs["last"]
        return {"W1": first["weight"].T, "b1": first["bias"], "W2": last["weight"].T, "b2": last["bias"]}

    return Net(init, fd.mlp(2, 4, 2).apply)


def test_a_module_computes_the_same_as_our_perceptron(folder: Path) -> None:
    stream = fd.stream("sine-2")
    net = named_net("torch_nets:Perceptron", stream)
    check_net(net, [2], 2)
    key = rng.derive_key(1, "init", 0)
    params = net.init(key)
    assert [path for path, _ in tree_paths(params)] == ["first/bias", "first/weight", "last/bias", "last/weight"]
    assert all(leaf.dtype == np.float32 for leaf in tree_leaves(params))
    assert tree_leaves(mark_trunk(net, params)) == [True, True, False, False]
    assert net.classes == (("last/bias", 0), ("last/weight", 0))  # of the layer that makes the logits
    np.testing.assert_allclose(
        net.apply(params, stream.x[:50]), ours(net).apply(ours(net).init(key), stream.x[:50]), atol=1e-5
    )
    runs = [list(fd.run(stream, "FedDrift", net=each, local=fd.Local(rounds=10), seed=2)) for each in (net, ours(net))]
    for a, b in zip(*runs, strict=True):
        assert a.model.tolist() == b.model.tolist() and abs(a.accuracy.mean() - b.accuracy.mean()) < 0.005


def test_a_run_is_its_seeds_alone(folder: Path) -> None:
    stream = fd.stream("sine-2")
    torch.manual_seed(3)
    before = torch.get_rng_state()
    runs = [
        [step.accuracy for step in fd.run(stream, "FedDrift", net="torch_nets:Perceptron", local=fd.Local(rounds=2))]
        for _ in range(2)
    ]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert torch.equal(before, torch.get_rng_state())  # nobody else's numbers are drawn


def test_a_net_is_known_again(folder: Path) -> None:
    """So that several runs in a process compile once."""
    for name in ("Perceptron", "of_stream"):
        nets = [named_net(f"torch_nets:{name}", fd.stream("sine-2")) for _ in range(2)]
        assert nets[0] is nets[1], name
    assert named_net("torch_nets:of_stream", fd.stream("circle-2")) is not nets[0]  # other data


def test_a_layer_called_trunk_is_the_trunk(folder: Path) -> None:
    steps = fd.run("sine-2", "FedDrift-Trunk", net="torch_nets:Layers", local=fd.Local(rounds=1, steps=2))
    shared = next(steps).state.models.trunk
    assert tree_leaves(shared["trunk"]) == [True, True] and tree_leaves(shared["head"]) == [False, False]


@pytest.mark.parametrize("name", ["Perceptron", "Layers"])
def test_moments_of_the_features_of_a_module(folder: Path, name: str) -> None:
    stream = fd.stream("sine-2")
    net = named_net(f"torch_nets:{name}", stream)
    fed = fd.engines.engine("simulator")(stream, net, fd.Local(rounds=1, steps=1), 0).at(0)
    models = fed.fresh()
    moments = fed.moments(models, "trunk")
    layer = models.params["first"] if name == "Perceptron" else models.params["trunk"]["0"]
    x, _ = stream.cell(0, 3)
    seen = x @ layer["weight"][0].T + layer["bias"][0]
    seen = np.maximum(seen, 0) if name == "Perceptron" else np.tanh(seen)
    np.testing.assert_allclose(moments.mean[3, 0, 0], seen.mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(moments.std[3, 0, 0], seen.std(axis=0), atol=1e-5)


def test_a_module_without_a_trunk_has_inputs_and_logits(folder: Path) -> None:
    stream = fd.stream("sine-2")
    net = named_net("torch_nets:of_stream", stream)
    fed = fd.engines.engine("simulator")(stream, net, fd.Local(rounds=1, steps=1), 0).at(0)
    assert np.isfinite(fed.moments(fed.fresh(), "logits").mean).all()
    with pytest.raises(fd.ConfigError, match="needs a net with the function `hidden`"):
        fed.moments(fed.fresh(), "trunk")


def test_frozen_parameters_do_not_change(folder: Path) -> None:
    net = named_net("torch_nets:frozen", fd.stream("sine-2"))
    assert [path for path, _ in tree_paths(net.init(rng.derive_key(0, "init", 0)))] == ["last/bias", "last/weight"]
    check_net(net, [2], 2)
    check_net(named_net("torch_nets:no_dropout", fd.stream("sine-2")), [2], 2)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("dropout", "net 'torch_nets:dropout' draws random numbers as it trains, as dropout does"),
        ("Functional", "net 'torch_nets:Functional' draws random numbers as it trains"),
        ("batch_norm", "net 'torch_nets:batch_norm': its batch norm '1' learns from whole batches.*use GroupNorm"),
        ("Counting", "net 'torch_nets:Counting' changes its buffer 'calls' as it trains"),
        ("lazy", "net 'torch_nets:lazy': 'weight' has no size before it sees data"),
        ("wide", r"net 'torch_nets:wide' does not take inputs of shape \(2,\): RuntimeError: mat1 and mat2"),
        ("classes", "the net gives 5 logits for an input, the stream has 2 classes"),
        ("Odd", "its trunk must be a layer, or the names of layers, got 3"),
        ("made", "got Perceptron: name its class, since each model needs new parameters"),
    ],
)
def test_unsupported_modules_give_a_one_sentence_error(folder: Path, name: str, sentence: str) -> None:
    with pytest.raises(fd.ConfigError, match=sentence):
        fd.run("sine-2", "FedDrift", net=f"torch_nets:{name}")


def test_the_missing_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bridges._import_torchax.cache_clear()
    monkeypatch.setitem(sys.modules, "torchax", None)
    with pytest.raises(fd.ConfigError, match=re.escape("need the extra torch (pip install 'feddrift[torch]')")):
        named_net("torch_nets:no_dropout", fd.stream("sea-2"))


def test_clients_behind_flower_train_it(folder: Path) -> None:
    pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    from feddrift.simulation import run_steps
    from tests.support.flower import InProcessFlower, make_clients

    stream, local = fd.stream("sine-2"), fd.Local(rounds=1, steps=5)
    net = named_net("torch_nets:Perceptron", stream)
    engine = InProcessFlower(stream, net, local, 0)
    engine.n_steps = 3
    found = list(run_steps(engine, fd.algorithm("FedDrift", stream)))
    for step, same in zip(found, fd.run(stream, "FedDrift", net=net, local=local), strict=False):
        assert step.model.tolist() == same.model.tolist()
        np.testing.assert_allclose(step.accuracy, same.accuracy, atol=0.01)
    import torch_nets  # type: ignore[import-not-found]

    (client, *_) = make_clients(stream, folder, torch_nets.Perceptron).values()  # as its client.toml names it
    assert build_client_net(client.model, (2,), 2) is net
    with pytest.raises(fd.ConfigError, match=re.escape("'of_stream' must be made without arguments")):
        build_client_net(torch_nets.of_stream, (2,), 2)
