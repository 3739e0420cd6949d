"""Functions for notebooks: run with a record, update runs, read and compare records, draw, report and export.

Tables are dictionaries of columns, each a list: ``pandas.DataFrame(fd.rows(records))`` converts them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from feddrift import streams
from feddrift._internal.system import check_folder_path
from feddrift.algorithms import RECOMMENDED
from feddrift.errors import ConfigError, DataError, FeddriftError, unknown_name_error
from feddrift.exported_models import ABOUT_FILE
from feddrift.reports import summary as summaries
from feddrift.reports.event_text import explain_alarm, explain_event
from feddrift.reports.labels import format_settings, select_non_default
from feddrift.reports.ranks import rank_methods
from feddrift.runs import onnx_files
from feddrift.runs.config import RunConfig
from feddrift.runs.export import Format
from feddrift.runs.export import export as export_run
from feddrift.runs.record import Record, Rows, read_all
from feddrift.runs.record import read as read_record
from feddrift.runs.recorded_run import RecordedRun, find_checkpoint_folders, load_stopped_run
from feddrift.runs.update import find_runs_to_update, prepare_update
from feddrift.tables.arrange import parse_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Columns = dict[str, list[Any]]
ROW_COLUMNS = tuple(column.name for column in fields(Rows))
RUN_COLUMNS = ("stream", "algorithm", "settings", "seed")  # identify the run of a row
Kind = Literal["clusters", "accuracy", "patterns", "delta", "traffic", "ranks"]


def record(
    stream: str,
    algorithm: str = RECOMMENDED,
    *,
    out: str | Path = "runs",
    seed: int = 0,
    resume: bool = False,
    checkpoint_every: int = 0,
    **options: Any,
) -> Record:
    """Run an algorithm on a stream to the end, write a record and checkpoints, and return the record.

    Args:
        stream: A name of `feddrift list`, a table ``FILE.csv`` or ``FILE.parquet``, ``folder:DIR``, or
            ``package.module:make``.
        algorithm: A name of `feddrift list`, or ``package.module:Name``; the default needs no settings.
        out: The folder of the records.
        seed: The seed of initial models and minibatches.
        resume: Continue the same run where it was stopped; a finished run is only read. Changes of your own code are
            not detected: use another folder after a change.
        checkpoint_every: Also save a checkpoint within a time step, each time after this number of rounds; 0: never.
        options: Options of `feddrift run`: ``settings={"delta": 0.1}``, ``rounds=5``, ``pattern="random:every=2"``,
            for a table ``client="shop"``, ``time="date"``, ``label="delay > 15"``, ``drop=["id"]``, ...

    Raises:
        ConfigError: A name or an option is not valid.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     record("sine-2", "Oblivious", out=folder, rounds=1).rows.steps
    10
    """
    for role, value in (("stream", stream), ("algorithm", algorithm)):
        if not isinstance(value, str):
            raise ConfigError(
                f"a record needs the {role} by name, so that it can be created again: package.module:Name, or in a "
                f"notebook '__main__:Name'; got {type(value).__name__}"
            )
    if not isinstance(resume, bool):
        raise ConfigError(f"resume must be True or False, got {resume!r}")
    if "every" in options and not streams.is_table(stream):  # its meaning in version 0.2
        warnings.warn("every is an option of tables, use checkpoint_every", DeprecationWarning, stacklevel=2)
        checkpoint_every = options.pop("every")
    if isinstance(checkpoint_every, bool) or not isinstance(checkpoint_every, int) or checkpoint_every < 0:
        raise ConfigError(f"checkpoint_every must be a whole number of rounds, or 0, got {checkpoint_every!r}")
    for name in options:
        if name not in RunConfig.model_fields:
            hint = f"; settings of the algorithm go into settings={{{name!r}: ...}}"
            raise ConfigError(f"{unknown_name_error('option', name, RunConfig.model_fields)}{hint}")
    config = RunConfig.from_values(stream=stream, algorithm=algorithm, seed=seed, **options)
    recorded = RecordedRun(config, Path(out), resume=resume, every=checkpoint_every)
    for _ in recorded:
        pass
    return read_record(recorded.path)


def update(
    where: str | Path,
    stream: str | None = None,
    *,
    append: str | Path | None = None,
    drop: str | Sequence[str] = (),
) -> list[Record]:
    r"""Continue finished runs on data that arrived later, and return the new records.

    If one of several runs cannot be updated, the others are updated before the error is raised.

    Args:
        where: A folder of records with their checkpoints, or one record.
        stream: The name of a stream with the data of the runs and later data; by default their own, which has grown.
        append: A file with later rows, for runs on tables: the stream of a run becomes its own files and this one.
        drop: Columns of later rows that the tables of the runs do not have.

    Raises:
        FeddriftError: An argument is not valid, or a run cannot be updated.

    >>> import tempfile
    >>> rows = [f"oslo,{month},{k},{k % 2}" for month in range(1, 8) for k in range(20)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sales = Path(folder, "sales.csv")
    ...     columns = {"client": "shop", "time": "month", "label": "sold"}
    ...     size = sales.write_text("\n".join(["shop,month,size,sold", *rows[:120]]))  # without the seventh month
    ...     run = record(str(sales), "Oblivious", out=f"{folder}/runs", rounds=1, **columns)
    ...     size = sales.write_text("\n".join(["shop,month,size,sold", *rows]))
    ...     run.rows.steps, [longer.rows.steps for longer in update(f"{folder}/runs")]
    (5, [6])
    """
    if not isinstance(where, str | Path):
        raise ConfigError(f"update takes the folder of the records, got {type(where).__name__}")
    if stream is not None and not isinstance(stream, str):
        raise ConfigError(f"update takes the stream by name, as fd.record does, got {type(stream).__name__}")
    if append is not None and not isinstance(append, str | Path):
        raise ConfigError(f"append must be a file, got {type(append).__name__}")
    dropped = parse_names("drop", drop)
    records: list[Record] = []
    problems: list[FeddriftError] = []
    for checkpoints in find_runs_to_update(Path(where)):
        try:
            updated = prepare_update(checkpoints, stream, None if append is None else str(append), dropped)
            for _ in updated:
                pass
            records.append(read_record(updated.path))
        except FeddriftError as error:
            problems.append(error)
    if problems:
        raise problems[0]
    return records


def read(where: str | Path) -> list[Record]:
    """Read all records below a folder, sorted by configuration and seed, or one file.

    Records of runs that are not finished have the time steps so far.

    Args:
        where: A folder of records, a record's file, or the folder of a deployment.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = record("sine-2", "Oblivious", out=folder, rounds=1)
    ...     read(folder)
    [Record(sine-2, Oblivious, seed 0: complete, 10 of 10 time steps, 10 clients)]
    """
    if not isinstance(where, str | Path):
        raise ConfigError(f"expected a folder of records or a record's file, got {type(where).__name__}")
    return read_all(where)


def rows(records: Record | Iterable[Record]) -> Columns:
    """Return a table with a row for every client and time step (from 0).

    Columns:
        settings: A text, as in `summary`.
        accuracy: The share of the `tested` examples of t + 1 with a correct prediction; NaN without any.
        concept, next_concept: The true concepts of t and t + 1; -1 if unknown.
        model: The id of the model in use; `n_models` is the number of models.
        drift: True for an alarm.
        models_sent: The number of models to and from the client; `sent_scoring` counts those that were only scored.
        received: The number of new examples.
        loss: The error of the model in use on the new examples before training, or the loss that the setting `metric`
            selects.
        routed: The share of tested examples for which inputs chose other votes than the client's own; NaN if a run
            has no such choice.

    >>> list(rows([]))[:6]
    ['stream', 'algorithm', 'settings', 'seed', 't', 'client']
    """
    table: Columns = {name: [] for name in (*RUN_COLUMNS, "t", "client", *ROW_COLUMNS)}
    for run in _to_list(records):
        steps, clients = run.rows.model.shape
        for name, value in _describe_run(run).items():
            table[name] += [value] * (steps * clients)
        table["t"] += np.repeat(np.arange(steps), clients).tolist()
        table["client"] += run.header["clients"] * steps
        for name in ROW_COLUMNS:
            table[name] += getattr(run.rows, name).reshape(-1).tolist()
    return table


def events(records: Record | Iterable[Record]) -> Columns:
    """Return a table with a row for every event: a model was created, merged, retired or revived, or a decision.

    `t` is the time step (from 0), `cause` has the values of the record, and `why` is a sentence.

    >>> list(events([]))
    ['stream', 'algorithm', 'settings', 'seed', 't', 'event', 'model', 'why', 'cause']
    """
    table: Columns = {name: [] for name in (*RUN_COLUMNS, "t", "event", "model", "why", "cause")}
    for run in _to_list(records):
        for event in run.events:
            line = {**_describe_run(run), **event}
            line["why"] = explain_event(event)
            for name, column in table.items():
                column.append(line[name])
    return table


def alarms(records: Record | Iterable[Record]) -> Columns:
    """Return a table with a row for every alarm: its time step (from 0), its client, and the changes of its data.

    `shifts` are the values of the record: the inputs and class shares that changed since the client's previous data,
    with their means or shares before and after. `why` is a sentence about them. Both are None if none were recorded.

    >>> list(alarms([]))
    ['stream', 'algorithm', 'settings', 'seed', 't', 'client', 'why', 'shifts']
    """
    table: Columns = {name: [] for name in (*RUN_COLUMNS, "t", "client", "why", "shifts")}
    for run in _to_list(records):
        for t, c in np.argwhere(run.rows.drift).tolist():
            shifts = run.shifts.get((t, c))
            line = {**_describe_run(run), "t": t, "client": run.header["clients"][c], "shifts": shifts}
            line["why"] = None if shifts is None else explain_alarm(shifts, t)
            for name, column in table.items():
                column.append(line[name])
    return table


def summary(records: Record | Iterable[Record], *, against: str | None = None) -> Columns:
    """Return a table with a row for every stream, algorithm and settings: means over seeds.

    Accuracies are in percent, with their standard deviations.

    Args:
        records: The result of `read` or `record`.
        against: An algorithm. The table then has the difference of each row to it in percentage points (`over_mean`),
            and its 95 % interval (`over_low`, `over_high`).

    >>> list(summary([]))[:6]
    ['stream', 'algorithm', 'settings', 'seeds', 'omitting_drifts', 'omitting_drifts_std']
    """
    runs = _to_list(records)
    accuracies = ("omitting_drifts", "including_drifts")
    other_means = ("models_sent", "models_sent_ratio", "models_final", "false_alarms", "ari")
    accuracy_columns = [column for name in accuracies for column in (name, f"{name}_std")]
    table: Columns = {
        name: [] for name in ("stream", "algorithm", "settings", "seeds", *accuracy_columns, *other_means)
    }
    for group in summaries.summarise(runs):
        line: dict[str, Any] = {"stream": group.stream, "algorithm": group.algorithm, "seeds": len(group.seeds)}
        line["settings"] = _format_settings(group.algorithm, group.settings, group.overrides)
        for name in accuracies:
            spread = getattr(group, name)
            line |= {name: spread and spread.mean, f"{name}_std": spread and spread.std}
        for name in other_means:
            line[name] = getattr(group, name)
        for name, value in line.items():
            table[name].append(value)
    if against is not None:
        differences = summaries.compare(runs, against)
        for name in ("mean", "low", "high"):
            table[f"over_{name}"] = [difference and getattr(difference, name) for difference in differences]
    return table


def plot(records: Record | Iterable[Record], kind: Kind = "clusters") -> Figure:
    """Draw records and return the figure.

    Args:
        records: The result of `read` or `record`.
        kind: `clusters`: the model that each client used; `accuracy`: over time; `patterns`: the true concepts;
            `delta` and `traffic`: accuracy against these; `ranks`: mean ranks of methods over several streams.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = record("sine-2", "Oblivious", out=folder, rounds=1)
    >>> plot(run, "accuracy").axes[0].get_ylabel()
    'accuracy on the next time step'
    """
    from feddrift.reports import pictures  # imported here, because importing matplotlib is slow

    draw: dict[str, Callable[[Sequence[Record]], Figure]] = {
        "clusters": pictures.draw_clusters,
        "accuracy": pictures.draw_accuracy,
        "patterns": pictures.draw_patterns,
        "delta": pictures.draw_threshold,
        "traffic": pictures.draw_traffic,
        "ranks": lambda runs: pictures.draw_ranks(rank_methods(runs)),
    }
    if not isinstance(kind, str) or kind not in draw:
        raise ConfigError(f"kind must be one of {', '.join(draw)}, got {kind!r}")
    return draw[kind](_to_list(records))


def report(records: str | Path | Record | Iterable[Record], file: str | Path = "report.html") -> Path:
    """Write an HTML page about records, and return its path.

    Args:
        records: The result of `read` or `record`, or a folder of records.
        file: The path of the page, which needs no other files.

    Raises:
        DataError: The list of records is empty.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = record("sine-2", "Oblivious", out=folder, rounds=1)
    ...     report(run, f"{folder}/page.html").name
    'page.html'
    """
    from feddrift.reports import page

    runs = read_all(records) if isinstance(records, str | Path) else _to_list(records)
    if not runs:
        raise DataError("found no records to report")
    title = Path(records).resolve().name if isinstance(records, str | Path) else Path(file).stem
    page.write_page(runs, Path(file), title)
    return Path(file)


def export(folder: str | Path, out: str | Path = "models", *, format: Format = "safetensors") -> list[Path]:
    """Write the newest models of runs or a deployment for `load_models`, and return the folders written to.

    Args:
        folder: A folder of records with their checkpoints, one record, or the folder of a deployment.
        out: The folder to write to. Models of several runs are written to one folder per run below it.
        format: `onnx` adds an ONNX file for each model, which needs the extra onnx.

    Raises:
        ConfigError: The format is unknown, or the net cannot be written as ONNX.
        DataError: There is nothing to export.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = record("sine-2", "Oblivious", out=f"{folder}/runs", rounds=1)
    ...     [path.name for path in export(f"{folder}/runs", f"{folder}/models")]
    ['models']
    """
    if not isinstance(folder, str | Path):
        raise ConfigError(f"export takes the folder of the records, got {type(folder).__name__}")
    return [target for target, _ in export_each(Path(folder), Path(out), format)]


def export_each(folder: Path, out: Path, format: Format = "safetensors") -> Iterator[tuple[Path, int]]:
    """Export models, and yield each folder written to and the number of time steps that its models were trained on.

    Args:
        folder: See `export`.
        out: See `export`.
        format: See `export`.

    Raises:
        ConfigError: See `export`.
        DataError: There is nothing to export; `folder` has several runs, and `out` has the models of one run; or runs
            could not be exported. The last error is raised after the export of all other runs.
    """
    if format not in get_args(Format):
        raise unknown_name_error("format", format, get_args(Format))
    if format == "onnx":
        onnx_files.import_onnx()
    for server in (folder, folder / "server"):
        if (server / "federation.toml").exists():
            from feddrift.deploy.operate.export import export_federation  # imported here, because it needs Flower

            yield out, export_federation(server.resolve(), out, format)
            return
    check_folder_path(out)
    runs = find_checkpoint_folders(folder)
    if not runs:
        raise DataError(f"no run below {folder} has checkpoints: a sweep keeps none of a finished run")
    if len(runs) == 1:
        yield out, export_run(load_stopped_run(runs[0]), out, format)
        return
    if (out / ABOUT_FILE).exists():  # `load_models` would load it in place of the new ones
        raise DataError(f"{out} has the models of one run, but {folder} has {len(runs)}: choose another folder")
    failures = []
    for run in runs:
        try:
            yield out / run.stem, export_run(load_stopped_run(run), out / run.stem, format)
        except FeddriftError as error:  # the others are exported
            failures.append(f"{run.stem}: {error}")
    if failures:
        raise DataError(f"not exported: {'; '.join(failures)}")


def _describe_run(run: Record) -> dict[str, Any]:
    """Return the values of RUN_COLUMNS."""
    header = run.header
    settings = _format_settings(header["algorithm"], header["settings"], header["overrides"])
    return {"stream": header["stream"], "algorithm": header["algorithm"], "settings": settings, "seed": header["seed"]}


def _format_settings(algorithm: str, settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> str:
    return format_settings({**select_non_default(algorithm, settings), **overrides})


def _to_list(records: Record | Iterable[Record]) -> Sequence[Record]:
    if isinstance(records, str | Path) or not isinstance(records, Iterable | Record):
        raise ConfigError(f"expected records, as fd.read returns them, got {records!r}")
    runs = [records] if isinstance(records, Record) else list(records)
    for run in runs:
        if not isinstance(run, Record):
            raise ConfigError(f"expected records, as fd.read returns them, got {type(run).__name__}")
    return runs
