"""`feddrift run`, `resume`, `update` and `export`."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from feddrift import algorithms, engines, streams
from feddrift.api import exports
from feddrift.cli import console
from feddrift.cli.console import can_be_stopped, fail, say, tell
from feddrift.cli.live import Board, step_line
from feddrift.data import Stream
from feddrift.engines.simulator.lanes import wake
from feddrift.errors import ConfigError, DataError, FeddriftError
from feddrift.reports import tables
from feddrift.reports.caveats import remarks
from feddrift.reports.summary import summarise
from feddrift.runs import record
from feddrift.runs.config import RunConfig, parse_seeds
from feddrift.runs.estimate import Estimate, estimate
from feddrift.runs.recorded_run import RecordedRun, checkpoint_folders, from_checkpoints, unfinished_runs
from feddrift.runs.update import runs_to_update
from feddrift.runs.update import update as find_update
from feddrift.tables.problems import listed
from feddrift.types import Ints


def _describe(name: str) -> str:
    return RunConfig.model_fields[name].description or ""


def _streams(typed: str) -> list[str]:
    """The streams whose names begin so, for shells that complete them."""
    return [name for name in (*streams.summaries(), "folder:", "table:") if name.startswith(typed)]


def _algorithms(typed: str) -> list[str]:
    return [name for name in algorithms.ALGORITHMS if name.startswith(typed)]


def run_(
    ctx: typer.Context,
    stream: Annotated[str, typer.Option(help=_describe("stream"), autocompletion=_streams)],
    algorithm: Annotated[
        list[str] | None,
        typer.Option(help=_describe("algorithm") + "; repeat it to compare several", autocompletion=_algorithms),
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_describe("settings"))] = None,
    seed: Annotated[int | None, typer.Option(help=_describe("seed") + " (default 0)")] = None,
    seeds: Annotated[str | None, typer.Option(help="several seeds: 0-4, or 0,2,5")] = None,
    data_seed: Annotated[str, typer.Option(metavar="N|seed", help=_describe("data_seed"))] = "0",
    out_dir: Annotated[Path, typer.Option("--out", help="the folder for the records")] = Path("runs"),
    data_dir: Annotated[Path | None, typer.Option(help=_describe("data_dir"))] = None,
    rounds: Annotated[int | None, typer.Option(help=_describe("rounds"))] = None,
    steps: Annotated[int | None, typer.Option(help=_describe("steps"))] = None,
    batch: Annotated[int | None, typer.Option(help=_describe("batch"))] = None,
    lr: Annotated[float | None, typer.Option(help=_describe("lr"))] = None,
    pattern: Annotated[str | None, typer.Option(help=_describe("pattern"))] = None,
    average: Annotated[str | None, typer.Option(help=_describe("average"))] = None,
    balance: Annotated[bool | None, typer.Option("--balance", help=_describe("balance"))] = None,
    precision: Annotated[str | None, typer.Option(help=_describe("precision"))] = None,
    participation: Annotated[float, typer.Option(help=_describe("participation"))] = 1.0,
    dropout: Annotated[float, typer.Option(help=_describe("dropout"))] = 0.0,
    trace: Annotated[Path | None, typer.Option(help=_describe("trace"))] = None,
    poison: Annotated[str | None, typer.Option(help=_describe("poison"))] = None,
    defend: Annotated[bool, typer.Option("--defend", help=_describe("defend"))] = False,
    rest: Annotated[int, typer.Option(help=_describe("rest"))] = 0,
    route: Annotated[str, typer.Option(help=_describe("route"))] = "none",
    engine: Annotated[str, typer.Option(help=_describe("engine"))] = "simulator",
    label: Annotated[str, typer.Option(help=_describe("label"))] = "label",
    client: Annotated[str | None, typer.Option(help=_describe("client"))] = None,
    time: Annotated[str | None, typer.Option(help=_describe("time"))] = None,
    every: Annotated[str | None, typer.Option(help=_describe("every"))] = None,
    missing: Annotated[str | None, typer.Option(help=_describe("missing"))] = None,
    categories: Annotated[str | None, typer.Option(help=_describe("categories"))] = None,
    no_scale: Annotated[bool, typer.Option("--no-scale", help="of a table: leave numbers as they are")] = False,
    weights: Annotated[Path | None, typer.Option(help=_describe("weights"))] = None,
    net: Annotated[str | None, typer.Option(help=_describe("net"))] = None,
    checkpoint_every: Annotated[
        int, typer.Option(min=0, help="also save inside a time step, every so many rounds; 0: only after each step")
    ] = 0,
    no_cache: Annotated[bool, typer.Option("--no-cache", help=console.NO_CACHE)] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what it would cost: work, memory, time")] = False,
) -> None:
    """Run algorithms on a stream: train on each time step, test on the next, record all.

    Example: feddrift run --stream sine-2 --algorithm FedDrift --set delta=0.1 --seeds 0-4
    """
    can_be_stopped()
    console.keep_nothing(no_cache)
    if seed is not None and seeds is not None:
        raise ConfigError("give either --seed or --seeds, not both")
    names, settings = list(dict.fromkeys(algorithm or [algorithms.RECOMMENDED])), _settings(set_ or [])
    options = ctx.params  # by name: those of a RunConfig, and a few of this command alone
    common = {name: options[name] for name in RunConfig.model_fields.keys() & options.keys()} | {"scale": not no_scale}
    configs = [
        RunConfig.checked(**common | {"algorithm": name, "settings": _settings_of(name, names, settings), "seed": s})
        for name in names
        for s in (parse_seeds(seeds) if seeds is not None else [seed or 0])
    ]
    if engine == "simulator" and not dry_run:
        wake()
    first = configs[0].load()
    for config in configs:
        config.resolve(first)  # a wrong name or setting shows now, not after the first hour
        config.conditions(first)
    configs[0].find_net(first)
    if not algorithm:
        say(f"algorithm: {algorithms.RECOMMENDED}, which needs no settings (--algorithm chooses another)")
    say(
        f"{stream}: {first.n_clients} clients, {first.n_steps} time steps + 1 to test, "
        f"{int(np.prod(first.x.shape[1:]))} features, {first.n_classes} classes"
    )
    if dry_run and engine not in engines.ENGINES:
        raise ConfigError(f"--dry-run knows what {' and '.join(engines.ENGINES)} cost, got engine {engine}")
    if dry_run:
        console.out.print(_costs(first, configs))
        return
    runs = _prepare_runs(configs, first, out_dir, checkpoint_every)
    del first  # the runs keep it as long as they need it
    _follow(runs, len(configs))
    say(f"records in {out_dir}")


def _prepare_runs(configs: Sequence[RunConfig], stream: Stream, out: Path, every: int) -> Iterator[RecordedRun]:
    """Yield the runs of these configs; those on the same data follow each other and share one stream.

    Args:
        configs: Configs in the order in which to run them where they use the same data.
        stream: Stream of the first config.
        out: Folder for the records.
        every: Number of rounds between checkpoints inside a time step, 0 for none.
    """
    configs_by_data: dict[tuple[Any, ...], list[RunConfig]] = {}
    for config in configs:
        configs_by_data.setdefault(config.stream_key(), []).append(config)
    loaded: Stream | None = stream
    del stream  # so that only one stream is in memory at a time
    for same_data in configs_by_data.values():
        if loaded is None:
            loaded = same_data[0].load()
        for config in same_data:
            yield RecordedRun(config, out, every=every, stream=loaded)
        loaded = None


def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder of records")] = Path("runs"),
) -> None:
    """Go on with the runs below a folder that were stopped or killed, as if nothing had happened.

    Example: feddrift resume runs
    """
    can_be_stopped()
    stopped = unfinished_runs(folder)
    if not stopped and not checkpoint_folders(folder):
        raise DataError(f"no run below {folder} has checkpoints to go on from")
    if not stopped:
        say(f"nothing to resume in {folder}: no run there was stopped before its end")
        return
    _each(stopped, from_checkpoints)


def update(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a folder of records, or one record")] = Path("runs"),
    stream: Annotated[
        str | None, typer.Option(help="the stream that goes on where theirs ended; else their own, which has grown")
    ] = None,
    append: Annotated[str | None, typer.Option(help="a file of later rows, to append to their table")] = None,
) -> None:
    """Give finished runs their next time steps, when their table, folder or stream has more data by now.

    Example: feddrift update runs --append july.csv
    """
    can_be_stopped()
    _each(runs_to_update(run), lambda state: find_update(state, stream, append))


def _each(states: Sequence[Path], find: Callable[[Path], RecordedRun]) -> None:
    """Go on with the runs of these checkpoint folders; what is wrong with one is no reason to leave the others."""
    alike: dict[str, list[str]] = {}  # the runs by what is wrong with them
    for state in states:
        try:
            _follow([find(state)], 1)
            continue
        except FeddriftError as error:
            why = str(error)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        same = alike.setdefault(why.replace(state.stem, ""), [])
        same.append(state.stem)
        if len(same) == 1:
            fail(f"{state.stem}: {why}")
    for first, *others in alike.values():
        if others:
            fail(f"the same, as of {first}, is wrong with {listed(others)}")
    if alike:
        raise typer.Exit(1)


def _follow(runs: Iterable[RecordedRun], n: int) -> None:
    """Run so many one after the other, telling each time step."""
    paths = []
    board = Board(n)
    logging.getLogger("feddrift.engines.simulator.simulator").setLevel(
        logging.INFO
    )  # why the first time steps may take longer
    try:
        with Live(board, console=console.out) if console.out.is_terminal else nullcontext():  # a pipe has lines instead
            for recorded in runs:
                what = f"{recorded.config.algorithm} seed {recorded.config.seed}"
                board.begin(what, recorded.stream.n_steps)
                if not console.out.is_terminal:
                    console.out.print(f"[bold]{escape(what)}[/]", highlight=False)
                before: Ints | None = None
                for step in recorded:
                    line = step_line(step, recorded.before if before is None else before, recorded.stream.clients)
                    board.step(step, line)
                    if not console.out.is_terminal:
                        say(line)
                    before = step.model
                paths.append(recorded.path)
    except KeyboardInterrupt:
        if board.runs:
            not_begun = n - len(board.runs)
            tell(
                f"`feddrift resume {shlex.quote(str(recorded.out))}` goes on with {what}"
                + (f"; {not_begun} more of this command had not begun" if not_begun else "")
            )
        raise
    records = [record.read(path) for path in paths]
    console.out.print(tables.table(summarise(records)))
    for sentence in remarks(records):
        say(sentence)


def export_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder of records, or one record")] = Path("runs"),
    to: Annotated[Path, typer.Option("--out", help="the folder for the models")] = Path("models"),
) -> None:
    """Write the current models of a run or a deployment, who uses which, and their lineage, to predict with.

    Example: feddrift export runs --out models
    """
    for target, steps in exports(folder, to):
        say(f"wrote {target}: the models after {steps} time steps")


def _costs(stream: Stream, configs: Sequence[RunConfig]) -> Table:
    """What each algorithm would cost, by a short rehearsal with its first seed."""
    table = Table("algorithm", "seeds", "lanes", "local steps", "memory", "time a run", "in all", box=None)
    total = time.process_time()  # to start up
    for name in dict.fromkeys(config.algorithm for config in configs):
        runs = [config for config in configs if config.algorithm == name]
        cost = rehearsed(runs[0], stream)
        total += cost.seconds * len(runs)
        table.add_row(
            escape(name),
            str(len(runs)),
            f"{cost.lanes:.0f}",
            f"{cost.local_steps:,}",
            f"{cost.bytes / 1e9:.1f} GB",
            duration(cost.seconds),
            duration(cost.seconds * len(runs)),
        )
    _, local = configs[0].resolve(stream)
    budget = f"{local.rounds} rounds of {local.steps} local steps a time step"
    table.caption = f"about {duration(total)} in all: {budget}; lanes are clients at work on a model in a round"
    return table


def rehearsed(config: RunConfig, stream: Stream) -> Estimate:
    """What a run would cost, told while it is found out."""
    name = f"rehearsing {config.algorithm} on {config.stream}"
    with console.out.status(escape(name)) if console.out.is_terminal else nullcontext():
        algorithm, local = config.resolve(stream)
        net = config.find_net(stream)
        return estimate(stream, algorithm, engine=config.engine, local=local, seed=config.seed, net=net)


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _settings_of(name: str, names: Sequence[str], settings: dict[str, str]) -> dict[str, str]:
    """The settings that this one of several algorithms knows; one that none of them knows is left for it to refuse."""
    legal = {}
    for n in names:
        with suppress(ConfigError):  # told when the run is made
            legal[n] = algorithms.options(algorithms.entry(n).cls)
    known_to_any = {key for options in legal.values() for key in options}
    return {k: v for k, v in settings.items() if k in legal.get(name, settings) or k not in known_to_any}


def _settings(pairs: list[str]) -> dict[str, str]:
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set takes KEY=VALUE, such as delta=0.1, got '{pair}'")
        if key.strip() in settings:
            raise ConfigError(f"--set {key.strip()} is given twice")
        settings[key.strip()] = value.strip()
    return settings
