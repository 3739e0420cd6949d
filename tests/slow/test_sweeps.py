"""Two sweeps into one folder, and a job array on a file system without locks: every run is done exactly once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from feddrift.runs import record
from tests.support.documentation import ROOT

pytestmark = pytest.mark.slow
GRID = """
[[runs]]
stream = "sine-2"
algorithm = "Oblivious"
rounds = 2000
pattern = "random:every=3,concepts=2,clients=4,steps=12"

[[runs]]
stream = "sine-2"
algorithm = ["Oblivious", "Window"]
seeds = "1-2"
rounds = 2
pattern = "random:every=3,concepts=2,clients=4,steps=12"
"""
WITHOUT_LOCKS = """
import errno, fcntl

def flock(file, how):
    raise OSError(errno.ENOLCK, "No locks available")

fcntl.flock = flock
"""


def start_sweep(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "feddrift", "sweep", "grid.toml", "--out", "runs", "--jobs", "1"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, start_new_session=True)


def until(true: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not true():
        assert process.poll() is None, "it ended before"
        time.sleep(0.01)


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A sweep that stands still in its first run, with that in hand."""
    (tmp_path / "grid.toml").write_text(GRID)
    first, out = start_sweep(tmp_path), tmp_path / "runs"
    try:
        until(lambda: any(out.glob("*.state/00000[1-9]-*.ckpt")), first)  # a time step is done, and kept
        os.killpg(first.pid, signal.SIGSTOP)
        yield first
    finally:
        with suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)


def test_two_sweeps_share_the_runs_and_report_it(tmp_path: Path, stopped: subprocess.Popen[str]) -> None:
    second, _ = start_sweep(tmp_path).communicate(timeout=300)
    assert "4 done here, 0 elsewhere, 1 still running elsewhere, 0 were finished before, 0 failed" in second
    os.killpg(stopped.pid, signal.SIGCONT)
    first, _ = stopped.communicate(timeout=300)
    assert "1 done here, 4 elsewhere, 0 still running elsewhere, 0 were finished before, 0 failed" in first
    assert [r.status for r in record.read_all(tmp_path / "runs")] == ["complete"] * 5
    third, _ = start_sweep(tmp_path).communicate(timeout=300)
    assert "0 done, 5 were finished before, 0 failed" in third


def test_runs_that_a_killed_sweep_had_begun_are_taken_over(tmp_path: Path, stopped: subprocess.Popen[str]) -> None:
    (part,) = (tmp_path / "runs").glob("*.part")
    begun = record.read(part)
    assert 1 <= begun.rows.steps < 12
    second = start_sweep(tmp_path)
    until(lambda: any((tmp_path / "runs").glob("*seed1.jsonl")), second)
    os.killpg(stopped.pid, signal.SIGKILL)
    stopped.communicate(timeout=60)
    told, _ = second.communicate(timeout=300)
    assert "5 done, 0 were finished before, 0 failed" in told
    done = re.findall(r"^\[\d/5\] (.*)$", told, re.M)
    assert len(set(done)) == 5 and done[-1] == "sine-2 Oblivious seed 0"
    assert [r.status for r in record.read_all(tmp_path / "runs")] == ["complete"] * 5
    over = record.read(part.with_suffix(""))
    assert over.header["started"] == begun.header["started"]  # gone on with, not begun anew
    assert sorted(path.suffix for path in (tmp_path / "runs").iterdir()) == [".jsonl"] * 5


def test_the_script_for_slurm_does_every_run_once_without_locks(tmp_path: Path) -> None:
    """A stand-in for `sbatch` reads the script's array and runs its tasks, one after the other."""
    (tmp_path / "grid.toml").write_text(GRID.replace("rounds = 2000", "rounds = 2"))
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LOCKS)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    script = ROOT / "examples" / "sweep.sbatch"
    said = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script.read_text(), re.M))
    first, last = map(int, said["array"].split("-"))
    env = os.environ | {"PYTHONPATH": paths, "PATH": path, "SLURM_CPUS_PER_TASK": said["cpus-per-task"]}

    def task(k: int) -> str:
        command = ["bash", str(script), "grid.toml", "runs"]
        done = subprocess.run(
            command, cwd=tmp_path, env=env | {"SLURM_ARRAY_TASK_ID": str(k)}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    told = [task(k) for k in range(first, last + 1)]
    assert "grid.toml: 5 runs, 2 of them in part 1/4" in told[0]
    assert "2 done, 0 were finished before, 0 failed" in told[0]
    assert all("1 done, 0 were finished before, 0 failed" in text for text in told[1:]) and len(told) == 4
    assert [r.status for r in record.read_all(tmp_path / "runs")] == ["complete"] * 5
    shared = [sys.executable, "-m", "feddrift", "sweep", "grid.toml", "--out", "runs"]
    refused = subprocess.run(shared, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "give each its own part" in refused.stderr
