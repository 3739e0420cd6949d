"""`feddrift report`, `plot` and `follow`."""

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
from feddrift.cli.console import can_be_stopped, say, tell
from feddrift.errors import ConfigError, DataError
from feddrift.reports import metrics, page, paper, tables, trackers
from feddrift.reports.caveats import remarks
from feddrift.reports.follow import Follower
from feddrift.reports.ranks import ranking
from feddrift.reports.summary import compare, finished, grouped, summarise, unfinished
from feddrift.runs import record
from feddrift.runs.config import parse_seeds
from feddrift.runs.record import Record
from feddrift.scores import ACCURACY, SCORES
from feddrift.scores import score as find_score


class Weigh(StrEnum):
    """What a mean counts alike."""

    clients = "clients"
    rows = "rows"


Folders = Annotated[list[Path], typer.Argument(metavar="DIR...", help="a folder of records, or one record; or several")]
Streams = Annotated[list[str] | None, typer.Option("--stream", help="only these streams; repeat it for several")]
Algorithms = Annotated[
    list[str] | None, typer.Option("--algorithm", help="only these algorithms; repeat it for several")
]
Seeds = Annotated[str | None, typer.Option("--seeds", metavar="RANGE", help="only these seeds: 2-6, or 0,2,5")]


def _records(
    folders: list[Path], streams: list[str] | None, names: list[str] | None, seeds: str | None
) -> list[Record]:
    """The records below these folders that were asked for."""
    of_seeds = None if seeds is None else set(parse_seeds(seeds))

    def wanted(header: Mapping[str, Any]) -> bool:
        of_stream, of_name = not streams or header["stream"] in streams, not names or header["algorithm"] in names
        return of_stream and of_name and (of_seeds is None or header["seed"] in of_seeds)

    records = [run for folder in folders for run in record.read_all(folder, wanted)]
    if not records:
        asked = [*(streams or []), *(names or []), *([] if seeds is None else [f"seeds {seeds}"])]
        raise ConfigError(f"no records of {', '.join(asked)} in {', '.join(map(str, folders))}")
    return records


def report(
    folders: Folders,
    stream: Streams = None,
    algorithm: Algorithms = None,
    seeds: Seeds = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="an algorithm, or one in a setting, such as 'IFCA n_models=4', to compare with seed by seed: "
            "difference and 95 % interval"
        ),
    ] = None,
    beside: Annotated[
        bool, typer.Option("--paper", help="the paper's numbers beside ours; *: over 1 point and 2 of its std apart")
    ] = False,
    measured: Annotated[
        bool, typer.Option("--metrics", help="how drifts were noticed and got over, clients, clusters, traffic")
    ] = False,
    ranks: Annotated[
        bool, typer.Option("--ranks", help="who is best over several streams: mean ranks, and which of them differ")
    ] = False,
    score: Annotated[
        str, typer.Option(metavar="NAME", help=f"in the place of accuracy: {', '.join(SCORES)}")
    ] = "accuracy",
    weigh: Annotated[
        Weigh, typer.Option(help="what a mean counts alike: each client at each time step, or each row tested")
    ] = Weigh.clients,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write a page to look at in a browser, of unfinished runs, too")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="with --html: write it again every 5 s until stopped")
    ] = False,
) -> None:
    """Summarise records: mean and standard deviation over seeds of each stream, algorithm and settings.

    Of a run that is there twice the one begun last counts.

    Example: feddrift report runs results/field --stream sine-2 --stream sea-4 --seeds 2-11 --ranks
    """
    if follow and html is None:
        raise ConfigError("--follow writes a page again and again: it needs --html FILE")
    chosen = find_score(score)
    if beside and (chosen != ACCURACY or weigh is Weigh.rows):
        raise ConfigError("the paper has mean accuracies of clients only: leave out --paper, --score or --weigh")
    if html is not None and (as_json or measured or beside or against or ranks):
        raise ConfigError(
            "--html writes a page of all there is: leave out --json, --metrics, --paper, --against, --ranks"
        )
    if ranks and (measured or beside or against):
        raise ConfigError("--ranks is a table of its own: leave out --metrics, --paper and --against")
    if html is not None and weigh is Weigh.rows:
        raise ConfigError("--weigh rows is for tables and --json, the page counts clients alike: leave out one of them")
    folder, title = ", ".join(map(str, folders)), ", ".join(folder.resolve().name for folder in folders)
    records = record.by_score(_records(folders, stream, algorithm, seeds), score)
    records = [replace(run, weigh=weigh.value) for run in records]
    if html is not None:
        page.write(records, html, title)
        say(f"wrote {html}")
        while follow:
            time.sleep(5)
            with suppress(DataError):  # a run that ends while its record is read: next time
                page.write(record.by_score(_records(folders, stream, algorithm, seeds), score), html, title)
        return
    summaries, left_out = summarise(records), unfinished(records)
    if not summaries and all(run.runs_on for run in records):
        raise DataError(f"no time step of the federation in {folder} is done yet")
    if not summaries:
        what = "the run" if len(records) == 1 else f"none of the {len(records)} runs"
        raise DataError(f"{what} in {folder} is {'not ' * (len(records) == 1)}finished yet: `feddrift resume` goes on")
    if ranks:
        found = ranking(records)
        if as_json:
            print(json.dumps(tables.ranks_to_json(found), indent=2))
        else:
            console.out.print(tables.ranks_table(found))
        return
    gaps = compare(records, against) if against else []
    published = [paper.published(summary) for summary in summaries] if beside else []
    numbers = metrics.summarise(records) if measured else []
    if as_json:
        named = {} if chosen == ACCURACY else {"score": score}
        named |= {} if weigh is Weigh.clients else {"weigh": weigh.value}
        print(json.dumps([named | group for group in tables.to_json(summaries, gaps, published, numbers)], indent=2))
    elif measured:
        for k, table in enumerate(tables.metrics_tables(summaries, numbers, chosen)):
            console.out.print(*[""] * bool(k), table, sep="\n")
    else:
        console.out.print(tables.table(summaries, gaps, published, chosen))
        flags = [flag for cell in published if cell for flag in cell.within.values() if flag is not None]
        if flags:
            say(f"{sum(flags)} of {len(flags)} accuracies within max(1.0, twice the paper's deviation) of the paper's")
        for sentence in remarks(records):
            say(sentence)
    if weigh is Weigh.rows and not as_json:
        say("means count every row that was tested alike (--weigh rows)")
    for going_on in (run for run in finished(records) if run.status != "complete"):
        tell(f"{going_on.header['stream']} is not finished: these are its first {going_on.rows.steps} time steps")
    if left_out:
        tell(f"left out, not finished: {len(left_out)}")


class Kind(StrEnum):
    """What can be plotted."""

    clusters = "clusters"
    accuracy = "accuracy"
    patterns = "patterns"
    delta = "delta"
    traffic = "traffic"
    ranks = "ranks"


def plot(
    folders: Folders,
    kind: Annotated[
        Kind,
        typer.Argument(
            help="clusters: who used which model when; accuracy: over time; patterns: "
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

    records = _records(folders, stream, algorithm, seeds)
    groups = grouped(records)
    if kind is Kind.clusters and len(records) > MAX_PANELS >= len(groups):
        records = [group[0] for group in groups]
        tell("too many runs for one picture: showing the first seed of each")
    if kind is Kind.ranks and (ranks := ranking(records)).left_out:
        tell(ranks.without)
    pictures.save(api.plot(records, kind.value), file)
    say(f"wrote {file}")


def follow(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a record, a folder of records, or a deployment's")],
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="mlflow:URI, tensorboard:DIR or wandb:PROJECT (kept offline)")
    ],
) -> None:
    """Show runs in a tracker, as far as they are and as long as they go on; doing it again doubles nothing.

    Example: feddrift follow runs tensorboard:tb
    """
    can_be_stopped()
    with closing(Follower(run, trackers.tracker(target))) as follower:
        while True:
            for sentence in follower.look():
                say(sentence)
            if not follower.waits:
                return
            time.sleep(2)
