"""Sweeps: grids of runs from a file, in parallel processes; finished runs are skipped, failures do not stop the others.

An executor, for example of Dask, may execute them in place of processes of this machine. Several sweeps, also on
several machines, share the work if they share a folder: each run locks its record.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import signal
import socket
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from feddrift import algorithms, streams
from feddrift._internal import plugins
from feddrift.errors import (
    BusyError,
    ConfigError,
    DataError,
    FeddriftError,
    safe_repr,
    suggest_name,
    to_one_line,
    unknown_name_error,
)
from feddrift.runs.config import RunConfig, parse_seeds
from feddrift.runs.recorded_run import RecordedRun
from feddrift.runs.writer import lock_record

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from feddrift.data import Stream

NAME_KEYS = ("stream", "algorithm")
GRID_OPTIONS = tuple(name for name in RunConfig.model_fields if name not in ("seed", "settings"))
KEY_DESCRIPTIONS = {  # the keys of a table [[runs]]
    name: field.description or "" for name, field in RunConfig.model_fields.items() if name != "seed"
} | {"seeds": 'seeds of initial models and minibatches: 3, [0, 2], or "0-4"'}
MAX_RUNS = 100_000
STOP_TIMEOUT_SECONDS = 20.0  # time for a stopped run to close its record
POLL_SECONDS = 0.1  # time between two looks at the runs of an executor


def read_grid(path: Path, data_dir: Path | None = None) -> list[RunConfig]:
    """Read all runs of a TOML file, in its order, each once.

    Each table ``[[runs]]`` is a grid: every combination of its streams, algorithms, seeds, run options and settings.
    Settings that an algorithm does not have are left out for it.

    Args:
        path: The file.
        data_dir: The folder of data files, which replaces that of the tables.

    Raises:
        ConfigError: A table is not valid.
        DataError: The file cannot be read.
    """
    try:
        grids = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # not text, not TOML, or beyond the limits of Python
        raise DataError(f"{path} cannot be read as TOML: {getattr(error, 'strerror', None) or error}") from None
    tables = grids.pop("runs", None)
    if grids or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables) or not tables:
        raise ConfigError(f"{path}: a sweep is one or more tables [[runs]], got {sorted(grids) or 'none'}")
    configs: dict[str, RunConfig] = {}
    for number, table in enumerate(tables, start=1):
        try:
            for config in _expand_grid(table, data_dir):
                configs.setdefault(config.model_dump_json(), config)
        except FeddriftError as error:
            raise ConfigError(f"{path}, runs {number}: {error}") from None
    return list(configs.values())


def select_part(configs: Sequence[RunConfig], part: str) -> list[RunConfig]:
    """Select every N-th run of a plan, beginning with the K-th.

    Args:
        configs: The plan.
        part: The part as text, K/N.

    Raises:
        ConfigError: The text is not such a part.

    >>> [config.seed for config in select_part([RunConfig(stream="sine-2", seed=s) for s in range(7)], "2/3")]
    [1, 4]
    """
    k, n = (int(word) if word.isdecimal() and len(word) < 10 else 0 for word in (part.partition("/")[::2]))
    if not 1 <= k <= n:
        raise ConfigError(f"a part is K/N with K from 1 to N, such as 3/20, got '{part}'")
    return list(configs[k - 1 :: n])


def get_data_key(config: RunConfig) -> str:
    """Return a key that is equal for runs on the same data."""
    return repr(config.model_copy(update={"algorithm": "", "settings": {}}))


def _expand_grid(table: Mapping[str, Any], data_dir: Path | None) -> Iterator[RunConfig]:
    """Yield the runs of one table."""
    if extra := sorted(set(table) - set(KEY_DESCRIPTIONS)):
        raise unknown_name_error("key", extra[0], KEY_DESCRIPTIONS)
    table = {"algorithm": algorithms.RECOMMENDED, **table}
    if data_dir is not None:
        table = {**table, "data_dir": str(data_dir)}
    if "stream" not in table:
        raise ConfigError("stream is missing")
    settings = table.get("settings", {})
    if not isinstance(settings, dict):
        raise ConfigError(f"settings must be a table such as {{delta = 0.1}}, got {safe_repr(settings)}")
    options = {name: _to_list(name, table[name]) for name in GRID_OPTIONS if name in table}
    settings_of = {name: algorithms.get_options(algorithms.find_entry(name).cls) for name in options["algorithm"]}
    for key in settings:
        if not any(key in legal for legal in settings_of.values()):
            hint = suggest_name(key, {name for legal in settings_of.values() for name in legal})
            raise ConfigError(f"none of {', '.join(settings_of)} has a setting {key!r}{hint}")
    for name in options["stream"]:
        streams.check_name(name)
    seed_items = _to_list("seeds", table.get("seeds", 0))
    seeds = parse_seeds(",".join(item if isinstance(item, str) else safe_repr(item) for item in seed_items))
    lengths = [len(_to_list(key, value)) for key, value in settings.items()]
    n_runs = math.prod([*map(len, options.values()), *lengths, len(seeds)])
    if n_runs > MAX_RUNS:
        raise ConfigError(f"a grid is at most {MAX_RUNS} runs, got {n_runs}")
    for option_values in itertools.product(*options.values()):
        run_options = dict(zip(options, option_values, strict=True))
        legal = settings_of[run_options["algorithm"]]
        setting_lists = {key: _to_list(key, value) for key, value in settings.items() if key in legal}
        for setting_values in itertools.product(*setting_lists.values()):
            run_settings = dict(zip(setting_lists, setting_values, strict=True))
            algorithms.algorithm(run_options["algorithm"], **run_settings)  # report illegal values before any run
            for seed in seeds:
                yield RunConfig.from_values(**run_options, settings=run_settings, seed=seed)


def _to_list(name: str, value: Any) -> list[Any]:
    """Return the values of a key, which may be a single value or a list."""
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ConfigError(f"{name} must have at least one value, got none")
    for item in values:
        if name in NAME_KEYS and not isinstance(item, str):
            raise ConfigError(f"{name} must be a name, or several, got {safe_repr(item)}")
    return values


@dataclass(frozen=True)
class SweepProgress:
    """Report about one run.

    Attributes:
        config: The run.
        kind: skipped: the run was finished before the sweep; elsewhere: another process has finished it since; busy:
            another process is running it; step: a time step is done; done and failed: the run has ended.
        share: A time step as a share of the run.
        reason: The reason of a failure, or of running a finished run again.
        record: The name of its record's file.
    """

    config: RunConfig
    kind: Literal["skipped", "elsewhere", "busy", "step", "done", "failed"]
    share: float = 1.0
    reason: str = ""
    record: str = ""


def run_sweep(
    configs: Sequence[RunConfig], out: Path, jobs: int, allow_unlocked: bool = False
) -> Generator[SweepProgress, None, None]:
    """Run a sweep; yield each time step that is done and the end of each run.

    Runs of another sweep are tried again at the end, each time a run of this sweep has ended: if the other sweep was
    killed, this one continues its runs. Closing the iterator stops the runs; their records stay unfinished.

    Args:
        configs: The runs.
        out: The folder of the records.
        jobs: The number of processes.
        allow_unlocked: Continue on a file system without locks; no other process may run the same runs.
    """
    import multiprocessing
    from multiprocessing.connection import wait

    waiting = _group_by_data(configs)[::-1]
    jobs = max(1, min(jobs, len(configs)))
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    workers: dict[Connection, _WorkerProcess] = {}
    free_numbers = list(range(jobs))  # of workers
    finished = _FinishedRecords(out)
    busy: list[SweepProgress] = []
    retry_busy = False
    try:
        while waiting or workers:
            while waiting and free_numbers:
                worker = _WorkerProcess(context, free_numbers.pop(0), jobs, cores, (out, allow_unlocked), waiting.pop())
                workers[worker.pipe] = worker
            for pipe in wait(list(workers)):
                worker = workers[pipe]  # type: ignore[index]
                try:
                    news: SweepProgress = worker.pipe.recv()
                except (EOFError, OSError):  # killed, or out of memory
                    worker.process.join()
                    reason = f"its process ended with code {worker.process.exitcode}"
                    yield SweepProgress(worker.config, "failed", reason=reason)
                    del workers[worker.pipe]
                    free_numbers.append(worker.number)
                    retry_busy = True
                    continue
                if news.kind == "busy":
                    busy.append(news)
                else:
                    yield finished.classify(news)
                if news.kind != "step":
                    retry_busy = retry_busy or news.kind in ("done", "failed")
                    if waiting and worker.send_run(waiting[-1]):
                        waiting.pop()
                    else:  # no run is left, or the worker has ended: another one replaces it
                        worker.stop()
                        del workers[worker.pipe]
                        free_numbers.append(worker.number)
            if busy and retry_busy and not waiting:
                waiting = [news.config for news in reversed(busy)]
                busy = []
                retry_busy = False
        yield from busy
    finally:
        for worker in workers.values():
            worker.interrupt()
        for worker in workers.values():
            worker.process.join(STOP_TIMEOUT_SECONDS)
            worker.process.kill()


def _group_by_data(configs: Sequence[RunConfig]) -> list[RunConfig]:
    """Sort runs so that runs on the same data follow each other, in the order of the plan."""
    position: dict[str, int] = {}
    return sorted(configs, key=lambda config: position.setdefault(get_data_key(config), len(position)))


def load_executor_factory(path: str) -> Callable[[], Any]:
    """Import the function that makes an executor.

    Args:
        path: The path ``module:factory``; modules in the working directory are found, too.

    Raises:
        ConfigError: The path is not valid, or its object cannot be called.
    """
    if not plugins.is_import_path(path):
        raise ConfigError(f"executor must be module:factory, such as dask_executor:connect, got '{path}'")
    factory: Callable[[], Any] = plugins.load_object("executor", path)
    if not callable(factory):
        raise ConfigError(f"executor '{path}' must be a function that returns an executor, got {safe_repr(factory)}")
    return factory


@contextmanager
def open_executor(path: str, factory: Callable[[], Any]) -> Iterator[Any]:
    """Make an executor, and close it at the end if it can be closed.

    Args:
        path: The path of the factory, for messages.
        factory: A function that returns an object with the method `submit` of concurrent.futures.Executor, or a context
            manager that returns one.

    Raises:
        ConfigError: The factory failed, or its result is not an executor.
    """
    made = plugins.call_function("executor", path, factory)
    with ExitStack() as stack:
        has_context = hasattr(made, "__enter__") and hasattr(made, "__exit__")
        executor = plugins.call_function("executor", path, stack.enter_context, made) if has_context else made
        if isinstance(executor, type) or not callable(getattr(executor, "submit", None)):
            raise ConfigError(
                f"executor '{path}' must return an object with the method submit, such as a "
                f"concurrent.futures.Executor, got {safe_repr(executor)}"
            )
        yield executor


def run_sweep_on_executor(
    configs: Sequence[RunConfig],
    out: Path,
    executor: Any,
    max_submitted: int | None = None,
    allow_unlocked: bool = False,
) -> Generator[SweepProgress, None, None]:
    """Run a sweep with an executor; yield the end of each run.

    If the executor starts a run again, for example after the end of its worker, the run continues from its checkpoint.
    A run that another process is executing is submitted again each time that a run of this sweep has ended. Closing the
    iterator cancels the runs that have not begun.

    Args:
        configs: The runs.
        out: The folder of the records, which all workers must have under the same path.
        executor: An object with `submit(function, *arguments)`, such as a concurrent.futures.Executor. The results of
            `submit` have `done`, `result` and `cancel`.
        max_submitted: The largest number of runs that are submitted at a time; by default all are.
        allow_unlocked: Continue on a file system without locks; no other process may run the same runs.
    """
    waiting = _group_by_data(configs)[::-1]
    pending: list[tuple[Any, RunConfig]] = []  # results of `submit`
    finished = _FinishedRecords(out)
    busy: list[SweepProgress] = []
    retry_busy = False
    n_submitted = 0
    try:
        while waiting or pending:
            while waiting and (max_submitted is None or len(pending) < max_submitted):
                config = waiting.pop()
                n_submitted += 1
                try:
                    future = executor.submit(
                        execute_run, config, out.absolute(), Path.cwd(), allow_unlocked, n_submitted
                    )
                except Exception as error:  # the executor has ended
                    yield _describe_failure(config, error)
                else:
                    pending.append((future, config))
            is_done = [future.done() for future, _ in pending]
            ended = list(itertools.compress(pending, is_done))
            pending = [item for item, done in zip(pending, is_done, strict=True) if not done]
            if pending and not ended:
                time.sleep(POLL_SECONDS)
            for future, config in ended:
                news = _get_report(future, config)
                if news.kind == "busy":
                    busy.append(news)
                else:
                    if news.kind == "done":
                        yield SweepProgress(config, "step")  # all of its time steps
                    yield finished.classify(news)
                    retry_busy = retry_busy or news.kind in ("done", "failed")
            if busy and retry_busy and not waiting:
                waiting = [news.config for news in reversed(busy)]
                busy = []
                retry_busy = False
        yield from busy
    finally:
        for future, _ in pending:
            with suppress(Exception):
                future.cancel()


def _get_report(future: Any, config: RunConfig) -> SweepProgress:
    """Return the report of a run that an executor has ended."""
    try:
        news = future.result()
    except Exception as error:  # its worker has ended, or the executor could not send or start the run
        return _describe_failure(config, error)
    if not isinstance(news, SweepProgress):
        reason = f"the executor returned {safe_repr(news)}, not the result of the function that it got"
        return SweepProgress(config, "failed", reason=to_one_line(reason))
    return news


def _describe_failure(config: RunConfig, error: Exception) -> SweepProgress:
    reason = str(error) if isinstance(error, FeddriftError) else f"{type(error).__name__}: {error}"
    return SweepProgress(config, "failed", reason=to_one_line(reason))


def execute_run(config: RunConfig, out: Path, cwd: Path, allow_unlocked: bool, number: int) -> SweepProgress:
    """Execute or continue a run in a worker of an executor, and return its last report.

    Args:
        config: The run.
        out: The folder of the records.
        cwd: The working directory of the sweep, which paths in the run refer to.
        allow_unlocked: Continue on a file system without locks.
        number: A number that differs in each call: Dask may return an earlier result if all arguments are the same.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share a GPU
    try:
        for folder in (cwd, out):
            if not folder.is_dir():
                raise DataError(
                    f"{folder} is not a folder on {socket.gethostname()}: all workers need the sweep's folders"
                )
        if Path.cwd() != cwd:
            os.chdir(cwd)
        return _run_config(config, _load_shared_stream(config), out, allow_unlocked, lambda _: None)
    except Exception as error:
        return _describe_failure(config, error)


_last_stream: tuple[str, Stream] | None = None  # of this process: the key of its data, and the stream


def _load_shared_stream(config: RunConfig) -> Stream:
    """Return the stream of a run; runs on the same data that follow each other in a process share one."""
    global _last_stream
    key = get_data_key(config)
    if _last_stream is not None and _last_stream[0] == key:
        return _last_stream[1]
    _last_stream = None  # free its memory before the next one is loaded
    stream = config.load_stream()
    _last_stream = key, stream
    return stream


class _FinishedRecords:
    """File stamps of the records that were finished before a sweep, to detect records that change later."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._finished_here: set[str] = set()
        self._before = {path.name: self._read_stamp(path) for path in out.glob("*.jsonl")}

    def classify(self, news: SweepProgress) -> SweepProgress:
        """Return the report; a skipped run gets the kind elsewhere if another process has finished it since."""
        if news.kind == "done":
            self._finished_here.add(news.record)
        if news.kind != "skipped" or news.record in self._finished_here:  # two configs are the same run
            return news
        stamp = self._read_stamp(self._out / news.record)
        return news if stamp == self._before.get(news.record) else replace(news, kind="elsewhere")

    @staticmethod
    def _read_stamp(path: Path) -> tuple[int, int]:
        """Return the modification time and the size of a file; zeros if it does not exist."""
        with suppress(OSError):
            return path.stat().st_mtime_ns, path.stat().st_size
        return 0, 0


def count_versions(out: Path, records: Iterable[str]) -> dict[str, int]:
    """Return the number of records that each version of feddrift has begun.

    Args:
        out: The folder of the records.
        records: The names of their files.
    """
    count: Counter[str] = Counter()
    for name in records:
        with suppress(OSError, ValueError, KeyError, TypeError), open(out / name, "rb") as file:
            count[str(json.loads(file.readline())["versions"]["feddrift"])] += 1
    return dict(sorted(count.items()))


class _WorkerProcess:
    """Process that executes one run after the other.

    Args:
        context: The context of multiprocessing.
        number: The number of the worker, from 0.
        jobs: The number of workers.
        cores: The cores that they share.
        target: The folder of the records, and whether runs may continue without locks.
        config: The first run.
    """

    def __init__(
        self, context: Any, number: int, jobs: int, cores: list[int], target: tuple[Path, bool], config: RunConfig
    ) -> None:
        self.number = number
        self.config = config
        self.pipe, worker_pipe = context.Pipe()
        own_cores = cores[number::jobs] if jobs <= len(cores) else cores
        self.process = context.Process(target=_run_worker, args=(worker_pipe, own_cores, *target), daemon=True)
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the worker until it starts
        try:
            self.process.start()
        finally:
            signal.signal(signal.SIGINT, handler)
        worker_pipe.close()
        self.send_run(config)

    def send_run(self, config: RunConfig) -> bool:
        """Send the worker its next run; return False if its process has ended."""
        try:
            self.pipe.send(config)
        except OSError:
            return False
        self.config = config
        return True

    def stop(self) -> None:
        """End the process, which is between two runs."""
        with suppress(OSError):
            self.pipe.send(None)
        self.process.join(STOP_TIMEOUT_SECONDS)
        self.process.kill()

    def interrupt(self) -> None:
        """Interrupt the run of the process, without waiting for its end."""
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGINT)


def _run_worker(pipe: Connection, cores: list[int], out: Path, allow_unlocked: bool) -> None:
    """Execute the runs that arrive through the pipe, and send reports about them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.disable(logging.WARNING)  # all runs would repeat the same warnings
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share a GPU
    if cores:
        os.sched_setaffinity(0, set(cores))
    try:
        while (config := pipe.recv()) is not None:
            try:
                pipe.send(_run_config(config, _load_shared_stream(config), out, allow_unlocked, pipe.send))
            except (BrokenPipeError, FeddriftError) as error:
                pipe.send(SweepProgress(config, "failed", reason=str(error)))
            except Exception as error:
                pipe.send(SweepProgress(config, "failed", reason=f"{type(error).__name__}: {error}"))
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        os._exit(130)  # the record is closed; compiled code may still run


def _run_config(
    config: RunConfig, stream: Stream, out: Path, allow_unlocked: bool, report: Callable[[SweepProgress], None]
) -> SweepProgress:
    """Execute or continue a run unless it is finished or busy; report its time steps, and return the last report."""
    recorded = RecordedRun(config, out, resume=True, stream=stream)
    news = SweepProgress(config, "skipped", record=recorded.path.name)
    if recorded.is_done():
        return news
    try:
        with lock_record(recorded.path, allow_unlocked) as part:
            if recorded.is_done():  # another sweep has finished it since
                return news
            changed = recorded.find_changed_code()
            recorded.resumes = not changed
            for _ in recorded.run_steps(part):
                report(SweepProgress(config, "step", share=1 / recorded.stream.n_steps))
    except BusyError:  # another sweep, or another config of this one, is running it
        return replace(news, kind="busy")
    recorded.checkpoints.clear()  # a sweep keeps only records
    return replace(news, kind="done", reason=f"{', '.join(changed)} has changed since" if changed else "")
