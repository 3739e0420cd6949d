"""The command line: list, run, resume, sweep, report, plot."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import click
import numpy as np
import typer
from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from feddrift import (
    __version__,
    algorithms,
    engines,
    metrics,
    page,
    paper,
    plugins,
    record,
    report,
    streams,
    sweep,
    tables,
)
from feddrift.background import busy, cores
from feddrift.config import RunConfig, parse_seeds
from feddrift.deploy.commands import deploy
from feddrift.errors import ConfigError, DataError, FeddriftError, one_line
from feddrift.estimate import estimate
from feddrift.export import export
from feddrift.live import Board, told
from feddrift.recorded import RecordedRun, reopened, states, stopped
from feddrift.types import Ints, Stream

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Federated learning when the data of different clients drift at different times.",
)
app.add_typer(deploy, name="deploy")

out = Console()
if not out.is_terminal and "COLUMNS" not in os.environ:
    out = Console(width=160)  # a pipe or a file has no edge
err = Console(stderr=True)


def _describe(name: str) -> str:
    return RunConfig.model_fields[name].description or ""


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"feddrift {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print it")] = False,
) -> None:
    pass


@app.command("list")
def list_(as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False) -> None:
    """Show the algorithms, streams and engines there are, one line each."""
    catalogue = {
        "algorithms": {name: entry.summary for name, entry in algorithms.ALGORITHMS.items()},
        "streams": {name: entry.summary for name, entry in streams.STREAMS.items()},
        "engines": {name: summary for name, (_, summary) in engines.ENGINES.items()},
    }
    for kind in ("algorithm", "stream"):
        catalogue[f"{kind}s"] |= {name: f"installed: {path}" for name, path in plugins.installed(kind).items()}
    if as_json:
        named = {k: [{"name": n, "summary": s} for n, s in v.items()] for k, v in catalogue.items()}
        print(json.dumps(named, indent=2))
        return
    catalogue["patterns"] = {
        "Y, F": "the paper's drifts with 2 and with 4 concepts",
        "R0 .. R4": "the paper's random drifts",
        "FILE": "whole numbers: a row per time step, a column per client; the last row only tests",
        "random:every=2,concepts=4": "each client draws a concept every 2 steps, by seed; also clients=, steps=, seed=",
    }
    catalogue["streams"]["folder:DIR"] = "your own data: DIR/client_<name>/step_<t>.csv (or .npz with x, y)"
    catalogue["algorithms"]["package.module:Name"] = "your own: a class with init(fed) and step(state, fed)"
    catalogue["streams"]["package.module:make"] = "your own: a function that makes a Stream; also for --net"
    for kind, entries in catalogue.items():
        table = Table(title=kind, title_justify="left", title_style="bold", box=None, show_header=False)
        for name, summary in entries.items():
            table.add_row(f"[cyan]{name}[/]", summary)
        out.print(table, "")
    table = Table(
        title="settings (--set), with their defaults off the paper's streams",
        title_justify="left",
        title_style="bold",
        box=None,
        show_header=False,
    )
    for cls in dict.fromkeys(entry.cls for entry in algorithms.ALGORITHMS.values()):
        names = [name for name, entry in algorithms.ALGORITHMS.items() if entry.cls is cls]
        for k, (setting, field) in enumerate(algorithms.options(cls).items()):
            default = "none" if field.default is None else field.default
            text = f"{field.metadata['help']} [dim]({default})[/]"
            table.add_row(", ".join(names) if k == 0 else "", f"[cyan]{setting}[/]", text)
    out.print(table)


def _streams(typed: str) -> list[str]:
    """For shells that complete names."""
    return [name for name in (*streams.STREAMS, "folder:") if name.startswith(typed)]


def _algorithms(typed: str) -> list[str]:
    return [name for name in algorithms.ALGORITHMS if name.startswith(typed)]


@app.command("run")
def run_(
    stream: Annotated[str, typer.Option(help=_describe("stream"), autocompletion=_streams)],
    algorithm: Annotated[
        list[str],
        typer.Option(help=_describe("algorithm") + "; repeat it to compare several", autocompletion=_algorithms),
    ],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_describe("settings"))] = None,
    seed: Annotated[int | None, typer.Option(help=_describe("seed") + " (default 0)")] = None,
    seeds: Annotated[str | None, typer.Option(help="several seeds: 0-4, or 0,2,5")] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="the folder for the records")] = Path("runs"),
    data_dir: Annotated[Path | None, typer.Option(help=_describe("data_dir"))] = None,
    rounds: Annotated[int | None, typer.Option(help=_describe("rounds"))] = None,
    steps: Annotated[int | None, typer.Option(help=_describe("steps"))] = None,
    batch: Annotated[int | None, typer.Option(help=_describe("batch"))] = None,
    lr: Annotated[float | None, typer.Option(help=_describe("lr"))] = None,
    pattern: Annotated[str | None, typer.Option(help=_describe("pattern"))] = None,
    average: Annotated[str | None, typer.Option(help=_describe("average"))] = None,
    participation: Annotated[float, typer.Option(help=_describe("participation"))] = 1.0,
    dropout: Annotated[float, typer.Option(help=_describe("dropout"))] = 0.0,
    trace: Annotated[Path | None, typer.Option(help=_describe("trace"))] = None,
    poison: Annotated[str | None, typer.Option(help=_describe("poison"))] = None,
    engine: Annotated[str, typer.Option(help=_describe("engine"))] = "simulator",
    label: Annotated[str, typer.Option(help=_describe("label"))] = "label",
    weights: Annotated[Path | None, typer.Option(help=_describe("weights"))] = None,
    net: Annotated[str | None, typer.Option(help=_describe("net"))] = None,
    checkpoint_every: Annotated[
        int, typer.Option(min=0, help="also save inside a time step, after every so many rounds; 0: between them only")
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what it would cost: work, memory, time")] = False,
) -> None:
    """Run algorithms on a stream: train on each time step, test on the next, record all.

    Example: feddrift run --stream sine-2 --algorithm FedDrift --set delta=0.1 --seeds 0-4
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a run closes its record when it is stopped
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if seed is not None and seeds is not None:
        raise ConfigError("give either --seed or --seeds, not both")
    names, settings = list(dict.fromkeys(algorithm)), _settings(set_ or [])
    configs = [
        RunConfig.checked(
            stream=stream, algorithm=name, settings=_settings_of(name, names, settings), seed=s, rounds=rounds,
            steps=steps, batch=batch, lr=lr, average=average, participation=participation, dropout=dropout, trace=trace,
            poison=poison, pattern=pattern, engine=engine, data_dir=data_dir, label=label, weights=weights, net=net,
        )
        for name in names
        for s in (parse_seeds(seeds) if seeds is not None else [seed or 0])
    ]  # fmt: skip
    first = configs[0].load()
    for config in configs:
        config.resolve(first)  # a wrong name or setting shows now, not after the first hour
        config.conditions(first)
    configs[0].find_net(first)
    _say(
        f"{stream}: {first.n_clients} clients, {first.n_steps} time steps + 1 to test, "
        f"{int(np.prod(first.x.shape[1:]))} features, {first.n_classes} classes"
    )
    if dry_run:
        out.print(_costs(first, configs))
        return
    _follow((RecordedRun(config, out_dir, every=checkpoint_every) for config in configs), len(configs))
    _say(f"records in {out_dir}")


@app.command("resume")
def resume_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder of records")] = Path("runs"),
) -> None:
    """Go on with the runs below a folder that were stopped or killed, as if nothing had happened.

    Example: feddrift resume runs
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found = stopped(folder)
    if not found and not states(folder):
        raise DataError(f"no run below {folder} has checkpoints to go on from")
    if not found:
        _say(f"nothing to resume in {folder}: no run there was stopped before its end")
        return
    failed = 0
    for state in found:  # what is wrong with one is no reason to leave the others
        try:
            _follow([reopened(state)], 1)
        except FeddriftError as error:
            _fail(f"{state.stem}: {error}")
            failed += 1
        except Exception as error:
            _fail(f"{state.stem}: {type(error).__name__}: {error}")
            failed += 1
    if failed:
        raise typer.Exit(1)


def _follow(runs: Iterable[RecordedRun], n: int) -> None:
    """Run so many one after the other, telling each time step."""
    paths = []
    board = Board(n)
    try:
        with Live(board, console=out) if out.is_terminal else nullcontext():  # a pipe has lines instead
            for recorded in runs:
                what = f"{recorded.config.algorithm} seed {recorded.config.seed}"
                board.begin(what, recorded.stream.n_steps)
                if not out.is_terminal:
                    out.print(f"[bold]{escape(what)}[/]", highlight=False)
                before: Ints | None = None
                for step in recorded:
                    line = told(step, recorded.before if before is None else before, recorded.stream.clients)
                    board.step(step, line)
                    if not out.is_terminal:
                        _say(line)
                    before = step.model
                paths.append(recorded.path)
    except KeyboardInterrupt:
        if board.runs:
            rest = n - len(board.runs)
            _tell(
                f"`feddrift resume {shlex.quote(str(recorded.out))}` goes on with {what}"
                + (f"; {rest} more of this command had not begun" if rest else "")
            )
        raise
    out.print(tables.table(report.summarise([record.read(path) for path in paths])))


@app.command("export")
def export_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder of records, or one record")] = Path("runs"),
    to: Annotated[Path, typer.Option("--out", help="the folder for the models")] = Path("models"),
) -> None:
    """Write the current models of a run, who uses which, and their lineage, to predict with.

    Example: feddrift export runs --out models
    """
    found = states(folder)
    if not found:
        raise DataError(f"no run below {folder} has checkpoints: a sweep keeps none of a finished run")
    for state in found:
        target = to if len(found) == 1 else to / state.stem
        steps = export(reopened(state), target)
        _say(f"wrote {target}: the models after {steps} time steps")


@app.command("sweep")
def sweep_(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="tables [[runs]]: streams, algorithms, seeds, ...")],
    out_dir: Annotated[Path, typer.Option("--out", help="the folder for the records")] = Path("runs"),
    jobs: Annotated[int | None, typer.Option(min=1, help="processes at a time; default: one per core")] = None,
    data_dir: Annotated[Path | None, typer.Option(help=_describe("data_dir"))] = None,
) -> None:
    """Run a grid of runs in parallel; those that are finished in the folder are skipped.

    Example: feddrift sweep experiments/tables-small.toml --out runs/tables
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    configs = sweep.read_grid(file, data_dir)
    record.check_folder(out_dir)
    _say(f"{file}: {len(configs)} runs")
    ended: dict[str, int] = {"done": 0, "skipped": 0, "failed": 0}
    failures: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    news = sweep.sweep(configs, out_dir, jobs or cores())
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress, closing(news):
        task = progress.add_task("runs", total=len(configs))
        for item in news:
            if item.kind == "step":
                progress.advance(task, item.share)
                continue
            ended[item.kind] += 1
            if item.kind == "skipped":  # says nothing about the speed of the others
                progress.update(task, total=len(configs) - ended["skipped"])
                continue
            what = f"{item.config.stream} {item.config.algorithm} seed {item.config.seed}"
            if item.kind == "failed":
                failures.append(f"{what}: {item.reason}")
            _say(f"[{sum(ended.values())}/{len(configs)}] {what}" + (" failed" if item.kind == "failed" else ""))
    _say(f"{ended['done']} done, {ended['skipped']} were finished before, {ended['failed']} failed; in {out_dir}")
    for failure in failures:
        _tell(f"failed: {failure}")
    if failures:
        raise typer.Exit(1)


@app.command("report")
def report_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder of records, or one record")],
    against: Annotated[
        str | None, typer.Option(help="an algorithm to compare with, seed by seed: difference and 95 % interval")
    ] = None,
    beside: Annotated[
        bool, typer.Option("--paper", help="the paper's numbers beside ours; *: outside its band")
    ] = False,
    measured: Annotated[
        bool, typer.Option("--metrics", help="how drifts were noticed and got over, clients, clusters, traffic")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write a page to look at in a browser, of unfinished runs, too")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="with --html: write it again every 5 s until stopped")
    ] = False,
) -> None:
    """Summarise records: mean and standard deviation over seeds of each stream, algorithm and settings."""
    if follow and html is None:
        raise ConfigError("--follow writes a page again and again: it needs --html FILE")
    if html is not None and (as_json or measured or beside or against):
        raise ConfigError("--html writes a page of all there is: leave out --json, --metrics, --paper and --against")
    records = record.read_all(folder)
    if html is not None:
        page.write(records, html, folder.resolve().name)
        _say(f"wrote {html}")
        while follow:
            time.sleep(5)
            with suppress(DataError):  # a run that ends while its record is read: next time
                page.write(record.read_all(folder), html, folder.resolve().name)
        return
    summaries, unfinished = report.summarise(records), report.unfinished(records)
    if not summaries:
        what = "the run" if len(records) == 1 else f"none of the {len(records)} runs"
        raise DataError(f"{what} in {folder} is {'not ' * (len(records) == 1)}finished yet: `feddrift resume` goes on")
    gaps = report.compare(records, against) if against else []
    theirs = [paper.published(summary) for summary in summaries] if beside else []
    found = metrics.summarise(records) if measured else []
    if as_json:
        print(json.dumps(tables.to_json(summaries, gaps, theirs, found), indent=2))
    elif measured:
        for k, table in enumerate(tables.metrics_tables(summaries, found)):
            out.print(*[""] * bool(k), table, sep="\n")
    else:
        out.print(tables.table(summaries, gaps, theirs))
        told = [flag for cell in theirs if cell for flag in cell.within.values() if flag is not None]
        if told:
            _say(f"{sum(told)} of {len(told)} accuracies within max(1.0, twice the paper's deviation) of the paper's")
    if unfinished:
        _tell(f"left out, not finished: {len(unfinished)}")


class Kind(StrEnum):
    """What can be plotted."""

    clusters = "clusters"
    accuracy = "accuracy"
    patterns = "patterns"
    delta = "delta"
    traffic = "traffic"


@app.command("plot")
def plot_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder of records, or one record")],
    kind: Annotated[
        Kind,
        typer.Argument(
            help="clusters: who used which model when; accuracy: over time; patterns: "
            "the true concepts; delta, traffic: accuracy against them"
        ),
    ],
    file: Annotated[Path, typer.Option("--out", help="the picture: .png, .pdf or .svg")],
    algorithm: Annotated[list[str] | None, typer.Option(help="only these algorithms; repeat it for several")] = None,
) -> None:
    """Draw a picture of the records in a folder."""
    from feddrift import figures, plots  # here, since matplotlib takes a while to import

    records = [r for r in record.read_all(folder) if not algorithm or r.header["algorithm"] in algorithm]
    if not records:
        raise ConfigError(f"no records of {', '.join(algorithm or [])} in {folder}")
    groups = report.grouped(records)
    if kind is Kind.clusters and len(records) > plots.MAX_PANELS >= len(groups):
        records = [group[0] for group in groups]
        _tell("too many runs for one picture: showing the first seed of each")
    draw = {
        Kind.clusters: plots.clusters, Kind.accuracy: plots.accuracy, Kind.patterns: figures.patterns,
        Kind.delta: figures.threshold, Kind.traffic: figures.traffic,
    }  # fmt: skip
    plots.save(draw[kind](records), file)
    _say(f"wrote {file}")


def _costs(stream: Stream, configs: Sequence[RunConfig]) -> Table:
    """What each algorithm would cost, by a short rehearsal with its first seed."""
    table = Table("algorithm", "seeds", "lanes", "local steps", "memory", "time a run", "in all", box=None)
    total = time.process_time()  # to start up
    for name in dict.fromkeys(config.algorithm for config in configs):
        runs = [config for config in configs if config.algorithm == name]
        with out.status(f"rehearsing {escape(name)}") if out.is_terminal else nullcontext():
            algorithm, local = runs[0].resolve(stream)
            cost = estimate(
                stream, algorithm, engine=runs[0].engine, local=local, seed=runs[0].seed, net=runs[0].find_net(stream)
            )
        total += cost.seconds * len(runs)
        table.add_row(
            escape(name), str(len(runs)), f"{cost.lanes:.0f}", f"{cost.local_steps:,}", f"{cost.bytes / 1e9:.1f} GB",
            _duration(cost.seconds), _duration(cost.seconds * len(runs)),
        )  # fmt: skip
    table.caption = f"about {_duration(total)} in all; lanes are clients at work on a model in a round"
    return table


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _say(text: str) -> None:
    """A plain line; a terminal wraps it between words, a pipe or a file has it whole."""
    out.print(text, highlight=False, markup=False, soft_wrap=not out.is_terminal)


def _settings_of(name: str, names: Sequence[str], settings: dict[str, str]) -> dict[str, str]:
    """The settings that this one of several algorithms knows; one that none of them knows is left for it to refuse."""
    legal = {}
    for n in names:
        with suppress(ConfigError):  # told when the run is made
            legal[n] = algorithms.options(algorithms.entry(n).cls)
    known = {key for options in legal.values() for key in options}
    return {k: v for k, v in settings.items() if k in legal.get(name, settings) or k not in known}


def _settings(pairs: list[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set takes KEY=VALUE, such as delta=0.1, got '{pair}'")
        if key.strip() in found:
            raise ConfigError(f"--set {key.strip()} is given twice")
        found[key.strip()] = value.strip()
    return found


def _once() -> Callable[[logging.LogRecord], bool]:
    """A filter that lets each message through once, however many seeds repeat it."""
    told: set[str] = set()

    def new(line: logging.LogRecord) -> bool:
        message = line.getMessage()
        return not (message in told or told.add(message))  # type: ignore[func-returns-value]

    return new


def main() -> None:
    """The `feddrift` command: one sentence and exit code 2 for bad input, 130 when a run is stopped."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing but a run has anything to save
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no ± still gets its table
    handler = RichHandler(console=err, show_time=False, show_path=False)
    handler.addFilter(_once())
    logging.basicConfig(format="%(message)s", handlers=[handler])
    try:
        code = app(standalone_mode=False) or 0
        sys.stdout.flush()
    except FeddriftError as error:
        code = _fail(str(error))
    except click.ClickException as error:
        code = _fail(re.sub(r"( Did you mean [^?]+\?)\1", r"\1", error.format_message()))  # typer and click both ask
    except BrokenPipeError:
        code = 141  # as if SIGPIPE had ended it
    except OSError as error:
        code = _fail(f"cannot write the output: {error.strerror or error}")
    except SystemExit as stop:  # the console's way to say that its pipe is gone
        code = int(stop.code or 0)
    if code == 130:  # Ctrl-C, as typer reports it
        _tell("stopped; what was done is on disk")
    if busy():  # do not wait for compiled code that still runs
        os._exit(code)
    sys.exit(code)


def _tell(sentence: str) -> None:
    """A plain line beside the output."""
    err.print(sentence, highlight=False, markup=False, soft_wrap=True)


def _fail(sentence: str) -> int:
    if sentence:  # the bare command prints its help and has nothing to add
        _tell(f"Error: {one_line(sentence)}")
    return 2


if __name__ == "__main__":
    main()
