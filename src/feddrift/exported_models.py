"""Models that `runs/export.py` wrote: they predict without a run, record or algorithm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.numpy import load_file

from feddrift import rng
from feddrift.errors import ConfigError, DataError, describe_validation_error, unknown_name_error
from feddrift.nets.perceptron import mlp
from feddrift.nets.voting import compute_layer, predict_probabilities, predict_votes
from feddrift.router import Per
from feddrift.tables.columns import read_frame
from feddrift.tables.features import Feature, transform_table
from feddrift.trees import fill_tree, tree_paths
from feddrift.types import Ballot, Floats, Ints, Layer, Models, Net, Params, Projection, Router

MODELS_FILE = "models.safetensors"
ABOUT_FILE = "models.json"
RESNET_FILE = "resnet18.safetensors"
MASK_NAME = "mask"  # the name of the mask of a model's inputs in the file of its parameters
ROUTER_NAME = "router"  # the prefix of the router's arrays in that file
ROUTER_ARRAYS = ("centre", "votes", "low", "scale")

Size = Annotated[int, Field(ge=1, lt=2**63)]
Vote = Annotated[float, Field(ge=0, le=1e100)]


@dataclass(frozen=True)
class Predictor:
    """One or several models that vote, with the names of classes and features."""

    net: Net
    models: Models
    votes: Floats  # [m]
    ballot: Ballot
    features: tuple[int, ...]  # the shape of one input
    classes: tuple[int | str, ...]
    columns: tuple[str, ...] = ()  # names of the features in their order, if they have any
    recipe: tuple[Feature, ...] = ()  # of a table: how each feature is computed from a column
    router: Router | None = None  # chooses the votes of each input, in place of `votes`

    def predict(self, x: npt.ArrayLike | Mapping[str, npt.ArrayLike]) -> npt.NDArray[Any]:
        """Predict the classes of inputs, by their names in the data.

        Args:
            x: Inputs x[n, ...]. If features have names, x may be a table with these columns, in any order: a dictionary
                or a data frame. Models trained on a table convert its columns as in training.

        Raises:
            DataError: The inputs have another shape or other columns, or are not finite numbers.
        """
        return np.asarray(np.array(self.classes)[self.scores(x).argmax(axis=1)])

    def scores(self, x: npt.ArrayLike | Mapping[str, npt.ArrayLike]) -> Floats:
        """Return [n, class], the shares of the votes, which add up to 1.

        If the models vote with probabilities (ballot `soft`), these are the mean probabilities.
        """
        inputs = self._read_inputs(x)
        votes = self._choose_votes(inputs)
        return np.asarray(
            predict_votes(self.net, self.models, votes, self.ballot, inputs) / votes.sum(axis=-1, keepdims=True)
        )

    def predict_proba(self, x: npt.ArrayLike | Mapping[str, npt.ArrayLike]) -> Floats:
        """Return [n, class], the mean of the models' probabilities, weighted by their votes."""
        inputs = self._read_inputs(x)
        return predict_probabilities(self.net, self.models, self._choose_votes(inputs), inputs)

    def _choose_votes(self, x: npt.NDArray[Any]) -> Floats:
        """Return the votes [m], or with a router [n, m]."""
        if self.router is None:
            return self.votes
        choice = self.router.choose_centres(
            compute_layer(self.net, self.router.model, self.router.layer, x), self.votes
        )
        return np.where((choice >= 0)[:, None], self.router.votes[choice], self.votes)

    def _describe_choice(self, x: npt.ArrayLike | Mapping[str, npt.ArrayLike], reason: str) -> Choice:
        """Predict, and describe the models that were chosen.

        Args:
            x: See `predict`.
            reason: The reason for the predictor's own votes.
        """
        inputs = self._read_inputs(x)
        votes = np.broadcast_to(self._choose_votes(inputs), (len(inputs), len(self.models)))
        models = np.array(self.models.ids)[votes.argmax(axis=1)]
        if self.router is not None and (self.router.margin is None or (votes != self.votes).any()):
            ids, counts = np.unique(models, return_counts=True)
            rows = [f"model {i} for {n} rows" for i, n in zip(ids.tolist(), counts.tolist(), strict=True)]
            reason = f"the inputs choose {', '.join(rows)}"
        elif self.router is not None:
            reason += "; the inputs do not clearly choose another one"
        return Choice(self.predict(inputs), models, reason, self)

    def _read_inputs(self, x: Any) -> npt.NDArray[Any]:
        """Return the inputs [n, ...] of an array or table."""
        is_table = isinstance(x, Mapping) or hasattr(x, "columns")
        return self._check_inputs(self._stack_columns(x) if is_table else x)

    def _check_inputs(self, x: Any) -> npt.NDArray[Any]:
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

    def _stack_columns(self, table: Any) -> npt.NDArray[Any]:
        if self.recipe:
            return transform_table(self.recipe, read_frame(table))
        missing = [name for name in self.columns if name not in table]
        if not self.columns or missing:
            why = f"got no column '{missing[0]}'" if missing else "the features have no names"
            raise DataError(f"inputs by name need the columns {', '.join(self.columns)}: {why}")
        try:
            return np.stack([np.asarray(table[name], dtype=np.float64) for name in self.columns], axis=1)
        except (TypeError, ValueError):
            raise DataError("inputs must be columns of numbers, all of the same length") from None


@dataclass(frozen=True, eq=False)
class Choice:
    """Predictions for a client that was not in training, and the models that they are from."""

    classes: npt.NDArray[Any]  # [n], the predictions, by the names of the classes in the data
    models: Ints  # [n], the id of the model of each row; of several models the one with the largest vote
    reason: str
    predictor: Predictor = field(repr=False)  # for further inputs and for probabilities


def choose_most_used(
    clients: Mapping[str, Mapping[str, float]], models: Iterable[str]
) -> tuple[dict[str, float], str] | None:
    """Choose the votes for a client that was not in training: those of the clients of the model with most clients.

    A client belongs to the model with its largest vote.

    Args:
        clients: The votes of each client, by the id of a model.
        models: The ids of the shared models, the oldest first; others are not used for other clients.

    Returns:
        The votes and the reason; None without a shared model.

    >>> choose_most_used({"a": {"0": 1.0}, "b": {"3": 1.0}, "c": {"3": 1.0}}, ["0", "3"])
    ({'3': 1.0}, 'model 3 has the most clients: 2 of 3')
    """
    users: dict[str, list[Mapping[str, float]]] = {i: [] for i in models}
    if not users:
        return None
    for votes in clients.values():
        main = max(votes, key=votes.__getitem__, default=None)
        if main in users:
            users[main].append({i: vote for i, vote in votes.items() if i in users})
    chosen = max(users, key=lambda i: len(users[i]))
    n = len(users[chosen])
    if not n:
        return {chosen: 1.0}, f"model {chosen} is shared, all clients use private models"
    total: dict[str, float] = {}
    for votes in users[chosen]:
        for i, vote in votes.items():
            total[i] = total.get(i, 0.0) + vote / sum(votes.values()) / n
    return total, f"model {chosen} has the most clients: {n} of {len(clients)}"


@dataclass(frozen=True)
class Exported:
    """Models of a folder, the votes of each client, and the history of the models."""

    about: dict[str, Any]
    net: Net
    models: Models
    router: Router | None = None  # chooses the models of clients that were not in training, where routing has paid

    def __repr__(self) -> str:
        about = self.about
        name = f"{about.get('stream')}, {about.get('algorithm')}, seed {about.get('seed')}"
        return f"Exported({name}: {len(self.models)} models, {len(about['clients'])} clients)"

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the features in the order of x; empty if they have no names."""
        return tuple(self.about["columns"])

    @property
    def classes(self) -> tuple[int | str, ...]:
        """The classes by their names in the data, in the order of the columns of `predict_proba`."""
        return tuple(self.about["classes"])

    def of(self, client: str) -> Predictor:
        """Return the models that a client uses.

        Raises:
            ConfigError: The client is unknown; `choose` predicts for clients that were not in training.
        """
        clients = self.about["clients"]
        if str(client) not in clients:
            unknown = unknown_name_error("client", client, clients)
            raise ConfigError(f"{unknown}; choose(x) predicts for a client that was not in training")
        return self._build_predictor(clients[str(client)])

    def choose(self, x: npt.ArrayLike | Mapping[str, npt.ArrayLike]) -> Choice:
        """Predict for a client that was not in training, and report which models were chosen, and why.

        The inputs choose the models if the export has a router: if they did so at the end of the run. Else, and for
        inputs that do not clearly choose another model, the client gets the model that most clients use.

        Args:
            x: The unlabelled inputs of the client, as for `Predictor.predict`.

        Raises:
            ConfigError: All models are private, so none can predict for another client.
        """
        new_client = self.about["new_client"]
        if new_client is None:
            raise ConfigError("all models are private to their clients: none can predict for another client")
        return self._build_predictor(new_client["votes"], self.router)._describe_choice(x, new_client["reason"])

    def _build_predictor(self, votes: Mapping[str, float], router: Router | None = None) -> Predictor:
        about = self.about
        return Predictor(
            self.net,
            self.models,
            np.array([votes.get(str(i), 0.0) for i in self.models.ids]),
            ballot=about["ballot"],
            features=tuple(about["net"]["features"]),
            classes=self.classes,
            columns=self.columns,
            recipe=tuple(Feature(**feature) for feature in about["recipe"]),
            router=router,
        )

    def predict(self, client: str, x: npt.ArrayLike | Mapping[str, npt.ArrayLike]) -> npt.NDArray[Any]:
        """Predict the classes of inputs x[n, ...] by the models that a client uses: see `Predictor.predict`."""
        return self.of(client).predict(x)

    def predict_proba(self, client: str, x: npt.ArrayLike | Mapping[str, npt.ArrayLike]) -> Floats:
        """Return the probabilities [n, class] of inputs x[n, ...] by the models that a client uses.

        The order of the classes is that of `classes`.
        """
        return self.of(client).predict_proba(x)


class _NetDescription(BaseModel):
    """Description of the net in models.json, from which it is rebuilt."""

    model_config = ConfigDict(strict=True)

    kind: Literal["perceptron", "resnet18", "own"]
    features: list[Size]
    classes: Size
    hidden: Size | list[Size] = 1  # units of the one hidden layer, or of each; an empty list: linear
    name: str = ""


class _NewClientDescription(BaseModel):
    """Votes for clients that were not in training, in models.json."""

    model_config = ConfigDict(strict=True)

    votes: dict[str, Vote]
    reason: str


class _ProjectionDescription(BaseModel):
    """Description of a random projection in models.json."""

    model_config = ConfigDict(strict=True)

    key: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(min_length=2, max_length=2)]
    size: Annotated[int, Field(ge=1, lt=2**31)]


class _RouterDescription(BaseModel):
    """Description of a router in models.json; its arrays are in the file of the parameters."""

    model_config = ConfigDict(strict=True)

    per: Per
    of: Literal["rows", "moments"]
    layer: Layer
    margin: Annotated[float, Field(ge=0, le=1e100)] | None
    project: _ProjectionDescription | None  # None: no projection, or an array in the file


class _ModelsDescription(BaseModel):
    """Required content of models.json; further keys are allowed."""

    model_config = ConfigDict(strict=True, extra="allow")

    net: _NetDescription
    ballot: Ballot
    classes: list[Annotated[int, Field(ge=-(2**63), lt=2**63)]] | list[str]
    columns: list[str] = []
    recipe: list[Feature] = []
    models: dict[str, Any]
    clients: dict[str, dict[str, Vote]]
    new_client: _NewClientDescription | None = None
    router: _RouterDescription | None = None

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if len(set(self.classes)) != self.net.classes or len(self.classes) != self.net.classes:
            raise ValueError(f"expected {self.net.classes} different numbers or names of classes")
        if self.columns and len(self.columns) != math.prod(self.net.features):
            raise ValueError(f"expected a name for each of {self.net.features} features")
        if self.recipe and [feature.name for feature in self.recipe] != self.columns:
            raise ValueError("the names in recipe must be those in columns")
        if "new_client" not in self.model_fields_set:  # an export of 0.3.0 or earlier
            most_used = choose_most_used(self.clients, self.models)
            if most_used is not None:
                self.new_client = _NewClientDescription(votes=most_used[0], reason=most_used[1])
        if self.new_client is not None and not (
            set(self.new_client.votes) <= set(self.models) and any(self.new_client.votes.values())
        ):
            raise ValueError("a new client must use models that are in models")
        if not {i for votes in self.clients.values() for i in votes} <= set(self.models):
            raise ValueError("a client uses a model that is missing in models")
        if not all(any(votes.values()) for votes in self.clients.values()):
            raise ValueError("every client must use a model")
        return self


def load_models(folder: str | Path, net: Net | None = None) -> Exported:
    """Load models that `export` wrote.

    Args:
        folder: The folder with the models.
        net: The net, if the run used a net of your own; built-in ones are rebuilt.

    Raises:
        ConfigError: `net` is not a Net.
        DataError: The folder has no exported models, or they do not fit the net.

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
        about = _ModelsDescription.model_validate_json((folder / ABOUT_FILE).read_bytes())
        arrays = load_file(folder / MODELS_FILE)
        net = net or _build_net(about.net, folder, max_size=sum(array.size for array in arrays.values()))
        like = net.init(rng.derive_key(0, "init", 0))
        ids = [int(i) for i in about.models]
        stacks = []
        for name, leaf in tree_paths(like):
            stacks.append(np.stack([arrays[f"{i}/{name}"] for i in ids]))
            if stacks[-1].shape[1:] != leaf.shape:
                raise DataError(f"{folder}: '{name}' has shape {stacks[-1].shape[1:]}, the net needs {leaf.shape}")
        has_mask = f"{ids[0]}/{MASK_NAME}" in arrays
        mask = np.stack([arrays[f"{i}/{MASK_NAME}"] for i in ids]) if has_mask else None
        exported = Exported(about.model_dump(), net, Models(fill_tree(like, iter(stacks)), tuple(ids), mask))
        return replace(exported, router=_read_router(about, exported, arrays, like))
    except OSError as error:
        several = sorted(path.parent.name for path in folder.glob(f"*/{ABOUT_FILE}"))
        hint = f" (it has several runs, choose one: {', '.join(several)})" if several else ""
        raise DataError(f"cannot read the models in {folder}: {error.strerror or error}{hint}") from None
    except ValidationError as error:
        raise DataError(
            f"{folder / ABOUT_FILE} does not describe exported models: {describe_validation_error(error)}"
        ) from None
    except (SafetensorError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise DataError(f"{folder} does not contain exported models: {type(error).__name__}: {error}") from None


load = load_models  # its name in version 0.1


def _read_router(
    about: _ModelsDescription, exported: Exported, arrays: Mapping[str, npt.NDArray[Any]], like: Params
) -> Router | None:
    """Return the router of an export, if it has one.

    Args:
        about: The description of the export.
        exported: Its models.
        arrays: The arrays of the file of parameters.
        like: Parameters of the net.

    Raises:
        ValueError: The router does not fit the models.
    """
    described = about.router
    if described is None:
        return None
    own = {name.removeprefix(f"{ROUTER_NAME}/"): array for name, array in arrays.items()}
    project: Projection | Floats | None = own.get("project")
    if described.project is not None:
        first, second = described.project.key
        project = Projection((first, second), described.project.size)
    model = None
    if described.layer != "input":
        leaves = [own[f"model/{name}"][None] for name, _ in tree_paths(like)]
        mask = own.get(f"model/{MASK_NAME}")
        model = Models(fill_tree(like, iter(leaves)), (0,), None if mask is None else mask[None])
    centre, votes, low, scale = (own[name] for name in ROUTER_ARRAYS)
    try:
        router = Router(
            described.per, centre, votes, described.of, project, low, scale, described.margin, model, described.layer
        )
    except ConfigError as error:
        raise ValueError(str(error)) from None
    n_models = len(exported.models)
    if votes.shape[1] != n_models:
        raise ValueError(f"the router has votes for {votes.shape[1]} models, not for {n_models}")
    probe = np.zeros((1, *about.net.features), dtype=np.float32)  # arrays of other shapes fail now, not in a prediction
    router.choose_centres(compute_layer(exported.net, model, described.layer, probe), np.ones(n_models))
    return router


def _build_net(description: _NetDescription, folder: Path, max_size: int) -> Net:
    """Create the net of a description.

    Args:
        description: The description in models.json.
        folder: The folder of the models.
        max_size: The largest size of a layer: the number of parameters in the file.
    """
    if description.kind == "perceptron":
        hidden = description.hidden if isinstance(description.hidden, list) else [description.hidden]
        sizes = math.prod(description.features), *hidden, description.classes
        if not all(1 <= n <= max_size for n in sizes):  # before memory is allocated
            raise DataError(f"{folder}: a net with layers of {list(sizes)} does not fit {max_size} parameters")
        return mlp(sizes[0], hidden, description.classes)
    if description.kind == "resnet18":
        from feddrift.nets.resnet import resnet18  # imported here, because few models need it

        return resnet18(description.classes, folder / RESNET_FILE)
    raise DataError(
        f"{folder} was made with the user's own net '{description.name}': pass it, load_models(folder, net=...)"
    )
