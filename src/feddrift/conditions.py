"""Under which conditions clients work: who is in reach, who takes part in a round, who joins later, who lies.

Absence has two kinds. A client without new data keeps its identity and still trains on its history; one out of reach
keeps its identity, too, but is neither scored nor trained, and the data that it received meanwhile were seen by no
model and train none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from feddrift import rng
from feddrift.errors import ConfigError, DataError
from feddrift.models import per_axis
from feddrift.streams.patterns import table
from feddrift.types import Bools, Clusters, Floats, Ints, Models, State, Stream, Updates

S = TypeVar("S", bound=State)
NOISE = 10.0  # the standard deviation of garbage


@dataclass(frozen=True, eq=False)
class Conditions:
    """By default everybody is always there, and honest."""

    participation: float = 1.0  # the share of the clients in reach that train in a round, drawn anew for each
    dropout: float = 0.0  # the chance that a client is out of reach for a whole time step
    trace: Bools | None = None  # [t, c], who is in reach
    garbage: tuple[int, ...] = ()  # clients that send noise in place of what they trained

    def __post_init__(self) -> None:
        if not 0 < self.participation <= 1:
            raise ConfigError(f"participation must be above 0 and at most 1, got {self.participation}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout must be at least 0 and below 1, got {self.dropout}")

    def in_reach(self, counts: Ints, seed: int) -> Bools:
        """[t, c] for data of these counts [t, c]: a client is there from its first data on, unless it drops out."""
        there: Bools = np.logical_or.accumulate(counts > 0, axis=0)
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
        found = np.zeros_like(reachable)
        found[clients[rng.permutation(key, len(clients))[:n]]] = True
        return found

    def received(self, models: Models, updates: Updates, key: Callable[[int], rng.Words]) -> Updates:
        """What reaches the server of these updates."""
        liars = [c for c in self.garbage if c in updates.client]
        if not liars:
            return updates
        _, first = np.unique(updates.lane, return_index=True)
        params = per_axis(lambda _, new, __: np.array(new), models, None, None, updates.params)
        for c in liars:
            rows = np.flatnonzero(updates.client == c), np.flatnonzero(updates.client[first] == c)

            params = per_axis(partial(_spoilt, key(c)), models, *rows, params)
        return replace(updates, params=params)


def _spoilt(key: rng.Words, _: Any, leaf: Any, rows: Ints) -> Any:
    leaf[rows] = NOISE * rng.normal(key, leaf[rows].shape)
    return leaf


IDEAL = Conditions()


def flipped(stream: Stream, clients: Sequence[int]) -> Stream:
    """The stream in which these clients call every class by the name of its opposite: the first the last, and so on."""
    y = stream.y.copy()
    for c in clients:
        for t in range(stream.n_steps + 1):
            y[stream.rows(t, c)] = stream.n_classes - 1 - y[stream.rows(t, c)]
    return replace(stream, y=y)


def read_poison(text: str, n_clients: int) -> tuple[Literal["flip", "garbage"], tuple[int, ...]]:
    """What some clients do, and which.

    >>> read_poison("flip:0,3", n_clients=10)
    ('flip', (0, 3))
    """
    kind, _, names = text.partition(":")
    clients = [name.strip() for name in names.split(",")]
    if kind not in ("flip", "garbage") or not all(name.isdecimal() and len(name) < 20 for name in clients):
        raise ConfigError(f"poison is flip: or garbage: and the numbers of clients, such as flip:0,3, got '{text}'")
    numbers = tuple(sorted({int(name) for name in clients}))
    if numbers[-1] >= n_clients:
        raise ConfigError(f"poison: clients are 0 to {n_clients - 1}, got {numbers[-1]}")
    return ("flip" if kind == "flip" else "garbage"), numbers


def read_trace(path: str | Path) -> Bools:
    """A file of 1 (in reach) and 0: a row per time step, a column per client."""
    try:
        rows = table(Path(path).read_text(encoding="utf-8-sig"), f"trace {path}", "expected 1 for in reach or 0")
    except (OSError, ValueError) as error:  # not there, or not text
        raise DataError(f"trace {path} cannot be read as text: {getattr(error, 'strerror', None) or error}") from None
    if not len(rows):
        raise DataError(f"trace {path}: needs a row per time step, got none")
    if rows.max() > 1:
        raise DataError(f"trace {path}: expected 1 for in reach or 0, got '{rows.max()}'")
    return rows.astype(bool)


def grown(state: S, n_clients: int) -> S:
    """The state with room for clients that have joined since.

    They bring no history, and until they are scored use what most others use. A field of your own State whose last axis
    is that of clients names the value of a newcomer in its metadata: ``field(metadata={"newcomer": np.nan})``.
    """
    more = n_clients - len(state.votes)
    if more < 0:
        raise ValueError(f"clients never leave the axis: {len(state.votes)} are known, got {n_clients}")
    if not more:
        return state
    w, drifted = state.w, state.drifted
    if isinstance(w, Clusters):
        w = replace(w, model=np.pad(w.model, ((0, 0), (0, more)), constant_values=-1))
    else:
        w = np.pad(w, ((0, 0), (0, more), (0, 0)))
    changes: dict[str, Any] = {}
    for f in fields(state):
        value = getattr(state, f.name)
        if "newcomer" in f.metadata and value.shape[-1] == len(state.votes):
            room = np.full((*value.shape[:-1], more), f.metadata["newcomer"], dtype=value.dtype)
            changes[f.name] = np.concatenate([value, room], axis=-1)
    if drifted is not None:
        changes["drifted"] = np.concatenate([drifted, np.zeros(more, dtype=bool)])
    votes = np.concatenate([state.votes, np.repeat(_usual(state.votes)[None], more, axis=0)])
    return replace(state, w=w, votes=votes, **changes)


def _usual(votes: Floats) -> Floats:
    """The model that most clients use, or where models vote together the mean of the votes."""
    mean: Floats = votes.mean(axis=0)
    if ((votes > 0).sum(axis=1) > 1).any():
        return mean
    return np.asarray(np.arange(len(mean)) == mean.argmax(), dtype=np.float64)
