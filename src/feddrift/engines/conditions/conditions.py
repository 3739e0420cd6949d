"""Conditions of a run: dropout, participation in rounds, Byzantine clients, defence, idle models, sharing, routing.

A client can be absent in two ways. A client without new data still trains on its earlier data. An unreachable client
neither scores nor trains models, and no model is ever trained on the data that it receives meanwhile. In both cases
the client keeps the model that it uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from feddrift import rng
from feddrift.engines.conditions.byzantine import NO_BYZANTINE_CLIENTS, ByzantineBehaviour
from feddrift.errors import ConfigError, DataError, safe_repr
from feddrift.router import Route
from feddrift.trees import map_trunk_and_head, tree_map
from feddrift.types import Algorithm, Bools, Ints, Models, State, Updates

S = TypeVar("S", bound=State)
Defend = bool | Literal["robust"]  # True: the limits of version 0.3
DEFEND_VALUES = "robust, true (the limits of version 0.3) or false"  # for messages
GARBAGE_STD = 10.0  # standard deviation of the noise that replaces parameters


@dataclass(frozen=True, eq=False)
class Conditions:
    """Conditions under which clients work; by default all take part in every round and are honest.

    >>> from feddrift import Local, run
    >>> steps = run("sine-2", "FedDrift", local=Local(rounds=1), conditions=Conditions(participation=0.3, dropout=0.1))
    >>> next(steps).tau
    0
    """

    participation: float = 1.0  # share of the reachable clients that train in a round, drawn in each round
    dropout: float = 0.0  # probability that a client is unreachable for a whole time step
    trace: Bools | None = None  # [t, c], true where a client is reachable
    garbage: tuple[int, ...] = ()  # clients that send noise instead of trained parameters
    rest: int = 0  # time steps without use after which a model is idle (see `idle_models`); 0: models are never idle
    share_from: int = 0  # clients that train a model before all receive it (see `unsupported_models`); 0: off
    route: Route = "none"  # the rows from which a router chooses the votes at a test: see `routing`
    defend: Defend = False  # whether, and how, the server limits the influence of each client: see `robust`
    lies: ByzantineBehaviour = NO_BYZANTINE_CLIENTS  # clients with false reports or updates

    def __post_init__(self) -> None:
        for name in ("participation", "dropout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise ConfigError(f"{name} must be a number, got {value!r}")
        if isinstance(self.rest, bool) or not isinstance(self.rest, int | np.integer) or self.rest < 0:
            raise ConfigError(f"rest must be a whole number of time steps, 0 for never, got {self.rest!r}")
        is_whole = isinstance(self.share_from, int | np.integer) and not isinstance(self.share_from, bool)
        if not is_whole or self.share_from < 0:
            raise ConfigError(f"share_from must be a whole number of clients, 0 for off, got {self.share_from!r}")
        if self.route not in get_args(Route):
            raise ConfigError(f"route must be one of {', '.join(get_args(Route))}, got {self.route!r}")
        if self.limits_sharing and self.route != "none":
            raise ConfigError(
                f"share_from={self.share_from} needs route=none, got route={self.route}: a router sends every model "
                "that it chooses from to all clients"
            )
        if self.trace is not None:
            trace = np.asarray(self.trace)
            if trace.ndim != 2 or not np.isin(trace, (0, 1)).all():
                raise ConfigError("trace must be a table [time step, client] of 1 (in reach) and 0")
            object.__setattr__(self, "trace", trace.astype(bool))
        if isinstance(self.garbage, str) or not all(isinstance(c, int | np.integer) and c >= 0 for c in self.garbage):
            raise ConfigError(f"garbage must be numbers of clients, such as (0, 3), got {self.garbage!r}")
        check_defend(self.defend)
        if not isinstance(self.lies, ByzantineBehaviour):
            raise ConfigError(f"lies must be a ByzantineBehaviour, got {type(self.lies).__name__}")
        if not 0 < self.participation <= 1:
            raise ConfigError(f"participation must be above 0 and at most 1, got {self.participation}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout must be at least 0 and below 1, got {self.dropout}")

    @property
    def limits_sharing(self) -> bool:
        """True if models of few clients are withheld from other clients."""
        return self.share_from > 1

    def check_algorithm(self, algorithm: Algorithm) -> None:
        """Raise ConfigError if the algorithm cannot run under these conditions."""
        if self.limits_sharing and getattr(algorithm, "router", False):
            raise ConfigError(
                f"share_from={self.share_from} does not work with the router of {type(algorithm).__name__}, which "
                "sends models to all clients: leave out share_from, or set router=false or another algorithm"
            )

    def draw_reachable(self, counts: Ints, seed: int) -> Bools:
        """Return [t, c], true where a client is reachable: from its first data on, unless it drops out.

        Args:
            counts: [t, c], the number of rows that each client receives.
            seed: The seed of the run.

        Raises:
            ConfigError: If `garbage` or `lies` has the number of a client that does not exist.
            DataError: If the trace has another number of clients, or too few time steps.
        """
        reachable: Bools = np.logical_or.accumulate(counts > 0, axis=0)
        for c in (*self.garbage, *self.lies.clients):
            if c >= counts.shape[1]:
                raise ConfigError(f"Byzantine clients: clients are 0 to {counts.shape[1] - 1}, got {c}")
        if self.trace is not None:
            if self.trace.shape[1] != counts.shape[1]:
                raise DataError(f"the trace is for {self.trace.shape[1]} clients, the stream has {counts.shape[1]}")
            if len(self.trace) < len(counts):
                raise DataError(
                    f"the trace has {len(self.trace)} rows, the stream {len(counts)} time steps to train in"
                )
            reachable &= self.trace[: len(counts)]
        if self.dropout:
            t, client = np.ogrid[: counts.shape[0], : counts.shape[1]]
            reachable &= rng.to_unit_interval(rng.derive_key(seed, "dropout", t, client)[0]) >= self.dropout
        return reachable

    def draw_participants(self, reachable: Bools, key: rng.Words) -> Bools:
        """Return [c], true for the clients that take part in a round: at least one of the reachable ones."""
        clients = np.flatnonzero(reachable)
        n = max(1, math.ceil(self.participation * len(clients) - 1e-9))
        chosen = np.zeros_like(reachable)
        chosen[clients[rng.permutation(key, len(clients))[:n]]] = True
        return chosen

    @property
    def alters_updates(self) -> bool:
        """True if some clients send false updates."""
        return bool(self.garbage) or (self.lies != NO_BYZANTINE_CLIENTS and self.lies.alters_updates)

    def alter_updates(self, models: Models, updates: Updates, key: Callable[[int], rng.Words]) -> Updates:
        """Replace the updates of Byzantine clients; the arguments are those of `add_garbage`."""
        return self.lies.alter_updates(models, self.add_garbage(models, updates, key))

    def add_garbage(self, models: Models, updates: Updates, key: Callable[[int], rng.Words]) -> Updates:
        """Replace the updates of the clients in `garbage` by noise.

        Args:
            models: The models before the round.
            updates: The updates of the round.
            key: Returns the random key of a client.
        """
        senders = [c for c in self.garbage if c in updates.client]
        if not senders:
            return updates
        _, first = np.unique(updates.lane, return_index=True)
        params = tree_map(np.array, updates.params)
        for c in senders:
            pairs = np.flatnonzero(updates.client == c)
            lanes = np.flatnonzero(updates.client[first] == c)
            params = map_trunk_and_head(partial(_overwrite_with_noise, key(c)), models, pairs, lanes, params)
        return replace(updates, params=params)


def _overwrite_with_noise(key: rng.Words, _: Any, leaf: Any, rows: Ints) -> Any:
    leaf[rows] = GARBAGE_STD * rng.normal(key, leaf[rows].shape)
    return leaf


def check_defend(value: object) -> None:
    """Raise ConfigError if this is not a value of the condition `defend`."""
    if not isinstance(value, bool) and not (isinstance(value, str) and value == "robust"):
        raise ConfigError(f"defend must be {DEFEND_VALUES}, got {safe_repr(value)}")


IDEAL = Conditions()
