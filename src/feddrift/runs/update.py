"""A finished run and its next time steps: when there are more data, it goes on from where it ended."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
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
from feddrift.runs.recorded_run import Lines, RecordedRun, checkpoint_folders, remove_replaced, replaced
from feddrift.runs.stream_fingerprint import AGAIN, Remembered
from feddrift.scores import SCORES
from feddrift.simulation import with_newcomers
from feddrift.streams.table import files
from feddrift.types import State

GROWS = ("data", "trace")  # overrides that are digests of what may have become longer


def runs_to_update(where: Path) -> list[Path]:
    """The checkpoint folders of the runs below a folder, or of one record; what a killed update left is cleared."""
    states = [s for s in checkpoint_folders(where) if _newest(s) is not None or is_complete(s.with_suffix(".jsonl"))]
    replaces = {state: _replaces(state) for state in states}
    for state, old in replaces.items():
        if old is not None:
            remove_replaced(state.with_suffix(".jsonl"), old)
    states = [state for state in states if state.is_dir()]
    begun = {state for state in states if not is_complete(state.with_suffix(".jsonl"))}
    names = {state.stem for state in states}
    if not states:
        raise DataError(f"no run below {where} has checkpoints, and a sweep keeps none of a finished run: {AGAIN}")
    return [state for state in states if not (state in begun and replaces[state] in names)]  # `update` goes on with it


def update(state: Path, stream: str | None = None, append: str | None = None) -> RecordedRun:
    """The finished run of a checkpoint folder, ready to go on with what its stream, or this other one, has by now.

    Or with the rows of a file, which are appended to its table. It gets the name of a run on all these data; the old
    record stays until the new one is complete.
    """
    path = state.with_suffix(".jsonl")
    if not is_complete(path):
        raise DataError(f"{state.stem} is not finished: `feddrift resume {state.parent}` first")
    header = read(path).header
    saved = _newest(state)
    if saved is None or saved.about.get("steps") != header["n_steps"] or not isinstance(saved.about["config"], dict):
        raise DataError(f"cannot update {state.stem}: the checkpoint of its last time step is gone: {AGAIN}")
    config, cwd = RunConfig.checked(**saved.about["config"]), str(saved.about.get("cwd"))
    if streams.listed(config.stream):
        length = f"the same {header['n_steps']} time steps + 1 to test"
        raise DataError(f"{config.stream} always has {length}: tables, folders and streams of your own can grow")
    if stream is not None and append is not None:
        raise ConfigError("an update takes another stream or a file to append, not both")
    if append is not None and not streams.is_table(config.stream):
        raise ConfigError(f"rows are appended to tables, FILE.csv, and the stream of {state.stem} is {config.stream}")
    if append is not None:
        _check_new(append, config.stream, cwd)
        later = _seen_from(cwd, f"table:{append.removeprefix('table:')}").removeprefix("table:")
        stream = f"{config.stream}+{later}"
        stream = stream if streams.is_table(stream) else f"table:{stream}"
    elif stream is not None:
        stream = _seen_from(cwd, stream)
    config = RunConfig.checked(**config.model_dump() | {"stream": stream or config.stream})
    with chdir(cwd) if os.path.isdir(cwd) else nullcontext():
        run = RecordedRun(config, state.parent, resume=True, clients=header["clients"], replaces=state.stem)
    stream_fingerprint.check(run.stream, config.stream, Remembered.read(saved.about, saved.path), header)
    _check_settings(state.stem, header, run.header)
    if is_complete(run.path):
        raise DataError(f"{run.path.stem} has all of {config.stream} already, so {state.stem} stays as it is")
    if _replaces(run.checkpoints.path) != state.stem:
        last = saved.value(run.like)[0]
        if not isinstance(last, State):
            raise DataError(f"{saved.path} is no checkpoint of a run: it has no state")
        run.header["started"] = header["started"]
        past = list(_past(path, header["n_clients"], run.stream))
        run.begin_after(past, with_newcomers(last, run.stream.n_clients), saved.about)
    return run


def _newest(state: Path) -> checkpoint.Checkpoint | None:
    """The newest whole checkpoint of a folder."""
    return next((c for c in checkpoint.Folder(state).newest_first() if isinstance(c, checkpoint.Checkpoint)), None)


def _replaces(state: Path) -> str | None:
    saved = _newest(state)
    return None if saved is None else replaced(saved)


def _check_new(append: str, stream: str, cwd: str) -> None:
    """Refuse to append a file that a table has already."""
    has = {(Path(cwd) / path).resolve() for path in files(stream)}
    for path in files(append):
        if path.resolve() in has:
            raise DataError(f"{path.name} is part of the run already: where it has grown, update without append")


def _seen_from(cwd: str, stream: str) -> str:
    """The name of a stream for a run whose paths are meant from another folder."""
    named = not (streams.is_table(stream) or streams.is_recipe(stream) or stream.startswith("folder:"))
    if named or Path(cwd) == Path.cwd():
        return stream
    if streams.is_recipe(stream):
        return str(Path(stream).absolute())
    if stream.startswith("folder:"):
        return f"folder:{Path(os.path.expanduser(stream.removeprefix('folder:'))).absolute()}"
    paths = "+".join(str(path.absolute()) for path in files(stream))
    return f"table:{paths}" if stream.startswith("table:") else paths


def _check_settings(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """What a run learns with stays as it was, also where its stream or a file decides it."""

    def flat(header: Mapping[str, Any]) -> dict[str, Any]:
        overrides = {key: value for key, value in header["overrides"].items() if key not in GROWS}
        return {**header["settings"], **header["local"], **overrides}

    before, now = flat(old), schema.plain(flat(new))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            change = f"{key} would be {now.get(key)!r} now and was {before.get(key)!r}"
            raise DataError(f"cannot update {name}: {change}: {AGAIN}")
    if old.get("model_bytes") not in (None, new["model_bytes"]):
        raise DataError(f"cannot update {name}: the data have other features or classes now: {AGAIN}")


def _past(path: Path, n_clients: int, stream: Stream) -> Iterator[Lines]:
    """The rows and events of each time step of a record, with rows for the clients that its run did not have."""
    rows: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for text in path.read_bytes().splitlines():
        line = schema.parse(text, str(path))
        kind = line.pop("kind")
        if kind == "event":
            events.append(line)
        elif kind == "row":
            rows.append(line)
        elif kind == "columns":
            t, columns = line.pop("t"), {name: values for name, values in line.items() if values is not None}
            rows = [{"t": t, "c": c} | {k: values[c] for k, values in columns.items()} for c in range(n_clients)]
        if len(rows) == n_clients:
            yield rows + [_not_yet_there(rows, c, stream) for c in range(n_clients, stream.n_clients)], events
            rows, events = [], []


def _not_yet_there(rows: list[dict[str, Any]], c: int, stream: Stream) -> dict[str, Any]:
    """What client c had at a time before it joined: nothing, and the model that most others used."""
    used, t = Counter(row["model"] for row in rows), rows[0]["t"]
    concepts = (None, None) if stream.concepts is None else stream.concepts[t : t + 2, c].tolist()
    nothing = {"accuracy": None, "tested": 0, "drift": False, "models_sent": 0, "sent_scoring": 0, "received": 0}
    nothing |= {"loss": None, "concept": concepts[0], "next_concept": concepts[1]} | dict.fromkeys((*SCORES, "routed"))
    usual = min(used, key=lambda model: (-used[model], model))
    known = {"t": t, "c": c, "model": usual, "n_models": rows[0]["n_models"]} | nothing
    return {name: known[name] for name in rows[0] if name in known}
