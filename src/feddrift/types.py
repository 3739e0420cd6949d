"""Types of the contract between algorithms, engines and data, explained by one toy algorithm.

At each time step an algorithm chooses two arrays, and a `Federation` scores and trains the models:

- ``w[t, c, m]``: the weight of the batch that client c received at time t in the training of model m; 0: not used;
- ``votes[c, m]``: the weight of model m's prediction at client c.

Axes are always in the order (t, c, m); time is 0-based. FedAvg on all data received so far takes four lines:

>>> class Toy:
...     def init(self, fed):
...         return State(fed.fresh(), w=np.zeros((0, fed.n_clients, 1)), votes=np.ones((fed.n_clients, 1)))
...     def step(self, state, fed):
...         w = np.ones((fed.tau + 1, fed.n_clients, 1))
...         return State(fed.train(state.models, w), w, votes=w[-1])
>>> from feddrift import run, stream
>>> steps = list(run(stream("sine-2"), Toy(), local=Local(rounds=1, steps=1)))
>>> len(steps), steps[0].accuracy.shape
(10, (10,))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

from feddrift.results import Moments as Moments
from feddrift.results import Projection as Projection
from feddrift.results import Tournament as Tournament
from feddrift.results import Updates as Updates
from feddrift.rng import Words
from feddrift.router import Router as Router
from feddrift.router import Routing as Routing
from feddrift.training import Average as Average
from feddrift.training import Holds as Holds
from feddrift.training import Local as Local
from feddrift.training import Pull as Pull
from feddrift.training import Trains as Trains

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Params = Any  # nested dicts, lists or tuples of arrays
Metric = Literal["error", "loss", "brier"]
Ballot = Literal["hard", "soft"]
Kind = Literal["created", "merged", "retired", "revived", "decided"]  # of an event
Start = Literal["warm", "fresh", "head", "joint"]
Layer = Literal["input", "trunk", "logits"]
Parting = Literal["class", "group"]  # how the rows of a cell are divided into parts


@dataclass(frozen=True, eq=False)
class Clusters:
    """Weights w[t, c, m] in which a cell trains at most one model; only the position of that model is stored.

    The size in memory does not depend on the number of models. `np.asarray(w)` is the full array; indexing and `shape`
    are those of the full array.

    >>> w = Clusters(np.array([[0, 1], [1, -1]]), n_models=2, weight=np.array([1.0, 3.0]))
    >>> w.shape, w[-1].tolist(), np.asarray(w)[:, :, 1].tolist()
    ((2, 2, 2), [[0.0, 3.0], [0.0, 0.0]], [[0.0, 1.0], [3.0, 0.0]])
    """

    model: Ints  # [t, c]; -1: none
    n_models: int
    weight: Floats = field(default_factory=lambda: np.ones(0))  # [t], of each time step; default: 1

    def __post_init__(self) -> None:
        if not len(self.weight):
            object.__setattr__(self, "weight", np.ones(len(self.model)))
        if self.weight.shape != (len(self.model),):
            raise ValueError(f"{len(self.model)} time steps need as many weights, got {self.weight.shape}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the array w[t, c, m]."""
        t, c = self.model.shape
        return t, c, self.n_models

    def __len__(self) -> int:
        return len(self.model)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int | np.integer):
            return np.where(self.model[index, :, None] == np.arange(self.n_models), self.weight[index], 0.0)
        return np.asarray(self)[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        dense = np.where(self.model[..., None] == np.arange(self.n_models), self.weight[:, None, None], 0.0)
        return dense if dtype is None else dense.astype(dtype)


Weights = Floats | Clusters  # w[t, c, m]


@dataclass(frozen=True, eq=False)
class Votes(NDArrayOperatorsMixin):
    """Votes votes[c, m]; only the models that each client votes with are stored.

    The size in memory does not depend on the number of models. `np.asarray(votes)` is the full array. Operators,
    indexing and methods of arrays work, most of them on the full array.

    >>> votes = Votes(np.array([[0, 2], [1, -1]]), np.array([[0.5, 0.5], [1.0, 0.0]]), n_models=3)
    >>> votes.shape, votes[0].tolist(), np.asarray(votes).tolist()
    ((2, 3), [0.5, 0.0, 0.5], [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]])
    """

    model: Ints  # [c, k], positions of models in ascending order, then -1 for empty slots
    weight: Floats  # [c, k], 0 in empty slots
    n_models: int

    def __post_init__(self) -> None:
        if self.model.ndim != 2 or self.model.shape != self.weight.shape:
            raise ValueError(f"votes need a weight for each model, got {self.model.shape} and {self.weight.shape}")

    @classmethod
    def for_one_model(cls, model: Ints, n_models: int) -> Votes:
        """Return votes with which each client c votes only with the model at the position model[c]."""
        return cls(model[:, None], np.ones((len(model), 1)), n_models)

    @classmethod
    def of(cls, votes: Floats | Votes) -> Votes:
        """Convert votes to this form.

        >>> Votes.of(np.array([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])).model.tolist()
        [[1, 2], [0, -1]]
        """
        if isinstance(votes, Votes):
            return votes
        voter, model = np.nonzero(votes)
        counts = np.bincount(voter, minlength=len(votes))
        slot = np.arange(len(voter)) - np.repeat(np.cumsum(counts) - counts, counts)
        shape = len(votes), int(counts.max(initial=0))
        models = np.full(shape, -1)
        weights = np.zeros(shape)
        models[voter, slot] = model
        weights[voter, slot] = votes[voter, model]
        return cls(models, weights, votes.shape[1])

    @classmethod
    def concatenate(cls, tables: Sequence[Votes]) -> Votes:
        """Concatenate the votes of several groups of clients for the same models."""
        width = max(table.model.shape[1] for table in tables)

        def pad(rows: npt.NDArray[Any], value: int) -> npt.NDArray[Any]:
            return np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=value)

        model = np.concatenate([pad(table.model, -1) for table in tables])
        return cls(model, np.concatenate([pad(table.weight, 0) for table in tables]), tables[0].n_models)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the array votes[c, m]."""
        return len(self.model), self.n_models

    @property
    def has_any(self) -> Bools:
        """[c], whether the client has a vote."""
        return np.asarray((self.weight > 0).any(axis=1))

    @property
    def used(self) -> Bools:
        """[m], whether a client votes with the model."""
        used = np.zeros(self.n_models, dtype=bool)
        used[self.model[self.weight > 0]] = True
        return used

    def argmax(self, axis: Literal[1]) -> Ints:
        """Return [c], the position of the model with the largest vote, the first of equals; 0 without votes."""
        if not self.model.shape[1]:
            return np.zeros(len(self.model), dtype=np.int64)
        largest = self.weight.argmax(axis=axis)
        return np.asarray(np.maximum(self.model[np.arange(len(self.model)), largest], 0))

    def __len__(self) -> int:
        return len(self.model)

    def of_client(self, client: int, models: Ints) -> Floats:
        """Return the client's votes for these models, 0 for models that it does not vote with."""
        weights = dict(zip(self.model[client].tolist(), self.weight[client].tolist(), strict=True))
        return np.array([weights.get(m, 0.0) for m in models.tolist()])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int | np.integer):
            row = np.zeros(self.n_models)
            filled = self.model[index] >= 0
            row[self.model[index][filled]] = self.weight[index][filled]
            return row
        if isinstance(index, tuple) and len(index) == 2 and isinstance(index[0], slice) and index[0] == slice(None):
            columns = np.arange(self.n_models)[index[1]]
            if np.ndim(columns) == 1:
                return self._select_columns(columns)
        return np.asarray(self)[index]

    def _select_columns(self, models: Ints) -> Floats:
        """Return [c, len(models)], the votes for these models, without the full array."""
        distinct, distinct_index = np.unique(models, return_inverse=True)
        column = np.full(self.n_models + 1, -1)  # of each model; the last entry is for model -1, an empty slot
        column[distinct] = np.arange(len(distinct))
        votes = np.zeros((len(self), len(distinct)))
        client, slot = np.nonzero(column[self.model] >= 0)
        votes[client, column[self.model[client, slot]]] = self.weight[client, slot]
        return votes[:, distinct_index.reshape(-1)]

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        full = [np.asarray(value) if isinstance(value, Votes) else value for value in inputs]
        return getattr(ufunc, method)(*full, **options)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the full array; Python calls this only for attributes that Votes does not have."""
        if name.startswith("__"):  # copy and pickle look for special methods
            raise AttributeError(name)
        return getattr(np.asarray(self), name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        full = np.zeros(self.shape)
        client, slot = np.nonzero(self.model >= 0)
        full[client, self.model[client, slot]] = self.weight[client, slot]
        return full if dtype is None else full.astype(dtype)


@dataclass(frozen=True)
class Net:
    """Architecture of a model: a pair of JAX-traceable functions.

    Attributes:
        init: ``init(key)`` returns the parameters, drawn with a key of two 32-bit words.
        apply: ``apply(params, x)`` returns the logits ``[n, n_classes]`` of inputs ``x[n, ...]``.
        trunk: The parameters that several models may share: paths such as ``"params/Dense_0"`` (an array, or a branch
            with everything below it), or a function that returns True for the paths of such arrays. The other
            parameters are a model's head. Algorithms decide whether models share their trunks.
        classes: The axis of each array of the head that counts the classes, such as ``{"W2": 1, "b2": 0}``. Heads can
            then be mixed class by class.
        hidden: ``hidden(params, x)`` returns the input of the head, ``[n, ...]``, for methods that use it.

    >>> def init(key):
    ...     return {"weight": np.zeros((2, 3), dtype=np.float32)}
    >>> net = Net(init, lambda params, x: x @ params["weight"])
    >>> net.apply(net.init((np.uint32(0), np.uint32(0))), np.ones((5, 2))).shape
    (5, 3)

    The two words are also a key of JAX's random numbers: ``jax.random.normal(jax.numpy.stack(key), shape)``.
    """

    init: Callable[[Words], Params]
    apply: Callable[[Params, Any], Any]
    trunk: Sequence[str] | Callable[[str], bool] = ()
    classes: Mapping[str, int] | tuple[tuple[str, int], ...] = ()
    hidden: Callable[[Params, Any], Any] | None = None

    def __post_init__(self) -> None:
        if not callable(self.trunk):  # a compiled program depends on it, so it must be hashable
            object.__setattr__(self, "trunk", (self.trunk,) if isinstance(self.trunk, str) else tuple(self.trunk))
        object.__setattr__(self, "classes", tuple(sorted(dict(self.classes).items())))


@dataclass(frozen=True, repr=False)
class Models:
    """Stack of models: every parameter array has a leading axis m; an id is never used again for another model.

    Models of one *family* share one trunk: its arrays have an axis of families in place of m, in the order in which
    `family` first names them. The name of a family is the id of the model that founded it. By default every model is a
    family of its own, and the two axes are the same.

    A model with an `owner` is *private*: only that client trains and uses it, and it is never sent.

    >>> Models({"b": np.zeros((2, 3))}, ids=(0, 4))
    Models(ids=(0, 4))
    """

    params: Params
    ids: tuple[int, ...]
    mask: Floats | None = None  # [m, *features]: inputs are multiplied by it; sent with the model, never trained
    family: tuple[int, ...] = ()  # [m]
    trunk: Params = None  # a tree like params: True where an array belongs to the trunk; None: no array does
    owner: tuple[int, ...] = ()  # [m], the client whose private model it is, -1: shared; by default all are shared
    # [m], 0: the parameters are in `params`; else the version label under which only the owner stores them.
    held: tuple[int, ...] = ()
    classes: Params = None  # a tree like params: the axis of each array that counts classes, -1: none; None: unknown

    def __post_init__(self) -> None:
        if not self.family:
            object.__setattr__(self, "family", self.ids)
        if not self.owner:
            object.__setattr__(self, "owner", (-1,) * len(self.ids))
        if not self.held:
            object.__setattr__(self, "held", (0,) * len(self.ids))
        if not len(self.owner) == len(self.held) == len(self.ids):
            raise ValueError(f"{len(self.ids)} models need as many owners, got {len(self.owner)}")
        private = {name for name, c in zip(self.family, self.owner, strict=True) if c >= 0}
        sizes = Counter(self.family)
        if any(sizes[name] > 1 for name in private):
            raise ValueError(f"a private model must be the only one of its family, got {self.family}")
        if len(self.family) != len(self.ids):
            raise ValueError(f"{len(self.ids)} models need as many families, got {len(self.family)}")
        if self.trunk is None and len(set(self.family)) < len(self.family):
            raise ValueError(f"models of one family need trunk, to mark the arrays that they share, got {self.family}")

    def __repr__(self) -> str:
        family = "" if self.family == self.ids else f", family={self.family}"
        owner = f", owner={self.owner}" if self.private.any() else ""
        return f"Models(ids={self.ids}{family}{owner})"

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def families(self) -> tuple[int, ...]:
        """The distinct families, in the order of the trunk's axis."""
        return tuple(dict.fromkeys(self.family))

    @cached_property
    def private(self) -> Bools:
        """[m], True for private models."""
        return np.array(self.owner, dtype=np.int64) >= 0

    @cached_property
    def trunk_index(self) -> Ints:
        """[m], the position of each model's trunk."""
        position = {name: f for f, name in enumerate(self.families)}
        return np.array([position[name] for name in self.family], dtype=np.int64)


@dataclass(frozen=True)
class Event:
    """A change of a model, or a decision about clients, with its cause. Reports describe it in words.

    A *decided* event does not create, merge or retire a model. Its cause names the clients (positions; an empty list:
    all) and the reason, a sentence without a full stop; its other keys are numbers, which reports add in brackets.
    A time step may have many events.

    >>> Event("created", model=2, cause={"clients": [4], "reason": "its error doubled"}).kind
    'created'
    >>> Event("decided", model=0, cause={"clients": [4], "reason": "goes back to model 0", "rows": 250}).kind
    'decided'
    """

    kind: Kind
    model: int  # id; of a decision: the model that it concerns, such as the client's earlier or next one
    cause: Mapping[str, Any]


@dataclass(frozen=True, repr=False)
class State:
    """Data that an algorithm carries from one time step to the next; subclass it to carry more.

    >>> models = Models({"b": np.zeros((1, 3))}, ids=(0,))
    >>> State(models, w=np.ones((1, 5, 1)), votes=np.ones((5, 1)))
    State(Models(ids=(0,)), 5 clients, 1 time steps, events=[])
    """

    models: Models
    w: Weights  # [t, c, m]
    votes: Floats | Votes  # [c, m]
    ballot: Ballot = "hard"  # votes weigh each model's predicted class (hard) or its probabilities (soft)
    events: tuple[Event, ...] = ()  # of this step
    drifted: Bools | None = None  # [c], True for clients with an alarm in this step
    router: Router | None = field(default=None, kw_only=True)  # chooses the votes for each test input, not votes[c]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = State.__repr__  # type: ignore[method-assign]  # @dataclass does not replace it

    def __repr__(self) -> str:
        size = f"{len(self.votes)} clients, {len(self.w)} time steps"
        return f"{type(self).__name__}({self.models!r}, {size}, events={[e.kind for e in self.events]})"


class Federation(Protocol):
    """Everything that a server can request from its clients at time tau; data of tau + 1 are not accessible.

    Every `init` and `step` of an algorithm receives one. `feddrift.testing` has one without clients, for tests.

    >>> from feddrift.testing import FakeFederation
    >>> fed = FakeFederation(tau=0, n_clients=3)
    >>> fed.evaluate(fed.fresh()).shape
    (3, 1)
    """

    @property
    def tau(self) -> int:
        """The time step, from 0."""
        ...

    @property
    def n_clients(self) -> int:
        """The number of clients that have joined so far."""
        ...

    @property
    def n_classes(self) -> int:
        """The number of classes."""
        ...

    @property
    def n_groups(self) -> int:
        """The number of groups into which the rows of each client are divided (`Stream.group`); 0: unknown."""
        ...

    @property
    def features(self) -> tuple[int, ...]:
        """The shape of one input."""
        ...

    @property
    def counts(self) -> Ints:
        """N[t, c], the number of examples that client c received at time t = 0..tau."""
        ...

    @property
    def reachable(self) -> Bools:
        """[c], True for clients that score and train models; for training they need no new data."""
        ...

    @property
    def concepts(self) -> Ints | None:
        """[t, c], the true concepts for t = 0..tau, or None if unknown. Only Oracle may read them."""
        ...

    @property
    def local(self) -> Local:
        """The settings of local training that apply unless a request has its own."""
        ...

    def key(self, purpose: str, *names: int) -> Words:
        """Derive the random key of (seed, purpose, tau, names...) for the algorithm's own draws.

        Args:
            purpose: A name in `rng.PURPOSES`.
            names: Non-negative integers that distinguish the draws for this purpose, such as a client's position.

        Returns:
            Two 32-bit words.
        """
        ...

    def allowed(self, alarms: Bools) -> Bools:
        """Select the alarms that may create models: all, unless the condition `defend` rejects some.

        Args:
            alarms: [c], True for clients with an alarm.

        Returns:
            [c], True for clients whose alarm is accepted. `defend` rejects further alarms of a client for two time
            steps after an accepted one.
        """
        ...

    def find_receivers(self, models: Models) -> Bools:
        """Find the clients to which models may be sent: all, unless the condition `share_from` withholds some models.

        Args:
            models: The models.

        Returns:
            [c, m], True where client c may receive model m. Only its owner has True for a private model.
        """
        ...

    def fresh(self, n: int = 1, distinct: bool = False) -> Models:
        """Initialise new models with the ids 0..n-1.

        Args:
            n: The number of models.
            distinct: If True, each model is drawn with its own random key; else all are copies of one initialisation,
                which is the same at every time step of a run.
        """
        ...

    def evaluate(self, models: Models, metric: Metric = "error", by: Parting | None = None) -> Floats:
        """Score models on the new data S_c^(tau) of each client c.

        Args:
            models: The models. Shared ones are scored by all clients, a private one by its owner only.
            metric: error: share of mistakes; loss: cross-entropy; brier: mean of (1 - probability of the true class)^2.
            by: If given, the rows of each class or group are scored separately.

        Returns:
            l[c, m], or with `by` l[c, m, g] for class or group g. NaN for clients that are unreachable or without new
            data, and for parts without rows. Idle models (condition `rest`) are scored only by clients whose new data
            none of the other models fits; at other clients they have NaN. So have models that the condition
            `share_from` withholds from a client (`find_receivers`).
        """
        ...

    def confusion(self, models: Models) -> Ints:
        """Count predictions on S_c^(tau): [c, m, true class, predicted class]; zeros where `evaluate` has NaN."""
        ...

    def cross_evaluate(
        self,
        models: Models,
        w: Weights,
        metric: Metric = "error",
        by: Parting | None = None,
        per_client: bool = False,
    ) -> Floats:
        """Score every model on a sample of the data of every model.

        Args:
            models: Shared models.
            w: The weights w[t, c, m], t = 0..tau, that define the data of each model.
            metric: See `evaluate`.
            by: If given, the rows of each class or group are scored separately.
            per_client: If True, the data of each client are scored separately.

        Returns:
            L[i, j], the score of model i on the data of model j, at the clients that may receive model i; NaN if model
            j has no data at such reachable clients, or if one of the two is idle and has no data of time tau. With
            `per_client` an axis of clients follows, with `by` an axis of classes or groups. The condition
            `defend` replaces the mean over rows by the median over clients, and `defend="robust"` also L[i, i] by the
            lowest score of all models on the data of model i.
        """
        ...

    def local_updates(self, models: Models, w: Weights, local: Local | None = None) -> Updates:
        """Run one round of local training without averaging.

        Args:
            models: Shared models.
            w: The weights w[t, c, m], t = 0..tau, of the training data.
            local: The settings of local training; by default those of the federation.

        Returns:
            The trained parameters of each pair of a client and a model.
        """
        ...

    def train(self, models: Models, w: Weights, rounds: int | None = None, local: Local | None = None) -> Models:
        """Train each model on its data by FedAvg (the paper's Algorithm 1).

        Args:
            models: The models.
            w: The weights w[t, c, m], t = 0..tau, of the training data. A call trains either shared or private models;
                private ones are trained on data of their owners only.
            rounds: The number of rounds; by default that of `local`.
            local: The settings of local training; by default those of the federation.

        Returns:
            The trained models. A family without training data of time tau is returned unchanged.
        """
        ...

    def moments(
        self,
        models: Models,
        layer: Layer,
        by: Literal["all", "class"] = "all",
        project: Floats | Projection | None = None,
        square: bool = True,
    ) -> Moments:
        """Compute mean and standard deviation of a layer's output on S_c^(tau), for each client c and model.

        Args:
            models: The models.
            layer: The masked inputs of the model (input), the features before its head (trunk) or its logits; each row
                is flattened to a vector.
            by: All rows together, or the rows of each class separately.
            project: A matrix [D, d] that is applied to each vector first, or a random map that server and clients draw
                from a key.
            square: If False, clients send only means, and the deviations are NaN.

        Returns:
            The statistics; NaN for the pairs that `evaluate` does not score, and for classes without rows.
        """
        ...

    def tournament(self, models: Models, w: Weights, parent: Ints, starts: Sequence[Start]) -> Tournament:
        """Compare starts of a new model at each client: train them on most of its new rows, test them on the others.

        `warm` is a copy of the parent, `fresh` a new initialisation, and `head` a copy of which only the head is
        trained. `joint` is a copy on the parent's trunk, which is trained with this head and the other heads on it; the
        other heads use most of the client's older data. A client sends only counts.

        Args:
            models: Shared models.
            w: The weights w[t, c, m] of the older data, t < tau.
            parent: [c], the position of the model that the client's starts derive from; -1: it does not take part.
                Reachable clients with a parent and at least 2 new rows take part.
            starts: The starts.

        Returns:
            The mistakes of each start, and those common to two of them, at each client.
        """
        ...

    def contest(self, models: Models, teams: Ints, held_by: Local | None = None) -> Tournament:
        """Compare the mistakes of models, or of ensembles of them, at each client.

        A client takes part if it is reachable, has rows to test on, and may receive a model of every contestant. It
        sends only counts.

        Args:
            models: The models. Private ones compete at their owner only.
            teams: teams[k, c, i], the positions of the models in contestant k at client c; -1: none. A contestant
                predicts with the mean of their probabilities.
            held_by: The settings, with a hold_out, of a training at this time step: models are compared on the rows
                that it left out. Two trainings that hold out opposite ends of the rows (`holds`) can be tested on each
                other's data. By default models are compared on all new rows.

        Returns:
            The mistakes of each contestant, and those common to two of them, at each client.
        """
        ...


class Algorithm(Protocol):
    """Frozen dataclass of hyperparameters with two methods.

    >>> from feddrift import algorithm
    >>> algorithm("FedDrift", delta=0.1).delta
    0.1
    """

    def init(self, fed: Federation) -> State:
        """Return the state before any data. It is called once, with the federation at tau = 0."""
        ...

    def step(self, state: State, fed: Federation) -> State:
        """Return the state after the training of time step tau. It is called for tau = 0, 1, ...

        Args:
            state: The state after the previous time step.
            fed: The federation at time tau.
        """
        ...
