"""Updates of finished runs: when a stream has grown, its new time steps are added to the run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, nullcontext
from pathlib import Path
from typing import Any

from feddrift import streams
from feddrift._internal import checkpoint
from feddrift.data import Stream
from feddrift.errors import ConfigError, DataError
from feddrift.runs import schema, stream_fingerprint
from feddrift.runs.config import RunConfig
from feddrift.runs.record import is_complete, read
from feddrift.runs.recorded_run import (
    RecordedRun,
    StepLines,
    find_checkpoint_folders,
    get_replaced_name,
    remove_replaced_run,
)
from feddrift.runs.stream_fingerprint import RERUN_HINT, StreamFingerprint
from feddrift.scores import SCORES
from feddrift.simulation import LoopState, add_newcomers
from feddrift.streams.table import split_paths
from feddrift.types import State

# Overrides that may differ in an update: digests of data and traces, which may be longer, and the columns that are left
# out, since later rows may have more of them. The features are compared by `check_continuation`.
GROWING_OVERRIDES = ("data", "trace", "drop")


def find_runs_to_update(folder: Path) -> list[Path]:
    """Delete runs that a complete update has replaced, and return the checkpoint folders of the other runs.

    Unfinished updates are left out: `prepare_update` of the old run continues them.

    Args:
        folder: A folder of records, or one record.

    Raises:
        DataError: If no run has checkpoints.
    """
    paths = [
        path
        for path in find_checkpoint_folders(folder)
        if _read_newest_checkpoint(path) is not None or is_complete(path.with_suffix(".jsonl"))
    ]
    replaced_names = {path: _read_replaced_name(path) for path in paths}
    for path, replaced_name in replaced_names.items():
        if replaced_name is not None:
            remove_replaced_run(path.with_suffix(".jsonl"), replaced_name)
    paths = [path for path in paths if path.is_dir()]
    unfinished = {path for path in paths if not is_complete(path.with_suffix(".jsonl"))}
    names = {path.stem for path in paths}
    if not paths:
        raise DataError(
            f"no run below {folder} has checkpoints, and a sweep keeps none of a finished run: {RERUN_HINT}"
        )
    return [path for path in paths if not (path in unfinished and replaced_names[path] in names)]


def prepare_update(
    checkpoint_folder: Path, stream: str | None = None, append: str | None = None, drop: Sequence[str] = ()
) -> RecordedRun:
    """Prepare the update of a finished run: a new run that begins with its time steps and continues with new data.

    The new run has the name of a run on all data. The old record stays until the new one is complete.

    Args:
        checkpoint_folder: The checkpoints of the finished run.
        stream: The name of another stream that begins with the same data; None: the same stream, which has grown.
        append: A file with rows to append to the run's table, in place of `stream`.
        drop: Columns of the table to leave out, besides those that the run leaves out.

    Raises:
        ConfigError: If both `stream` and `append` are given, or the run's stream is not a table.
        DataError: If the run is unfinished or its checkpoint is missing, or the data do not continue those of the run.
    """
    name = checkpoint_folder.stem
    path = checkpoint_folder.with_suffix(".jsonl")
    if not is_complete(path):
        raise DataError(f"{name} is not finished: `feddrift resume {checkpoint_folder.parent}` first")
    header = read(path).header
    saved = _read_newest_checkpoint(checkpoint_folder)
    if saved is None or saved.about.get("steps") != header["n_steps"] or not isinstance(saved.about["config"], dict):
        raise DataError(f"cannot update {name}: the checkpoint of its last time step is missing: {RERUN_HINT}")
    config = RunConfig.from_values(**saved.about["config"])
    cwd = str(saved.about.get("cwd"))
    if streams.is_in_catalogue(config.stream):
        length = f"the same {header['n_steps']} time steps + 1 to test"
        raise DataError(f"{config.stream} always has {length}: tables, folders and streams of your own can grow")
    if stream is not None and append is not None:
        raise ConfigError("an update takes another stream or a file to append, not both")
    if append is not None and not streams.is_table(config.stream):
        raise ConfigError(f"rows are appended to tables, FILE.csv, and the stream of {name} is {config.stream}")
    if append is not None:
        _check_not_appended_yet(append, config.stream, cwd)
        added = _make_name_absolute(cwd, f"table:{append.removeprefix('table:')}").removeprefix("table:")
        stream = f"{config.stream}+{added}"
        stream = stream if streams.is_table(stream) else f"table:{stream}"
    elif stream is not None:
        stream = _make_name_absolute(cwd, stream)
    if drop and not streams.is_table(config.stream):
        raise ConfigError(f"drop is for tables, FILE.csv, and the stream of {name} is {config.stream}")
    dropped = (*config.drop, *drop) if config.features is None else ()  # other columns are left out anyway
    config = RunConfig.from_values(**config.model_dump() | {"stream": stream or config.stream, "drop": dropped})
    with chdir(cwd) if os.path.isdir(cwd) else nullcontext():
        run = RecordedRun(config, checkpoint_folder.parent, resume=True, clients=header["clients"], replaces=name)
    stream_fingerprint.check_continuation(
        run.stream, config.stream, StreamFingerprint.from_checkpoint(saved.about, saved.path), header
    )
    _check_settings(name, header, run.header)
    if is_complete(run.path):
        raise DataError(f"{run.path.stem} already has all data of {config.stream}, so {name} is unchanged")
    if _read_replaced_name(run.checkpoints.path) != name:
        state, _, *stored = saved.decode(run.param_template)
        if not isinstance(state, State):
            raise DataError(f"{saved.path} is not a checkpoint of a run: it has no state")
        run.header["started"] = header["started"]
        past = list(_read_history(path, header["n_clients"], run.stream))
        loop = LoopState.from_checkpoint(saved, stored, run.param_template)
        run.write_history(past, add_newcomers(state, run.stream.n_clients), loop, saved.about)
    return run


def _read_newest_checkpoint(checkpoint_folder: Path) -> checkpoint.Checkpoint | None:
    """Return the newest intact checkpoint in a folder, None if there is none."""
    return next(
        (c for c in checkpoint.Folder(checkpoint_folder).newest_first() if isinstance(c, checkpoint.Checkpoint)), None
    )


def _read_replaced_name(checkpoint_folder: Path) -> str | None:
    saved = _read_newest_checkpoint(checkpoint_folder)
    return None if saved is None else get_replaced_name(saved)


def _check_not_appended_yet(append: str, stream: str, cwd: str) -> None:
    """Raise DataError if a file to append is already part of the table."""
    files = {(Path(cwd) / path).resolve() for path in split_paths(stream)}
    for path in split_paths(append):
        if not files.isdisjoint({path.resolve(), path.resolve().parent}):
            raise DataError(f"{path.name} is part of the run already: if it has grown, update without append")


def _make_name_absolute(cwd: str, stream: str) -> str:
    """Make the paths in the name of a stream absolute if those of the run are relative to another folder, `cwd`."""
    has_no_path = not (streams.is_table(stream) or streams.is_recipe(stream) or stream.startswith("folder:"))
    if has_no_path or Path(cwd) == Path.cwd():
        return stream
    if streams.is_recipe(stream):
        return str(Path(stream).absolute())
    if stream.startswith("folder:"):
        return f"folder:{Path(os.path.expanduser(stream.removeprefix('folder:'))).absolute()}"
    paths = "+".join(str(path.absolute()) for path in split_paths(stream))
    return f"table:{paths}" if stream.startswith("table:") else paths


def _check_settings(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise DataError if an update would change a setting; its default may depend on the stream or a file.

    Args:
        name: The run.
        old: Its header.
        new: The header of its update.
    """

    def join_settings(header: Mapping[str, Any]) -> dict[str, Any]:
        overrides = {key: value for key, value in header["overrides"].items() if key not in GROWING_OVERRIDES}
        return {**header["settings"], **header["local"], **overrides}

    old_settings = join_settings(old)
    new_settings = schema.to_json_value(join_settings(new))
    for key in sorted(old_settings.keys() | new_settings.keys()):
        if old_settings.get(key) != new_settings.get(key):
            change = f"{key} would be {new_settings.get(key)!r} now and was {old_settings.get(key)!r}"
            raise DataError(f"cannot update {name}: {change}: {RERUN_HINT}")
    if old.get("model_bytes") not in (None, new["model_bytes"]):
        raise DataError(f"cannot update {name}: the data have other features or classes now: {RERUN_HINT}")


def _read_history(path: Path, n_clients: int, stream: Stream) -> Iterator[StepLines]:
    """Yield the rows and events of each time step of a record, with additional rows for new clients.

    Args:
        path: The record.
        n_clients: The number of clients in the record.
        stream: The stream with all clients.
    """
    rows: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for text in path.read_bytes().splitlines():
        line = schema.parse_line(text, str(path))
        kind = line.pop("kind")
        if kind == "event":
            events.append(line)
        elif kind == "row":
            rows.append(line)
        elif kind == "columns":
            t = line.pop("t")
            columns = {name: values for name, values in line.items() if values is not None}
            rows = [{"t": t, "c": c} | {k: values[c] for k, values in columns.items()} for c in range(n_clients)]
        if len(rows) == n_clients:
            yield rows + [_build_absent_row(rows, c, stream) for c in range(n_clients, stream.n_clients)], events
            rows = []
            events = []


def _build_absent_row(rows: list[dict[str, Any]], c: int, stream: Stream) -> dict[str, Any]:
    """Return the row of client c at a time before it joined: no data, and the model that most others used.

    Args:
        rows: The rows of the other clients at that time.
        c: The client.
        stream: The stream with all clients.
    """
    t = rows[0]["t"]
    users = Counter(row["model"] for row in rows)
    usual_model = min(users, key=lambda model: (-users[model], model))
    concepts = (None, None) if stream.concepts is None else stream.concepts[t : t + 2, c].tolist()
    values = {"t": t, "c": c, "model": usual_model, "n_models": rows[0]["n_models"]}
    values |= {"accuracy": None, "tested": 0, "drift": False, "models_sent": 0, "sent_scoring": 0, "received": 0}
    values |= {"loss": None, "concept": concepts[0], "next_concept": concepts[1]} | dict.fromkeys((*SCORES, "routed"))
    return {name: values[name] for name in rows[0] if name in values}
