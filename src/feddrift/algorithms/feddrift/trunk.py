"""FedDrift-Trunk: FedDrift whose models may share a trunk and differ in their heads.

FedDrift trains a model per concept. Each model learns only from a part of the data, and every client trains and sends
several models. Here, concepts that a common representation serves share one trunk, which is trained on the data of all
of them. A trial on the data of a drifted client decides whether its new concept is one of those. docs/trunk.md has the
pseudo-code.
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
from feddrift.memory import average_over_clients
from feddrift.models import mix, unused_id
from feddrift.trees import has_trunk
from feddrift.types import Event, Federation, Floats, Ints, Metric, Models, Start


@dataclass(frozen=True)
class FedDriftTrunk(FedDrift):
    """FedDrift-Trunk: a new concept gets a head on its client's trunk, or a model of its own.

    A trial on the client's new data decides, unless `init_` does. All settings are those of FedDrift.

    Attributes:
        init_: Start of a new model: the best in a trial, or always a head, a copy or a fresh model.
    """

    init_: Literal["best", "head", "warm", "fresh"] = option(  # type: ignore[assignment]  # one more than FedDrift
        "best",
        "how a new model starts: the best in a trial, or always a head, a copy (warm), an untrained one (fresh)",
    )
    candidates: ClassVar[tuple[Start, ...]] = ("warm", "head", "joint", "fresh")

    def choose_start(self, rows: int, wrong: Ints) -> int:
        """Return the position in `candidates` of the start that won a trial.

        The better start on a shared trunk (head or joint) also wins if its error is significantly below delta and
        neither a copy nor a fresh model beats it: then a model of its own could gain little.
        """
        warm, head, joint, fresh = range(4)
        shared = head if wrong[head, head] <= wrong[joint, joint] else joint
        little_to_gain = self.metric == "error" and clustering.is_error_below(
            int(wrong[shared, shared]), rows, self.delta
        )
        if (
            little_to_gain
            and not clustering.wins_sign_test(wrong, warm, shared)
            and not clustering.wins_sign_test(wrong, fresh, shared)
        ):
            return shared
        return super().choose_start(rows, wrong)

    def init(self, fed: Federation) -> DriftState:
        state = super().init(fed)
        if not has_trunk(state.models):
            raise ConfigError("FedDrift-Trunk needs a net with a trunk and a head, this one names no trunk")
        return state

    def merge_models(self, clusters: Clustering, D: Floats, fed: Federation) -> Clustering:
        """Merge models as FedDrift does, except that a pair keeps one of its models if that is better."""
        return merge_families(clusters, D, self.merge_limit, self.delta / 2, self.metric, fed)


def merge_families(
    clusters: Clustering, D: Floats, limit: float, allowance: float, metric: Metric, fed: Federation
) -> Clustering:
    """Merge the two closest models while their distance is within the limit (complete linkage).

    The merged model is the average of both, or one of them if that is better on the new data that train the pair.

    Args:
        clusters: The models and their data.
        D: [i, j], the distances between models.
        limit: The maximum distance.
        allowance: Loss by which a model of the larger family may be worse than the other candidates and still be kept.
        metric: The loss.
        fed: The federation.
    """
    models = clusters.models
    w = clusters.w
    events: list[Event] = []
    pairs = clustering.ClosestPairs(D)
    rows = list(range(len(models)))  # rows[m]: the row in D of the model that is now at position m
    first_trial_id = unused_id(models)
    while True:
        first, second, distance = pairs.find_closest()
        if distance > limit + clustering.TOLERANCE:
            break
        i = rows.index(first)
        j = rows.index(second)
        remaining = np.flatnonzero(np.arange(len(models)) != j)
        data = np.where((w.model == i) | (w.model == j), w.weight[:, None], 0.0)
        sizes = clustering.sum_examples_per_model(w, fed.counts)[[i, j]]
        kept, shares, family = _choose_merged_model(
            models, i, j, sizes, data, first_trial_id + len(events), allowance, metric, fed
        )
        cause = {"into": models.ids[i], "distance": distance, "kept": kept, "family": family}
        events.append(Event("merged", models.ids[j], cause))
        A = np.eye(len(models))
        A[i] = shares
        families = [family if m == i else models.family[m] for m in remaining]
        models = mix(models, A[remaining], [models.ids[m] for m in remaining], families)
        new_positions = np.arange(w.n_models) - (np.arange(w.n_models) > j)
        new_positions[j] = i
        w = clustering.remap_models(w, new_positions, len(remaining))
        pairs.unite(first, second)
        rows.pop(j)
    return Clustering(models, w, clusters.events).add_events(events)


def _choose_merged_model(
    models: Models,
    i: int,
    j: int,
    sizes: Floats,
    data: Floats,
    trial_id: int,
    allowance: float,
    metric: Metric,
    fed: Federation,
) -> tuple[str | int, Floats, int]:
    """Choose what replaces models i and j: their average, or the one of them with the lowest loss.

    They are evaluated on the new data that train the pair; if there are none, on all data that train it. A model of the
    larger family wins unless it is worse by more than the allowance. If the condition `share_from` withholds one of
    them from a client, nothing is compared, and the average wins if there is one.

    Args:
        models: All models.
        i: Position of a model.
        j: Position of the other model.
        sizes: The numbers of examples that train i and j.
        data: [t, c], the weights of the data that train either of them.
        trial_id: Id of the average while it is evaluated; no model has it.
        allowance: See `merge_families`.
        metric: The loss.
        fed: The federation.

    Returns:
        The word "average" or the id of the model that is kept, its shares of all models (a row of `mix`), and its
        family.
    """
    only_i, only_j = np.eye(len(models))[[i, j]]
    share = sizes / sizes.sum() if sizes.sum() else np.array([0.5, 0.5])
    a = models.family[i]
    b = models.family[j]
    family_size = {family: models.family.count(family) for family in (a, b)}
    options: list[tuple[str | int, Floats, int]] = [(models.ids[i], only_i, a), (models.ids[j], only_j, b)]
    discounts = [
        allowance if family_size[a] > family_size[b] else 0.0,
        allowance if family_size[b] > family_size[a] else 0.0,
    ]
    if a == b or min(family_size.values()) == 1:  # two trunks that both have other models cannot be averaged
        average_family = a if a == b or family_size[a] == 1 else b
        options.insert(0, ("average", share[0] * only_i + share[1] * only_j, average_family))
        discounts.insert(0, 0.0)
    if not fed.find_receivers(models)[:, [i, j]].all():  # they may not be compared at all clients of the pair
        return options[0]
    ids = [trial_id if kept == "average" else int(kept) for kept, _, _ in options]
    families = [trial_id if kept == "average" and a != b else family for kept, _, family in options]
    candidates = mix(models, [shares for _, shares, _ in options], ids, families)
    members = data[-1] > 0
    error = average_over_clients(fed.evaluate(candidates, metric)[members], fed.counts[-1, members])
    if np.isnan(error).any():  # no client has new data
        error = fed.cross_evaluate(candidates, np.repeat(data[:, :, None], len(options), axis=2), metric)[:, 0]
    best, _ = clustering.find_best_models((error - discounts)[None], np.zeros(1, dtype=np.int64))
    return options[int(best[0])]
