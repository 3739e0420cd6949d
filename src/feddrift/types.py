"""The whole contract: a few small types, explained by one toy algorithm.

At each time step an algorithm decides two arrays and asks a `Federation` for the rest:

- ``w[t, c, m]``: does the batch that client c received at time t train model m, and how strongly;
- ``votes[c, m]``: whose prediction counts at client c.

Axes are always in the order (t, c, m); time is 0-based. FedAvg that forgets nothing is four lines:

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
Parting = Literal["class", "group"]  # what rows are told apart by


@dataclass(frozen=True, eq=False)
class Clusters:
    """w[t, c, m] where a cell trains one model or none, kept as that model's position: small however many models.

    `np.asarray(w)` is the array that it stands for; indexing and `shape` are those of that array.

    >>> w = Clusters(np.array([[0, 1], [1, -1]]), n_models=2, weight=np.array([1.0, 3.0]))
    >>> w.shape, w[-1].tolist(), np.asarray(w)[:, :, 1].tolist()
    ((2, 2, 2), [[0.0, 3.0], [0.0, 0.0]], [[0.0, 1.0], [3.0, 0.0]])
    """

    model: Ints  # [t, c]; -1: none
    n_models: int
    weight: Floats = field(default_factory=lambda: np.ones(0))  # [t], how strongly a time step counts; default: 1

    def __post_init__(self) -> None:
        if not len(self.weight):
            object.__setattr__(self, "weight", np.ones(len(self.model)))
        if self.weight.shape != (len(self.model),):
            raise ValueError(f"{len(self.model)} time steps need as many weights, got {self.weight.shape}")

    @property
    def shape(self) -> tuple[int, int, int]:
        t, c = self.model.shape
        return t, c, self.n_models

    def __len__(self) -> int:
        return len(self.model)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, int | np.integer):
            return np.where(self.model[at, :, None] == np.arange(self.n_models), self.weight[at], 0.0)
        return np.asarray(self)[at]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        dense = np.where(self.model[..., None] == np.arange(self.n_models), self.weight[:, None, None], 0.0)
        return dense if dtype is None else dense.astype(dtype)


Weights = Floats | Clusters  # w[t, c, m]


@dataclass(frozen=True, eq=False)
class Votes(NDArrayOperatorsMixin):
    """votes[c, m] stored as the models that each client votes with: small however many models there are.

    `np.asarray(votes)` is the full array. Operators, indexing and methods of arrays work, most of them on that array.

    >>> votes = Votes(np.array([[0, 2], [1, -1]]), np.array([[0.5, 0.5], [1.0, 0.0]]), n_models=3)
    >>> votes.shape, votes[0].tolist(), np.asarray(votes).tolist()
    ((2, 3), [0.5, 0.0, 0.5], [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]])
    """

    model: Ints  # [c, k], positions of models in ascending order, then -1 for empty places
    weight: Floats  # [c, k], 0 in empty places
    n_models: int

    def __post_init__(self) -> None:
        if self.model.ndim != 2 or self.model.shape != self.weight.shape:
            raise ValueError(f"votes need a weight for each model, got {self.model.shape} and {self.weight.shape}")

    @classmethod
    def for_one_model(cls, model: Ints, n_models: int) -> Votes:
        """Each client votes with the model at the position model[c] alone."""
        return cls(model[:, None], np.ones((len(model), 1)), n_models)

    @classmethod
    def of(cls, votes: Floats | Votes) -> Votes:
        """The same votes in this form.

        >>> Votes.of(np.array([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])).model.tolist()
        [[1, 2], [0, -1]]
        """
        if isinstance(votes, Votes):
            return votes
        voter, model = np.nonzero(votes)
        counts = np.bincount(voter, minlength=len(votes))
        place = np.arange(len(voter)) - np.repeat(np.cumsum(counts) - counts, counts)
        shape = len(votes), int(counts.max(initial=0))
        models = np.full(shape, -1)
        weights = np.zeros(shape)
        models[voter, place] = model
        weights[voter, place] = votes[voter, model]
        return cls(models, weights, votes.shape[1])

    @classmethod
    def concatenate(cls, tables: Sequence[Votes]) -> Votes:
        """The votes of several groups of clients, in their order, for the same models."""
        width = max(table.model.shape[1] for table in tables)

        def pad(rows: npt.NDArray[Any], value: int) -> npt.NDArray[Any]:
            return np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=value)

        model = np.concatenate([pad(table.model, -1) for table in tables])
        return cls(model, np.concatenate([pad(table.weight, 0) for table in tables]), tables[0].n_models)

    @property
    def shape(self) -> tuple[int, int]:
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
        """[c], the position of the model with the largest vote, the first of equals; 0 for a client without votes."""
        if not self.model.shape[1]:
            return np.zeros(len(self.model), dtype=np.int64)
        largest = self.weight.argmax(axis=axis)
        return np.asarray(np.maximum(self.model[np.arange(len(self.model)), largest], 0))

    def __len__(self) -> int:
        return len(self.model)

    def of_client(self, client: int, models: Ints) -> Floats:
        """The weights of these models at a client, 0 for those that it does not vote with."""
        weights = dict(zip(self.model[client].tolist(), self.weight[client].tolist(), strict=True))
        return np.array([weights.get(m, 0.0) for m in models.tolist()])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int | np.integer):
            row = np.zeros(self.n_models)
            named = self.model[index] >= 0
            row[self.model[index][named]] = self.weight[index][named]
            return row
        if isinstance(index, tuple) and len(index) == 2 and isinstance(index[0], slice) and index[0] == slice(None):
            columns = np.arange(self.n_models)[index[1]]
            if np.ndim(columns) == 1:
                return self._columns(columns)
        return np.asarray(self)[index]

    def _columns(self, models: Ints) -> Floats:
        """[c, len(models)], without the full array."""
        distinct, of_column = np.unique(models, return_inverse=True)
        place = np.full(self.n_models + 1, -1)  # the last one is that of empty places
        place[distinct] = np.arange(len(distinct))
        columns = np.zeros((len(self), len(distinct)))
        client, k = np.nonzero(place[self.model] >= 0)
        columns[client, place[self.model[client, k]]] = self.weight[client, k]
        return columns[:, of_column.reshape(-1)]

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        full = [np.asarray(value) if isinstance(value, Votes) else value for value in inputs]
        return getattr(ufunc, method)(*full, **options)

    def __getattr__(self, name: str) -> Any:
        """Whatever else an array has, of the full array."""
        if name.startswith("__"):  # what copies and pickles look for
            raise AttributeError(name)
        return getattr(np.asarray(self), name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        full = np.zeros(self.shape)
        client, place = np.nonzero(self.model >= 0)
        full[client, self.model[client, place]] = self.weight[client, place]
        return full if dtype is None else full.astype(dtype)


@dataclass(frozen=True)
class Net:
    """A model's shape: any pair of functions, JAX-traceable.

    ``init(key)`` makes the parameters from a key of two 32-bit words; ``apply(params, x)`` gives the logits
    ``[n, n_classes]`` of inputs ``x[n, ...]``. ``trunk`` says which parameters several models may share, by paths such
    as ``"params/Dense_0"`` (an array, or a branch with all below it) or by a function of an array's path; the rest is a
    model's head. Nothing is shared unless an algorithm asks for it. ``classes`` says of each array of the head which of
    its axes counts the classes, such as ``{"W2": 1, "b2": 0}``: heads can then be mixed class by class.
    ``hidden(params, x)`` gives what the head sees of inputs, ``[n, ...]``, for methods that ask for it.

    >>> def init(key):
    ...     return {"weight": np.zeros((2, 3), dtype=np.float32)}
    >>> net = Net(init, lambda params, x: x @ params["weight"])
    >>> net.apply(net.init((np.uint32(0), np.uint32(0))), np.ones((5, 2))).shape
    (5, 3)

    JAX's own random numbers take the two words as they are: ``jax.random.normal(jax.numpy.stack(key), shape)``.
    """

    init: Callable[[Words], Params]
    apply: Callable[[Params, Any], Any]
    trunk: Sequence[str] | Callable[[str], bool] = ()
    classes: Mapping[str, int] | tuple[tuple[str, int], ...] = ()
    hidden: Callable[[Params, Any], Any] | None = None

    def __post_init__(self) -> None:
        if not callable(self.trunk):  # hashable, as everything that a compiled program depends on
            object.__setattr__(self, "trunk", (self.trunk,) if isinstance(self.trunk, str) else tuple(self.trunk))
        object.__setattr__(self, "classes", tuple(sorted(dict(self.classes).items())))


@dataclass(frozen=True, repr=False)
class Models:
    """A stack of models: every parameter array has a leading axis m; ``ids`` are names for life.

    Models of one *family* stand on one trunk: its arrays have an axis of families (in the order in which `family` names
    them) in place of m. A family is called by the id of the model that founded it. By default every model is a family
    of its own, and the two axes are the same.

    A model with an `owner` is *private*: only that client trains and uses it, and it is never sent.

    >>> Models({"b": np.zeros((2, 3))}, ids=(0, 4))
    Models(ids=(0, 4))
    """

    params: Params
    ids: tuple[int, ...]
    mask: Floats | None = None  # [m, *features]: what each model sees of its inputs; travels with it, never trained
    family: tuple[int, ...] = ()  # [m]
    trunk: Params = None  # a tree like params: True where an array belongs to the trunk; None: nowhere
    owner: tuple[int, ...] = ()  # [m], the client whose private model it is, -1: shared; by default all are shared
    held: tuple[int, ...] = ()  # [m], 0: parameters are here; else only its owner has them, in the version of this name
    classes: Params = None  # a tree like params: which axis of a model's array counts classes, -1: none; None: unknown

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
            raise ValueError(f"a private model stands alone in its family, got {self.family}")
        if len(self.family) != len(self.ids):
            raise ValueError(f"{len(self.ids)} models need as many families, got {len(self.family)}")
        if self.trunk is None and len(set(self.family)) < len(self.family):
            raise ValueError(f"models of one family must say which arrays are their trunk, got {self.family}")

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
        """[m], whether it is a client's own, never sent."""
        return np.array(self.owner, dtype=np.int64) >= 0

    @cached_property
    def trunk_index(self) -> Ints:
        """[m], the position of each model's trunk."""
        at = {name: f for f, name in enumerate(self.families)}
        return np.array([at[name] for name in self.family], dtype=np.int64)


@dataclass(frozen=True)
class Event:
    """A turn in the life of a model, or a decision about clients, with its cause, which reports put into words.

    What is *decided* makes, merges or retires no model. Its cause names the clients (positions; none: all) and the
    reason, a sentence without a full stop; other keys are numbers, which follow in brackets. A time step may have many.

    >>> Event("created", model=2, cause={"clients": [4], "reason": "its error doubled"}).kind
    'created'
    >>> Event("decided", model=0, cause={"clients": [4], "reason": "goes back to model 0", "rows": 250}).kind
    'decided'
    """

    kind: Kind
    model: int  # of a decision: the one that it concerns, such as what its client had, or moves to
    cause: Mapping[str, Any]


@dataclass(frozen=True, repr=False)
class State:
    """What an algorithm carries from one time step to the next; subclass it to carry more.

    >>> models = Models({"b": np.zeros((1, 3))}, ids=(0,))
    >>> State(models, w=np.ones((1, 5, 1)), votes=np.ones((5, 1)))
    State(Models(ids=(0,)), 5 clients, 1 time steps, events=[])
    """

    models: Models
    w: Weights  # [t, c, m]
    votes: Floats | Votes  # [c, m]
    ballot: Ballot = "hard"  # what is weighed by the votes: each model's class, or its probabilities
    events: tuple[Event, ...] = ()  # of this step
    drifted: Bools | None = None  # [c], where this step raised an alarm
    router: Router | None = field(default=None, kw_only=True)  # at a test: in place of votes[c], what inputs choose
    routing: Routing | None = field(default=None, kw_only=True)  # the condition `route`'s own, no algorithm's
    acted: Ints | None = field(default=None, kw_only=True)  # [c], when its last alarm counted: `defend`'s own

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = State.__repr__  # type: ignore[method-assign]  # a dataclass keeps what it has

    def __repr__(self) -> str:
        size = f"{len(self.votes)} clients, {len(self.w)} time steps"
        return f"{type(self).__name__}({self.models!r}, {size}, events={[e.kind for e in self.events]})"


class Federation(Protocol):
    """All a server may ask of its clients at time tau; nothing of tau + 1 is reachable.

    Every `init` and `step` of an algorithm gets one; `feddrift.testing` has one without clients.

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
        """How many clients have joined so far."""
        ...

    @property
    def n_classes(self) -> int:
        """How many classes there are."""
        ...

    @property
    def n_groups(self) -> int:
        """How many groups the rows of each client fall into (`Stream.group`); 0: nobody tells."""
        ...

    @property
    def features(self) -> tuple[int, ...]:
        """The shape of one input."""
        ...

    @property
    def counts(self) -> Ints:
        """N[t, c] for t = 0..tau."""
        ...

    @property
    def reachable(self) -> Bools:
        """[c]; a client out of reach is neither scored nor trained, one without new data still trains."""
        ...

    @property
    def concepts(self) -> Ints | None:
        """The truth for t = 0..tau where somebody knows it. For Oracle only."""
        ...

    @property
    def local(self) -> Local:
        """How clients train unless they are told otherwise."""
        ...

    def key(self, purpose: str, *names: int) -> Words:
        """A random key of (seed, purpose, tau, names...) for the algorithm's own draws."""
        ...

    def allowed(self, alarms: Bools) -> Bools:
        """[c], which of these alarms may found new models: all, unless some clients raise too many (`defend`)."""
        ...

    def fresh(self, n: int = 1, distinct: bool = False) -> Models:
        """n new models with ids 0..n-1: all the trial's one initialisation, or each its own."""
        ...

    def evaluate(self, models: Models, metric: Metric = "error", by: Parting | None = None) -> Floats:
        """l[c, m] on S_c^(tau); NaN for a client without new data or out of reach, and where model m rests for it.

        error: share of mistakes; loss: cross-entropy; brier: mean of (1 - probability of the true class)^2. With `by`,
        l[c, m, g] on the rows of each class or group g; NaN also where there are none.
        """
        ...

    def confusion(self, models: Models) -> Ints:
        """Counts [c, m, true class, predicted class] on S_c^(tau); zeros where evaluate has NaN."""
        ...

    def cross_evaluate(
        self,
        models: Models,
        w: Weights,
        metric: Metric = "error",
        by: Parting | None = None,
        per_client: bool = False,
    ) -> Floats:
        """L[i, j], model i on a sample of the data that w gives to model j; NaN where there are none, or one rests.

        Per client it is L[i, j, c] on the data that client c has for model j, and with `by` there is one axis more.
        """
        ...

    def local_updates(self, models: Models, w: Weights, local: Local | None = None) -> Updates:
        """One round of local training, not averaged."""
        ...

    def train(self, models: Models, w: Weights, rounds: int | None = None, local: Local | None = None) -> Models:
        """FedAvg of each model on its data by w (the paper's Algorithm 1); a family unused at tau stays as it is."""
        ...

    def moments(
        self,
        models: Models,
        layer: Layer,
        by: Literal["all", "class"] = "all",
        project: Floats | Projection | None = None,
        square: bool = True,
    ) -> Moments:
        """Mean and standard deviation of what a layer of each model makes of S_c^(tau), over all rows or by class.

        The layer is what the model sees (input), the features before its head (trunk) or its logits, each row as one
        vector. A matrix [D, d], or a map that both sides draw from a key, is applied to it first. Without `square`
        only means are sent, and the deviations are NaN. Who is not scored by `evaluate` is not asked here.
        """
        ...

    def tournament(self, models: Models, w: Weights, parent: Ints, starts: Sequence[Start]) -> Tournament:
        """Let clients find out, each on its own new data, how a new model should start.

        Client c takes part if parent[c] is the position of a model, not -1, and it has at least 2 new rows. It trains
        each start on most of them: a copy of its parent (warm), a fresh model, a copy of which only the head learns
        (head), or a copy of its head whose trunk learns with it and with the models that stand on that trunk, on most
        of the older data w[t < tau] that the client has for these (joint). Only the counts leave the client.
        """
        ...

    def contest(self, models: Models, teams: Ints, held_by: Local | None = None) -> Tournament:
        """Let models, or teams of them, compete at each client: which mistakes do they make, and which in common?

        teams[k, c, i] are positions of the models whose mean probabilities are contestant k at client c, -1: none. The
        rows are all new ones of the client, or, where models were trained with `held_by` (a Local with a hold_out),
        those that this training left out; two trainings that hold out either end (`holds`) can judge each other.
        Client c takes part if every contestant has a model there and there are such rows. A private model competes at
        its owner. Only the counts leave the client.
        """
        ...


class Algorithm(Protocol):
    """A frozen dataclass of hyper-parameters with two methods.

    >>> from feddrift import algorithm
    >>> algorithm("FedDrift", delta=0.1).delta
    0.1
    """

    def init(self, fed: Federation) -> State:
        """The state before any data: called once, with the federation at tau = 0."""
        ...

    def step(self, state: State, fed: Federation) -> State:
        """One time step, called for tau = 0, 1, ..."""
        ...
