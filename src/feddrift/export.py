"""The models of a run in a folder of their own, to predict with: safetensors, and who uses which as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from feddrift import __version__, checkpoint, record, rng
from feddrift.errors import DataError, unknown
from feddrift.models import leaves, one, paths, refill
from feddrift.nets import mlp, poll
from feddrift.recorded import RecordedRun
from feddrift.resnet import resnet18, torchvision_names
from feddrift.types import Ballot, Floats, Net, Params, State

MODELS, ABOUT, RESNET = "models.safetensors", "models.json", "resnet18.safetensors"
MASK = "mask"  # the name of what a model sees of its inputs, beside its parameters


def export(run: RecordedRun, folder: Path) -> int:
    """Write the models of a run as they stand now; how many time steps they have seen."""
    like = run.net.init(rng.derive(run.config.seed, "init", 0))
    found = next((c for c in run.checkpoints.newest_first() if isinstance(c, checkpoint.Checkpoint)), None)
    state = None if found is None else found.value(like)[0]
    if found is None or state is None:
        raise DataError(f"{run.checkpoints.path} has no whole checkpoint of a time step to export")
    arrays: dict[str, npt.NDArray[Any]] = {}
    for m, i in enumerate(state.models.ids):
        parts = dict(paths(one(state.models, m)))
        if state.models.mask is not None:
            parts[MASK] = state.models.mask[m]
        arrays |= {f"{i}/{path}": np.ascontiguousarray(leaf) for path, leaf in parts.items()}
    net = _described(run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(arrays, folder / MODELS)
        if net["kind"] == "resnet18":
            save_file(torchvision_names(run.net, one(state.models, 0)), folder / RESNET)
        about = _about(run, state, int(found.about["steps"])) | {"net": net}
        (folder / ABOUT).write_text(json.dumps(about, indent=2, allow_nan=False) + "\n")
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot write models into {folder}: {getattr(error, 'strerror', None) or error}") from None
    return int(found.about["steps"])


def _described(run: RecordedRun) -> dict[str, Any]:
    """What a reader needs to make the net again."""
    classes, shape = run.stream.n_classes, list(run.stream.x.shape[1:])
    if run.config.net is not None:
        return {"kind": "own", "name": run.config.net, "features": shape, "classes": classes}
    if len(shape) == 3 and run.stream.family == "fmow":
        return {"kind": "resnet18", "features": shape, "classes": classes}
    hidden = run.net.init(rng.derive(0, "init", 0))["W1"].shape[1]
    return {"kind": "perceptron", "features": shape, "hidden": hidden, "classes": classes}


def _about(run: RecordedRun, state: State, steps: int) -> dict[str, Any]:
    known = record.read(run.path if run.path.exists() else record.part_of(run.path))
    ids = state.models.ids
    clients = {
        name: {str(ids[m]): float(votes[m]) for m in np.flatnonzero(votes)}
        for name, votes in zip(run.stream.clients, state.votes, strict=True)
    }
    return {
        "feddrift": __version__,
        "stream": run.config.stream,
        "algorithm": run.config.algorithm,
        "seed": run.config.seed,
        "time_steps": steps,
        "ballot": state.ballot,
        "classes": list(run.stream.classes or range(run.stream.n_classes)),
        "columns": list(run.stream.columns),
        "models": {str(i): {"family": state.models.family[m]} for m, i in enumerate(ids)},
        "clients": clients,
        "lineage": [_told(event, run.stream.clients) for event in known.events if event["t"] < steps],
    }


def _told(event: Mapping[str, Any], clients: Sequence[str]) -> dict[str, Any]:
    """An event for people: time counts from 1, clients have their names."""
    cause = dict(event["cause"])
    if isinstance(cause.get("clients"), list):
        cause["clients"] = [clients[c] for c in cause["clients"]]
    return {"time": event["t"] + 1, "event": event["event"], "model": event["model"], "cause": cause}


@dataclass(frozen=True)
class Exported:
    """The models of a folder, each client's own choice of them, and their lineage."""

    about: dict[str, Any]
    net: Net
    params: dict[int, Params]
    masks: dict[int, Floats]

    @property
    def columns(self) -> tuple[str, ...]:
        """What the features are called, in the order of x; nothing where they have no names."""
        return tuple(self.about.get("columns", ()))

    def predict(self, client: str, x: npt.ArrayLike | Mapping[str, npt.ArrayLike]) -> npt.NDArray[Any]:
        """The classes of inputs x[n, ...] by the models that this client uses, as they are called in the data.

        Where features have names, x may be a table of columns, in any order: a dictionary, or a data frame.
        """
        votes = self.about["clients"].get(str(client))
        if votes is None:
            raise unknown("client", client, self.about["clients"])
        if isinstance(x, Mapping) or hasattr(x, "columns"):
            x = self._in_order(x)
        features = tuple(self.about["net"]["features"])
        try:
            inputs = np.asarray(x)
        except ValueError:  # rows of different lengths
            raise DataError(f"inputs must have shape [n, {', '.join(map(str, features))}]") from None
        if inputs.dtype.kind not in "biuf":
            raise DataError(f"inputs must be numbers, got {inputs.dtype}")
        if inputs.ndim < 1 or inputs.shape[1:] != features:
            raise DataError(f"inputs must have shape [n, {', '.join(map(str, features))}], got {inputs.shape}")
        if not np.isfinite(inputs).all():
            raise DataError("inputs must be finite numbers, got NaN or infinity")
        voters = ((weight, self.params[int(i)], self.masks.get(int(i))) for i, weight in votes.items())
        total = poll(self.net, voters, self.about["ballot"], inputs)
        return np.asarray(np.array(self.about["classes"])[total.argmax(axis=1)])

    def _in_order(self, table: Any) -> npt.NDArray[Any]:
        missing = [name for name in self.columns if name not in table]
        if not self.columns or missing:
            why = f"got no column '{missing[0]}'" if missing else "the features have no names"
            raise DataError(f"inputs by name need the columns {', '.join(self.columns)}: {why}")
        try:
            return np.stack([np.asarray(table[name], dtype=np.float64) for name in self.columns], axis=1)
        except (TypeError, ValueError):
            raise DataError("inputs must be columns of numbers, all of the same length") from None


def load(folder: str | Path, net: Net | None = None) -> Exported:
    """Exported models; a net of your own has to be given again."""
    folder = Path(folder)
    try:
        about = json.loads((folder / ABOUT).read_text())
        arrays = load_file(folder / MODELS)
        made = net or _net(about["net"], folder, sum(array.size for array in arrays.values()))
        like = made.init(rng.derive(0, "init", 0))
        names, ids = [path for path, _ in paths(like)], [int(i) for i in about["models"]]
        params = {i: refill(like, iter([arrays[f"{i}/{name}"] for name in names])) for i in ids}
        for i in ids:
            for name, expected, leaf in zip(names, leaves(like), leaves(params[i]), strict=True):
                if expected.shape != leaf.shape:
                    raise DataError(f"{folder}: '{i}/{name}' has shape {leaf.shape}, the net needs {expected.shape}")
        for key in ("classes", "columns"):
            if not isinstance(about.get(key, []), list):
                raise DataError(f"{folder}: {key} must be a list, got {type(about[key]).__name__}")
        width = math.prod(about["net"]["features"])
        columns = about.get("columns") or [""] * width
        if len(columns) != width or any(type(name) is not str for name in columns):
            raise DataError(f"{folder}: expected a name for each of {about['net']['features']} features")
        kinds, n_classes = {type(name) for name in about["classes"]}, about["net"]["classes"]
        if kinds not in ({int}, {str}) or len(set(about["classes"])) != n_classes or len(about["classes"]) != n_classes:
            raise DataError(f"{folder}: expected {n_classes} different numbers or names of classes")
        if kinds == {int} and max(map(abs, about["classes"])) >= 2**63:
            raise DataError(f"{folder}: classes that are numbers must fit 64 bits")
        masks = {i: arrays[f"{i}/{MASK}"] for i in ids if f"{i}/{MASK}" in arrays}
        if not {int(i) for votes in about["clients"].values() for i in votes} <= set(ids):
            raise DataError(f"{folder}: a client uses a model that is not there")
        if not all(about["clients"].values()):
            raise DataError(f"{folder}: every client must use a model")
        weights = [weight for votes in about["clients"].values() for weight in votes.values()]
        if not all(type(weight) in (int, float) and 0 <= weight <= 1e100 for weight in weights):
            raise DataError(f"{folder}: a client's votes must be numbers from 0 to 1e100")
        if about["ballot"] not in get_args(Ballot):
            raise DataError(f"{folder}: the ballot must be one of {get_args(Ballot)}, got {about['ballot']!r}")
        if list(about["net"]["features"]) != [n for n in about["net"]["features"] if type(n) is int and n > 0]:
            raise DataError(f"{folder}: features must be whole numbers from 1, got {about['net']['features']}")
        return Exported(about, made, params, masks)
    except OSError as error:
        several = sorted(path.parent.name for path in folder.glob(f"*/{ABOUT}"))
        hint = f" (of several runs, choose one: {', '.join(several)})" if several else ""
        raise DataError(f"cannot read the models in {folder}: {error.strerror or error}{hint}") from None
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{folder} holds no exported models: {type(error).__name__}: {error}") from None


def _net(about: dict[str, Any], folder: Path, most: int) -> Net:
    if about["kind"] == "perceptron":
        sizes = [math.prod(about["features"]), about["hidden"], about["classes"]]
        if not all(type(n) is int and 1 <= n <= most for n in sizes):  # before memory is asked for
            raise DataError(f"{folder}: a net of {sizes} does not fit the {most} numbers that are there")
        return mlp(*sizes)
    if about["kind"] == "resnet18":
        return resnet18(int(about["classes"]), folder / RESNET)
    raise DataError(f"{folder} was made with a net of its own, '{about['name']}': load(folder, net=...)")
