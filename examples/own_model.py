"""Bring your own model: scikit-learn's perceptron on clients behind Flower; the contract is a list of arrays."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import SGDClassifier

import feddrift as fd
from feddrift.deploy.server.loop import federate
from feddrift.engines.flower.client.client import Client
from feddrift.engines.flower.local_grid import LocalGrid
from feddrift.engines.flower.server.connection import Roster
from feddrift.engines.flower.server.exchange import WaitingRules
from feddrift.engines.flower.server.federation import Flower
from feddrift.nets.external import net_of


class Logistic:
    """Model that trains itself; clients and server name it in their settings: `model = "mine:model"`."""

    def init(self, seed: int) -> list[Any]:
        return [np.zeros((1, 2)), np.zeros(1)]

    def logits(self, params: list[Any], x: Any) -> Any:
        score = x @ params[0].T + params[1]
        return np.hstack([-score, score])

    def fit(self, params: list[Any], batches: Iterable[tuple[Any, Any]], lr: float) -> list[Any]:
        model = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=lr)
        for x, y in ((x.astype(np.float64), y) for x, y in batches):
            if not hasattr(model, "coef_"):  # scikit-learn makes its arrays with the first batch
                model.partial_fit(x, y, classes=[0, 1])
                model.coef_, model.intercept_ = params
            model.partial_fit(x, y)
        return [model.coef_, model.intercept_]


def load(t: int, flips: bool) -> Any:
    """Return a client's data of time t: the labels of the second client flip at time 2."""
    x = np.random.default_rng(2 * t + flips).normal(size=(200, 2))
    return x, (x[:, 0] > 0) != (flips and t >= 2)


with tempfile.TemporaryDirectory() as folder:
    names = ("a", "b")
    data = {"a": lambda t: load(t, False), "b": lambda t: load(t, True)}
    grid = LocalGrid({name: Client(name, Path(folder), data[name], Logistic()) for name in names})
    roster = Roster("flips", names, {name.encode(): name for name in names}, (2,), n_classes=2)
    local = fd.Local(rounds=3, steps=20, lr=0.1)
    engine = Flower(grid, roster, net_of(Logistic()), local, 0, WaitingRules(start=0), n_steps=5)
    for step in federate(engine, fd.algorithm("FedDrift", delta=0.2), Path(folder) / "server"):
        print(f"time {step.tau}: accuracy {step.accuracy.round(2)}, models {step.model}")
