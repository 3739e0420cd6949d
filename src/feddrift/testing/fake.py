"""Federation without clients, for unit tests of methods."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from feddrift import rng
from feddrift.types import (
    Bools,
    Floats,
    Ints,
    Layer,
    Local,
    Metric,
    Models,
    Moments,
    Parting,
    Projection,
    Start,
    Tournament,
    Updates,
    Weights,
)

FORMER_NAMES = {  # attributes and arguments of FakeFederation in version 0.3 -> their current names
    "asked": "requests",
    "crossed": "last_cross_evaluation",
    "described": "compute_moments",
    "judge": "run_contest",
    "quiet": "rejected_alarms",
    "tried": "last_tournament",
}


def _find_current_name(name: str) -> str:
    """Return the current name of an attribute or argument, with a warning if it has another one."""
    if name not in FORMER_NAMES:
        return name
    warnings.warn(f"FakeFederation.{name} is now {FORMER_NAMES[name]}", DeprecationWarning, stacklevel=3)
    return FORMER_NAMES[name]


def _accept_former_arguments(cls: type[FakeFederation]) -> type[FakeFederation]:
    """Let the constructor of the class accept arguments with the names of version 0.3."""
    init = cls.__init__

    @functools.wraps(init)
    def init_with_current_names(self: FakeFederation, *args: Any, **named: Any) -> None:
        current: dict[str, Any] = {}
        for name, value in named.items():
            current[_find_current_name(name)] = value
        init(self, *args, **current)

    cls.__init__ = init_with_current_names  # type: ignore[method-assign]
    return cls


@_accept_former_arguments
@dataclass
class FakeFederation:
    """Federation without clients, for unit tests of a method: it returns the results that you define.

    Training adds 1 to the parameters of each model with data of time tau. Below, i and j are ids of models.

    Attributes:
        tau: The time step.
        n_clients: The number of clients.
        loss: ``loss(c, i)``, the scores that `evaluate` returns.
        cross: ``cross(i, j)``, the scores that `cross_evaluate` returns.
        n_classes: The number of classes.
        n_groups: The number of groups of rows.
        features: The shape of one input.
        counts: N[t, c], the numbers of examples; by default 100 each.
        concepts: The true concepts, if they are known.
        local: The settings of local training.
        confusions: The result of `confusion`.
        lanes: A function that returns the result of `local_updates`.
        trial: The result of `tournament`.
        loss_by: ``loss_by(c, i, g)``, the scores of `evaluate` for class or group g.
        cross_by: ``cross_by(i, j, c, g)``, the scores of `cross_evaluate` for class or group g at client c.
        compute_moments: A function that returns the result of `moments`.
        run_contest: A function that returns the result of `contest`.
        requests: The requests so far, such as "evaluate error".
        last_cross_evaluation: The weights w of the last `cross_evaluate`.
        last_tournament: The weights w and the parents of the last `tournament`.
        trained: The models, the weights w and the settings of the last `train`.
        rejected_alarms: [c], True for clients whose alarms `allowed` rejects; by default none.
        withheld: By the id of a model, the clients that may not receive it; by default none.

    >>> from feddrift import algorithm
    >>> method = algorithm("FedDrift", delta=0.1)
    >>> state = method.init(FakeFederation(tau=0, n_clients=2))
    >>> for tau in (0, 1, 2):  # at time 2 the error of client 1 jumps
    ...     fed = FakeFederation(tau, n_clients=2, loss=lambda c, i: 0.4 if (tau, c) == (2, 1) else 0.1)
    ...     state = method.step(state, fed)
    >>> state.models.ids, state.drifted.tolist(), fed.requests[:2]
    ((0, 1), [False, True], ['evaluate error', 'train'])
    """

    tau: int
    n_clients: int
    loss: Callable[[int, int], float] = lambda c, i: 0.0
    cross: Callable[[int, int], float] = lambda i, j: 0.0 if i == j else 1.0
    n_classes: int = 2
    n_groups: int = 0
    features: tuple[int, ...] = (4,)
    counts: Ints = None  # type: ignore[assignment]
    concepts: Ints | None = None
    local: Local = Local()
    confusions: Ints = None  # type: ignore[assignment]
    lanes: Callable[[Models, Weights], Updates] | None = None
    trial: Tournament | None = None
    loss_by: Callable[[int, int, int], float] | None = None
    cross_by: Callable[[int, int, int, int], float] | None = None
    compute_moments: Callable[[Models, Layer, str], Moments] | None = None
    run_contest: Callable[[Models, Ints], Tournament] | None = None
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.counts is None:
            self.counts = np.full((self.tau + 1, self.n_clients), 100)
        self.reachable: Bools = np.ones(self.n_clients, dtype=bool)
        self.rejected_alarms: Bools = np.zeros(self.n_clients, dtype=bool)
        self.withheld: dict[int, list[int]] = {}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in FORMER_NAMES:
                raise AttributeError(f"FakeFederation has no attribute '{name}'")
            return getattr(self, _find_current_name(name))

        def __setattr__(self, name: str, value: Any) -> None:
            object.__setattr__(self, _find_current_name(name), value)

    def key(self, purpose: str, *names: int) -> rng.Words:
        return rng.derive_key(0, purpose, self.tau, *names)

    def allowed(self, alarms: Bools) -> Bools:
        return np.asarray(alarms & ~self.rejected_alarms)

    def find_receivers(self, models: Models) -> Bools:
        receivers: Bools = np.ones((self.n_clients, len(models)), dtype=bool)
        for m, i in enumerate(models.ids):
            receivers[self.withheld.get(i, []), m] = False
        return receivers

    def fresh(self, n: int = 1, distinct: bool = False) -> Models:
        return Models({"a": np.zeros((n, 1))}, tuple(range(n)))

    def evaluate(self, models: Models, metric: Metric = "error", by: Parting | None = None) -> Floats:
        self.requests.append(f"evaluate {metric}" + (f" by {by}" if by else ""))
        if by is not None:
            loss_by = self.loss_by
            parts = range(self.n_classes if by == "class" else self.n_groups)
            assert loss_by is not None
            by_part = [[[loss_by(c, i, g) for g in parts] for i in models.ids] for c in range(self.n_clients)]
            return np.where((self.counts[-1] == 0)[:, None, None], np.nan, by_part)
        losses = np.array([[self.loss(c, i) for i in models.ids] for c in range(self.n_clients)], dtype=float)
        losses[self.counts[-1] == 0] = np.nan
        return losses

    def confusion(self, models: Models) -> Ints:
        self.requests.append("confusion")
        return self.confusions[:, : len(models)]

    def cross_evaluate(
        self,
        models: Models,
        w: Weights,
        metric: Metric = "error",
        by: Parting | None = None,
        per_client: bool = False,
    ) -> Floats:
        self.requests.append(f"cross_evaluate {metric}" + (f" by {by}" if by else ""))
        self.last_cross_evaluation = w
        if by is not None:
            cross_by = self.cross_by
            parts = range(self.n_classes if by == "class" else self.n_groups)
            assert cross_by is not None and per_client, "by needs cross_by, and per_client=True"
            clients = range(self.n_clients)
            return np.array(
                [[[[cross_by(i, j, c, g) for g in parts] for c in clients] for j in models.ids] for i in models.ids]
            )
        return np.array([[self.cross(i, j) for j in models.ids] for i in models.ids])

    def moments(
        self,
        models: Models,
        layer: Layer,
        by: Literal["all", "class"] = "all",
        project: Floats | Projection | None = None,
        square: bool = True,
    ) -> Moments:
        self.requests.append(f"moments {layer} {by}")
        assert self.compute_moments is not None
        return self.compute_moments(models, layer, by)

    def tournament(self, models: Models, w: Weights, parent: Ints, starts: Sequence[Start]) -> Tournament:
        self.requests.append(f"tournament {' '.join(starts)}")
        self.last_tournament = w, parent
        assert self.trial is not None
        return self.trial

    def contest(self, models: Models, teams: Ints, held_by: Local | None = None) -> Tournament:
        self.requests.append("contest" + ("" if held_by is None else f" holds={held_by.holds}"))
        assert self.run_contest is not None
        return self.run_contest(models, teams)

    def local_updates(self, models: Models, w: Weights, local: Local | None = None) -> Updates:
        self.requests.append("local_updates")
        assert self.lanes is not None
        return self.lanes(models, w)

    def train(self, models: Models, w: Weights, rounds: int | None = None, local: Local | None = None) -> Models:
        self.trained = models, w, local or self.local
        lr = "" if local is None else f" lr={local.lr:g}"
        self.requests.append("train" + ("" if rounds is None else f" rounds={rounds}") + lr)
        used = (w[self.tau] > 0).any(axis=0)
        return replace(models, params={"a": models.params["a"] + used[:, None]})
