"""Models to take away, ready to predict: no run, no record, no algorithm. `runs/export.py` writes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.numpy import load_file

from feddrift import rng
from feddrift.errors import ConfigError, DataError, problem, unknown
from feddrift.nets.perceptron import mlp
from feddrift.nets.voting import layer_of, poll, poll_chances
from feddrift.tables.columns import read_frame
from feddrift.tables.features import Feature, read_again
from feddrift.trees import leaves, paths, refill
from feddrift.types import Ballot, Floats, Models, Net, Router

MODELS, ABOUT, RESNET = "models.safetensors", "models.json", "resnet18.safetensors"
MASK = "mask"  # the name of what a model sees of its inputs, beside its parameters

Size = Annotated[int, Field(ge=1, lt=2**63)]
Vote = Annotated[float, Field(ge=0, le=1e100)]


@dataclass(frozen=True)
class Predictor:
    """One or several models that vote."""

    net: Net
    models: Models
    votes: Floats  # [m]
    ballot: Ballot
    features: tuple[int, ...]  # the shape of one input
    classes: tuple[int | str, ...]
    columns: tuple[str, ...] = ()  # what the features are called, in their order, where they have names
    recipe: tuple[Feature, ...] = ()  # of a table: how each feature is made of its columns
    router: Router | None = None  # what inputs choose in the place of these votes

    def predict(self, x: npt.ArrayLike | Mapping[str, npt.ArrayLike]) -> npt.NDArray[Any]:
        """The classes of inputs x[n, ...], as they are called in the data.

        Where features have names, x may be a table of columns, in any order: a dictionary, or a data frame. Models
        that learned from a table make their features of it as then: scaled, words and gaps as numbers.
        """
        return np.asarray(np.array(self.classes)[self.scores(x).argmax(axis=1)])

    def scores(self, x: npt.ArrayLike | Mapping[str, npt.ArrayLike]) -> Floats:
        """[n, class], which adds up to 1: shares of the votes, or probabilities where the models vote with these."""
        inputs = self._inputs(x)
        votes = self._votes(inputs)
        return np.asarray(poll(self.net, self.models, votes, self.ballot, inputs) / votes.sum(axis=-1, keepdims=True))

    def predict_proba(self, x: npt.ArrayLike | Mapping[str, npt.ArrayLike]) -> Floats:
        """[n, class], the probability of each of `classes`: the mean of the models' own, weighed by their votes."""
        inputs = self._inputs(x)
        return poll_chances(self.net, self.models, self._votes(inputs), inputs)

    def _votes(self, x: npt.NDArray[Any]) -> Floats:
        """[m], or where inputs choose [n, m]."""
        if self.router is None:
            return self.votes
        choice = self.router.choose(layer_of(self.net, self.router.model, self.router.layer, x), self.votes)
        return np.where((choice >= 0)[:, None], self.router.votes[choice], self.votes)

    def _inputs(self, x: Any) -> npt.NDArray[Any]:
        return self._checked(self._in_order(x) if isinstance(x, Mapping) or hasattr(x, "columns") else x)

    def _checked(self, x: Any) -> npt.NDArray[Any]:
        shape = f"[n, {', '.join(map(str, self.features))}]"
        try:
            inputs = np.asarray(x)
        except ValueError:  # rows of different lengths
            raise DataError(f"inputs must have shape {shape}") from None
        if inputs.dtype.kind not in "biuf":
            raise DataError(f"inputs must be numbers, got {inputs.dtype}")
        if inputs.ndim < 1 or inputs.shape[1:] != self.features:
            raise DataError(f"inputs must have shape {shape}, got {inputs.shape}")
        if not np.isfinite(inputs).all():
            raise DataError("inputs must be finite numbers, got NaN or infinity")
        return inputs.astype(np.float32) if inputs.dtype.kind == "f" else inputs

    def _in_order(self, table: Any) -> npt.NDArray[Any]:
        if self.recipe:
            return read_again(self.recipe, read_frame(table))
        missing = [name for name in self.columns if name not in table]
        if not self.columns or missing:
            why = f"got no column '{missing[0]}'" if missing else "the features have no names"
            raise DataError(f"inputs by name need the columns {', '.join(self.columns)}: {why}")
        try:
            return np.stack([np.asarray(table[name], dtype=np.float64) for name in self.columns], axis=1)
        except (TypeError, ValueError):
            raise DataError("inputs must be columns of numbers, all of the same length") from None


@dataclass(frozen=True)
class Exported:
    """The models of a folder, each client's own choice of them, and their lineage."""

    about: dict[str, Any]
    net: Net
    models: Models

    def __repr__(self) -> str:
        about = self.about
        name = f"{about.get('stream')}, {about.get('algorithm')}, seed {about.get('seed')}"
        return f"Exported({name}: {len(self.models)} models, {len(about['clients'])} clients)"

    @property
    def columns(self) -> tuple[str, ...]:
        """What the features are called, in the order of x; nothing where they have no names."""
        return tuple(self.about["columns"])

    def of(self, client: str) -> Predictor:
        """The models that this client uses."""
        about, clients = self.about, self.about["clients"]
        if str(client) not in clients:
            raise unknown("client", client, clients)
        votes = np.array([clients[str(client)].get(str(i), 0.0) for i in self.models.ids])
        features, classes = tuple(about["net"]["features"]), tuple(about["classes"])
        recipe = tuple(Feature(**feature) for feature in about["recipe"])
        return Predictor(self.net, self.models, votes, about["ballot"], features, classes, self.columns, recipe)

    def predict(self, client: str, x: npt.ArrayLike | Mapping[str, npt.ArrayLike]) -> npt.NDArray[Any]:
        """The classes of inputs x[n, ...] by the models that this client uses: see `Predictor.predict`."""
        return self.of(client).predict(x)

    def predict_proba(self, client: str, x: npt.ArrayLike | Mapping[str, npt.ArrayLike]) -> Floats:
        """The probabilities [n, class] of inputs x[n, ...] by the models that this client uses."""
        return self.of(client).predict_proba(x)


class _Net(BaseModel):
    """What a reader needs to make the net again."""

    model_config = ConfigDict(strict=True)

    kind: Literal["perceptron", "resnet18", "own"]
    features: list[Size]
    classes: Size
    hidden: Size | list[Size] = 1  # units of the one hidden layer, or of each; none: linear
    name: str = ""


class _About(BaseModel):
    """What models.json must say; it may say more."""

    model_config = ConfigDict(strict=True, extra="allow")

    net: _Net
    ballot: Ballot
    classes: list[Annotated[int, Field(ge=-(2**63), lt=2**63)]] | list[str]
    columns: list[str] = []
    recipe: list[Feature] = []
    models: dict[str, Any]
    clients: dict[str, dict[str, Vote]]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(set(self.classes)) != self.net.classes or len(self.classes) != self.net.classes:
            raise ValueError(f"expected {self.net.classes} different numbers or names of classes")
        if self.columns and len(self.columns) != math.prod(self.net.features):
            raise ValueError(f"expected a name for each of {self.net.features} features")
        if self.recipe and [feature.name for feature in self.recipe] != self.columns:
            raise ValueError("the recipe must be of the columns")
        if not {i for votes in self.clients.values() for i in votes} <= set(self.models):
            raise ValueError("a client uses a model that is not there")
        if not all(any(votes.values()) for votes in self.clients.values()):
            raise ValueError("every client must use a model")
        return self


def load_models(folder: str | Path, net: Net | None = None) -> Exported:
    """Exported models, as `export` wrote them.

    Parameters:
        folder: Where they are.
        net: A net of your own has to be given again; a built-in one is known.

    >>> import tempfile
    >>> from feddrift import export, record
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = record("sine-2", "Oblivious", out=f"{folder}/runs", rounds=1)
    ...     models = load_models(*export(f"{folder}/runs", f"{folder}/models"))
    >>> models
    Exported(sine-2, Oblivious, seed 0: 1 models, 10 clients)
    >>> models.predict("3", [[0.1, 0.9], [0.9, 0.1]]).shape, models.predict_proba("3", [[0.1, 0.9]]).shape
    ((2,), (1, 2))
    """
    if net is not None and not isinstance(net, Net):
        raise ConfigError(f"net must be a Net, got {type(net).__name__}")
    folder = Path(folder)
    try:
        about = _About.model_validate_json((folder / ABOUT).read_bytes())
        arrays = load_file(folder / MODELS)
        rebuilt = net or _made(about.net, folder, sum(array.size for array in arrays.values()))
        like, ids = rebuilt.init(rng.derive(0, "init", 0)), [int(i) for i in about.models]
        stacks = []
        for (name, _), leaf in zip(paths(like), leaves(like), strict=True):
            stacks.append(np.stack([arrays[f"{i}/{name}"] for i in ids]))
            if stacks[-1].shape[1:] != leaf.shape:
                raise DataError(f"{folder}: '{name}' has shape {stacks[-1].shape[1:]}, the net needs {leaf.shape}")
        masked = f"{ids[0]}/{MASK}" in arrays
        mask = np.stack([arrays[f"{i}/{MASK}"] for i in ids]) if masked else None
        return Exported(about.model_dump(), rebuilt, Models(refill(like, iter(stacks)), tuple(ids), mask))
    except OSError as error:
        several = sorted(path.parent.name for path in folder.glob(f"*/{ABOUT}"))
        hint = f" (of several runs, choose one: {', '.join(several)})" if several else ""
        raise DataError(f"cannot read the models in {folder}: {error.strerror or error}{hint}") from None
    except ValidationError as error:
        raise DataError(f"{folder / ABOUT} does not describe exported models: {problem(error)}") from None
    except (SafetensorError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise DataError(f"{folder} holds no exported models: {type(error).__name__}: {error}") from None


load = load_models  # its name in version 0.1


def _made(net: _Net, folder: Path, most: int) -> Net:
    if net.kind == "perceptron":
        hidden = net.hidden if isinstance(net.hidden, list) else [net.hidden]
        sizes = math.prod(net.features), *hidden, net.classes
        if not all(1 <= n <= most for n in sizes):  # before memory is asked for
            raise DataError(f"{folder}: a net of {list(sizes)} does not fit the {most} numbers that are there")
        return mlp(sizes[0], hidden, net.classes)
    if net.kind == "resnet18":
        from feddrift.nets.resnet import resnet18  # here: few need it

        return resnet18(net.classes, folder / RESNET)
    raise DataError(f"{folder} was made with a net of its own, '{net.name}': load_models(folder, net=...)")
