"""`feddrift report`, `plot` and `follow`: tables, pictures, pages and trackers of records."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from feddrift import api
from feddrift.cli import console
from feddrift.cli.console import handle_stop_signals, print_line, print_to_stderr, print_verdicts
from feddrift.errors import ConfigError, DataError
from feddrift.reports import metrics, page, paper, tables, trackers
from feddrift.reports.caveats import find_caveats
from feddrift.reports.follow import Follower
from feddrift.reports.ranks import rank_methods
from feddrift.reports.summary import compare, group_by_configuration, select_reportable, select_unreportable, summarise
from feddrift.reports.verdict import find_verdicts
from feddrift.runs import record
from feddrift.runs.config import parse_seeds
from feddrift.runs.record import Record
from feddrift.scores import ACCURACY, SCORES, find_score


class Weigh(StrEnum):
    """Units with equal weight in a mean."""

    clients = "clients"
    rows = "rows"


Folders = Annotated[list[Path], typer.Argument(metavar="DIR...", help="folders of records, or single records")]
Streams = Annotated[list[str] | None, typer.Option("--stream", help="only these streams; repeat it for several")]
Algorithms = Annotated[
    list[str] | None, typer.Option("--algorithm", help="only these algorithms; repeat it for several")
]
Seeds = Annotated[str | None, typer.Option("--seeds", metavar="RANGE", help="only these seeds: 2-6, or 0,2,5")]


def _read_records(
    folders: list[Path], streams: list[str] | None, algorithms: list[str] | None, seeds: str | None
) -> list[Record]:
    """Return the records below these folders with these streams, algorithms and seeds; None or [] selects all.

    Raises:
        ConfigError: No record matches.
    """
    seed_set = None if seeds is None else set(parse_seeds(seeds))

    def matches(header: Mapping[str, Any]) -> bool:
        has_stream = not streams or header["stream"] in streams
        has_algorithm = not algorithms or header["algorithm"] in algorithms
        return has_stream and has_algorithm and (seed_set is None or header["seed"] in seed_set)

    records = [run for folder in folders for run in record.read_all(folder, matches)]
    if not records:
        filters = [*(streams or []), *(algorithms or []), *([] if seeds is None else [f"seeds {seeds}"])]
        raise ConfigError(f"no records of {', '.join(filters)} in {', '.join(map(str, folders))}")
    return records


def report_records(  # noqa: C901
    folders: Folders,
    stream: Streams = None,
    algorithm: Algorithms = None,
    seeds: Seeds = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="baseline: an algorithm, also with settings, such as 'IFCA n_models=4'; shows the difference to it, "
            "seed by seed, and its 95 % interval"
        ),
    ] = None,
    with_paper: Annotated[
        bool,
        typer.Option(
            "--paper",
            help="also show the paper's numbers; *: over 1 point and over 2 of its std apart",
        ),
    ] = False,
    with_metrics: Annotated[
        bool, typer.Option("--metrics", help="show metrics of drift detection, recovery, clients, clusters and traffic")
    ] = False,
    ranks: Annotated[
        bool,
        typer.Option("--ranks", help="show mean ranks over several streams, and which of them differ"),
    ] = False,
    score: Annotated[
        str, typer.Option(metavar="NAME", help=f"score to show instead of accuracy: {', '.join(SCORES)}")
    ] = "accuracy",
    weigh: Annotated[
        Weigh, typer.Option(help="unit with equal weight in a mean: clients (at each time step), or tested rows")
    ] = Weigh.clients,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="write a page for a browser, also of unfinished runs; missing folders are created"
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="with --html: write the page again every 5 s, until Ctrl-C")
    ] = False,
) -> None:
    """Summarise records: mean and standard deviation over seeds of each stream, algorithm and settings.

    If several records have the same configuration and seed, only the one that was begun last counts.

    Example: feddrift report runs results/field --stream sine-2 --stream sea-4 --seeds 2-11 --ranks
    """
    if follow and html is None:
        raise ConfigError("--follow writes a page repeatedly: it needs --html FILE")
    chosen_score = find_score(score)
    if with_paper and (chosen_score != ACCURACY or weigh is Weigh.rows):
        raise ConfigError("the paper has mean accuracies of clients only: leave out --paper, --score or --weigh")
    if html is not None:
        _check_page_options({"--json": as_json, "--metrics": with_metrics, "--paper": with_paper, "--ranks": ranks})
    if ranks and (with_metrics or with_paper or against):
        raise ConfigError("--ranks shows a separate table: leave out --metrics, --paper and --against")
    if html is not None and weigh is Weigh.rows:
        raise ConfigError("--weigh rows is for tables and --json, the page counts clients alike: leave out one of them")
    paths = ", ".join(map(str, folders))
    title = ", ".join(folder.resolve().name for folder in folders)
    records = record.select_score(_read_records(folders, stream, algorithm, seeds), score)
    records = [replace(run, weigh=weigh.value) for run in records]
    if html is not None:
        page.write_page(records, html, title, against)
        print_line(f"wrote {html}")
        while follow:
            time.sleep(5)
            with suppress(DataError):  # the record was renamed while it was read: try again later
                records = record.select_score(_read_records(folders, stream, algorithm, seeds), score)
                page.write_page(records, html, title, against)
        return
    summaries = summarise(records)
    left_out = select_unreportable(records)
    if not summaries and all(run.runs_on for run in records):
        raise DataError(f"no time step of the federation in {paths} is done yet")
    if not summaries:
        if len(records) == 1:
            raise DataError(f"the run in {paths} is not finished yet: `feddrift resume` continues it")
        raise DataError(f"none of the {len(records)} runs in {paths} is finished yet: `feddrift resume` continues them")
    if ranks:
        ranking = rank_methods(records)
        if as_json:
            print(json.dumps(tables.convert_ranks_to_json(ranking), indent=2))
        else:
            console.out.print(tables.build_ranks_table(ranking))
        return
    gaps = compare(records, against) if against else []
    published = [paper.find_published_result(summary) for summary in summaries] if with_paper else []
    numbers = metrics.summarise_metrics(records) if with_metrics else []
    if as_json:
        options = {} if chosen_score == ACCURACY else {"score": score}
        options |= {} if weigh is Weigh.clients else {"weigh": weigh.value}
        print(json.dumps([options | group for group in tables.to_json(summaries, gaps, published, numbers)], indent=2))
    elif with_metrics:
        for k, table in enumerate(tables.build_metrics_tables(summaries, numbers, chosen_score)):
            console.out.print(*[""] * bool(k), table, sep="\n")
    else:
        print_verdicts(find_verdicts(records))
        console.out.print(tables.build_summary_table(summaries, gaps, published, chosen_score))
        flags = [flag for cell in published if cell for flag in cell.within.values() if flag is not None]
        if flags:
            print_line(
                f"{sum(flags)} of {len(flags)} accuracies within max(1.0, twice the paper's deviation) of the paper's"
            )
        for sentence in find_caveats(records):
            print_line(sentence)
    if weigh is Weigh.rows and not as_json:
        print_line("all tested rows count equally in means (--weigh rows)")
    for run in select_reportable(records):
        if run.status != "complete":
            print_to_stderr(f"{run.header['stream']} is not finished: these are its first {run.rows.steps} time steps")
    if left_out:
        print_to_stderr(f"runs left out because they are not finished: {len(left_out)}")


def _check_page_options(given: Mapping[str, bool]) -> None:
    """Raise ConfigError if one of these options, which are for tables only, is given with --html."""
    wrong = [option for option, is_given in given.items() if is_given]
    if wrong:
        raise ConfigError(
            f"--html writes a page, not a table: leave out {' and '.join(wrong)}, or --html (the page has all metrics)"
        )


class PlotKind(StrEnum):
    """The kinds of pictures."""

    clusters = "clusters"
    accuracy = "accuracy"
    patterns = "patterns"
    delta = "delta"
    traffic = "traffic"
    ranks = "ranks"


def plot_records(
    folders: Folders,
    kind: Annotated[
        PlotKind,
        typer.Argument(
            help="clusters: the model of each client over time; accuracy: over time; patterns: "
            "the true concepts; delta, traffic: accuracy against them; ranks: over several streams"
        ),
    ],
    file: Annotated[Path, typer.Option("--out", help="the picture: .png, .pdf or .svg")],
    stream: Streams = None,
    algorithm: Algorithms = None,
    seeds: Seeds = None,
) -> None:
    """Draw a picture of records.

    Example: feddrift plot runs accuracy --out accuracy.png
    """
    from feddrift.reports import pictures  # here, since matplotlib takes a while to import
    from feddrift.reports.pictures.style import MAX_PANELS

    records = _read_records(folders, stream, algorithm, seeds)
    groups = group_by_configuration(records)
    if kind is PlotKind.clusters and len(records) > MAX_PANELS >= len(groups):
        records = [group[0] for group in groups]
        print_to_stderr("too many runs for one picture: showing the first seed of each")
    if kind is PlotKind.ranks:
        ranking = rank_methods(records)
        if ranking.left_out:
            print_to_stderr(ranking.left_out_text)
    pictures.save_picture(api.plot(records, kind.value), file)
    print_line(f"wrote {file}")


def follow_runs(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a record, a folder of records, or a deployment")],
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="mlflow:URI, tensorboard:DIR or wandb:PROJECT (stored offline)")
    ],
) -> None:
    """Stream runs to a tracker until they end; repeated calls do not duplicate values.

    Example: feddrift follow runs tensorboard:tb
    """
    handle_stop_signals()
    with closing(Follower(run, trackers.parse_tracker(target))) as follower:
        while True:
            for sentence in follower.report_news():
                print_line(sentence)
            if not follower.expects_news:
                return
            time.sleep(2)
