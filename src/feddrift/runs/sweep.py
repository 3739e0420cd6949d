"""A grid of runs from a file, in parallel processes: what is finished is skipped, what fails is told at the end.

Several sweeps, also on several machines, share the work where they share a folder: who begins a run locks its record.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import signal
import tomllib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from feddrift import algorithms, streams
from feddrift.errors import BusyError, ConfigError, DataError, FeddriftError, nearest, safe_repr, unknown
from feddrift.runs.config import RunConfig, parse_seeds
from feddrift.runs.recorded_run import RecordedRun
from feddrift.runs.writer import held

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from feddrift.data import Stream

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


def part_of(configs: Sequence[RunConfig], part: str) -> list[RunConfig]:
    """Every N-th run of a plan, from the K-th on: what `K/N` of it is.

    >>> [config.seed for config in part_of([RunConfig(stream="sine-2", seed=s) for s in range(7)], "2/3")]
    [1, 4]
    """
    k, n = (int(word) if word.isdecimal() and len(word) < 10 else 0 for word in (part.partition("/")[::2]))
    if not 1 <= k <= n:
        raise ConfigError(f"a part is K/N with K from 1 to N, such as 3/20, got '{part}'")
    return list(configs[k - 1 :: n])


def data_of(config: RunConfig) -> str:
    """What all runs on the same data have in common."""
    return repr(config.model_copy(update={"algorithm": "", "settings": {}}))


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
            hint = nearest(key, {name for legal in knows.values() for name in legal})
            raise ConfigError(f"none of {', '.join(knows)} has a setting {key!r}{hint}")
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
    """News of one run; skipped: it was finished before, elsewhere: since, by others, busy: others are at work on it."""

    config: RunConfig
    kind: Literal["skipped", "elsewhere", "busy", "step", "done", "failed"]
    share: float = 1.0  # of the run, that a time step is
    reason: str = ""  # of a failure, or of doing again what was finished
    record: str = ""  # the name of its file


def sweep(configs: Sequence[RunConfig], out: Path, jobs: int, alone: bool = False) -> Generator[Progress, None, None]:
    """Run them in so many processes; yields each time step done and how each run ended.

    What another sweep has in hand is looked at again at the end, whenever a run here has ended: if it has died, this
    one goes on with its run. Who is `alone` with these runs needs no locks. Closing the iterator stops the runs; what
    they have done of a record stays, unfinished.
    """
    import multiprocessing
    from multiprocessing.connection import wait

    place: dict[str, int] = {}  # of data, in the order of the plan
    in_turn = sorted(configs, key=lambda config: place.setdefault(data_of(config), len(place)))  # data are read once
    waiting, jobs = in_turn[::-1], max(1, min(jobs, len(configs)))
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    workers: dict[Connection, _Worker] = {}
    free = list(range(jobs))
    seen, busy, look_again = _Seen(out), list[Progress](), False
    try:
        while waiting or workers:
            while waiting and free:
                worker = _Worker(context, free.pop(0), jobs, cores, (out, alone), waiting.pop())
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
                    look_again = True
                    continue
                if news.kind == "busy":
                    busy.append(news)
                else:
                    yield seen.told(news)
                if news.kind != "step":
                    look_again = look_again or news.kind in ("done", "failed")
                    if waiting and worker.give(waiting[-1]):
                        waiting.pop()
                    else:  # nothing left, or the worker is gone and another takes its place
                        worker.stop()
                        del workers[worker.pipe]
                        free.append(worker.number)
            if busy and look_again and not waiting:
                waiting, busy, look_again = [news.config for news in reversed(busy)], [], False
        yield from busy
    finally:
        for worker in workers.values():
            worker.interrupt()
        for worker in workers.values():
            worker.process.join(PATIENCE)
            worker.process.kill()


class _Seen:
    """Which records were finished before a sweep: those whose files are still what they were."""

    def __init__(self, out: Path) -> None:
        self._out, self._here = out, set[str]()
        self._before = {path.name: self._stamp(path) for path in out.glob("*.jsonl")}

    def told(self, news: Progress) -> Progress:
        """The news, where it is of a finished run with who finished it."""
        if news.kind == "done":
            self._here.add(news.record)
        if news.kind != "skipped" or news.record in self._here:  # the same run in other words
            return news
        stamp = self._stamp(self._out / news.record)
        return news if stamp == self._before.get(news.record) else replace(news, kind="elsewhere")

    @staticmethod
    def _stamp(path: Path) -> tuple[int, int]:
        with suppress(OSError):
            return path.stat().st_mtime_ns, path.stat().st_size
        return 0, 0


def versions(out: Path, records: Iterable[str]) -> dict[str, int]:
    """By version of feddrift: how many of these records were begun with it."""
    count: Counter[str] = Counter()
    for name in records:
        with suppress(OSError, ValueError, KeyError, TypeError), open(out / name, "rb") as file:
            count[str(json.loads(file.readline())["versions"]["feddrift"])] += 1
    return dict(sorted(count.items()))


class _Worker:
    """A process that does one run after the other."""

    def __init__(
        self, context: Any, number: int, jobs: int, cores: list[int], where: tuple[Path, bool], config: RunConfig
    ) -> None:
        self.number, self.config = number, config
        self.pipe, far_end = context.Pipe()
        share = cores[number::jobs] if jobs <= len(cores) else cores
        self.process = context.Process(target=_work, args=(far_end, share, *where), daemon=True)
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


def _work(pipe: Connection, cores: list[int], out: Path, alone: bool) -> None:
    """Do what comes through the pipe, telling how it goes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.disable(logging.WARNING)  # a thousand runs would say the same thing a thousand times
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share a GPU
    if cores:
        os.sched_setaffinity(0, set(cores))
    data, stream = "", None
    try:
        while (config := pipe.recv()) is not None:
            try:
                if stream is None or data != data_of(config):
                    stream = None  # before the next one takes its memory
                    data, stream = data_of(config), config.load()
                pipe.send(_one(config, stream, out, alone, pipe))
            except (BrokenPipeError, FeddriftError) as error:
                pipe.send(Progress(config, "failed", reason=str(error)))
            except Exception as error:
                pipe.send(Progress(config, "failed", reason=f"{type(error).__name__}: {error}"))
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        os._exit(130)  # the record is closed; compiled code may still run


def _one(config: RunConfig, stream: Stream, out: Path, alone: bool, pipe: Connection) -> Progress:
    recorded = RecordedRun(config, out, resume=True, stream=stream)
    news = Progress(config, "skipped", record=recorded.path.name)
    if recorded.is_done():
        return news
    try:
        with held(recorded.path, alone) as part:
            if recorded.is_done():  # by another sweep, since
                return news
            changed = recorded.changed_since()
            recorded.resumes = not changed
            for _ in recorded.steps(part):
                pipe.send(Progress(config, "step", share=1 / recorded.stream.n_steps))
    except BusyError:  # in another sweep, or the same run under other words in this one
        return replace(news, kind="busy")
    recorded.checkpoints.clear()  # a sweep is run for its records
    return replace(news, kind="done", reason=f"{', '.join(changed)} has changed since" if changed else "")
