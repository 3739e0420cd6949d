"""Algorithms on a FakeFederation: their states after each time step, and the models that clients use."""

from __future__ import annotations

from typing import Any

from feddrift.algorithms.feddrift.detection import DriftState
from feddrift.testing import FakeFederation
from feddrift.types import Floats, Models, Votes


def list_model_ids(votes: Floats | Votes, models: Models) -> list[int]:
    """Return the id of the model that each client uses."""
    return [models.ids[m] for m in votes.argmax(axis=1)]


def run_algorithm(algorithm: Any, worlds: list[dict[str, Any]], n_clients: int = 3) -> list[DriftState]:
    """Return the states after each time step; `worlds` are the arguments of its FakeFederation."""
    feds = [FakeFederation(tau, n_clients, **world) for tau, world in enumerate(worlds)]
    state = algorithm.init(feds[0])
    states = []
    for fed in feds:
        state = algorithm.step(state, fed)
        states.append(state)
    return states


def make_loss_table(rows: dict[int, list[float]]) -> Any:
    """Return loss(c, id) from one list per model id; other models have a loss of 0.9."""
    return lambda c, i: rows[i][c] if i in rows else 0.9


NO_DRIFT = {"loss": lambda c, i: 0.1}
