"""Exported models, ready to predict: no run, no record, no algorithm."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from feddrift import rng
from feddrift.errors import DataError, unknown
from feddrift.nets.perceptron import mlp
from feddrift.nets.resnet import resnet18
from feddrift.nets.voting import poll
from feddrift.trees import leaves, paths, refill
from feddrift.types import Ballot, Floats, Net, Params

MODELS, ABOUT, RESNET = "models.safetensors", "models.json", "resnet18.safetensors"


MASK = "mask"  # the name of what a model sees of its inputs, beside its parameters


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
