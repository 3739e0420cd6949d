"""A classifier with the interface of scikit-learn, for rows that have a client and a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from feddrift.algorithms import RECOMMENDED
from feddrift.algorithms import algorithm as find_algorithm
from feddrift.data import Stream
from feddrift.engines import engine as find_engine
from feddrift.engines.conditions.conditions import IDEAL
from feddrift.errors import ConfigError
from feddrift.exported_models import Predictor
from feddrift.nets import default_net, named_net
from feddrift.simulation import NO_LOOP_STATE, TrainedStep, add_newcomers, run_steps
from feddrift.types import Algorithm, Floats, Ints, Local, Net, State

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.metrics import accuracy_score
    from sklearn.utils import check_random_state, column_or_1d
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError(f"feddrift.sklearn needs scikit-learn: pip install 'feddrift[sklearn]' ({error})") from error

ONLY_CLIENT = "0"  # the name of the client if no clients are given


class FedDriftClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Classifier for rows that belong to clients and arrive over time, trained by a federation in this process.

    `fit` trains all time steps in their order; `partial_fit` adds one time step. `predict` uses the models that each
    client uses after the last time step. Features are not scaled: put a StandardScaler before the classifier.

    Args:
        algorithm: The method: a name that `feddrift list` shows, ``package.module:Name``, or an object.
        settings: The settings of an algorithm that is given by name, such as ``{"delta": 0.1}``.
        net: The model: a Net, or a name such as linear or mlp:64,64; by default a perceptron with one hidden layer.
        rounds: The number of rounds in each time step; by default that of `Local`, as the next three.
        steps: The number of local steps in a round.
        batch: The number of rows in a minibatch.
        lr: The step size.
        random_state: The seed of initial models and minibatches: a whole number, or None for another one in each fit.

    Attributes:
        classes_: The classes, in the order of the columns of `predict_proba`.
        clients_: The names of the clients.
        n_steps_: The number of time steps that the classifier was trained on.
        test_scores_: For each time step the accuracy on its rows before they were trained on; NaN for the first.
        alarms_: The alarms as pairs: the number of the time step, from 0, and the name of the client.
        state_: The state of the algorithm.

    >>> draw = np.random.default_rng(0)
    >>> X = draw.uniform(size=(400, 2))
    >>> client = np.repeat(["a", "b"], 200)
    >>> y = (X[:, 0] > 0.5) ^ (client == "b")  # the same inputs have opposite labels
    >>> model = FedDriftClassifier("Local", rounds=5, lr=0.1, random_state=0).fit(X, y, clients=client)
    >>> model.score(X, y, clients=client) > 0.9
    True
    """

    def __init__(
        self,
        algorithm: str | Algorithm = RECOMMENDED,
        *,
        settings: Mapping[str, Any] | None = None,
        net: str | Net | None = None,
        rounds: int | None = None,
        steps: int | None = None,
        batch: int | None = None,
        lr: float | None = None,
        random_state: Any = None,
    ) -> None:
        self.algorithm = algorithm
        self.settings = settings
        self.net = net
        self.rounds = rounds
        self.steps = steps
        self.batch = batch
        self.lr = lr
        self.random_state = random_state

    def fit(self, X: Any, y: Any, clients: Any = None, times: Any = None) -> FedDriftClassifier:
        """Train on all time steps in their order, without what was learnt before.

        Args:
            X: Inputs [n, features].
            y: The class of each row.
            clients: The client of each row; by default all rows are of one client.
            times: The time step of each row: numbers, dates or words that can be sorted; by default there is one.
        """
        X, y = validate_data(self, X, y, dtype=np.float32)
        check_classification_targets(y)
        n = len(X)
        names = _read_clients(clients, n)
        time = np.zeros(n, dtype=np.int64)
        if times is not None:
            time = np.unique(_read_column(times, n, "times"), return_inverse=True)[1].reshape(-1)
        self._begin(np.unique(y), has_clients=clients is not None)
        self._train(X, y, names, time)
        return self

    def partial_fit(self, X: Any, y: Any, clients: Any = None, classes: Any = None) -> FedDriftClassifier:
        """Test on the rows of one more time step, then train on them.

        Clients may be new, and clients without rows keep their models. All rows of earlier calls are kept in memory:
        algorithms may train on them again.

        Args:
            X: Inputs [n, features].
            y: The class of each row.
            clients: The client of each row; by default all rows are of one client.
            classes: All classes that will occur; required in the first call.
        """
        is_first = not hasattr(self, "state_")
        X, y = validate_data(self, X, y, dtype=np.float32, reset=is_first)
        check_classification_targets(y)
        if is_first:
            if classes is None:
                raise ValueError("classes must be given in the first call of partial_fit: a list of all classes")
            self._begin(np.unique(column_or_1d(classes)), has_clients=clients is not None)
        elif classes is not None and not np.array_equal(np.unique(column_or_1d(classes)), self.classes_):
            raise ValueError(f"classes must be those of the first call, {self.classes_.tolist()}, got {classes!r}")
        if (clients is not None) != self._has_clients:
            raise ValueError("clients must be given in all calls or in none: the first call decides")
        self._train(X, y, _read_clients(clients, len(X)), np.full(len(X), self.n_steps_))
        return self

    def predict(self, X: Any, clients: Any = None) -> npt.NDArray[Any]:
        """Predict the class of each row by the models that its client uses.

        Args:
            X: Inputs [n, features].
            clients: The client of each row. Clients that were not in training, and all rows by default, get the shared
                model that most clients use; with a single client in training, the default is that client.
        """
        classes = self._predict(X, clients, "predict")[:, 0].astype(np.int64)
        return np.asarray(self.classes_[classes])

    def predict_proba(self, X: Any, clients: Any = None) -> Floats:
        """Return the probabilities [n, class] of inputs; see `predict` for the arguments.

        If several models vote, these are their mean probabilities. The votes may then prefer another class.
        """
        return self._predict(X, clients, "predict_proba")

    def score(self, X: Any, y: Any, clients: Any = None, sample_weight: Any = None) -> float:
        """Return the accuracy of `predict`.

        Args:
            X: Inputs [n, features].
            y: The class of each row.
            clients: The client of each row: see `predict`.
            sample_weight: The weight of each row; by default all rows have the same.
        """
        return float(accuracy_score(y, self.predict(X, clients=clients), sample_weight=sample_weight))

    def _begin(self, classes: npt.NDArray[Any], has_clients: bool) -> None:
        """Forget the data and models of earlier calls."""
        if isinstance(self.random_state, int | np.integer) and not isinstance(self.random_state, bool):
            self._seed = int(self.random_state)
        else:
            self._seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        if self._seed < 0:
            raise ConfigError(f"random_state must be a whole number from 0 on or None, got {self.random_state}")
        self.classes_ = classes
        self.clients_: list[str] = []
        self.n_steps_ = 0
        self.test_scores_: list[float] = []
        self.alarms_: list[tuple[int, str]] = []
        self._has_clients = has_clients
        self._stream: Stream | None = None  # the rows of all time steps so far
        self._trained: TrainedStep | None = None  # the last time step

    def _train(self, X: npt.NDArray[Any], y: npt.NDArray[Any], names: list[str], time: Ints) -> None:
        """Add rows of new time steps, and train on them; attributes change only if that succeeds."""
        unknown = ~np.isin(y, self.classes_)
        if unknown.any():
            raise ValueError(f"y has the class {y[unknown][0]}, known are {self.classes_.tolist()}: see classes")
        clients = [*self.clients_, *sorted(set(names) - set(self.clients_))]
        client = _find_positions(names, clients)
        order = np.lexsort((client, time))  # stable: rows of a cell keep their order
        labels = np.searchsorted(self.classes_, y[order]).astype(np.int32)
        n_new = int(time.max()) + 1 - self.n_steps_
        cells = (time - self.n_steps_) * len(clients) + client
        counts = np.bincount(cells, minlength=n_new * len(clients)).reshape(n_new, len(clients))
        x = X[order]
        if self._stream is not None:
            x = np.concatenate([self._stream.x, x])
            labels = np.concatenate([self._stream.y, labels])
            n_more = len(clients) - self._stream.n_clients
            counts = np.concatenate([np.pad(self._stream.counts[:-1], ((0, 0), (0, n_more))), counts])
        stream = Stream(
            name="scikit-learn",
            x=x,
            y=labels,
            counts=np.pad(counts, ((0, 1), (0, 0))),  # the last time step of a stream is only for testing
            n_classes=len(self.classes_),
            clients=tuple(clients),
        )
        self._run(stream)
        self._stream = stream
        self.clients_ = clients
        self.n_steps_ = stream.n_steps

    def _run(self, stream: Stream) -> None:
        """Continue the run with the new time steps of a stream."""
        engine = find_engine("simulator")(stream, self._make_net(stream), self._make_local(), self._seed, IDEAL)
        last = self._trained
        if last is not None:
            last = replace(last, state=add_newcomers(last.state, stream.n_clients))
        trained: list[TrainedStep] = []
        steps = run_steps(
            engine,
            self._make_algorithm(stream),
            done=self.n_steps_,
            state=None if last is None else last.state,
            loop=NO_LOOP_STATE if last is None else last.loop,
            untested=last,
            sink=trained.append,
        )
        scores = [np.nan] if last is None else []  # the first time step is not tested
        for step in steps:
            tested = step.tested > 0
            if tested.any():  # not so for the last step, whose test data have not arrived
                scores.append(float(np.average(step.accuracy[tested], weights=step.tested[tested])))
        self.test_scores_ = self.test_scores_ + scores
        self.alarms_ = self.alarms_ + [
            (step.tau, stream.clients[c]) for step in trained for c in np.flatnonzero(step.drifted).tolist()
        ]
        self._trained = trained[-1]
        self.state_: State = trained[-1].state

    def _make_algorithm(self, stream: Stream) -> Algorithm:
        if isinstance(self.algorithm, str):
            return find_algorithm(self.algorithm, stream, **(self.settings or {}))
        if self.settings:
            raise ConfigError(f"settings are for an algorithm that is given by name, got {self.algorithm!r}")
        if isinstance(self.algorithm, type) or not callable(getattr(self.algorithm, "step", None)):
            raise ConfigError(f"algorithm must be a name or an object with init and step, got {self.algorithm!r}")
        return self.algorithm

    def _make_net(self, stream: Stream) -> Net:
        net = named_net(self.net, stream) if isinstance(self.net, str) else self.net
        return default_net(stream) if net is None else net

    def _make_local(self) -> Local:
        values = {name: getattr(self, name) for name in ("rounds", "steps", "batch", "lr")}
        return Local(**{name: value for name, value in values.items() if value is not None})

    def _find_votes(self, clients: Any, n: int) -> Floats:
        """Return [n, m], the votes for each row."""
        n_known = len(self.clients_)
        votes = add_newcomers(self.state_, n_known + 1).votes  # the last ones are those of an unknown client
        if clients is None:
            client = np.full(n, 0 if n_known == 1 else n_known)
        else:
            client = _find_positions(_read_clients(clients, n), self.clients_)
        present, row = np.unique(client, return_inverse=True)
        return np.stack([votes[c] for c in present.tolist()])[row.reshape(-1)]

    def _predict(self, X: Any, clients: Any, method: Literal["predict", "predict_proba"]) -> npt.NDArray[Any]:
        """Call a method of `Predictor` once for all rows with the same votes, and return [n, ...]."""
        check_is_fitted(self, "state_")
        X = validate_data(self, X, dtype=np.float32, reset=False)
        assert self._stream is not None
        n_classes = len(self.classes_)
        result = np.zeros((len(X), 1 if method == "predict" else n_classes))
        distinct_votes, group = np.unique(self._find_votes(clients, len(X)), axis=0, return_inverse=True)
        for g, votes in enumerate(distinct_votes):
            rows = np.flatnonzero(group.reshape(-1) == g)
            predictor = Predictor(
                self._make_net(self._stream),
                self.state_.models,
                votes,
                self.state_.ballot,
                features=X.shape[1:],
                classes=tuple(range(n_classes)),
                router=self.state_.router,
            )
            result[rows] = getattr(predictor, method)(X[rows]).reshape(len(rows), -1)
        return result


def _read_column(values: Any, n: int, name: str) -> npt.NDArray[Any]:
    """Return a column with a value for each of n rows."""
    column: npt.NDArray[Any] = column_or_1d(np.asarray(values))
    if len(column) != n:
        raise ValueError(f"{name} must have a value for each of {n} rows, got {len(column)}")
    missing = [value is None or value != value for value in column.tolist()]
    if any(missing):
        raise ValueError(f"{name} must have a value for each row, row {missing.index(True)} has none")
    return column


def _read_clients(clients: Any, n: int) -> list[str]:
    """Return the name of each row's client."""
    return (
        [ONLY_CLIENT] * n if clients is None else [str(name) for name in _read_column(clients, n, "clients").tolist()]
    )


def _find_positions(names: list[str], clients: list[str]) -> Ints:
    """Return the position of each name in a list of clients; for other names the length of the list."""
    position = {name: c for c, name in enumerate(clients)}
    return np.array([position.get(name, len(clients)) for name in names], dtype=np.int64)
