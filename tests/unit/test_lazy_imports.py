"""Imports: slow libraries are loaded only where they are needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import feddrift as fd
from feddrift.engines.simulator import lanes
from tests.support.lazy_imports import COMMAND_CODE, find_loaded_libraries


@pytest.mark.parametrize(
    "code",
    [
        "import feddrift",
        "import feddrift as fd; fd.stream('sine-2'); fd.algorithm('FedDrift'); fd.run",
        "import feddrift as fd; [getattr(fd, name) for name in fd.__all__]",
        *(COMMAND_CODE.format(words=[words]) for words in ("--version", "--help", "list")),
        COMMAND_CODE.format(words=["run", "--help"]),
        COMMAND_CODE.format(words=["deploy", "--help"]),
    ],
)
def test_nothing_slow_is_loaded(code: str) -> None:
    assert find_loaded_libraries(code) == set()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["FedDrift", "FedDrift-Auto", "AUE", "KUE", "Oracle"])
def test_a_run_that_native_code_serves_whole_loads_no_jax(tmp_path: Path, algorithm: str) -> None:
    words = ["run", "--stream", "sine-2", "--algorithm", algorithm, "--rounds", "2", "--out", str(tmp_path)]
    assert "jax" not in find_loaded_libraries(COMMAND_CODE.format(words=words), JAX_PLATFORMS="cpu")
    (path,) = tmp_path.glob("*.jsonl")
    assert json.loads(path.read_text().splitlines()[0])["device"] == "cpu"


@pytest.mark.slow
def test_jax_is_loaded_where_it_is_needed(tmp_path: Path) -> None:
    words = [
        "run",
        "--stream",
        "sine-2",
        "--algorithm",
        "Oblivious",
        "--net",
        "mlp:4,4",
        "--rounds",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert "jax" in find_loaded_libraries(COMMAND_CODE.format(words=words), JAX_PLATFORMS="cpu")


@pytest.mark.parametrize(
    ("env", "asked"),
    [
        ({"JAX_PLATFORMS": "cpu"}, False),
        ({"JAX_PLATFORMS": "cpu,cuda"}, True),
        ({"JAX_PLATFORMS": "cuda"}, True),
        ({"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}, True),
        ({"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}, True),
    ],
)
def test_environments_in_which_jax_must_list_devices(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], asked: bool
) -> None:
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert lanes.has_only_one_cpu() is not asked


def test_one_cpu_is_not_assumed_where_jax_may_have_a_plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "jax_plugins" / "some_gpu").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(lanes, "_has_plugins", lanes._has_plugins.__wrapped__)  # which looks anew
    assert not lanes.has_only_one_cpu()


def test_public_names_win_over_modules() -> None:
    code = "import feddrift.simulation, feddrift.runs.recorded_run, feddrift as fd; assert callable(fd.run), fd.run"
    assert find_loaded_libraries(code) == set()
    assert dir(fd) == sorted([*fd.__all__, "__version__"])
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = fd.nonsense  # type: ignore[attr-defined]


@pytest.mark.parametrize(("given", "expected"), [(None, "false"), ("true", "true")])
def test_a_gpus_memory_is_taken_as_it_is_needed(given: str | None, expected: str) -> None:
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    load = "from feddrift.engines.simulator.lanes import Devices; Devices.find_all()"
    code = f"import os; {load}; print(os.environ['{name}'])"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    env.pop(name, None)
    env |= {} if given is None else {name: given}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


def test_native_code_is_not_loaded_to_shuffle_a_few_rows_for_a_gpu() -> None:
    code = """
import numpy as np, feddrift as fd
from feddrift.engines.simulator.simulator import Simulator
engine = Simulator(fd.stream("sine-2"), fd.mlp(2, 4, 2), fd.Local(rounds=1, steps=1), 0)
engine.native = False
fed = engine.at(0)
fed.train(fed.fresh(), np.ones((1, 10, 1)))
"""
    found = find_loaded_libraries(code, JAX_PLATFORMS="cpu")
    assert "jax" in found and "numba" not in found
