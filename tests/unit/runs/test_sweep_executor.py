"""Sweeps whose runs an executor executes."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from feddrift.runs import record, sweep
from feddrift.runs.writer import lock_record
from tests.support.cli import SWEEP_GRID, run_feddrift

EXECUTORS = """
import concurrent.futures
from contextlib import contextmanager

not_a_function = 3
submitted = []

def threads():
    return concurrent.futures.ThreadPoolExecutor(2)

def nothing():
    return None

def unreachable():
    raise OSError("connection refused")

@contextmanager
def closed():
    raise OSError("no such cluster")
    yield

class Job:
    '''Result of a scheduler whose executor is not one of concurrent.futures: it has no context and no callbacks.'''

    def __init__(self, function, arguments):
        self.result_or_error = function(*arguments)

    def done(self):
        return True

    def result(self):
        return self.result_or_error

    def cancel(self):
        pass

class Scheduler:
    def submit(self, function, *arguments):
        submitted.append(arguments)
        return Job(function, arguments)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "grid.toml").write_text(SWEEP_GRID)
    (tmp_path / "executors_for_tests.py").write_text(EXECUTORS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "executors_for_tests", raising=False)
    return tmp_path


def run_sweep(capsys: pytest.CaptureFixture[str], name: str, *options: str) -> tuple[int, str, str]:
    path = f"executors_for_tests:{name}" if name.isidentifier() else name
    return run_feddrift(capsys, "sweep", "grid.toml", "--executor", path, *options)


@pytest.mark.parametrize("name", ["threads", "Scheduler"])
def test_an_executor_executes_every_run_with_the_same_records(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    code, told, errors = run_sweep(capsys, name, "--out", "runs")
    assert (code, errors) == (0, "") and "[7/7]" in told and "7 done, 0 were finished before, 0 failed" in told
    assert [r.status for r in record.read_all(folder / "runs")] == ["complete"] * 7
    assert "0 done, 7 were finished before, 0 failed" in run_sweep(capsys, name, "--out", "runs")[1]
    config = sweep.read_grid(folder / "grid.toml")[0]
    expected = sweep.execute_run(config, folder, folder, False, 0)
    same = record.read(folder / "runs" / expected.record)
    assert expected.kind == "done"
    assert (record.read(folder / expected.record).rows.accuracy == same.rows.accuracy).all()


def test_jobs_limits_the_runs_that_are_submitted(folder: Path) -> None:
    waiting: list[tuple[Future[Any], Callable[[], Any]]] = []
    largest = 0

    class Lazy(Executor):
        def submit(self, function: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
            nonlocal largest
            future: Future[Any] = Future()
            waiting.append((future, lambda: function(*arguments)))
            largest = max(largest, len(waiting))
            if len(waiting) == 3 or left[0] <= 3:
                for other, call in waiting:
                    left[0] -= 1
                    other.set_result(call())
                waiting.clear()
            return future

    configs = sweep.read_grid(folder / "grid.toml")
    left = [len(configs)]
    out = folder / "runs"
    out.mkdir()
    news = list(sweep.run_sweep_on_executor(configs, out, Lazy(), max_submitted=3))
    assert largest == 3 and [item.kind for item in news].count("done") == 7


def test_a_run_of_another_process_is_tried_again_and_left_to_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = sweep.read_grid(folder / "grid.toml")[0]
    out = folder / "runs"
    out.mkdir()
    name = sweep.execute_run(config, folder, folder, False, 0).record
    with lock_record(out / name):
        code, told, errors = run_sweep(capsys, "Scheduler", "--out", "runs")
    assert code == 0 and "6 done here, 0 elsewhere, 1 still running elsewhere" in told
    assert "start this command again" in errors
    numbers = [arguments[-1] for arguments in sys.modules["executors_for_tests"].submitted]
    assert len(numbers) == 8 and len(set(numbers)) == 8  # no two calls have the same arguments
    assert "1 done, 6 were finished before" in run_sweep(capsys, "Scheduler", "--out", "runs")[1]


@pytest.mark.slow
def test_processes_execute_the_runs_and_the_rest_follows_after_one_is_killed(folder: Path) -> None:
    configs = sweep.read_grid(folder / "grid.toml")
    out = folder / "runs"
    out.mkdir()

    @contextmanager
    def pool() -> Any:
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
            yield executor

    with pool() as executor:
        news = []
        for item in sweep.run_sweep_on_executor(configs, out, executor, max_submitted=2):
            news.append(item)
            if [item.kind for item in news].count("done") == 1:
                for process in executor._processes.values():
                    process.kill()
    kinds = [item.kind for item in news if item.kind != "step"]
    assert len(kinds) == 7 and set(kinds) == {"done", "failed"}
    assert all("BrokenProcessPool" in item.reason for item in news if item.kind == "failed")
    with pool() as executor:
        again = [item.kind for item in sweep.run_sweep_on_executor(configs, out, executor) if item.kind != "step"]
    assert sorted(again) == ["done"] * kinds.count("failed") + ["skipped"] * kinds.count("done")
    assert [r.status for r in record.read_all(out)] == ["complete"] * 7


def test_failures_are_reported_by_run_and_do_not_stop_the_others(folder: Path) -> None:
    configs = sweep.read_grid(folder / "grid.toml")

    class Unreliable(ThreadPoolExecutor):
        n = 0

        def submit(self, function: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
            self.n += 1
            if self.n == 1:
                raise RuntimeError("the cluster has\nended")
            if self.n == 2:
                return super().submit(int, "x")
            return super().submit(int) if self.n == 3 else super().submit(function, *arguments)

    with Unreliable(1) as executor:
        news = list(sweep.run_sweep_on_executor(configs, folder, executor))
    reasons = {item.reason for item in news if item.kind == "failed"}
    assert reasons == {
        "RuntimeError: the cluster has\\nended",
        "ValueError: invalid literal for int() with base 10: 'x'",
        "the executor returned 0, not the result of the function that it got",
    }
    assert [item.kind for item in news].count("done") == 4


def test_a_worker_without_the_folders_reports_it(folder: Path) -> None:
    config = sweep.read_grid(folder / "grid.toml")[0]
    news = sweep.execute_run(config, folder / "elsewhere", folder, False, 0)
    assert news.kind == "failed" and "elsewhere is not a folder on" in news.reason and "all workers need" in news.reason
    assert not (folder / "elsewhere").exists()


def test_closing_the_sweep_cancels_what_has_not_begun(folder: Path) -> None:
    configs = sweep.read_grid(folder / "grid.toml")
    futures: list[Future[Any]] = []

    class OnlyFirst(Executor):
        def submit(self, function: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
            futures.append(Future())
            if len(futures) == 1:
                futures[0].set_result(function(*arguments))
            return futures[-1]

    news = sweep.run_sweep_on_executor(configs, folder, OnlyFirst())
    assert next(news).kind == "step"
    news.close()
    assert [future.cancelled() for future in futures] == [False, *[True] * 6]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("dask", "executor must be module:factory, such as dask_executor:connect, got 'dask'"),
        ("", "executor must be module:factory, such as dask_executor:connect, got ''"),
        ("no_such_module:connect", "executor 'no_such_module:connect': there is no module 'no_such_module'"),
        ("executors_for_tests:thread", "has no 'thread', did you mean 'threads'"),
        ("not_a_function", "must be a function that returns an executor, got 3"),
        ("nothing", "must return an object with the method submit, such as a concurrent.futures.Executor, got None"),
        ("unreachable", "executor 'executors_for_tests:unreachable' failed: OSError: connection refused"),
        ("closed", "executor 'executors_for_tests:closed' failed: OSError: no such cluster"),
    ],
)
def test_a_wrong_executor_is_one_sentence_and_nothing_runs(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, sentence: str
) -> None:
    code, told, errors = run_feddrift(
        capsys, "sweep", "grid.toml", "--out", "runs", "--executor",
        name if ":" in name or name in ("", "dask") else f"executors_for_tests:{name}",
    )  # fmt: skip
    assert code == 2 and errors.count("\n") == 1 and sentence in errors, errors
    assert "done" not in told and not list(folder.glob("runs/*"))
