"""Algorithms, streams and nets of users, by path and from an installed package."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import feddrift as fd
from feddrift import algorithms, streams
from feddrift.errors import ConfigError
from feddrift.nets import named_net
from feddrift.reports import summary
from feddrift.runs import record, sweep
from feddrift.runs.config import RunConfig
from feddrift.runs.recorded_run import RecordedRun
from tests.support.cli import run_feddrift

MINE = '''
from dataclasses import dataclass
import numpy as np
import feddrift as fd
from feddrift.algorithms.feddrift.method import FedDrift

@dataclass(frozen=True)
class Mean:
    """FedAvg with a setting that it ignores."""
    strength: float = 0.5
    hidden: tuple = ()
    def init(self, fed):
        return fd.State(fed.fresh(), w=np.zeros((0, fed.n_clients, 1)), votes=np.ones((fed.n_clients, 1)))
    def step(self, state, fed):
        w = np.ones((fed.tau + 1, fed.n_clients, 1))
        return fd.State(fed.train(state.models, w), w, votes=w[-1])

class Buggy(Mean):
    def step(self, state, fed):
        return fed.train(state.models, state.weights)

@dataclass(frozen=True)
class Mine(FedDrift):
    twist: int = 3

def two():
    return Mean(strength=2.0)

@dataclass(frozen=True)
class Needy(Mean):
    gift: float = None
    def __post_init__(self):
        if self.gift is None:
            raise TypeError("a gift is missing")

def data(data_dir=None):
    x = np.arange(12.0).reshape(6, 2) / 12
    return fd.Stream.from_arrays([[(x, [0, 1] * 3)], [(x, [0, 1] * 3)]], name=str(data_dir))

def net(stream):
    return fd.mlp(stream.x.shape[1], 3, stream.n_classes)

NUMBER = 3
'''
LINE = MINE[: MINE.index("state.weights")].count("\n") + 1
BUGGY = (
    rf"Buggy.step at tau=0: AttributeError: 'State' object has no attribute 'weights' \(.*people_own.py, line {LINE}\)"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with people's own module in it, under a name of this test's own."""
    (tmp_path / "people_own.py").write_text(MINE)
    (tmp_path / "people_broken.py").write_text("1 / 0")
    (tmp_path / "people_lacking.py").write_text("import no_such_package")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_error_that_is_raised_elsewhere_names_its_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr("feddrift.engines.server.federation.TimeStep.fresh", broken)
    place = r"\(.*people_own.py, line \d+; raised in .*test_plugins.py, line \d+\)"
    with pytest.raises(ConfigError, match=f"Mean.init: KeyError: 'ours' {place}"):
        next(fd.run(fd.stream("sine-2"), fd.algorithm("people_own:Mean")))


def test_a_class_a_subclass_and_a_function_make_algorithms(folder: Path) -> None:
    assert algorithms.get_settings(fd.algorithm("people_own:Mean", strength="0.7")) == {"strength": 0.7}
    assert algorithms.get_settings(fd.algorithm("people_own.Mean")) == {"strength": 0.5}
    assert algorithms.get_settings(fd.algorithm("people_own:two")) == {"strength": 2.0}
    mine = fd.algorithm("people_own:Mine", fd.stream("sine-2"), twist=4)
    found = algorithms.get_settings(mine)
    assert found["twist"] == 4 and found["delta"] == 0.1 and "memory" not in found and "one_global" not in found
    with pytest.raises(ConfigError, match="unknown setting of people_own:Mean 'strenth', did you mean 'strength'"):
        fd.algorithm("people_own:Mean", strenth=1)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("people_gone:Mean", "algorithm 'people_gone:Mean': there is no module 'people_gone' here or installed"),
        ("people_own:Median", "people_own has no 'Median'"),
        ("people_broken:Mean", "importing people_broken failed: ZeroDivisionError: division by zero"),
        ("people_lacking:Mean", "importing people_lacking failed: No module named 'no_such_package'"),
        ("people_own:NUMBER", "must be a class or a function that makes one, got 3"),
        ("people_own:FedDrift.delta", "must be a class or a function that makes one, got 0.05"),
        ("people_own:dataclass", "cannot be made|is not an algorithm"),
        ("people_own:Needy", "cannot be made: a gift is missing"),
        ("pathlib:Path", r"is not an algorithm: it needs init\(fed\) and step\(state, fed\), got no init"),
        ("FedDrit", "unknown algorithm 'FedDrit', did you mean 'FedDrift'.*package.module:Name"),
        ("no such", "unknown algorithm 'no such'"),
    ],
)
def test_invalid_algorithms_are_refused_in_one_sentence(folder: Path, name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        fd.algorithm(name)


def test_streams_and_nets_of_ones_own(folder: Path) -> None:
    assert fd.stream("people_own:data", data_dir=folder).name == str(folder)
    streams.check_name("people_own:data")
    for name, sentence in {
        "people_own:NUMBER": "must be a Stream or a function that makes one, got a int",
        "people_own:gone": "people_own has no 'gone'",
        "people_own:Meen": "people_own has no 'Meen', did you mean 'Mean'?",
        "sin-2": "unknown stream 'sin-2', did you mean 'sine-2'",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            fd.stream(name)
    with pytest.raises(ConfigError, match="has its own drift"):
        fd.stream("people_own:data", pattern="Y")
    config = RunConfig(stream="people_own:data", algorithm="Oblivious", net="people_own:net")
    assert config.find_net(config.load_stream()) == fd.mlp(2, 3, 2)
    for name, sentence in {"people_own:NUMBER": "must be a Net", "mlp": "unknown net 'mlp'"}.items():
        with pytest.raises(ConfigError, match=sentence):
            RecordedRun(config.model_copy(update={"net": name}), folder)


def test_they_run_and_are_recorded_by_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_feddrift(
        capsys, "run", "--stream", "people_own:data", "--algorithm", "people_own:Mean", "--algorithm", "FedDrift",
        "--net", "people_own:net", "--set", "strength=0.9", "--set", "delta=0.2", "--out", "runs", "--rounds", "1",
        "--seeds", "0-1",
    )  # fmt: skip
    assert code == 0 and not err and "people_own:Mean" in out
    records = record.read_all("runs")
    header = next(r.header for r in records if r.header["algorithm"] == "people_own:Mean")
    assert header["stream"] == "people_own:data" and header["settings"] == {"strength": 0.9}
    assert header["overrides"]["net"] == "people_own:net" and len(header["overrides"]["data"]) == 8
    assert len(summary.summarise(records)) == 2  # seeds belong together
    code, _, err = run_feddrift(capsys, "run", "--stream", "sine-2", "--algorithm", "people_own:Mode")
    assert code == 2 and err.count("\n") == 1 and "people_own has no 'Mode'" in err
    code, _, err = run_feddrift(capsys, "run", "--stream", "people_own:data", "--algorithm", "people_own:Buggy")
    assert code == 2 and err.count("\n") == 1 and re.search(BUGGY, err)


def test_a_sweep_takes_them(folder: Path) -> None:
    (folder / "grid.toml").write_text(
        '[[runs]]\nstream = "people_own:data"\nalgorithm = ["people_own:Mean", "Oblivious", "people_own:Buggy"]\n'
        'rounds = 1\nnet = "people_own:net"\nsettings = {strength = [0.1, 0.2]}\n'
    )
    configs = sweep.read_grid(folder / "grid.toml")
    news = list(sweep.run_sweep(configs, folder / "runs", jobs=1))
    failures = [n.reason for n in news if n.kind == "failed"]
    assert len(configs) == 5 and len(failures) == 2 and all(re.match(BUGGY, reason) for reason in failures)
    assert len([n for n in news if n.kind == "done"]) == 3


def test_entry_points_of_an_installed_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = folder / "people-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: people\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[feddrift.algorithms]\nMean = people_own:Mean\n[feddrift.streams]\nsix = people_own:data\n"
        "[feddrift.nets]\nthree = people_own:net\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    assert algorithms.get_settings(fd.algorithm("Mean")) == {"strength": 0.5} and fd.stream("six").n_clients == 1
    config = RunConfig(stream="six", algorithm="Mean", net="three")
    assert config.find_net(fd.stream("six")) == fd.mlp(2, 3, 2)
    listed = json.loads(run_feddrift(capsys, "list", "--json")[1])
    assert {"name": "Mean", "summary": "installed: people_own:Mean"} in listed["algorithms"]
    assert "six" in [entry["name"] for entry in listed["streams"]]


def test_the_drift_test_of_the_docs(folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "extend-nets.md").read_text()
    (snippet,) = re.findall(r"```python\n(# mytest.py\n.*?)```", page, re.S)
    (folder / "people_test.py").write_text(snippet)
    steps = list(
        fd.run(fd.stream("sine-2"), fd.algorithm("FedDrift", test="people_test:doubled"), local=fd.Local(rounds=5))
    )
    assert 0 < sum(int(step.drifted.sum()) for step in steps) < 30


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: fd.stream("json:loads"), "stream 'json:loads' failed: TypeError"),
        (lambda: fd.stream("builtins:dict"), "'builtins:dict' must be a Stream.*, got a dict"),  # tells no parameters
        (lambda: named_net("json:loads", fd.stream("sine-2")), "net 'json:loads' failed: TypeError"),
        (lambda: named_net("os:getcwd", fd.stream("sine-2")), "'os:getcwd' must be a Net.*, got str"),
        (lambda: fd.algorithm("FedDrift", test="enum:Enum"), "test 'enum:Enum' failed: TypeError"),
    ],
)
def test_a_function_that_fails_is_one_sentence(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()
