"""FEROMA of Li, Fenoglio et al., ICLR 2026: each client has its own mixture of the models of all clients.

After a few rounds with one model for all clients, which is kept as G, the profile of each client is computed under G
(`data_profiles`). Each block is scaled by its smallest and largest numbers at the first time step. In every round, with
p_i the profile of client i in this round and p_j that of client j in the round before,

    W[i, j] ~ 1 / (|p_i - p_j| + 1e-8),   or ~ exp(-|p_i - p_j|)   (weighting=softmax),

client i starts its training from  sum over j of N_j W[i, j] theta_j / sum over j of N_j W[i, j],  where theta_j are the
parameters that client j sent last. At a test the inputs of each client, without labels, determine the model: that of
the client whose last profile is nearest to theirs.

In the publication a profile is the mean over three random halves of a fifth of the client's rows, which it holds out;
the halves are drawn in every round. Here profiles are computed once per time step, on all new rows, and the server adds
random noise with the standard deviation that such means would have. Without it p_i would not change between rounds, and
each client would use its own model alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from feddrift import clustering, numerics, rng
from feddrift.algorithms.later.data_profiles import (
    MISSING,
    BlockScale,
    build_router,
    compute_distances,
    copy_as_describer,
    profile_clients,
)
from feddrift.algorithms.later.flux import assign_newest_data
from feddrift.algorithms.options import option
from feddrift.averaging import average_updates
from feddrift.errors import ConfigError
from feddrift.models import join, mix, take
from feddrift.types import Event, Federation, Floats, Ints, Layer, Models, Projection, Router, State

# The mean of three random halves of a fifth of n rows varies around the mean of the fifth like that of 0.6 n rows.
INDEPENDENT_ROWS_SHARE = 0.6


@dataclass(frozen=True, repr=False)
class FeromaState(State):
    """State of FEROMA after a time step."""

    describer: Models | None = None  # G
    key: tuple[int, int] = (0, 0)  # of the projection
    scale: Floats = field(default_factory=lambda: np.zeros((2, 0)))  # [low and scale, block], of the first profiles
    profile: Floats = field(  # [block * d, c], each client's last profile, scaled; NaN: it has none
        default_factory=lambda: np.zeros((0, 0)), metadata={"newcomer": np.nan}
    )


@dataclass(frozen=True)
class FEROMA:
    """FEROMA: a model for each client, in every round a mixture of those of clients with similar data."""

    common_rounds: int = option(5, "rounds with one model for all, before profiles are computed")
    weighting: Literal["inverse", "softmax"] = option(
        "inverse", "weight of a model by the distance of profiles: 1 / distance, or exp(-distance)"
    )
    layer: Layer = option("trunk", "layer of the profiles: the input of the net's head (trunk), input or logits")
    router: bool = option(True, "at a test a client's inputs determine whose model predicts; false: its own")
    needs_consent = ("describe",)

    def __post_init__(self) -> None:
        if self.common_rounds < 1:
            raise ConfigError(f"FEROMA.common_rounds must be at least 1, got {self.common_rounds}")

    def init(self, fed: Federation) -> FeromaState:
        a, b = fed.key("projection")
        n = fed.n_clients
        models = take(fed.fresh(), [0] * n, range(n))
        return FeromaState(models, clustering.create_empty_clusters(n, n), np.eye(n), key=(int(a), int(b)))

    def step(self, state: State, fed: Federation) -> FeromaState:
        assert isinstance(state, FeromaState)
        n = fed.n_clients
        rounds = fed.local.rounds
        models = state.models
        describer = state.describer
        newcomers = range(len(models), n)
        if newcomers:
            models = join(models, take(describer or fed.fresh(), [0] * len(newcomers), newcomers))
        events = _create_events(range(1, n) if fed.tau == 0 else newcomers)
        w = assign_newest_data(np.arange(n), n, fed.tau)
        last = state.profile.T  # [c, block * d]
        if not (fed.reachable & (fed.counts[-1] > 0)).any():  # no client has a profile
            router = self._build_router(last, state.scale, describer, state.key, fed)
            return replace(state, models=models, w=w, votes=np.eye(n), events=events, router=router)
        if describer is None:
            n_common = min(self.common_rounds, rounds)
            one_cluster = assign_newest_data(np.zeros(n, dtype=np.int64), 1, fed.tau)
            common = fed.train(take(models, [0], [models.ids[0]]), one_cluster, rounds=n_common)
            models = take(common, [0] * n, range(n))
            describer = copy_as_describer(common)
            rounds -= n_common
        profiles, count = profile_clients(fed, describer, self.layer, state.key)  # [c, block, d], [c, k]
        if np.isnan(profiles[:, 0, 0]).all():  # no client replied
            router = self._build_router(last, state.scale, describer, state.key, fed)
            return replace(
                state, models=models, describer=describer, w=w, votes=np.eye(n), events=events, router=router
            )
        scale = BlockScale(*state.scale) if state.scale.size else BlockScale.fit_profiles(profiles)
        size = _count_newest_rows(fed.counts)
        scaled = scale(profiles)
        last = last if last.size else np.full_like(scaled, np.nan)
        for k in range(rounds):
            draws = [rng.normal(fed.key("profile", k, c), profiles.shape[1:]) for c in range(n)]
            scaled = scale(profiles + estimate_scatter(profiles, count) * np.array(draws))
            mixed = mix(models, compute_shares(scaled, last, size, self.weighting), models.ids)
            models = average_updates(models, fed.local_updates(mixed, w), fed.local.average)
            last = np.where(np.isnan(scaled), last, scaled)
        last = np.where(np.isnan(scaled), last, scaled)  # if there were no rounds
        scale_arrays = np.stack([scale.low, scale.scale])
        router = self._build_router(last, scale_arrays, describer, state.key, fed)
        return FeromaState(
            models, w, np.eye(n), events=events, describer=describer, key=state.key, scale=scale_arrays,
            profile=last.T, router=router,
        )  # fmt: skip

    def _build_router(
        self, last: Floats, scale: Floats, describer: Models | None, key: tuple[int, int], fed: Federation
    ) -> Router | None:
        """Return the router by the last profiles [c, block * d] of all clients that have one, if there are any."""
        known = np.isnan(last).sum(axis=1) == 0
        if describer is None or not self.router or not known.sum():
            return None
        votes = np.eye(len(known), fed.n_clients)[known]
        project = Projection(key, fed.n_classes)
        return build_router(last[known], votes, BlockScale(*scale), describer, self.layer, project)


def estimate_scatter(profiles: Floats, count: Ints) -> Floats:
    """Return [c, block, d], the standard deviation of each number of a profile over random draws of the rows.

    It is std / sqrt(n) for a mean of n rows, std / sqrt(2 n) for a deviation, and 0 for the numbers of a missing class.

    Args:
        profiles: [c, block, d], the profiles.
        count: [c, k], the number of rows of each class.
    """
    n_classes = count.shape[1]
    std = np.concatenate([profiles[:, 1:2], profiles[:, 2 + n_classes :]], axis=1)  # of all rows, then of each class
    counts = np.concatenate([count.sum(axis=1, keepdims=True), count], axis=1)
    rows = np.maximum(INDEPENDENT_ROWS_SHARE * counts, 1)[..., None]
    scatter_of_mean = np.where(std == MISSING, 0.0, std / np.sqrt(rows))
    scatter_of_std = scatter_of_mean / np.sqrt(2)
    blocks = [scatter_of_mean[:, :1], scatter_of_std[:, :1], scatter_of_mean[:, 1:], scatter_of_std[:, 1:]]
    return np.concatenate(blocks, axis=1)


def compute_shares(profiles: Floats, previous: Floats, size: Ints, weighting: str) -> Floats:
    """Return A[i, j], the share of client j's model in the mixture from which client i starts its training.

    Without previous profiles the shares are in proportion to the rows. A client without a profile keeps its own model.

    Args:
        profiles: [c, number], the scaled profiles in this round.
        previous: [c, number], those in the round before.
        size: [c], the number of rows of each client.
        weighting: The option of `FEROMA`.

    >>> profiles = np.array([[0.0], [1.0]])
    >>> previous = np.array([[0.0], [3.0]])
    >>> compute_shares(profiles, previous, np.array([1, 1]), "inverse").round(6).tolist()
    [[1.0, 0.0], [0.666667, 0.333333]]
    """
    D = compute_distances(profiles, previous)
    if weighting == "inverse":
        similarity = 1 / (D + 1e-8)
    else:
        smallest = np.where(np.isnan(D), np.inf, D).min(axis=1, keepdims=True)
        similarity = numerics.exp(np.where(np.isfinite(smallest), smallest, 0.0) - D)
    weight = np.nan_to_num(similarity) * size
    weight = np.where(weight.sum(axis=1, keepdims=True) > 0, weight, size.astype(np.float64))
    weight = np.where(np.isnan(profiles[:, :1]), np.eye(len(profiles)), weight)
    return np.asarray(weight / weight.sum(axis=1, keepdims=True))


def _count_newest_rows(counts: Ints) -> Ints:
    """Return [c], the number of rows that each client received last, 0 if it never received any."""
    last = len(counts) - 1 - (counts[::-1] > 0).argmax(axis=0)
    return np.asarray(counts[last, np.arange(counts.shape[1])])


def _create_events(clients: Iterable[int]) -> tuple[Event, ...]:
    return tuple(Event("created", c, {"reason": "a model for each client", "clients": [c]}) for c in clients)
