"""`feddrift run`, `resume`, `update` and `export`."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import typer
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from feddrift import algorithms, engines, streams
from feddrift.api import export_each
from feddrift.cli import console
from feddrift.cli.console import handle_stop_signals, print_error, print_line, print_to_stderr
from feddrift.cli.live import ProgressTable, format_step
from feddrift.data import Stream
from feddrift.engines.simulator.lanes import start_devices
from feddrift.errors import ConfigError, DataError, FeddriftError, unknown_name_error
from feddrift.reports import tables
from feddrift.reports.caveats import find_caveats
from feddrift.reports.summary import summarise
from feddrift.reports.verdict import find_verdicts
from feddrift.runs import record
from feddrift.runs.config import RunConfig, parse_seeds
from feddrift.runs.estimate import CostEstimate, estimate_cost
from feddrift.runs.export import Format
from feddrift.runs.recorded_run import RecordedRun, find_checkpoint_folders, find_unfinished_runs, load_stopped_run
from feddrift.runs.update import find_runs_to_update, prepare_update
from feddrift.tables.arrange import parse_names
from feddrift.tables.problems import join_first
from feddrift.types import Ints


def _get_help(name: str) -> str:
    """Return the help text of an option that is a field of RunConfig."""
    return RunConfig.model_fields[name].description or ""


def _complete_streams(typed: str) -> list[str]:
    """Return the stream names that begin with the typed text, for completion in shells."""
    return [name for name in (*streams.list_summaries(), "folder:", "table:") if name.startswith(typed)]


def _complete_algorithms(typed: str) -> list[str]:
    """Return the algorithm names that begin with the typed text, for completion in shells."""
    return [name for name in algorithms.ALGORITHMS if name.startswith(typed)]


class RunCommand(TyperCommand):
    """The command `feddrift run`, whose option `--defend` needs no value: without one it means true, as in 0.3."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        filled = [
            "--defend=true" if arg == "--defend" and (i + 1 == len(args) or args[i + 1].startswith("-")) else arg
            for i, arg in enumerate(args)
        ]
        return super().parse_args(ctx, filled)


def run_algorithms(
    ctx: typer.Context,
    stream: Annotated[str, typer.Option(help=_get_help("stream"), autocompletion=_complete_streams)],
    algorithm: Annotated[
        list[str] | None,
        typer.Option(
            help=_get_help("algorithm") + "; repeat it to compare several", autocompletion=_complete_algorithms
        ),
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=_get_help("settings"))] = None,
    seed: Annotated[int | None, typer.Option(help=_get_help("seed") + "; default: 0")] = None,
    seeds: Annotated[str | None, typer.Option(help="several seeds: 0-4, or 0,2,5")] = None,
    data_seed: Annotated[str, typer.Option(metavar="N|seed", help=_get_help("data_seed"))] = "0",
    out_dir: Annotated[Path, typer.Option("--out", help="the folder for the records")] = Path("runs"),
    data_dir: Annotated[Path | None, typer.Option(help=_get_help("data_dir"))] = None,
    rounds: Annotated[int | None, typer.Option(help=_get_help("rounds"))] = None,
    steps: Annotated[int | None, typer.Option(help=_get_help("steps"))] = None,
    batch: Annotated[int | None, typer.Option(help=_get_help("batch"))] = None,
    lr: Annotated[float | None, typer.Option(help=_get_help("lr"))] = None,
    pattern: Annotated[str | None, typer.Option(help=_get_help("pattern"))] = None,
    average: Annotated[str | None, typer.Option(help=_get_help("average"))] = None,
    balance: Annotated[bool | None, typer.Option("--balance", help=_get_help("balance"))] = None,
    precision: Annotated[str | None, typer.Option(help=_get_help("precision"))] = None,
    participation: Annotated[float, typer.Option(help=_get_help("participation"))] = 1.0,
    dropout: Annotated[float, typer.Option(help=_get_help("dropout"))] = 0.0,
    trace: Annotated[Path | None, typer.Option(help=_get_help("trace"))] = None,
    poison: Annotated[str | None, typer.Option(help=_get_help("poison"))] = None,
    defend: Annotated[str, typer.Option(metavar="[robust|true]", help=_get_help("defend"))] = "false",
    rest: Annotated[int, typer.Option(help=_get_help("rest"))] = 0,
    share_from: Annotated[int, typer.Option(help=_get_help("share_from"))] = 0,
    route: Annotated[str, typer.Option(help=_get_help("route"))] = "none",
    engine: Annotated[str, typer.Option(help=_get_help("engine"))] = "simulator",
    label: Annotated[str, typer.Option(help=_get_help("label"))] = "label",
    client: Annotated[str | None, typer.Option(help=_get_help("client"))] = None,
    time: Annotated[str | None, typer.Option(help=_get_help("time"))] = None,
    every: Annotated[str | None, typer.Option(help=_get_help("every"))] = None,
    missing: Annotated[str | None, typer.Option(help=_get_help("missing"))] = None,
    categories: Annotated[str | None, typer.Option(help=_get_help("categories"))] = None,
    no_scale: Annotated[bool, typer.Option("--no-scale", help="tables only: do not standardise numbers")] = False,
    drop: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help=_get_help("drop") + "; repeat it for several")
    ] = None,
    features: Annotated[str | None, typer.Option(metavar="COLUMN,...", help=_get_help("features"))] = None,
    weights: Annotated[Path | None, typer.Option(help=_get_help("weights"))] = None,
    net: Annotated[str | None, typer.Option(help=_get_help("net"))] = None,
    checkpoint_every: Annotated[
        int,
        typer.Option(min=0, help="rounds between checkpoints within a time step; 0: only after time steps"),
    ] = 0,
    no_cache: Annotated[bool, typer.Option("--no-cache", help=console.NO_CACHE_HELP)] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only estimate the cost: work, memory, time")] = False,
) -> None:
    """Run algorithms on a stream: train on each time step, test on the next one, and write records.

    Example: feddrift run --stream sine-2 --algorithm FedDrift --set delta=0.1 --seeds 0-4
    """
    handle_stop_signals()
    console.disable_caches(no_cache)
    if seed is not None and seeds is not None:
        raise ConfigError("give either --seed or --seeds, not both")
    names = list(dict.fromkeys(algorithm or [algorithms.RECOMMENDED]))
    settings = _parse_settings(set_ or [])
    options = ctx.params  # by name: fields of RunConfig, and a few options of this command only
    common = {name: options[name] for name in RunConfig.model_fields.keys() & options.keys()}
    common |= {"scale": not no_scale, "drop": _parse_repeated_names(drop)}
    configs = [
        RunConfig.from_values(
            **common | {"algorithm": name, "settings": _select_settings(name, names, settings), "seed": s}
        )
        for name in names
        for s in (parse_seeds(seeds) if seeds is not None else [seed or 0])
    ]
    if engine == "simulator" and not dry_run:
        start_devices()
    first = configs[0].load_stream()
    for config in configs:
        config.resolve_algorithm(first)  # report wrong names and settings before the first run
        config.build_conditions(first)
    configs[0].find_net(first)
    if not algorithm:
        print_line(f"algorithm: {algorithms.RECOMMENDED}, which needs no settings (--algorithm chooses another)")
    print_line(
        f"{stream}: {first.n_clients} clients, {first.n_steps} time steps + 1 to test, "
        f"{int(np.prod(first.x.shape[1:]))} features, {first.n_classes} classes"
    )
    if dry_run and engine not in engines.ENGINES:
        raise ConfigError(f"--dry-run estimates the engines {' and '.join(engines.ENGINES)}, got engine {engine}")
    if dry_run:
        console.out.print(_build_cost_table(first, configs))
        return
    runs = _prepare_runs(configs, first, out_dir, checkpoint_every)
    del first  # the runs hold it as long as they need it
    paths = _execute_runs(runs, [f"{config.algorithm} seed {config.seed}" for config in configs])
    _print_results(paths)
    print_line(f"records in {out_dir}")


def _prepare_runs(configs: Sequence[RunConfig], stream: Stream, out: Path, every: int) -> Iterator[RecordedRun]:
    """Yield the runs of these configs; runs on the same data follow each other and share one stream.

    Args:
        configs: The configs; those on the same data are run in this order.
        stream: The stream of the first config.
        out: The folder of the records.
        every: The number of rounds between checkpoints within a time step; 0: no such checkpoints.
    """
    configs_by_data: dict[tuple[Any, ...], list[RunConfig]] = {}
    for config in configs:
        configs_by_data.setdefault(config.build_stream_key(), []).append(config)
    loaded: Stream | None = stream
    del stream  # so that only one stream is in memory at a time
    for same_data in configs_by_data.values():
        if loaded is None:
            loaded = same_data[0].load_stream()
        for config in same_data:
            yield RecordedRun(config, out, every=every, stream=loaded)
        loaded = None


def resume_runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder of records")] = Path("runs"),
) -> None:
    """Continue the runs below a folder that were stopped or killed.

    Their results are those of runs without a stop.

    Example: feddrift resume runs
    """
    handle_stop_signals()
    stopped = find_unfinished_runs(folder)
    if not stopped and not find_checkpoint_folders(folder):
        raise DataError(f"no run below {folder} has checkpoints to continue from")
    if not stopped:
        print_line(f"nothing to resume in {folder}: it has no run that was stopped before its end")
        return
    _continue_runs(stopped, load_stopped_run)


def update_runs(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a folder of records, or one record")] = Path("runs"),
    stream: Annotated[
        str | None,
        typer.Option(help="a longer stream that begins with their data; default: their own stream, which has grown"),
    ] = None,
    append: Annotated[str | None, typer.Option(help="a file with later rows, to append to their table")] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="a column of later rows that the runs do not have; repeat it for several"),
    ] = None,
) -> None:
    """Continue finished runs on new time steps, after their table, folder or stream has grown.

    Example: feddrift update runs --append july.csv
    """
    handle_stop_signals()
    dropped = _parse_repeated_names(drop)
    _continue_runs(find_runs_to_update(run), lambda folder: prepare_update(folder, stream, append, dropped))


def _continue_runs(checkpoint_folders: Sequence[Path], load_run: Callable[[Path], RecordedRun]) -> None:
    """Continue the runs of these checkpoint folders; an error in one of them does not stop the others.

    Args:
        checkpoint_folders: The checkpoints of each run.
        load_run: Returns the run of a checkpoint folder.

    Raises:
        typer.Exit: A run failed; its error has been printed. The code is 1 after an unexpected error.
    """
    paths = list[Path]()
    code = 2
    runs_by_error: dict[str, list[str]] = {}
    for folder in checkpoint_folders:
        try:
            paths += _execute_runs([load_run(folder)])
            continue
        except FeddriftError as error:
            message = str(error)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            code = 1
        runs = runs_by_error.setdefault(message.replace(folder.stem, ""), [])
        runs.append(folder.stem)
        if len(runs) == 1:
            print_error(f"{folder.stem}: {message}")
    for _, *others in runs_by_error.values():
        if others:
            print_to_stderr(f"the same error occurred in {join_first(others)}")
    if paths:
        _print_results(paths)
    if runs_by_error:
        raise typer.Exit(code)


def _execute_runs(runs: Iterable[RecordedRun], names: Sequence[str] = ()) -> list[Path]:
    """Execute runs one after the other, and show each time step.

    Args:
        runs: The runs.
        names: Algorithm and seed of all runs, also of those that are prepared later; empty: there is one run.

    Returns:
        The records.
    """
    paths = list[Path]()
    progress = ProgressTable(len(names) or 1)
    simulator_log = logging.getLogger("feddrift.engines.simulator.simulator")
    simulator_log.setLevel(logging.INFO)  # logs why the first time steps may take longer
    try:
        with Live(progress, console=console.out) if console.out.is_terminal else nullcontext():
            for recorded in runs:
                name = f"{recorded.config.algorithm} seed {recorded.config.seed}"
                progress.add_run(name, recorded.stream.n_steps)
                if not console.out.is_terminal:
                    console.out.print(f"[bold]{escape(name)}[/]", highlight=False)
                previous_models: Ints | None = None
                for step in recorded:
                    if previous_models is None:
                        previous_models = recorded.previous_models
                    line = format_step(step, previous_models, recorded.stream.clients)
                    progress.add_step(step, line)
                    if not console.out.is_terminal:
                        print_line(line)
                    previous_models = step.model
                paths.append(recorded.path)
    except KeyboardInterrupt:
        if progress.runs:
            begun = {run.name for run in progress.runs}
            not_begun = [other for other in names if other not in begun]
            print_to_stderr(
                f"`feddrift resume {shlex.quote(str(recorded.out))}` continues {name}"
                + (f". Not begun yet, so run them again: {join_first(not_begun)}" if not_begun else "")
            )
        raise
    return paths


def _print_results(paths: Sequence[Path]) -> None:
    """Print verdict and summary of these records, beside finished runs on the same data in the same folders."""
    own = [record.read(path) for path in paths]
    others = record.read_beside(paths, [run.header for run in own])
    if others:
        runs = "1 finished run" if len(others) == 1 else f"{len(others)} finished runs"
        print_line(f"compared with {runs} on the same data in {join_first(sorted({str(p.parent) for p in paths}))}")
    records = [*others, *own]
    console.print_verdicts(find_verdicts(records))
    console.out.print(tables.build_summary_table(summarise(records)))
    for sentence in find_caveats(records):
        print_line(sentence)


def export_models(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder of records, or one record")] = Path("runs"),
    out_dir: Annotated[Path, typer.Option("--out", help="the folder for the models")] = Path("models"),
    format: Annotated[
        str,
        typer.Option(metavar="safetensors|onnx", help="onnx adds an ONNX file for each model"),
    ] = "safetensors",
) -> None:
    """Export the current models of a run or a deployment for predictions, with the users and the lineage of each.

    Example: feddrift export runs --out models
    """
    for target, steps in export_each(folder, out_dir, cast("Format", format)):
        print_line(f"wrote {target}: the models after {steps} time steps")


def _build_cost_table(stream: Stream, configs: Sequence[RunConfig]) -> Table:
    """Return a table with the expected costs of each algorithm, from a short rehearsal with its first seed."""
    table = Table("algorithm", "seeds", "lanes", "local steps", "memory", "time a run", "in all", box=None)
    total = time.process_time()  # of the start of the program
    for name in dict.fromkeys(config.algorithm for config in configs):
        runs = [config for config in configs if config.algorithm == name]
        cost = rehearse_run(runs[0], stream)
        total += cost.seconds * len(runs)
        table.add_row(
            escape(name),
            str(len(runs)),
            f"{cost.lanes:.0f}",
            f"{cost.local_steps:,}",
            f"{cost.bytes / 1e9:.1f} GB",
            format_duration(cost.seconds),
            format_duration(cost.seconds * len(runs)),
        )
    _, local = configs[0].resolve_algorithm(stream)
    budget = f"{local.rounds} rounds of {local.steps} local steps a time step"
    table.caption = f"about {format_duration(total)} in all: {budget}; lanes are clients at work on a model in a round"
    return table


def rehearse_run(config: RunConfig, stream: Stream) -> CostEstimate:
    """Estimate the costs of a run; a terminal shows a status line meanwhile."""
    name = f"rehearsing {config.algorithm} on {config.stream}"
    with console.out.status(escape(name)) if console.out.is_terminal else nullcontext():
        algorithm, local = config.resolve_algorithm(stream)
        net = config.find_net(stream)
        return estimate_cost(stream, algorithm, engine=config.engine, local=local, seed=config.seed, net=net)


def format_duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours, depending on its length."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _select_settings(name: str, names: Sequence[str], settings: dict[str, str]) -> dict[str, str]:
    """Return the settings for one of several algorithms; settings that only other algorithms have are left out.

    Args:
        name: The algorithm.
        names: All algorithms of the command.
        settings: All settings of the command.

    Raises:
        ConfigError: None of several algorithms has one of the settings.
    """
    legal = {}
    for algorithm in names:
        with suppress(ConfigError):  # an unknown algorithm is reported when its run is prepared
            legal[algorithm] = algorithms.get_options(algorithms.find_entry(algorithm).cls)
    all_legal = {key for options in legal.values() for key in options}
    unknown = [key for key in settings if key not in all_legal]
    if unknown and len(names) > 1 and len(legal) == len(names) and not all_legal:
        raise ConfigError(f"{' and '.join([', '.join(names[:-1]), names[-1]])} have no settings, got '{unknown[0]}'")
    if unknown and len(names) > 1 and len(legal) == len(names):
        raise unknown_name_error(f"setting of {', '.join(names)}", unknown[0], sorted(all_legal))
    return {k: v for k, v in settings.items() if k in legal.get(name, settings) or k in unknown}


def _parse_repeated_names(texts: Iterable[str] | None) -> list[str]:
    """Return the column names of an option --drop that may be repeated, each time with one or more names."""
    return [name for text in texts or () for name in parse_names("drop", text)]


def _parse_settings(pairs: list[str]) -> dict[str, str]:
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set takes KEY=VALUE, such as delta=0.1, got '{pair}'")
        if key.strip() in settings:
            raise ConfigError(f"--set {key.strip()} is given twice")
        settings[key.strip()] = value.strip()
    return settings
