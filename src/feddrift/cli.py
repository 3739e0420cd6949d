"""The command line: list, run, report, plot."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import click
import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from feddrift import __version__, algorithms, engines, plots, record, report, streams
from feddrift.config import RecordedRun, RunConfig
from feddrift.errors import ConfigError, FeddriftError
from feddrift.run import Step

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Federated learning when the data of different clients drift at different times.",
)
out = Console()
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
    if as_json:
        named = {k: [{"name": n, "summary": s} for n, s in v.items()] for k, v in catalogue.items()}
        print(json.dumps(named, indent=2))
        return
    catalogue["streams"]["folder:DIR"] = "your own data: DIR/client_<name>/step_<t>.csv (or .npz with x, y)"
    for kind, entries in catalogue.items():
        table = Table(title=kind, title_justify="left", title_style="bold", box=None, show_header=False)
        for name, summary in entries.items():
            table.add_row(f"[cyan]{name}[/]", summary)
        out.print(table, "")
    described: dict[str, str] = {}
    for entry in algorithms.ALGORITHMS.values():
        described |= {name: field.metadata["help"] for name, field in algorithms.options(entry.cls).items()}
    table = Table(title="settings (--set)", title_justify="left", title_style="bold", box=None, show_header=False)
    for name, text in described.items():
        table.add_row(f"[cyan]{name}[/]", text)
    out.print(table)


@app.command("run")
def run_(
    stream: Annotated[str, typer.Option(help=_describe("stream"))],
    algorithm: Annotated[list[str], typer.Option(help=_describe("algorithm") + "; repeat it to compare several")],
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
    engine: Annotated[str, typer.Option(help=_describe("engine"))] = "simulator",
    label: Annotated[str, typer.Option(help=_describe("label"))] = "label",
) -> None:
    """Run algorithms on a stream: train on each time step, test on the next, record all.

    Example: feddrift run --stream sine-2 --algorithm FedDrift --set delta=0.1 --seeds 0-4
    """
    if seed is not None and seeds is not None:
        raise ConfigError("give either --seed or --seeds, not both")
    configs = [
        RunConfig.checked(
            stream=stream, algorithm=name, settings=_settings(set_ or []), seed=s, rounds=rounds, steps=steps,
            batch=batch, lr=lr, pattern=pattern, engine=engine, data_dir=data_dir, label=label,
        )
        for name in dict.fromkeys(algorithm)
        for s in (_seeds(seeds) if seeds is not None else [seed or 0])
    ]  # fmt: skip
    for config in configs:
        config.check()  # a wrong name or setting shows now, not after the first hour
    paths = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("loading the data", total=None)
        for k, config in enumerate(configs):
            recorded = RecordedRun(config, out_dir)
            n_steps = recorded.stream.n_steps
            what = f"{config.stream} {config.algorithm} seed {config.seed}"
            progress.update(task, description=what, completed=k * n_steps, total=len(configs) * n_steps)
            out.print(f"[bold]{escape(what)}[/]", highlight=False)
            for step in recorded:
                out.print(_line(step), highlight=False)
                progress.advance(task)
            paths.append(recorded.path)
    out.print(report.table(report.summarise([record.read(path) for path in paths])))
    out.print(f"records in {out_dir}", highlight=False, markup=False)


@app.command("report")
def report_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder of records")],
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Summarise records: mean and standard deviation over seeds of each stream, algorithm and settings."""
    records = record.read_all(folder)
    summaries, unfinished = report.summarise(records), report.unfinished(records)
    if as_json:
        print(json.dumps(report.to_json(summaries), indent=2))
    else:
        out.print(report.table(summaries))
    if unfinished:
        err.print(f"{len(unfinished)} unfinished runs left out", highlight=False)


class Kind(StrEnum):
    """What can be plotted."""

    clusters = "clusters"
    accuracy = "accuracy"


@app.command("plot")
def plot_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder of records")],
    kind: Annotated[Kind, typer.Argument(help="clusters: who used which model when; accuracy: over time")],
    file: Annotated[Path, typer.Option("--out", help="the picture: .png, .pdf or .svg")],
) -> None:
    """Draw a picture of the records in a folder."""
    records = record.read_all(folder)
    if kind is Kind.clusters and len(records) > plots.MAX_PANELS:
        records = [group[0] for group in report.grouped(records)]
        err.print("too many runs for one picture: showing the first seed of each", highlight=False)
    plots.save(plots.clusters(records) if kind is Kind.clusters else plots.accuracy(records), file)
    out.print(f"wrote {file}", highlight=False, markup=False)


def _line(step: Step) -> str:
    """One time step in one line."""
    created = sum(e.kind == "created" for e in step.events)
    merged = sum(e.kind == "merged" for e in step.events)
    told = [f"{int(step.drifted.sum())} drifted" if step.drifted.any() else "", f"{created} new" if created else "",
            f"{merged} merged" if merged else ""]  # fmt: skip
    seen = step.tested > 0
    accuracy = f"{100 * step.accuracy[seen].mean():6.2f} %" if seen.any() else "no test data"
    return f"  time {step.tau + 1:3d}   {accuracy}   {len(step.state.models)} models   {', '.join(filter(None, told))}"


def _settings(pairs: list[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set takes KEY=VALUE, such as delta=0.1, got '{pair}'")
        found[key.strip()] = value.strip()
    return found


def _seeds(text: str) -> list[int]:
    """Seeds from a range or a list.

    >>> _seeds("0-3"), _seeds("7,2")
    ([0, 1, 2, 3], [7, 2])
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ConfigError(f"--seeds takes a range such as 0-4 or a list such as 0,2,5, got '{text}'")
        seeds += range(int(first), int(last or first) + 1)
    return list(dict.fromkeys(seeds))


def main() -> None:
    """The `feddrift` command: one sentence and exit code 2 for bad input, 130 when stopped."""
    logging.basicConfig(format="%(message)s", handlers=[RichHandler(console=err, show_time=False, show_path=False)])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = app(standalone_mode=False)
    except FeddriftError as error:
        code = _fail(str(error))
    except click.ClickException as error:
        code = _fail(error.format_message())
    if code == 130:  # Ctrl-C, as typer reports it
        err.print("stopped; the time steps that were done are in the record", highlight=False)
        os._exit(code)  # without waiting for the compiled code that still runs
    sys.exit(code or 0)


def _fail(sentence: str) -> int:
    err.print(f"Error: {sentence}", highlight=False, markup=False, soft_wrap=True)
    return 2


if __name__ == "__main__":
    main()
