"""FEROMA of Li, Fenoglio et al., ICLR 2026: no clusters; each client's model is its own mixture of all clients' models.

After a few rounds with one model for all, which is kept as G, each client describes its data under G (`profiles`), each
block scaled by the smallest and largest numbers of the first time. In every round, with p_i the profile of client i
now and p_j that of client j in the round before,

    W[i, j] ~ 1 / (|p_i - p_j| + 1e-8),   or ~ exp(-|p_i - p_j|)   (weighting=softmax),

client i trains from  sum over j of N_j W[i, j] theta_j / sum over j of N_j W[i, j],  theta_j as client j sent it last.
At a test each client's inputs, without labels, choose the model of the client whose last profile they are nearest to.

A profile there is the mean over three random halves of the fifth of its rows that a client holds out, drawn anew in
every round. Here clients are described once a time step, by all new rows, and the server draws what such halves would
scatter by: without it p_i would be exactly what it was, and each client would listen to itself alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from feddrift import clustering, numerics, rng
from feddrift.algorithms.later.data_profiles import MISSING, Scale, describe, describer, distances, router
from feddrift.algorithms.later.flux import newest
from feddrift.algorithms.options import option
from feddrift.averaging import averaged
from feddrift.errors import ConfigError
from feddrift.models import join, mix, take
from feddrift.types import Event, Federation, Floats, Ints, Layer, Models, Projection, Router, State

LOOKED_AT = 0.6  # three halves of a fifth of n rows scatter about the fifth's mean as 0.6 n independent rows would


@dataclass(frozen=True, repr=False)
class FeromaState(State):
    """`describer` is G, `scale` that of the first profiles, `profile` of each client the last."""

    describer: Models | None = None
    key: tuple[int, int] = (0, 0)  # of the projection
    scale: Floats = field(default_factory=lambda: np.zeros((2, 0)))  # [low and scale, block]
    profile: Floats = field(  # [number, c], scaled; NaN: not described yet
        default_factory=lambda: np.zeros((0, 0)), metadata={"newcomer": np.nan}
    )


@dataclass(frozen=True)
class FEROMA:
    """A model for each client, mixed in every round of those whose data look like its own."""

    common_rounds: int = option(5, "rounds with one model for all, before clients are described")
    weighting: Literal["inverse", "softmax"] = option(
        "inverse", "how near models count: 1 / distance, or exp(-distance)"
    )
    layer: Layer = option("trunk", "what is described: what the net's head sees (trunk), input or logits")
    router: bool = option(True, "at a test a client's inputs choose whose model it takes; false: its own")

    def __post_init__(self) -> None:
        if self.common_rounds < 1:
            raise ConfigError(f"FEROMA.common_rounds must be at least 1, got {self.common_rounds}")

    def init(self, fed: Federation) -> FeromaState:
        (a, b), n = fed.key("projection"), fed.n_clients
        models = take(fed.fresh(), [0] * n, range(n))
        return FeromaState(models, clustering.nobody(n, n), np.eye(n), key=(int(a), int(b)))

    def step(self, state: State, fed: Federation) -> FeromaState:
        assert isinstance(state, FeromaState)
        n, rounds = fed.n_clients, fed.local.rounds
        models, model = state.models, state.describer
        late = range(len(models), n)  # clients that have joined since
        if late:
            models = join(models, take(model or fed.fresh(), [0] * len(late), late))
        events = _births(range(1, n) if fed.tau == 0 else late)
        w, before = newest(np.arange(n), n, fed.tau), state.profile.T
        if not (fed.reachable & (fed.counts[-1] > 0)).any():  # nobody to describe
            way = self._router(before, state.scale, model, state.key, fed)
            return replace(state, models=models, w=w, votes=np.eye(n), events=events, router=way)
        if model is None:
            common = min(self.common_rounds, rounds)
            one = newest(np.zeros(n, dtype=np.int64), 1, fed.tau)
            first = fed.train(take(models, [0], [models.ids[0]]), one, rounds=common)
            models, model, rounds = take(first, [0] * n, range(n)), describer(first), rounds - common
        described, count = describe(fed, model, self.layer, state.key)  # [c, block, d], [c, k]
        if np.isnan(described[:, 0, 0]).all():  # all were lost while they were asked
            way = self._router(before, state.scale, model, state.key, fed)
            return replace(state, models=models, describer=model, w=w, votes=np.eye(n), events=events, router=way)
        scale = Scale(*state.scale) if state.scale.size else Scale.of(described)
        now, size = scale(described), _newest_counts(fed.counts)
        before = before if before.size else np.full_like(now, np.nan)
        for k in range(rounds):
            draws = [rng.normal(fed.key("profile", k, c), described.shape[1:]) for c in range(n)]
            now = scale(described + scatter(described, count) * np.array(draws))  # [c, number]
            mixed = mix(models, shares(now, before, size, self.weighting), models.ids)
            models = averaged(models, fed.local_updates(mixed, w), fed.local.average)
            before = np.where(np.isnan(now), before, now)
        before = np.where(np.isnan(now), before, now)  # also where no rounds are left
        kept = np.stack([scale.low, scale.scale])
        way = self._router(before, kept, model, state.key, fed)
        return FeromaState(models, w, np.eye(n), "hard", events, None, model, state.key, kept, before.T, router=way)

    def _router(
        self, profile: Floats, scale: Floats, model: Models | None, key: tuple[int, int], fed: Federation
    ) -> Router | None:
        """By the last profiles [c, number] of all that have one."""
        there = np.isnan(profile).sum(axis=1) == 0
        if model is None or not self.router or not there.sum():
            return None
        votes, project = np.eye(len(there), fed.n_clients)[there], Projection(key, fed.n_classes)
        return router(profile[there], votes, Scale(*scale), model, self.layer, project)


def scatter(described: Floats, count: Ints) -> Floats:
    """[c, block, d], by how much each number of a profile varies from look to look: std / sqrt(n) of a mean, and
    std / sqrt(2 n) of a deviation, of the rows looked at; nothing where a class is missing."""
    n_classes = count.shape[1]
    std = np.concatenate([described[:, 1:2], described[:, 2 + n_classes :]], axis=1)  # of all, then of each class
    rows = np.maximum(LOOKED_AT * np.concatenate([count.sum(axis=1, keepdims=True), count], axis=1), 1)[..., None]
    of_mean = np.where(std == MISSING, 0.0, std / np.sqrt(rows))
    of_std = of_mean / np.sqrt(2)
    return np.concatenate([of_mean[:, :1], of_std[:, :1], of_mean[:, 1:], of_std[:, 1:]], axis=1)


def shares(now: Floats, before: Floats, size: Ints, weighting: str) -> Floats:
    """A[i, j], how much of client j's model is in what client i trains from, by profiles [c, number] now and before.

    Without profiles before, all count by their data; a client that is not described keeps its own model.

    >>> now, before = np.array([[0.0], [1.0]]), np.array([[0.0], [3.0]])
    >>> shares(now, before, np.array([1, 1]), "inverse").round(6).tolist()
    [[1.0, 0.0], [0.666667, 0.333333]]
    """
    D = distances(now, before)
    if weighting == "inverse":
        near = 1 / (D + 1e-8)
    else:
        least = np.where(np.isnan(D), np.inf, D).min(axis=1, keepdims=True)
        near = numerics.exp(np.where(np.isfinite(least), least, 0.0) - D)
    weighed = np.nan_to_num(near) * size
    weighed = np.where(weighed.sum(axis=1, keepdims=True) > 0, weighed, size.astype(np.float64))
    weighed = np.where(np.isnan(now[:, :1]), np.eye(len(now)), weighed)
    return np.asarray(weighed / weighed.sum(axis=1, keepdims=True))


def _newest_counts(counts: Ints) -> Ints:
    """[c], the number of rows that each client received last, 0 for those that never did."""
    last = len(counts) - 1 - (counts[::-1] > 0).argmax(axis=0)
    return np.asarray(counts[last, np.arange(counts.shape[1])])


def _births(clients: Iterable[int]) -> tuple[Event, ...]:
    return tuple(Event("created", c, {"reason": "a model for each client", "clients": [c]}) for c in clients)
