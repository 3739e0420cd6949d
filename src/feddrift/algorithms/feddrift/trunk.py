"""FedDrift-Trunk: FedDrift whose models may share a trunk and differ in their heads.

Where the paper stops: a model per concept learns from a part of the data only, and every client trains and sends
several. Here concepts that a common representation serves stand on one trunk, which learns from all of them; a drifted
client finds out on its own data whether its new concept is one of those. docs/trunk.md has the pseudo-code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from feddrift import clustering
from feddrift.algorithms.feddrift.detection import DriftState
from feddrift.algorithms.feddrift.method import FedDrift
from feddrift.algorithms.options import option
from feddrift.clustering import Clustering
from feddrift.errors import ConfigError
from feddrift.memory import pooled
from feddrift.models import mix, unused_id
from feddrift.trees import has_trunk
from feddrift.types import Event, Federation, Floats, Ints, Metric, Models, Start


@dataclass(frozen=True)
class FedDriftTrunk(FedDrift):
    """A new concept gets a head on its client's trunk, or a model of its own where a trial on the new data says so."""

    init_: Literal["best", "head", "warm", "fresh"] = option(  # type: ignore[assignment]  # one more than FedDrift
        "best", "how a new model starts: what a trial finds best, or always a head, a copy (warm), a fresh model"
    )
    candidates: ClassVar[tuple[Start, ...]] = ("warm", "head", "joint", "fresh")

    def winner(self, rows: int, wrong: Ints) -> int:
        """A shared trunk also wins where it leaves no more than delta to gain, and nobody beats it."""
        warm, head, joint, fresh = range(4)
        shared = head if wrong[head, head] <= wrong[joint, joint] else joint
        little = self.metric == "error" and clustering.below(int(wrong[shared, shared]), rows, self.delta)
        if little and not clustering.beats(wrong, warm, shared) and not clustering.beats(wrong, fresh, shared):
            return shared
        return super().winner(rows, wrong)

    def init(self, fed: Federation) -> DriftState:
        state = super().init(fed)
        if not has_trunk(state.models):
            raise ConfigError("FedDrift-Trunk needs a net with a trunk and a head, this one names no trunk")
        return state

    def merge(self, now: Clustering, D: Floats, fed: Federation) -> Clustering:
        """As FedDrift, pair by pair; the average stands unless a parent is better on the members' new data."""
        return merge_families(now, D, self.limit, self.delta / 2, self.metric, fed)


def merge_families(
    now: Clustering, D: Floats, limit: float, allowance: float, metric: Metric, fed: Federation
) -> Clustering:
    """Merge models no further apart than the limit, pair by pair; the average stands unless a parent is better on the
    members' new data."""
    models, w = now.models, now.w
    events: list[Event] = []
    pairs, left = clustering.Pairs(D), list(range(len(models)))  # left[k]: the row in D of the model now at k
    name = unused_id(models)  # names for averages on trial
    while (closest := pairs.closest())[2] <= limit + clustering.TOLERANCE:
        i, j = left.index(closest[0]), left.index(closest[1])
        remaining = np.flatnonzero(np.arange(len(models)) != j)
        data = np.where((w.model == i) | (w.model == j), w.weight[:, None], 0.0)
        share = clustering.mass(w, fed.counts)[[i, j]]
        kept, row, family = _merged(models, i, j, share, data, name + len(events), allowance, metric, fed)
        cause = {"into": models.ids[i], "distance": closest[2], "kept": kept, "family": family}
        events.append(Event("merged", models.ids[j], cause))
        A = np.eye(len(models))
        A[i] = row
        families = [family if m == i else models.family[m] for m in remaining]
        models = mix(models, A[remaining], [models.ids[m] for m in remaining], families)
        new = np.arange(w.n_models) - (np.arange(w.n_models) > j)
        new[j] = i
        w = clustering.moved(w, new, len(remaining))
        pairs.unite(closest[0], closest[1])
        left.pop(j)
    return Clustering(models, w, now.events).tell(events)


def _merged(
    models: Models,
    i: int,
    j: int,
    share: Floats,
    data: Floats,
    name: int,
    more: float,
    metric: Metric,
    fed: Federation,
) -> tuple[str | int, Floats, int]:
    """What i and j become: their average or one of them, as a row of `mix`, and the family of it.

    The best on held-out data; but the larger of two families keeps its own unless that is worse by more than so much.
    """
    only_i, only_j = np.eye(len(models))[[i, j]]
    share = share / share.sum() if share.sum() else np.array([0.5, 0.5])
    a, b = models.family[i], models.family[j]
    kin = {family: models.family.count(family) for family in (a, b)}
    ways: list[tuple[str | int, Floats, int]] = [(models.ids[i], only_i, a), (models.ids[j], only_j, b)]
    allowance = [more if kin[a] > kin[b] else 0.0, more if kin[b] > kin[a] else 0.0]
    if a == b or min(kin.values()) == 1:  # two trunks that both serve others cannot become one
        alone = a if a == b or kin[a] == 1 else b
        ways.insert(0, ("average", share[0] * only_i + share[1] * only_j, alone))
        allowance.insert(0, 0.0)
    names = [name if kept == "average" else int(kept) for kept, _, _ in ways]
    families = [name if kept == "average" and a != b else family for kept, _, family in ways]
    rivals = mix(models, [row for _, row, _ in ways], names, families)
    members = data[-1] > 0
    error = pooled(fed.evaluate(rivals, metric)[members], fed.counts[-1, members])
    if np.isnan(error).any():  # nobody among them has new data: what they have must do
        error = fed.cross_evaluate(rivals, np.repeat(data[:, :, None], len(ways), axis=2), metric)[:, 0]
    best, _ = clustering.best_models((error - allowance)[None], np.zeros(1, dtype=np.int64))
    return ways[int(best[0])]
