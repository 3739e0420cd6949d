"""Runs that are killed by SIGKILL at random moments and resumed have the same record and models."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feddrift._internal import checkpoint

CASES = [
    ("FedDrift", "simulator", 0), ("FedDrift", "simulator", 2), ("FedDrift-Trunk", "simulator", 1),
    ("FedDrift-C", "simulator", 3), ("CFL", "simulator", 1), ("IFCA", "simulator", 1), ("KUE", "simulator", 2),
    ("Adaptive-FedAvg", "simulator", 1), ("DriftSurf", "simulator", 0), ("AUE-PC", "simulator", 0),
    ("FedDrift", "reference", 1), ("IFCA-W", "reference", 2), ("FedDrift-Eager", "reference", 0),
]  # fmt: skip
KILLS = 4  # per case, and as many more as it takes to strike a run before its end


def run_feddrift(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "feddrift", *words], cwd=folder, stdout=subprocess.DEVNULL)


def read_comparable_lines(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("started", "seconds")} for line in lines]


def read_last_arrays(folder: Path) -> tuple[Any, dict[str, Any]]:
    """All that the last checkpoint holds but its times and places."""
    (state,) = folder.glob("runs/*.state")
    newest = next(checkpoint.Folder(state).newest_first())
    assert isinstance(newest, checkpoint.Checkpoint)
    return newest._tree, newest._arrays


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "engine", "every"), CASES)
def test_a_run_killed_at_random_moments_ends_as_one_that_was_not(
    tmp_path: Path, algorithm: str, engine: str, every: int
) -> None:
    size = ("--rounds", "10") if engine == "simulator" else ("--rounds", "2", "--steps", "4")
    words = ["run", "--stream", "sine-2", "--algorithm", algorithm, "--engine", engine, *size]
    words += ["--checkpoint-every", str(every)]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    begin = time.monotonic()
    assert run_feddrift(whole, *words).wait() == 0
    usual = time.monotonic() - begin
    moments, struck, command = random.Random(f"{algorithm} {engine} {every}"), 0, words
    while struck < KILLS:
        process = run_feddrift(broken, *command)
        try:
            process.wait(timeout=moments.uniform(0.3, 1.0) * usual)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            struck += 1
        else:
            assert process.returncode == 0
            if struck:
                break
            (record,) = broken.glob("runs/*.jsonl")  # it was over before the blow: again from the start
            record.unlink()
        command = ["resume", "runs"] if any(broken.glob("runs/*.state/*.ckpt")) and struck else words
    if list(broken.glob("runs/*.state/*.ckpt")):
        assert run_feddrift(broken, "resume", "runs").wait() == 0
    else:
        assert run_feddrift(broken, *words).wait() == 0
    (expected,), (found,) = (list(folder.glob("runs/*.jsonl")) for folder in (whole, broken))
    assert read_comparable_lines(expected) == read_comparable_lines(found)
    (tree, numbers), (other_tree, other_numbers) = read_last_arrays(whole), read_last_arrays(broken)
    assert tree == other_tree or json.dumps(tree) == json.dumps(other_tree)  # NaN is not NaN
    assert numbers.keys() == other_numbers.keys()
    for name in numbers:
        np.testing.assert_array_equal(numbers[name], other_numbers[name])
    assert not list(broken.rglob("*.part"))
