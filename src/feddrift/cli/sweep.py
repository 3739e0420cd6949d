"""`feddrift sweep`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from feddrift._internal.system import cores
from feddrift.cli import console
from feddrift.cli.console import can_be_stopped, say, tell
from feddrift.cli.run import duration, rehearsed
from feddrift.data import Stream
from feddrift.reports.labels import describe
from feddrift.runs import record, sweep
from feddrift.runs.config import RunConfig
from feddrift.runs.locks import check_locks
from feddrift.runs.recorded_run import RecordedRun
from feddrift.runs.writer import check_folder

REHEARSING = 60.0  # seconds that all rehearsals of a plan may take; one that has begun ends
DATA_DIR = RunConfig.model_fields["data_dir"].description


def sweep_(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.toml", help=r"tables \[\[runs]]: streams, algorithms, seeds, ...")
    ],
    out_dir: Annotated[Path, typer.Option("--out", help="the folder for the records")] = Path("runs"),
    jobs: Annotated[int | None, typer.Option(min=1, help="processes at a time; default: one per core")] = None,
    part: Annotated[
        str | None, typer.Option(metavar="K/N", help="only the K-th of N parts of the runs, for one of N machines")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help=DATA_DIR)] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help=console.NO_CACHE)] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="only say what is left to do, and how long it takes")
    ] = False,
) -> None:
    """Run a grid of runs in parallel; those that are finished in the folder are skipped.

    Several at once, also on several machines, share the runs where they share the folder.

    Example: feddrift sweep experiments/tables-small.toml --out runs/tables
    """
    can_be_stopped()
    console.keep_nothing(no_cache)
    plan = sweep.read_grid(file, data_dir)
    configs = plan if part is None else sweep.part_of(plan, part)
    if not dry_run:
        check_folder(out_dir)
        if part is None:
            check_locks(out_dir)
    say(f"{file}: {len(plan)} runs" + ("" if part is None else f", {len(configs)} of them in part {part}"))
    if dry_run:
        console.out.print(_plan(configs, out_dir, jobs or cores()))
        return
    ended = dict.fromkeys(("done", "skipped", "elsewhere", "busy", "failed"), 0)
    records: set[str] = set()
    failures: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    news = sweep.sweep(configs, out_dir, jobs or cores(), alone=part is not None)
    with (
        Progress(*columns, console=console.out, transient=True, disable=not console.out.is_terminal) as progress,
        closing(news),
    ):
        task = progress.add_task("runs", total=len(configs))
        for item in news:
            if item.kind == "step":
                progress.advance(task, item.share)
                continue
            ended[item.kind] += 1
            records.add(item.record)
            if item.kind in ("skipped", "elsewhere", "busy"):  # says nothing about the speed of the others
                not_here = ended["skipped"] + ended["elsewhere"] + ended["busy"]
                progress.update(task, total=len(configs) - not_here)
                continue
            method = f"{item.config.algorithm} {describe(item.config.settings)}".strip()
            what = f"{item.config.stream} {method} seed {item.config.seed}"
            if item.kind == "failed":
                failures.append(f"{what}: {item.reason}")
            why = " failed" if item.kind == "failed" else f", again: {item.reason}" if item.reason else ""
            say(f"[{sum(ended.values())}/{len(configs)}] {what}{why}")
    shared = f" here, {ended['elsewhere']} elsewhere, {ended['busy']} still running elsewhere"
    done = f"{ended['done']} done{shared if ended['elsewhere'] or ended['busy'] else ''}"
    say(f"{done}, {ended['skipped']} were finished before, {ended['failed']} failed; in {out_dir}")
    if ended["busy"]:
        tell("should what runs elsewhere die, start this again: it goes on where that one was")
    if len(made_by := sweep.versions(out_dir, records)) > 1:
        several = ", ".join(f"{version} ({n})" for version, n in made_by.items())
        tell(f"these records are of several versions of feddrift: {several}")
    for failure in failures:
        tell(f"failed: {failure}")
    if failures:
        raise typer.Exit(1)


def _plan(configs: Sequence[RunConfig], out: Path, jobs: int) -> Table:
    """What is left to do on each stream: a run takes as long as the finished ones of its algorithm there took on
    average, else as a rehearsal says, and where rehearsals have taken too long, as long as the others on average."""
    table = Table("stream", "runs", "finished", "left", "time of these", box=None)
    known, total, longest, rehearsing, guessed = list[float](), 0.0, 0.0, 0.0, 0
    for name in dict.fromkeys(config.stream for config in configs):
        took: dict[tuple[str, str], list[float]] = {}
        left: dict[tuple[str, str], list[RunConfig]] = {}
        of_stream = sorted((config for config in configs if config.stream == name), key=sweep.data_of)
        for _, same_data in groupby(of_stream, sweep.data_of):
            stream: Stream | None = None  # made once for all of them
            for config in same_data:
                stream = config.load() if stream is None else stream
                run, method = RecordedRun(config, out, stream=stream), (config.algorithm, describe(config.settings))
                if run.is_done():
                    took.setdefault(method, []).append(record.read(run.path).seconds or 0.0)
                else:
                    left.setdefault(method, []).append(config)
        seconds = 0.0
        for method, runs in left.items():
            begin = time.monotonic()
            if method in took:
                each = fmean(took[method])
            elif not known or rehearsing < REHEARSING:
                each = rehearsed(runs[0], runs[0].load()).seconds
                rehearsing += time.monotonic() - begin
            else:
                each, guessed = fmean(known), guessed + len(runs)
            known.append(each)
            seconds, longest = seconds + len(runs) * each, max(longest, each)
        n_left = sum(map(len, left.values()))
        table.add_row(escape(name), str(len(of_stream)), str(len(of_stream) - n_left), str(n_left), duration(seconds))
        total += seconds
    table.caption = f"about {duration(max(longest, total / jobs))} with {jobs} processes at a time"
    if guessed:
        table.caption += f"; {guessed} runs were not rehearsed and are taken for average ones"
    return table
