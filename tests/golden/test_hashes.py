"""The golden list: records, models and decisions of many short runs do not change, on every processor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden import hashes

# What the native code is compiled for: name, features, and the flags of a processor that can run it. Without any, and
# with a generic name, there is no fused multiply-add: it is computed in software.
TARGETS = {
    "haswell": ("haswell", "", {"avx2", "fma"}),
    "avx2-and-fma": ("haswell", "+avx,+avx2,+fma", {"avx2", "fma"}),
    "skylake-avx512": ("skylake-avx512", "", {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512cd"}),
    "generic": ("generic", "", set[str]()),
}
OTHER_LIBRARIES = {  # the paths that NumPy and OpenBLAS take on older processors; unknown names are ignored
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    "OPENBLAS_CORETYPE": "Haswell",
}
NATIVE = [case for case in hashes.CASES if case.partition("/")[0] in hashes.NATIVE]


def test_the_list_has_every_case() -> None:
    assert list(hashes.expected()) == hashes.CASES


def is_slow(case: str) -> bool:
    """Whether a case belongs to the long checks: XLA compiles long, and Flower's grid is slow, so a few run quickly."""
    kind, _, name = case.partition("/")
    quick = {
        "compiled": {"FedDrift"},
        "flower": {"FedDrift", "FedDrift-Trunk", "FedDrift-Auto", "Local", "FedRep", "FLUX"},
    }
    return kind in quick and name not in quick[kind]


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if is_slow(c) else c for c in hashes.CASES])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # killed runs leave files open
def test_the_result_is_that_of_the_list(case: str) -> None:
    if case.startswith("flower"):
        pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    if case == "option/page-hinkley":
        pytest.importorskip("river", reason="the extra 'river' is not installed")
    assert hashes.find_differences(hashes.outcome(case), hashes.expected()[case]) == []


def processor_flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return {flag for line in lines if line.startswith("flags") for flag in line.split()}


def check_in_a_process(cases: list[str], **settings: str) -> None:
    env = os.environ | settings
    command = [sys.executable, "-m", "tests.golden.hashes", "check", *cases]
    done = subprocess.run(command, env=env, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_native_code_for_another_processor_gives_the_same_bits(target: str) -> None:
    name, features, needed = TARGETS[target]
    if missing := needed - processor_flags():
        pytest.skip(f"this processor cannot run code for {name}: it lacks {', '.join(sorted(missing))}")
    cases = NATIVE if target != "generic" else NATIVE[::6]  # without fused multiply-adds it is slow
    check_in_a_process(cases, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features)


@pytest.mark.slow
def test_numpy_on_another_processor_gives_the_same_bits() -> None:
    check_in_a_process(NATIVE, **OTHER_LIBRARIES)


def test_a_difference_is_found() -> None:
    listed = {"decisions": "a", "values": {"record": [0.5, 1.0], "parameters": [0.1]}}
    near = {"decisions": "a", "values": {"record": [0.52, 1.0], "parameters": [0.1]}}
    far = {"decisions": "a", "values": {"record": [0.5, 0.9], "parameters": [float("nan")]}}
    assert hashes.find_differences(near, listed) == []
    assert hashes.find_differences({**near, "decisions": "b"}, listed) == ["decisions"]
    assert hashes.find_differences(far, listed) == [
        "values of record by 0.1, more than 0.06",
        "values of parameters by nan, more than 0.01",
    ]
    assert hashes.find_differences({"record": "1", "state": "2"}, {"record": "1", "state": "3"}) == ["state"]
