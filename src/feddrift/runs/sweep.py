"""A grid of runs from a file, in parallel processes: what is finished is skipped, what fails is told at the end."""

from __future__ import annotations

import itertools
import logging
import math
import os
import signal
import tomllib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from feddrift import algorithms, streams
from feddrift.errors import BusyError, ConfigError, DataError, FeddriftError, safe_repr, unknown
from feddrift.runs import record
from feddrift.runs.config import RunConfig, parse_seeds
from feddrift.runs.recorded import RecordedRun

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

NAMES = ("stream", "algorithm")
LISTS = tuple(name for name in RunConfig.model_fields if name not in ("seed", "settings"))  # values to combine
KEYS = {  # all that a table may say, and what it means
    name: field.description or "" for name, field in RunConfig.model_fields.items() if name != "seed"
} | {"seeds": f'{RunConfig.model_fields["seed"].description}: 3, [0, 2], or "0-4"'}
MAX_RUNS = 100_000
PATIENCE = 20.0  # seconds that a stopped run has to close its record


def read_grid(path: Path, data_dir: Path | None = None) -> list[RunConfig]:
    """All runs of a TOML file, in its order; of the same lines only one.

    Each table ``[[runs]]`` is a grid: every combination of its streams, algorithms, seeds, run options and settings,
    all that a run takes. A setting goes to those of its algorithms that know it. A `data_dir` that is given wins.
    """
    try:
        grids = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # not text, not TOML, or a number or list beyond Python
        raise DataError(f"{path} cannot be read as TOML: {getattr(error, 'strerror', None) or error}") from None
    tables = grids.pop("runs", None)
    if grids or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables) or not tables:
        raise ConfigError(f"{path}: a sweep is one or more tables [[runs]], got {sorted(grids) or 'none'}")
    configs: dict[str, RunConfig] = {}
    for number, table in enumerate(tables, start=1):
        try:
            for config in _combinations(table, data_dir):
                configs.setdefault(config.model_dump_json(), config)
        except FeddriftError as error:
            raise ConfigError(f"{path}, runs {number}: {error}") from None
    return list(configs.values())


def _combinations(table: Mapping[str, Any], data_dir: Path | None) -> Iterator[RunConfig]:
    if extra := sorted(set(table) - set(KEYS)):
        raise unknown("key", extra[0], KEYS)
    table = {"algorithm": algorithms.RECOMMENDED, **table}
    if data_dir is not None:
        table = {**table, "data_dir": str(data_dir)}
    if "stream" not in table:
        raise ConfigError("stream is missing")
    settings = table.get("settings", {})
    if not isinstance(settings, dict):
        raise ConfigError(f"settings must be a table such as {{delta = 0.1}}, got {safe_repr(settings)}")
    options = {name: _listed(name, table[name]) for name in LISTS if name in table}
    knows = {name: algorithms.options(algorithms.entry(name).cls) for name in options["algorithm"]}
    for key in settings:
        if not any(key in legal for legal in knows.values()):
            raise ConfigError(f"none of {', '.join(knows)} has a setting {key!r}")
    for name in options["stream"]:
        streams.check(name)
    listed = _listed("seeds", table.get("seeds", 0))
    seeds = parse_seeds(",".join(item if isinstance(item, str) else safe_repr(item) for item in listed))
    lengths = [len(_listed(key, value)) for key, value in settings.items()]
    if (n := math.prod([*map(len, options.values()), *lengths, len(seeds)])) > MAX_RUNS:
        raise ConfigError(f"a grid is at most {MAX_RUNS} runs, got {n}")
    for chosen in itertools.product(*options.values()):
        values = dict(zip(options, chosen, strict=True))
        own = {key: _listed(key, value) for key, value in settings.items() if key in knows[values["algorithm"]]}
        for picked in itertools.product(*own.values()):
            picked_settings = dict(zip(own, picked, strict=True))
            algorithms.algorithm(values["algorithm"], **picked_settings)  # a bad value shows now
            for seed in seeds:
                yield RunConfig.checked(**values, settings=picked_settings, seed=seed)


def _listed(name: str, value: Any) -> list[Any]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ConfigError(f"{name} must have at least one value, got none")
    for item in values:
        if name in NAMES and not isinstance(item, str):
            raise ConfigError(f"{name} must be a name, or several, got {safe_repr(item)}")
    return values


@dataclass(frozen=True)
class Progress:
    """News of one run."""

    config: RunConfig
    kind: Literal["skipped", "step", "done", "failed"]
    share: float = 1.0  # of the run, that a time step is
    reason: str = ""  # of a failure, or of doing again what was finished


def sweep(configs: Sequence[RunConfig], out: Path, jobs: int) -> Generator[Progress, None, None]:
    """Run them in so many processes; yields each time step done and how each run ended.

    Closing the iterator stops the runs; what they have done of a record stays, unfinished.
    """
    import multiprocessing
    from multiprocessing.connection import wait

    waiting, jobs = list(configs)[::-1], max(1, min(jobs, len(configs)))
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    workers: dict[Connection, _Worker] = {}
    free = list(range(jobs))
    try:
        while waiting or workers:
            while waiting and free:
                worker = _Worker(context, free.pop(0), jobs, cores, out, waiting.pop())
                workers[worker.pipe] = worker
            for pipe in wait(list(workers)):
                worker = workers[pipe]  # type: ignore[index]
                try:
                    news: Progress = worker.pipe.recv()
                except (EOFError, OSError):  # killed, or out of memory
                    worker.process.join()
                    reason = f"its process ended with code {worker.process.exitcode}"
                    yield Progress(worker.config, "failed", reason=reason)
                    del workers[worker.pipe]
                    free.append(worker.number)
                    continue
                yield news
                if news.kind != "step":
                    if waiting and worker.give(waiting[-1]):
                        waiting.pop()
                    else:  # nothing left, or the worker is gone and another takes its place
                        worker.stop()
                        del workers[worker.pipe]
                        free.append(worker.number)
    finally:
        for worker in workers.values():
            worker.interrupt()
        for worker in workers.values():
            worker.process.join(PATIENCE)
            worker.process.kill()


class _Worker:
    """A process that does one run after the other."""

    def __init__(self, context: Any, number: int, jobs: int, cores: list[int], out: Path, config: RunConfig) -> None:
        self.number, self.config = number, config
        self.pipe, far_end = context.Pipe()
        share = cores[number::jobs] if jobs <= len(cores) else cores
        self.process = context.Process(target=_work, args=(far_end, share, out), daemon=True)
        heard = signal.signal(signal.SIGINT, signal.SIG_IGN)  # until it is ready to close a record
        try:
            self.process.start()
        finally:
            signal.signal(signal.SIGINT, heard)
        far_end.close()
        self.give(config)

    def give(self, config: RunConfig) -> bool:
        """Send the worker its next run; False where its process is gone."""
        try:
            self.pipe.send(config)
        except OSError:
            return False
        self.config = config
        return True

    def stop(self) -> None:
        with suppress(OSError):
            self.pipe.send(None)
        self.process.join(PATIENCE)
        self.process.kill()

    def interrupt(self) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGINT)


def _work(pipe: Connection, cores: list[int], out: Path) -> None:
    """Do what comes through the pipe, telling how it goes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.disable(logging.WARNING)  # a thousand runs would say the same thing a thousand times
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share a GPU
    if cores:
        os.sched_setaffinity(0, set(cores))
    try:
        while (config := pipe.recv()) is not None:
            try:
                pipe.send(_one(config, out, pipe))
            except (BrokenPipeError, FeddriftError) as error:
                pipe.send(Progress(config, "failed", reason=str(error)))
            except Exception as error:
                pipe.send(Progress(config, "failed", reason=f"{type(error).__name__}: {error}"))
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        os._exit(130)  # the record is closed; compiled code may still run


def _one(config: RunConfig, out: Path, pipe: Connection) -> Progress:
    recorded = RecordedRun(config, out, resume=True)
    if changed := recorded.changed_since():
        recorded = RecordedRun(config, out)  # from its beginning
    elif record.is_complete(recorded.path):
        return Progress(config, "skipped")
    try:
        for _ in recorded:
            pipe.send(Progress(config, "step", share=1 / recorded.stream.n_steps))
    except BusyError:  # the same run under other words, in this sweep or another
        return Progress(config, "skipped")
    recorded.checkpoints.clear()  # a sweep is run for its records
    return Progress(config, "done", reason=f"{', '.join(changed)} has changed since" if changed else "")
