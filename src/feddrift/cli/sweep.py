"""`feddrift sweep`: a grid of runs in parallel."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from feddrift._internal.system import count_cores
from feddrift.cli import console
from feddrift.cli.console import handle_stop_signals, print_line, print_to_stderr
from feddrift.cli.run import format_duration, rehearse_run
from feddrift.data import Stream
from feddrift.reports.labels import format_settings
from feddrift.runs import record, sweep
from feddrift.runs.config import RunConfig
from feddrift.runs.locks import check_locks
from feddrift.runs.recorded_run import RecordedRun
from feddrift.runs.writer import prepare_folder

MAX_REHEARSAL_SECONDS = 60.0  # no rehearsal of a plan starts after this time
DATA_DIR = RunConfig.model_fields["data_dir"].description


def sweep_runs(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.toml", help=r"tables \[\[runs]]: streams, algorithms, seeds, ...")
    ],
    out_dir: Annotated[Path, typer.Option("--out", help="the folder for the records")] = Path("runs"),
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="number of processes; default: one per core; with --executor: runs submitted at a time"
        ),
    ] = None,
    executor: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="a function that returns a concurrent.futures.Executor, which executes the runs",
        ),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(metavar="K/N", help="execute only part K of N of the runs, for one of N machines"),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help=DATA_DIR)] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help=console.NO_CACHE_HELP)] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="only list the runs that are left, and estimate their time")
    ] = False,
) -> None:
    """Execute a grid of runs in parallel; runs with a complete record in the folder are skipped.

    Several sweeps with the same folder, also on several machines, share the runs.

    Example: feddrift sweep experiments/tables-small.toml --out runs/tables
    """
    handle_stop_signals()
    console.disable_caches(no_cache)
    plan = sweep.read_grid(file, data_dir)
    factory = None if executor is None else sweep.load_executor_factory(executor)
    configs = plan if part is None else sweep.select_part(plan, part)
    if not dry_run:
        prepare_folder(out_dir)
        if part is None:
            check_locks(out_dir)
    print_line(f"{file}: {len(plan)} runs" + ("" if part is None else f", {len(configs)} of them in part {part}"))
    if dry_run:
        console.out.print(_build_plan_table(configs, out_dir, jobs or count_cores()))
        return
    counts = dict.fromkeys(("done", "skipped", "elsewhere", "busy", "failed"), 0)
    records: set[str] = set()
    failures: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with ExitStack() as stack:
        allow_unlocked = part is not None
        if factory is None or executor is None:
            news = sweep.run_sweep(configs, out_dir, jobs or count_cores(), allow_unlocked)
        else:
            opened = stack.enter_context(sweep.open_executor(executor, factory))
            news = sweep.run_sweep_on_executor(configs, out_dir, opened, jobs, allow_unlocked)
        bars = Progress(*columns, console=console.out, transient=True, disable=not console.out.is_terminal)
        progress = stack.enter_context(bars)
        stack.enter_context(closing(news))
        task = progress.add_task("runs", total=len(configs))
        for item in news:
            if item.kind == "step":
                progress.advance(task, item.share)
                continue
            counts[item.kind] += 1
            records.add(item.record)
            if item.kind in (
                "skipped",
                "elsewhere",
                "busy",
            ):  # they took no time here
                n_not_here = counts["skipped"] + counts["elsewhere"] + counts["busy"]
                progress.update(task, total=len(configs) - n_not_here)
                continue
            method = f"{item.config.algorithm} {format_settings(item.config.settings)}".strip()
            name = f"{item.config.stream} {method} seed {item.config.seed}"
            if item.kind == "failed":
                failures.append(f"{name}: {item.reason}")
            note = " failed" if item.kind == "failed" else f", again: {item.reason}" if item.reason else ""
            print_line(f"[{sum(counts.values())}/{len(configs)}] {name}{note}")
    elsewhere = f" here, {counts['elsewhere']} elsewhere, {counts['busy']} still running elsewhere"
    done = f"{counts['done']} done{elsewhere if counts['elsewhere'] or counts['busy'] else ''}"
    print_line(f"{done}, {counts['skipped']} were finished before, {counts['failed']} failed; in {out_dir}")
    if counts["busy"]:
        print_to_stderr("if a process elsewhere dies, start this command again: it continues the runs of that process")
    versions = sweep.count_versions(out_dir, records)
    if len(versions) > 1:
        listed = ", ".join(f"{version} ({n})" for version, n in versions.items())
        print_to_stderr(f"these records were written by several versions of feddrift: {listed}")
    for failure in failures:
        print_to_stderr(f"failed: {failure}")
    if failures:
        raise typer.Exit(1)


def _build_plan_table(configs: Sequence[RunConfig], out: Path, jobs: int) -> Table:
    """Return a table with the runs that are left on each stream, and their expected time.

    The time of a run is the mean time of the finished runs of its method and stream. Without finished runs, a rehearsal
    estimates it. After MAX_REHEARSAL_SECONDS of rehearsals, it is the mean time of the other methods.
    """
    table = Table("stream", "runs", "finished", "left", "time of these", box=None)
    estimates: list[float] = []  # seconds per run, of each method on each stream
    total = 0.0
    longest = 0.0
    rehearsal_seconds = 0.0
    n_guessed = 0
    for name in dict.fromkeys(config.stream for config in configs):
        seconds_taken: dict[tuple[str, str], list[float]] = {}
        left: dict[tuple[str, str], list[RunConfig]] = {}
        configs_of_stream = sorted((config for config in configs if config.stream == name), key=sweep.get_data_key)
        for _, same_data in groupby(configs_of_stream, sweep.get_data_key):
            stream: Stream | None = None  # loaded once for all of them
            for config in same_data:
                stream = config.load_stream() if stream is None else stream
                run = RecordedRun(config, out, stream=stream)
                method = (config.algorithm, format_settings(config.settings))
                if run.is_done():
                    seconds_taken.setdefault(method, []).append(record.read(run.path).seconds or 0.0)
                else:
                    left.setdefault(method, []).append(config)
        seconds = 0.0
        for method, runs in left.items():
            begin = time.monotonic()
            if method in seconds_taken:
                estimate = fmean(seconds_taken[method])
            elif not estimates or rehearsal_seconds < MAX_REHEARSAL_SECONDS:
                estimate = rehearse_run(runs[0], runs[0].load_stream()).seconds
                rehearsal_seconds += time.monotonic() - begin
            else:
                estimate = fmean(estimates)
                n_guessed += len(runs)
            estimates.append(estimate)
            seconds += len(runs) * estimate
            longest = max(longest, estimate)
        n_left = sum(map(len, left.values()))
        n_runs = len(configs_of_stream)
        table.add_row(escape(name), str(n_runs), str(n_runs - n_left), str(n_left), format_duration(seconds))
        total += seconds
    table.caption = f"about {format_duration(max(longest, total / jobs))} with {jobs} processes at a time"
    if n_guessed:
        table.caption += f"; {n_guessed} runs were not rehearsed and count with the mean time"
    return table
