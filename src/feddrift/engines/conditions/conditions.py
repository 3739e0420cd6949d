"""Under which conditions clients work: who is in reach, who takes part in a round, who joins later, who lies.

Absence has two kinds. A client without new data keeps the model it uses and still trains on its history; one out of
reach keeps its model, too, but is neither scored nor trained, and the data that it received meanwhile were seen by no
model and train none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, get_args

import numpy as np

from feddrift import rng
from feddrift.engines.conditions.byzantine import Lies
from feddrift.errors import ConfigError, DataError
from feddrift.router import Route
from feddrift.trees import map_trunk_and_head
from feddrift.types import Bools, Ints, Models, State, Updates

S = TypeVar("S", bound=State)
NOISE = 10.0  # the standard deviation of garbage


@dataclass(frozen=True, eq=False)
class Conditions:
    """Who is in reach, who takes part, and who lies: by default everybody is always there, and honest.

    >>> from feddrift import Local, run
    >>> steps = run("sine-2", "FedDrift", local=Local(rounds=1), conditions=Conditions(participation=0.3, dropout=0.1))
    >>> next(steps).tau
    0
    """

    participation: float = 1.0  # the share of the clients in reach that train in a round, drawn anew for each
    dropout: float = 0.0  # the chance that a client is out of reach for a whole time step
    trace: Bools | None = None  # [t, c], who is in reach
    garbage: tuple[int, ...] = ()  # clients that send noise in place of what they trained
    rest: int = 0  # after so many time steps unused, a model is scored by badly served clients only; 0: by all, always
    route: Route = "none"  # what a client chooses by at a test whose model votes, besides its own: see engines.routing
    defend: bool = False  # whether the server bounds what one client can do to the others: see engines.defence
    lies: Lies = Lies()  # who tells what is not so

    def __post_init__(self) -> None:
        for name in ("participation", "dropout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise ConfigError(f"{name} must be a number, got {value!r}")
        if isinstance(self.rest, bool) or not isinstance(self.rest, int | np.integer) or self.rest < 0:
            raise ConfigError(f"rest must be a whole number of time steps, 0 for never, got {self.rest!r}")
        if self.route not in get_args(Route):
            raise ConfigError(f"route must be one of {', '.join(get_args(Route))}, got {self.route!r}")
        if self.trace is not None:
            trace = np.asarray(self.trace)
            if trace.ndim != 2 or not np.isin(trace, (0, 1)).all():
                raise ConfigError("trace must be a table [time step, client] of 1 (in reach) and 0")
            object.__setattr__(self, "trace", trace.astype(bool))
        if isinstance(self.garbage, str) or not all(isinstance(c, int | np.integer) and c >= 0 for c in self.garbage):
            raise ConfigError(f"garbage must be numbers of clients, such as (0, 3), got {self.garbage!r}")
        if not isinstance(self.defend, bool):
            raise ConfigError(f"defend must be true or false, got {self.defend!r}")
        if not isinstance(self.lies, Lies):
            raise ConfigError(f"lies must be a Lies, got {type(self.lies).__name__}")
        if not 0 < self.participation <= 1:
            raise ConfigError(f"participation must be above 0 and at most 1, got {self.participation}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout must be at least 0 and below 1, got {self.dropout}")

    def in_reach(self, counts: Ints, seed: int) -> Bools:
        """[t, c] for data of these counts [t, c]: a client is there from its first data on, unless it drops out."""
        there: Bools = np.logical_or.accumulate(counts > 0, axis=0)
        if strangers := [c for c in (*self.garbage, *self.lies.who) if c >= counts.shape[1]]:
            raise ConfigError(f"liars: clients are 0 to {counts.shape[1] - 1}, got {strangers[0]}")
        if self.trace is not None:
            if self.trace.shape[1] != counts.shape[1]:
                raise DataError(f"the trace is for {self.trace.shape[1]} clients, the stream has {counts.shape[1]}")
            if len(self.trace) < len(counts):
                raise DataError(
                    f"the trace has {len(self.trace)} rows, the stream {len(counts)} time steps to train in"
                )
            there &= self.trace[: len(counts)]
        if self.dropout:
            t, c = np.ogrid[: counts.shape[0], : counts.shape[1]]
            there &= rng.unit(rng.derive(seed, "dropout", t, c)[0]) >= self.dropout
        return there

    def drawn(self, reachable: Bools, key: rng.Words) -> Bools:
        """[c], who takes part in a round: at least one of those in reach."""
        clients = np.flatnonzero(reachable)
        n = max(1, math.ceil(self.participation * len(clients) - 1e-9))
        chosen = np.zeros_like(reachable)
        chosen[clients[rng.permutation(key, len(clients))[:n]]] = True
        return chosen

    def received(self, models: Models, updates: Updates, key: Callable[[int], rng.Words]) -> Updates:
        """The updates as the server receives them: those of clients that send garbage are noise."""
        liars = [c for c in self.garbage if c in updates.client]
        if not liars:
            return updates
        _, first = np.unique(updates.lane, return_index=True)
        params = map_trunk_and_head(lambda _, new, __: np.array(new), models, None, None, updates.params)
        for c in liars:
            rows = np.flatnonzero(updates.client == c), np.flatnonzero(updates.client[first] == c)

            params = map_trunk_and_head(partial(_spoilt, key(c)), models, *rows, params)
        return replace(updates, params=params)


def _spoilt(key: rng.Words, _: Any, leaf: Any, rows: Ints) -> Any:
    leaf[rows] = NOISE * rng.normal(key, leaf[rows].shape)
    return leaf


IDEAL = Conditions()
