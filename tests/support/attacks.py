"""Attacks of a server on the rows of one client, by an attacker who knows the protocol and the code of the client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift import rng
from feddrift.engines.flower import model_parts, serialization
from feddrift.engines.flower.client.client import Client
from feddrift.engines.flower.messages import VERSION, RequestContext
from feddrift.engines.local import sampling
from feddrift.nets import build_client_net
from feddrift.trees import mark_trunk
from feddrift.types import Local, Models

Array = npt.NDArray[Any]
ONE_ROW_PER_STEP = Local(rounds=1, steps=1, batch=1, lr=1.0, optimizer="sgd", weight_decay=0.0)
PRIMING_WEIGHT = 1e4
TINY = 1e-16  # weight of the last layer: Adam's eps is far larger than such gradients, so Adam is linear in them


class Attacker:
    """A server that sends requests to one client.

    Args:
        client: The client, which is alone in its federation.
        n_features: The number of columns.
        n_classes: The number of classes.
        seed: The seed of the federation, which the server chooses.
    """

    def __init__(self, client: Client, n_features: int, n_classes: int = 2, seed: int = 5) -> None:
        self.client = client
        self.context = RequestContext("attack", client.name, 0, 1, n_classes, (n_features,), seed, 0)
        self.net = build_client_net(client.model, (n_features,), n_classes)
        self.refused: list[str] = []  # sentences with which the client refused requests
        self.n_requests = 0
        self._next_id = 1

    def send(self, kind: str, body: dict[str, Any], parts: Any = None) -> tuple[dict[str, Any], Any]:
        """Send a request, and return the body and the parts of the reply."""
        head = {"version": VERSION, "about": asdict(self.context)}
        reply = self.client.handle_message(kind, serialization.pack_message(head | body, parts))
        self.n_requests += 1
        fields, raw = serialization.unpack_message(reply)
        if "refused" in fields:
            self.refused.append(fields["refused"])
        return fields, raw

    def say_hello(self, tau: int = 0) -> dict[str, Any]:
        """Let the client take its next batch at this time step, and return its reply."""
        self.context = replace(self.context, tau=tau)
        return self.send("hello", {"seen": tau - 1})[0]

    def make_models(
        self, *stack: dict[str, Array], first_id: int | None = None
    ) -> tuple[list[dict[str, Any]], Any, tuple[int, ...]]:
        """Return the description of made-up models, each with a new id, their parts and ids."""
        first = self._next_id if first_id is None else first_id
        ids = tuple(range(first, first + len(stack)))
        self._next_id = max(self._next_id, first + len(stack))
        template = model_parts.init_template(self.net)
        params = {name: np.stack([np.asarray(p[name], dtype=np.float32) for p in stack]) for name in template}
        models = Models(params, ids, trunk=dict.fromkeys(template, False))
        trunk = mark_trunk(self.net, template)
        specs, parts = model_parts.describe_models(self.net, replace(models, trunk=trunk))
        return specs, parts, ids

    def train(
        self,
        params: dict[str, Array],
        local: Local,
        w: tuple[Sequence[int], Sequence[float]] = ((0,), (1.0,)),
        round: int = 0,
        model_id: int | None = None,
    ) -> tuple[dict[str, Array] | None, int]:
        """Let the client train a made-up model; return its change, None if the client refuses, and the model's id."""
        specs, parts, ids = self.make_models(params, first_id=model_id)
        entries = [list(w[0]), [0] * len(w[0]), list(w[1])]
        body = {
            "round": round, "local": local.to_dict(), "models": specs, "w": entries, "rounds": 1, "keep": 0,
            "pull": None, "to": [], "more": 0, "within": 0.0,
        }  # fmt: skip
        fields, raw = self.send("train", body, parts)
        if "round" not in fields:
            return None, ids[0]
        template = model_parts.init_template(self.net)
        is_trunk = mark_trunk(self.net, template)
        change: dict[str, Array] = {}
        for kind, trained in (("trunk", True), ("head", False)):
            names = [name for name in sorted(template) if is_trunk[name] is trained and f"{kind}-0" in raw]
            shapes = model_parts.list_shapes([template[name] for name in names])
            if names:
                arrays = serialization.read_arrays(raw[f"{kind}-0"], shapes, kind)
                for name, array in zip(names, arrays, strict=True):
                    change[name] = array.astype(np.float64) - np.asarray(params[name], dtype=np.float64)
        return change, ids[0]

    def make_open_model(self, head: float = 0.1) -> dict[str, Array]:
        """Return a model whose hidden units react to every row alike, and whose output is almost constant."""
        params = {name: np.zeros(np.shape(value)) for name, value in model_parts.init_template(self.net).items()}
        params["b1"] += 1.0
        params["W2"][:, 0] = head
        params["W2"][:, 1] = -head
        params["b2"] -= params["W2"].sum(axis=0)  # logits 0
        return params

    def draw_weights(self, model_id: int, local: Local, n: int) -> Array:
        """Return [row], the weight of each row in the sum of Adam's steps, computed from the seed as clients do."""
        key = rng.derive_key(self.context.seed, "batch", self.context.tau, 0, model_id)
        order = sampling.draw_row_order(self.context.seed, self.context.tau, 0, 0, n)
        weights = np.zeros(n)
        for step in range(local.steps):
            words = sampling.derive_step_words(key, np.uint32(0), np.uint32(step))
            first = int(words[1] % np.uint32(n))
            later = np.arange(step + 1, local.steps + 1)
            share = float((0.1 * 0.9 ** (later - step - 1) / (1 - 0.9**later)).sum())  # of a gradient in later steps
            np.add.at(weights, order[(first + np.arange(local.batch)) % n], share / local.batch)
        return weights


def divide_updates(change: dict[str, Array] | None) -> Iterator[Array]:
    """Yield for each hidden unit the change of its weights divided by that of its bias: a row, if there is one only."""
    if change is not None:
        for unit in np.flatnonzero(change["b1"]):
            yield change["W1"][:, unit] / change["b1"][unit]


def read_single_rows(attacker: Attacker, settings: Iterable[Local], n_requests: int) -> list[Array]:
    """Divide the updates of a model whose units react to every row, for each of these settings."""
    found: list[Array] = []
    for local in settings:
        for _ in range(n_requests):
            change, _ = attacker.train(attacker.make_open_model(), local)
            if change is None:
                break
            found += divide_updates(change)
    return found


def solve_many_updates(attacker: Attacker, local: Local, n_rows: int, n_requests: int) -> list[Array]:
    """Solve for all rows: each update is a sum of rows whose weights follow from the seed, which the server knows."""
    weights = []
    sums = []
    for _ in range(n_requests):
        change, model_id = attacker.train(attacker.make_open_model(TINY), local)
        if change is None:
            return []
        weights.append(attacker.draw_weights(model_id, local, n_rows))
        sums.append(np.append(change["W1"][:, 0], change["b1"][0]))
    scale = np.abs(sums).max() or 1.0
    solved = np.linalg.lstsq(np.array(weights), np.array(sums) / scale, rcond=None)[0]
    return [row[:-1] / row[-1] for row in solved if row[-1]]


def isolate_rows_by_units(
    attacker: Attacker, local: Local, head: float, n_requests: int, seed: int = 0, primes: bool = False
) -> list[Array]:
    """Send models whose units react to all rows beyond a threshold each, and divide differences of their updates.

    The rows between two thresholds determine a difference. It reveals the row if there is only one.

    Args:
        attacker: The server.
        local: The settings of training that it requests.
        head: The weights of the last layer.
        n_requests: The number of models.
        seed: The seed of the models.
        primes: Whether a first round with huge weights makes Adam linear in the second: AMSGrad divides all later
            steps of a time step by the largest gradient so far, which weight decay of huge weights makes known.
    """
    draw = np.random.default_rng(seed)
    found: list[Array] = []
    for _ in range(n_requests):
        params = attacker.make_open_model(head)
        n_features, n_units = params["W1"].shape
        direction: Array = draw.normal(size=(n_features,))
        direction /= np.linalg.norm(direction)
        params["W1"] = np.repeat(direction[:, None], n_units, axis=1)
        params["b1"] = -np.sort(draw.normal(size=n_units))
        params["b2"] = np.zeros(2)
        model_id = None
        if primes:
            huge = {name: np.full_like(value, PRIMING_WEIGHT) for name, value in params.items()}
            _, model_id = attacker.train(huge, local)
        change, _ = attacker.train(params, local, round=int(primes), model_id=model_id)
        if change is None:
            return found
        if primes:
            change = {name: change[name] - simulate_decay(params[name], local) for name in ("W1", "b1")}
        found += divide_updates(change)
        pairs = {name: change[name][..., :-1] - change[name][..., 1:] for name in ("W1", "b1")}
        found += divide_updates(pairs)
    return found


def simulate_decay(weights: Array, local: Local) -> Array:
    """Return the change of weights in a round after one with huge weights, if no row contributed."""
    theta = np.full_like(weights, PRIMING_WEIGHT)
    mean: Array = np.zeros_like(theta)
    square: Array = np.zeros_like(theta)
    largest: Array = np.zeros_like(theta)
    for k in range(1, 2 * local.steps + 1):
        theta = weights if k == local.steps + 1 else theta
        gradient = local.weight_decay * theta
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        largest = np.maximum(largest, square)
        theta = theta - local.lr * mean / (1 - 0.9**k) / (np.sqrt(largest / (1 - 0.999**k)) + 1e-8)
    return np.asarray(theta - weights)


def count_recovered_rows(x: Array, candidates: Iterable[Array], tolerance: float = 0.01) -> int:
    """Return the number of rows that a candidate equals within this share of each column's standard deviation."""
    limit = tolerance * x.std(axis=0)
    recovered = np.zeros(len(x), dtype=bool)
    for candidate in candidates:
        recovered |= (np.abs(x - candidate) <= limit).all(axis=1)
    return int(recovered.sum())


def find_smallest_distance(x: Array, candidates: Iterable[Array]) -> float:
    """Return the smallest largest error of a column, in standard deviations, over all rows and candidates."""
    errors = (np.abs((x - candidate) / x.std(axis=0)).max(axis=1).min() for candidate in candidates)
    return float(min(errors, default=np.inf))
