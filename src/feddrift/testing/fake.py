"""A federation without clients, for unit tests of methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

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


@dataclass
class FakeFederation:
    """A federation without clients, for unit tests of a method: it answers with what you write down, and notes what it
    was asked.

    `loss(c, id)` and `cross(i, j)` (by model id) are the world; training adds 1 to what is used at tau.

    >>> from feddrift import algorithm
    >>> method = algorithm("FedDrift", delta=0.1)
    >>> state = method.init(FakeFederation(tau=0, n_clients=2))
    >>> for tau in (0, 1, 2):  # at time 2 the error of client 1 jumps
    ...     fed = FakeFederation(tau, n_clients=2, loss=lambda c, i: 0.4 if (tau, c) == (2, 1) else 0.1)
    ...     state = method.step(state, fed)
    >>> state.models.ids, state.drifted.tolist(), fed.asked[:2]
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
    confusions: Ints = None  # type: ignore[assignment]  # what confusion() answers
    lanes: Callable[[Models, Weights], Updates] | None = None  # what local_updates() answers
    trial: Tournament | None = None  # what tournament() answers
    loss_by: Callable[[int, int, int], float] | None = None  # loss_by(c, id, g) of each class or group g
    cross_by: Callable[[int, int, int, int], float] | None = None  # cross_by(i, j, c, g), also of each client
    described: Callable[[Models, Layer, str], Moments] | None = None  # what moments() answers
    judge: Callable[[Models, Ints], Tournament] | None = None  # what contest() answers
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.counts is None:
            self.counts = np.full((self.tau + 1, self.n_clients), 100)
        self.reachable: Bools = np.ones(self.n_clients, dtype=bool)
        self.quiet: Bools = np.zeros(self.n_clients, dtype=bool)  # whose alarms are not acted on

    def key(self, purpose: str, *names: int) -> rng.Words:
        return rng.derive(0, purpose, self.tau, *names)

    def allowed(self, alarms: Bools) -> Bools:
        return np.asarray(alarms & ~self.quiet)

    def fresh(self, n: int = 1, distinct: bool = False) -> Models:
        return Models({"a": np.zeros((n, 1))}, tuple(range(n)))

    def evaluate(self, models: Models, metric: Metric = "error", by: Parting | None = None) -> Floats:
        self.asked.append(f"evaluate {metric}" + (f" by {by}" if by else ""))
        if by is not None:
            ask, parts = self.loss_by, range(self.n_classes if by == "class" else self.n_groups)
            assert ask is not None
            by_part = [[[ask(c, i, g) for g in parts] for i in models.ids] for c in range(self.n_clients)]
            return np.where((self.counts[-1] == 0)[:, None, None], np.nan, by_part)
        table = np.array([[self.loss(c, i) for i in models.ids] for c in range(self.n_clients)], dtype=float)
        table[self.counts[-1] == 0] = np.nan
        return table

    def confusion(self, models: Models) -> Ints:
        self.asked.append("confusion")
        return self.confusions[:, : len(models)]

    def cross_evaluate(
        self,
        models: Models,
        w: Weights,
        metric: Metric = "error",
        by: Parting | None = None,
        per_client: bool = False,
    ) -> Floats:
        self.asked.append(f"cross_evaluate {metric}" + (f" by {by}" if by else ""))
        self.crossed = w
        if by is not None:
            ask, parts = self.cross_by, range(self.n_classes if by == "class" else self.n_groups)
            assert ask is not None and per_client, "write down what each client has for each model"
            clients = range(self.n_clients)
            return np.array(
                [[[[ask(i, j, c, g) for g in parts] for c in clients] for j in models.ids] for i in models.ids]
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
        self.asked.append(f"moments {layer} {by}")
        assert self.described is not None
        return self.described(models, layer, by)

    def tournament(self, models: Models, w: Weights, parent: Ints, starts: Sequence[Start]) -> Tournament:
        self.asked.append(f"tournament {' '.join(starts)}")
        self.tried = w, parent
        assert self.trial is not None
        return self.trial

    def contest(self, models: Models, teams: Ints, held_by: Local | None = None) -> Tournament:
        self.asked.append("contest" + ("" if held_by is None else f" holds={held_by.holds}"))
        assert self.judge is not None
        return self.judge(models, teams)

    def local_updates(self, models: Models, w: Weights, local: Local | None = None) -> Updates:
        self.asked.append("local_updates")
        assert self.lanes is not None
        return self.lanes(models, w)

    def train(self, models: Models, w: Weights, rounds: int | None = None, local: Local | None = None) -> Models:
        self.trained = models, w, local or self.local
        lr = "" if local is None else f" lr={local.lr:g}"
        self.asked.append("train" + ("" if rounds is None else f" rounds={rounds}") + lr)
        used = (w[self.tau] > 0).any(axis=0)
        return replace(models, params={"a": models.params["a"] + used[:, None]})
