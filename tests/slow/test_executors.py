"""Sweeps on Dask, with a scheduler and two workers, and on submitit: the files of docs/sweeps.md."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from feddrift.runs import record
from tests.support.documentation import read_blocks
from tests.support.ports import reserve_port

pytestmark = pytest.mark.slow
N_RUNS = 5
N_STEPS = 6
GRID = f"""
[[runs]]
stream = "sine-2"
algorithm = "logged:Logged"
settings = {{label = {list(range(N_RUNS))}}}
rounds = 1
steps = 1
pattern = "random:every=3,concepts=2,clients=4,steps={N_STEPS}"
"""
METHOD = """
import os
import time
from dataclasses import dataclass

import numpy as np

import feddrift as fd


@dataclass(frozen=True)
class Logged:
    '''One model; each time step that is begun adds a line to a file, and takes a while.'''

    label: int = 0

    def init(self, fed):
        return fd.State(fed.fresh(), w=np.zeros((0, fed.n_clients, 1)), votes=np.ones((fed.n_clients, 1)))

    def step(self, state, fed):
        with open("log.txt", "a") as log:
            log.write(f"{self.label} {fed.tau} {os.getpid()}\\n")
        time.sleep(0.3)
        w = np.ones((fed.tau + 1, fed.n_clients, 1))
        return fd.State(fed.train(state.models, w), w, votes=w[-1])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "grid.toml").write_text(GRID)
    (tmp_path / "logged.py").write_text(METHOD)
    for block in read_blocks("docs/sweeps.md"):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    return tmp_path


def start_sweep(folder: Path, executor: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "feddrift", "sweep", "grid.toml", "--out", "runs", "--executor", executor]
    return subprocess.Popen(
        command, cwd=folder, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def read_log(folder: Path) -> list[list[int]]:
    """Return the time steps that were begun: the label of the run, the time and the process."""
    path = folder / "log.txt"
    return [[int(word) for word in line.split()] for line in path.read_text().splitlines()] if path.exists() else []


def check_log(log: list[list[int]], killed: int) -> None:
    """Check that every time step was begun, and that only time steps without a checkpoint were begun twice.

    These are the last one that the killed process had begun, and perhaps the one before, whose checkpoint was being
    written.
    """
    begun = Counter((label, tau) for label, tau, _ in log)
    assert set(begun) == {(label, tau) for label in range(N_RUNS) for tau in range(N_STEPS)}
    last = [(label, tau) for label, tau, pid in log if pid == killed][-2:]
    assert {cell for cell, n in begun.items() if n > 1} <= set(last) and max(begun.values()) <= 2


def wait_until(is_true: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


@contextmanager
def start_dask(folder: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """Start a scheduler and two workers on this machine, and yield the address of the scheduler and the workers."""
    port = reserve_port()
    address = f"tcp://127.0.0.1:{port}"
    python = [sys.executable, "-m"]
    scheduler = [*python, "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", str(port)]
    worker = [*python, "distributed.cli.dask_worker", address, "--nthreads", "1", "--no-nanny", "--no-dashboard"]
    elsewhere = folder / "workers"  # the sweep has another working directory
    elsewhere.mkdir()
    with open(folder / "dask.log", "wb") as log:
        commands = [[*scheduler, "--no-dashboard"], worker, worker]
        processes = [subprocess.Popen(words, cwd=elsewhere, stdout=log, stderr=log) for words in commands]
        try:
            wait_until(lambda: (folder / "dask.log").read_text().count("Starting established connection") >= 2)
            yield address, processes[1:]
        finally:
            for process in processes:
                process.kill()
                process.wait()


def test_a_run_of_a_killed_dask_worker_continues_on_the_other(folder: Path) -> None:
    pytest.importorskip("distributed", reason="Dask is not installed: pip install distributed")
    with start_dask(folder) as (address, workers):
        sweep = start_sweep(folder, "dask_executor:connect", DASK_SCHEDULER_ADDRESS=address)
        try:
            pids = {worker.pid for worker in workers}
            wait_until(lambda: {pid for _, tau, pid in read_log(folder) if tau >= 2} == pids)
            killed = workers[0]
            os.kill(killed.pid, signal.SIGKILL)
            killed.wait()
            label = [label for label, _, pid in read_log(folder) if pid == killed.pid][-1]
            told, _ = sweep.communicate(timeout=300)
        finally:
            sweep.kill()
    assert sweep.returncode == 0 and f"{N_RUNS} done, 0 were finished before, 0 failed" in told, told
    records = record.read_all(folder / "runs")
    assert [r.status for r in records] == ["complete"] * N_RUNS and all(r.rows.steps == N_STEPS for r in records)
    assert {path.suffix for path in (folder / "runs").iterdir()} == {".jsonl"}
    check_log(read_log(folder), killed.pid)
    processes = {pid for run, _, pid in read_log(folder) if run == label}
    assert processes == pids, "the other worker continued the run"


def test_dask_executes_a_sweep_that_is_finished_only_once(folder: Path) -> None:
    pytest.importorskip("distributed", reason="Dask is not installed: pip install distributed")
    with start_dask(folder) as (address, _):
        for expected in (f"{N_RUNS} done, 0 were finished", f"0 done, {N_RUNS} were finished"):
            sweep = start_sweep(folder, "dask_executor:connect", DASK_SCHEDULER_ADDRESS=address)
            told, _ = sweep.communicate(timeout=300)
            assert sweep.returncode == 0 and expected in told, told
    assert len(read_log(folder)) == N_RUNS * N_STEPS


def test_ctrl_c_stops_a_sweep_on_dask_and_the_same_command_continues_it(folder: Path) -> None:
    pytest.importorskip("distributed", reason="Dask is not installed: pip install distributed")
    with start_dask(folder) as (address, _):
        sweep = start_sweep(folder, "dask_executor:connect", DASK_SCHEDULER_ADDRESS=address)
        wait_until(lambda: any(tau >= 1 for _, tau, _ in read_log(folder)))
        sweep.send_signal(signal.SIGINT)
        told, _ = sweep.communicate(timeout=60)
        assert sweep.returncode == 130 and "Traceback" not in told, told
        assert len({label for label, _, _ in read_log(folder)}) < N_RUNS
        wait_until(lambda: not list((folder / "runs").glob("*.part")))  # runs that have begun continue on their workers
        again, _ = start_sweep(folder, "dask_executor:connect", DASK_SCHEDULER_ADDRESS=address).communicate(timeout=300)
    assert "0 failed" in again and len(read_log(folder)) == N_RUNS * N_STEPS
    assert [r.status for r in record.read_all(folder / "runs")] == ["complete"] * N_RUNS


def test_dask_without_a_scheduler_is_an_error_in_one_sentence(folder: Path) -> None:
    pytest.importorskip("distributed", reason="Dask is not installed: pip install distributed")
    port = reserve_port()
    env = {"DASK_SCHEDULER_ADDRESS": f"tcp://127.0.0.1:{port}", "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "1s"}
    sweep = start_sweep(folder, "dask_executor:connect", **env)
    told, _ = sweep.communicate(timeout=120)
    assert sweep.returncode == 2 and "executor 'dask_executor:connect' failed: OSError: Timed out" in told, told
    assert "Traceback" not in told and not list((folder / "runs").iterdir())


def test_submitit_executes_a_sweep_with_its_local_executor(folder: Path) -> None:
    pytest.importorskip("submitit", reason="submitit is not installed: pip install submitit")
    for expected in (f"{N_RUNS} done, 0 were finished", f"0 done, {N_RUNS} were finished"):
        sweep = start_sweep(folder, "submitit_executor:connect", SWEEP_CLUSTER="local")
        told, _ = sweep.communicate(timeout=300)
        assert sweep.returncode == 0 and expected in told, told
    assert [r.status for r in record.read_all(folder / "runs")] == ["complete"] * N_RUNS
    assert len(read_log(folder)) == N_RUNS * N_STEPS
    assert len({pid for _, _, pid in read_log(folder)}) == N_RUNS  # a job for each run


def test_the_run_of_a_killed_job_of_submitit_is_continued_by_the_same_command(folder: Path) -> None:
    pytest.importorskip("submitit", reason="submitit is not installed: pip install submitit")
    sweep = start_sweep(folder, "submitit_executor:connect", SWEEP_CLUSTER="local")
    wait_until(lambda: any(tau >= 2 for _, tau, _ in read_log(folder)))
    _, _, pid = next(line for line in read_log(folder) if line[1] >= 2)
    os.kill(pid, signal.SIGKILL)
    told, _ = sweep.communicate(timeout=300)
    assert sweep.returncode == 1 and f"{N_RUNS - 1} done, 0 were finished before, 1 failed" in told, told
    again, _ = start_sweep(folder, "submitit_executor:connect", SWEEP_CLUSTER="local").communicate(timeout=300)
    assert f"1 done, {N_RUNS - 1} were finished before, 0 failed" in again, again
    check_log(read_log(folder), pid)
