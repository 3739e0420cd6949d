"""Checkpoints: files with the state of a run after a time step, or within one. They are not pickles.

A checkpoint is one line of JSON (its type, schema and checksum) and a safetensors file of all arrays, whose metadata
contain everything else as JSON. It appears under its name only when it is complete. A run stores its checkpoints beside
its record (`runs/recorded_run.py`), the server of a deployment in `state/checkpoints` (`deploy/server/loop.py`).
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

from feddrift._internal.device_arrays import SHARED_ROWS, StackView, find_distinct_rows
from feddrift._internal.system import atomic_write
from feddrift.errors import DataError
from feddrift.trees import fill_tree, tree_leaves
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

SCHEMA = 4  # increase it also if runs or servers store other values
READABLE_SCHEMAS = (2, 3, SCHEMA)  # 2 named classes by their modules; 3 had no Votes, and stored equal rows repeatedly
MAX_CHECKPOINTS = 2  # per run: if the newest is damaged, the one before can be used
MAX_HEADER_BYTES = 4096  # bytes of the first line
TREE_FIELDS = ("params", "trunk", "classes")  # fields of models and updates with the tree structure of parameters

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint file with a correct checksum. `about` is plain JSON; `decode` rebuilds the value."""

    path: Path
    about: dict[str, Any]
    _tree: Any
    _arrays: Arrays

    def decode(self, like: Params) -> Any:
        """Rebuild the value that was saved.

        Args:
            like: Parameters of the run's net; parameters in the value get the same tree structure.

        Raises:
            DataError: The value has other fields, classes or parameters than this program and this run.
        """
        try:
            return _decode(self._tree, self._arrays, like)
        except Exception as error:  # the classes may raise any error for unexpected values
            raise DataError(f"{self.path} does not fit this run: {type(error).__name__}: {error}") from None

    def decode_moved_fields(self, like: Params) -> dict[str, Any]:
        """Return the data of conditions that version 0.3 stored in the state, the first item of the value.

        Args:
            like: Parameters of the run's net.
        """
        try:
            state = self._tree["tuple"][0]
            cls = _find_class(state["is"])
            return {
                MOVED_STATE_FIELDS[name]: _decode(state["fields"][name], self._arrays, like)
                for name in _list_moved_fields(cls) & state["fields"].keys()
            }
        except (KeyError, TypeError):  # the value does not begin with a state
            return {}


# Fields of `State` in version 0.3 -> fields of `feddrift.simulation.LoopState`.
MOVED_STATE_FIELDS = {"routing": "routing", "acted": "alarm_times"}


def write(path: Path, about: Mapping[str, Any], value: Any) -> None:
    """Save a checkpoint, complete or not at all.

    Args:
        path: The file.
        about: JSON values that describe the checkpoint.
        value: Plain values, arrays, instances of the contract's dataclasses, and containers of these.

    Raises:
        DataError: The value has a part of another type, or the file cannot be written.
    """
    arrays: Arrays = {}
    tree = {"about": dict(about), "value": _encode(value, arrays)}
    payload = save_arrays(arrays, {"tree": json.dumps(tree)})
    header = {"feddrift": "checkpoint", "schema": SCHEMA, "sha256": hashlib.sha256(payload).hexdigest()}
    atomic_write(path, json.dumps(header).encode() + b"\n" + payload)


def read(path: Path) -> Checkpoint:
    """Read a checkpoint and verify its checksum.

    Raises:
        DataError: The file cannot be read, is not a checkpoint, has an unknown schema, or is damaged.
    """
    try:
        line, _, payload = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    header = _parse_json(line[:MAX_HEADER_BYTES])
    if not isinstance(header, dict) or header.get("feddrift") != "checkpoint":
        raise DataError(f"{path} is not a checkpoint")
    if header.get("schema") not in READABLE_SCHEMAS:
        readable = f"{', '.join(map(str, READABLE_SCHEMAS[:-1]))} and {READABLE_SCHEMAS[-1]}"
        raise DataError(f"{path} is a checkpoint of schema {header.get('schema')!r}, this feddrift reads {readable}")
    if header.get("sha256") != hashlib.sha256(payload).hexdigest():
        raise DataError(f"{path} is damaged: its checksum is wrong")
    try:
        arrays = load_arrays(payload)
        size = int.from_bytes(payload[:8], "little")
        tree = json.loads(json.loads(payload[8 : 8 + size])["__metadata__"]["tree"])
        return Checkpoint(path, dict(tree["about"]), tree["value"], arrays)
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is not a checkpoint: {type(error).__name__}: {error}") from None


def _parse_json(line: bytes) -> Any:
    """Parse JSON; None if it is not valid."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


class Folder:
    """Folder with the newest checkpoints of a run: `<finished steps>-<finished rounds of the next step>.ckpt`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, steps: int, rounds: int, about: Mapping[str, Any], value: Any) -> Path:
        """Save a checkpoint, delete all but the newest MAX_CHECKPOINTS, and return the new file.

        Args:
            steps: The number of finished time steps.
            rounds: The number of finished rounds of the next time step.
            about: JSON values that describe the checkpoint; steps and rounds are added.
            value: See `write`.
        """
        path = self.path / f"{steps:06d}-{rounds:06d}.ckpt"
        write(path, {**about, "steps": steps, "rounds": rounds}, value)
        for old in self._list_files()[MAX_CHECKPOINTS:]:
            old.unlink(missing_ok=True)
        return path

    def keep_only(self, path: Path) -> None:
        """Delete all other checkpoints."""
        for other in self._list_files():
            if other != path:
                other.unlink(missing_ok=True)

    def newest_first(self) -> Iterator[Checkpoint | DataError]:
        """Yield all checkpoints, newest first; for a file that cannot be used, yield the error."""
        for path in self._list_files():
            try:
                yield read(path)
            except DataError as error:
                yield error

    def clear(self) -> None:
        """Delete all checkpoints of the run."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _list_files(self) -> list[Path]:
        return sorted(self.path.glob("*.ckpt"), reverse=True)


def _get_classes_by_name() -> dict[str, type[Any]]:
    """Return the classes that a checkpoint may contain: those of the contract, and states of all imported algorithms.

    The key of a class is its name. If several classes have the same name, it is the key of one of them, of feddrift's
    own class if there is one; the keys of the others are their paths, with the module.
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
    own_first = sorted(classes, key=lambda cls: not _is_own_class(cls))
    by_path = {_get_class_path(cls): cls for cls in own_first}  # of classes with the same path, the last
    by_name: dict[str, type[Any]] = {}
    for path, cls in by_path.items():
        by_name[cls.__qualname__ if cls.__qualname__ not in by_name else path] = cls
    return by_name


def _find_class(name: str) -> type[Any]:
    """Return the class with this name or path.

    Schema 2 has paths only. feddrift's own classes are then found by their names, since their modules may have moved.
    """
    by_name = _get_classes_by_name()
    short_name = name.rpartition(".")[2]
    if name in by_name:
        return by_name[name]
    if name.startswith("feddrift.") and short_name in by_name and _is_own_class(by_name[short_name]):
        return by_name[short_name]
    for cls in by_name.values():
        if _get_class_path(cls) == name:
            return cls
    raise TypeError(f"it contains a {name}, which is not a class of this program")


def _list_moved_fields(cls: type[Any]) -> set[str]:
    """Return the fields that version 0.3 stored in this class, and which it no longer has."""
    if not issubclass(cls, State):
        return set()
    return MOVED_STATE_FIELDS.keys() - {field.name for field in dataclasses.fields(cls)}


def _map_former_names(cls: type[Any]) -> dict[str, str]:
    """Return the current names of the fields with `former_name` in their metadata, by former name."""
    return {
        field.metadata["former_name"]: field.name
        for field in dataclasses.fields(cls)
        if "former_name" in field.metadata
    }


def _is_own_class(cls: type[Any]) -> bool:
    return cls.__module__.partition(".")[0] == "feddrift"


def _get_class_path(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _encode(value: Any, arrays: Arrays) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if dataclasses.is_dataclass(value):
        path = _get_class_path(type(value))
        name = next((name for name, cls in _get_classes_by_name().items() if _get_class_path(cls) == path), None)
        if name is None:
            raise DataError(f"a checkpoint cannot contain a {path}: it is neither a State nor a part of the contract")
        fields = {}
        for field in dataclasses.fields(value):
            part = getattr(value, field.name)
            if isinstance(value, Models | Updates) and field.name in TREE_FIELDS and part is not None:
                fields[field.name] = {"tree": [_encode(leaf, arrays) for leaf in tree_leaves(part)]}
            else:
                fields[field.name] = _encode(part, arrays)
        return {"is": name, "fields": fields}
    if isinstance(value, Mapping):
        return {"dict": [[_encode(k, arrays), _encode(v, arrays)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(item, arrays) for item in value]}
    if isinstance(value, StackView) and value.storage is SHARED_ROWS:
        stack, index = find_distinct_rows(value)
        return {"rows": [_encode(stack, arrays), _encode(index, arrays)]}
    if hasattr(value, "__array__"):
        key = str(len(arrays))
        arrays[key] = np.array(value, order="C")
        return {"array": key}
    raise DataError(f"a checkpoint cannot contain a {type(value).__name__}")


def _decode(tree: Any, arrays: Arrays, like: Params) -> Any:
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if "is" in tree:
        cls = _find_class(tree["is"])
        current_names = _map_former_names(cls)
        fields = {name: part for name, part in tree["fields"].items() if name not in _list_moved_fields(cls)}
        return cls(**{current_names.get(name, name): _decode(part, arrays, like) for name, part in fields.items()})
    (kind, parts), *extra = tree.items()
    if extra or kind not in ("array", "rows", "tree", "dict", "list", "tuple"):
        raise TypeError(f"it contains an unknown {kind!r}")
    if kind == "array":
        return arrays[parts]
    if kind == "rows":
        stack, index = (_decode(part, arrays, like) for part in parts)
        return StackView(SHARED_ROWS, stack, index)
    if kind == "dict":
        return {_decode(k, arrays, like): _decode(v, arrays, like) for k, v in parts}
    items = [_decode(item, arrays, like) for item in parts]
    if kind == "tree":
        if len(items) != len(tree_leaves(like)):
            raise ValueError(f"its models have {len(items)} arrays, those of this run {len(tree_leaves(like))}")
        return fill_tree(like, iter(items))
    return items if kind == "list" else tuple(items)
