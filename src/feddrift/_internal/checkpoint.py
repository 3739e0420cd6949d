"""A run on disk, to go on from after anything: the state after a time step, or inside one. Never a pickle.

A checkpoint is one line of JSON (what it is, its schema and checksum) and a safetensors file of all arrays, whose
metadata hold the rest as JSON. It appears under its name only when it is whole. A run keeps its own beside its record
(`runs/recorded_run.py`), the server of a deployment in its folder `state/checkpoints` (`deploy/server/loop.py`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from feddrift._internal.device_arrays import SHARED_ROWS, Resident, distinct_rows
from feddrift._internal.system import atomic_write
from feddrift.errors import DataError
from feddrift.trees import leaves, refill
from feddrift.types import (
    Clusters,
    Event,
    Models,
    Moments,
    Params,
    Projection,
    Router,
    Routing,
    State,
    Tournament,
    Updates,
    Votes,
)

SCHEMA = 4  # what runs and servers keep in them is a part of it
READABLE = (2, 3, SCHEMA)  # 2 named classes by their modules, 3 had no Votes and each row of each array
KEPT = 2  # should the last one be damaged, there is the one before
MAX_LINE = 4096  # bytes of the first line
TREES = ("params", "trunk", "classes")  # fields of models that are trees like their parameters

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Checkpoint:
    """A file whose checksum is right. `about` is plain JSON; `value` rebuilds what was saved."""

    path: Path
    about: dict[str, Any]
    _tree: Any
    _arrays: Arrays

    def value(self, like: Params) -> Any:
        """What was saved; `like` is a tree of parameters of the run's net, for the shape of all others."""
        try:
            return _decoded(self._tree, self._arrays, like)
        except Exception as error:  # whatever the classes say of values that are none of theirs
            raise DataError(f"{self.path} does not fit this run: {type(error).__name__}: {error}") from None


def write(path: Path, about: Mapping[str, Any], value: Any) -> None:
    """Save any state, with what to know about it, whole or not at all."""
    arrays: Arrays = {}
    tree = {"about": dict(about), "value": _encoded(value, arrays)}
    payload = save_arrays(arrays, {"tree": json.dumps(tree)})
    first = {"feddrift": "checkpoint", "schema": SCHEMA, "sha256": hashlib.sha256(payload).hexdigest()}
    atomic_write(path, json.dumps(first).encode() + b"\n" + payload)


def read(path: Path) -> Checkpoint:
    """A checkpoint, or one sentence that says what is wrong with the file."""
    try:
        line, _, payload = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    first = _json(line[:MAX_LINE])
    if not isinstance(first, dict) or first.get("feddrift") != "checkpoint":
        raise DataError(f"{path} is no checkpoint")
    if first.get("schema") not in READABLE:
        readable = f"{', '.join(map(str, READABLE[:-1]))} and {READABLE[-1]}"
        raise DataError(f"{path} is a checkpoint of schema {first.get('schema')!r}, this feddrift reads {readable}")
    if first.get("sha256") != hashlib.sha256(payload).hexdigest():
        raise DataError(f"{path} is damaged: its checksum is wrong")
    try:
        arrays, size = load_arrays(payload), int.from_bytes(payload[:8], "little")
        tree = json.loads(json.loads(payload[8 : 8 + size])["__metadata__"]["tree"])
        return Checkpoint(path, dict(tree["about"]), tree["value"], arrays)
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is no checkpoint: {type(error).__name__}: {error}") from None


def _json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


class Folder:
    """The checkpoints of one run, the last two of them: `<steps done>-<rounds done in the next>.ckpt`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, steps: int, rounds: int, about: Mapping[str, Any], value: Any) -> Path:
        """Save a checkpoint, and delete all but the newest two; its file."""
        path = self.path / f"{steps:06d}-{rounds:06d}.ckpt"
        write(path, {**about, "steps": steps, "rounds": rounds}, value)
        for old in self._files()[KEPT:]:
            old.unlink(missing_ok=True)
        return path

    def keep_only(self, path: Path) -> None:
        """Delete all checkpoints but this one."""
        for other in self._files():
            if other != path:
                other.unlink(missing_ok=True)

    def newest_first(self) -> Iterator[Checkpoint | DataError]:
        """Every checkpoint, newest first; for a file that cannot be used, the error that says why."""
        for path in self._files():
            try:
                yield read(path)
            except DataError as error:
                yield error

    def clear(self) -> None:
        """Delete all checkpoints of the run."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _files(self) -> list[Path]:
        return sorted(self.path.glob("*.ckpt"), reverse=True)


def _classes_by_name() -> dict[str, type[Any]]:
    """The classes that a checkpoint may hold: those of the contract, and the states of all imported algorithms.

    They go by their names; where several have the same, all but the first, ours, go by their modules, too.
    """
    classes: list[type[Any]] = [
        Models,
        Clusters,
        Votes,
        Event,
        Tournament,
        Updates,
        Moments,
        Projection,
        Router,
        Routing,
        State,
    ]
    for cls in classes:
        classes += [sub for sub in cls.__subclasses__() if sub not in classes]
    at_path = {_path(cls): cls for cls in sorted(classes, key=lambda cls: not _ours(cls))}  # the last definition counts
    by_name: dict[str, type[Any]] = {}
    for path, cls in at_path.items():
        by_name[cls.__qualname__ if cls.__qualname__ not in by_name else path] = cls
    return by_name


def _named(name: str) -> type[Any]:
    """The class of this name, or of this path, which is what schema 2 has: ours may have moved since, theirs not."""
    by_name, last = _classes_by_name(), name.rpartition(".")[2]
    if name not in by_name and name.startswith("feddrift.") and last in by_name and _ours(by_name[last]):
        name = last
    match = by_name.get(name) or next((cls for cls in by_name.values() if _path(cls) == name), None)
    if match is None:
        raise TypeError(f"it holds a {name}, which this program does not know")
    return match


def _ours(cls: type[Any]) -> bool:
    return cls.__module__.partition(".")[0] == "feddrift"


def _path(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _encoded(value: Any, arrays: Arrays) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if dataclasses.is_dataclass(value):
        path = _path(type(value))
        name = next((name for name, cls in _classes_by_name().items() if _path(cls) == path), None)
        if name is None:
            raise DataError(f"a checkpoint cannot hold a {path}: it is neither a State nor a part of the contract")
        fields = {}
        for field in dataclasses.fields(value):
            part = getattr(value, field.name)
            if isinstance(value, Models | Updates) and field.name in TREES and part is not None:
                fields[field.name] = {"tree": [_encoded(leaf, arrays) for leaf in leaves(part)]}
            else:
                fields[field.name] = _encoded(part, arrays)
        return {"is": name, "fields": fields}
    if isinstance(value, Mapping):
        return {"dict": [[_encoded(k, arrays), _encoded(v, arrays)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encoded(item, arrays) for item in value]}
    if isinstance(value, Resident) and value.place is SHARED_ROWS:
        stack, index = distinct_rows(value)
        return {"rows": [_encoded(stack, arrays), _encoded(index, arrays)]}
    if hasattr(value, "__array__"):
        name = str(len(arrays))
        arrays[name] = np.array(value, order="C")
        return {"array": name}
    raise DataError(f"a checkpoint cannot hold a {type(value).__name__}")


def _decoded(tree: Any, arrays: Arrays, like: Params) -> Any:
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if "is" in tree:
        fields = {name: _decoded(part, arrays, like) for name, part in tree["fields"].items()}
        return _named(tree["is"])(**fields)
    (kind, parts), *extra = tree.items()
    if extra or kind not in ("array", "rows", "tree", "dict", "list", "tuple"):
        raise TypeError(f"it holds an unknown {kind!r}")
    if kind == "array":
        return arrays[parts]
    if kind == "rows":
        stack, index = (_decoded(part, arrays, like) for part in parts)
        return Resident(SHARED_ROWS, stack, index)
    if kind == "dict":
        return {_decoded(k, arrays, like): _decoded(v, arrays, like) for k, v in parts}
    items = [_decoded(item, arrays, like) for item in parts]
    if kind == "tree":
        if len(items) != len(leaves(like)):
            raise ValueError(f"its models have {len(items)} arrays, those of this run {len(leaves(like))}")
        return refill(like, iter(items))
    return items if kind == "list" else tuple(items)
