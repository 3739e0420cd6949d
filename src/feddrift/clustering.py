"""Clustering of clients over time: choose models, detect drift, retire, merge and split them. NumPy and SciPy only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from feddrift import rng
from feddrift.models import join, mix, take
from feddrift.types import Bools, Clusters, Event, Floats, Ints, Models

TOLERANCE = 1e-9  # losses that differ by less are equal: equal error rates may differ by a rounding error


@dataclass(frozen=True)
class Clustering:
    """Models, the data that train them (w), and the events of this time step."""

    models: Models
    w: Clusters
    events: tuple[Event, ...] = ()

    def add_events(self, events: Sequence[Event]) -> Clustering:
        """Return the clustering with these events appended."""
        return replace(self, events=(*self.events, *events))

    def assign_new_data(self, positions: Ints) -> Clustering:
        """Let client c's new data train the model at positions[c], or no model where that is -1."""
        return replace(self, w=append_assignment(self.w, positions))

    def add_models(self, models: Models, clients_per_model: Sequence[Sequence[int]]) -> Clustering:
        """Append models, each trained by the newest data of its clients."""
        return replace(self, models=join(self.models, models), w=append_models(self.w, clients_per_model))

    def retire_models(self, positions: Ints, reason: str) -> Clustering:
        """Remove the models at these positions and the data that trained them, with an event for each."""
        events = [Event("retired", self.models.ids[m], {"reason": reason}) for m in positions]
        models, w = keep_models(self.models, self.w, ~np.isin(np.arange(len(self.models)), positions))
        return Clustering(models, w, self.events).add_events(events)

    def forget_old_data(self, memory: Callable[[int], Floats]) -> Clustering:
        """Weight past data by the memory and retire models without remaining data."""
        w = apply_memory(self.w, memory(len(self.w) - 1))
        forgotten = np.setdiff1d(np.arange(w.n_models), w.model[w.weight > 0])
        return replace(self, w=w).retire_models(forgotten, "its data left the window")


def find_best_models(loss: Floats, current: Ints, tie_keys: Sequence[rng.Words] | None = None) -> tuple[Ints, Floats]:
    """Return each client's best model and its loss.

    Args:
        loss: [c, m], the loss of each model on each client's data; NaN for models that were not evaluated.
        current: [c], the position of the model that a client without any loss keeps.
        tie_keys: One random key per client to choose among equally good models; None: the lowest position.

    Returns:
        Positions [c], and losses [c], NaN for clients without any loss.

    >>> find_best_models(np.array([[0.3, 0.1], [np.nan, np.nan]]), current=np.array([0, 1]))
    (array([1, 1]), array([0.1, nan]))
    """
    scored = ~np.isnan(loss).all(axis=1)
    filled = np.where(np.isnan(loss), np.inf, loss)
    lowest = filled.min(axis=1)
    tied = filled <= lowest[:, None] + TOLERANCE
    best = tied.argmax(axis=1)
    if tie_keys is not None:
        for c in np.flatnonzero(scored & (tied.sum(axis=1) > 1)):
            options = np.flatnonzero(tied[c])
            best[c] = options[rng.choice(tie_keys[int(c)], len(options))]
    return np.where(scored, best, current), np.where(scored, lowest, np.nan)


def detect_rise(lowest: Floats, reference: Floats, delta: float) -> Bools:
    """Return True where the best model's loss exceeds the reference by more than delta (eq. 4), False for NaN."""
    with np.errstate(invalid="ignore"):  # inf - inf
        return np.asarray(lowest - reference > delta + TOLERANCE)


def create_empty_clusters(n_clients: int, n_models: int = 1) -> Clusters:
    """Return the weights w of a run before its first time step."""
    return Clusters(np.zeros((0, n_clients), dtype=np.int64), n_models)


def append_assignment(w: Clusters, positions: Ints) -> Clusters:
    """Append a row to w: client c's new data train the model at positions[c], or no model where that is -1.

    The data of older rows with weight 0 train no model from now on. The other rows get weight 1 again, since
    `apply_memory` sets the weights in each time step.
    """
    with_weight = np.where(w.weight[:, None] > 0, w.model, -1)
    return Clusters(np.concatenate([with_weight, positions[None]]), w.n_models)


def apply_memory(w: Clusters, memory: Floats) -> Clusters:
    """Multiply the weight of each time step t by memory[t]."""
    return replace(w, weight=w.weight * memory)


def wins_sign_test(wrong: Ints, a: int, b: int) -> bool:
    """Return True if candidate a is better than b: a one-sided sign test at 5 % on rows that only one predicts right.

    Args:
        wrong: [a, b], the number of rows that both candidates predict wrong; on the diagonal each one's own errors.
        a: Index of the candidate that may win.
        b: Index of its rival.

    >>> wins_sign_test(np.array([[3, 3], [3, 9]]), 0, 1), wins_sign_test(np.array([[3, 1], [1, 6]]), 0, 1)
    (True, False)
    """
    won, lost = count_decisive_rows(wrong, a, b)
    return won > lost and _binomial_cdf(lost, won + lost, 0.5) <= 0.05


def count_decisive_rows(wrong: Ints, a: int, b: int) -> tuple[int, int]:
    """Count the rows that only candidate a predicts right, and those that only b predicts right."""
    return int(wrong[b, b] - wrong[a, b]), int(wrong[a, a] - wrong[a, b])


def is_error_below(wrong: int, rows: int, limit: float) -> bool:
    """Test if the error rate is below the limit (one-sided binomial test at 5 %), given `wrong` errors on `rows` rows.

    >>> is_error_below(0, 28, 0.1), is_error_below(0, 29, 0.1), is_error_below(8, 150, 0.1)
    (False, True, True)
    """
    return rows > 0 and _binomial_cdf(wrong, rows, limit) <= 0.05


def _binomial_cdf(k: int, n: int, p: float) -> float:
    """Return the probability of at most k successes in n trials, each with probability p."""
    from scipy.special import bdtr  # imported here, because importing SciPy is slow

    return float(bdtr(k, n, p))


def append_models(w: Clusters, clients_per_model: Sequence[Sequence[int]]) -> Clusters:
    """Add one model per entry of `clients_per_model` to w, trained by the newest data of those clients."""
    model = w.model.copy()
    for k, clients in enumerate(clients_per_model):
        model[-1, list(clients)] = w.n_models + k
    return replace(w, model=model, n_models=w.n_models + len(clients_per_model))


def keep_models(models: Models, w: Clusters, kept: Bools) -> tuple[Models, Clusters]:
    """Keep the marked models; the data of all other models train no model."""
    positions = np.flatnonzero(kept)
    if len(positions) == len(models):
        return models, w
    new_positions = np.where(kept, np.cumsum(kept) - 1, -1)
    return take(models, positions, [models.ids[m] for m in positions]), remap_models(w, new_positions, len(positions))


def remap_models(w: Clusters, new_positions: Ints, n_models: int) -> Clusters:
    """Move each model m of w to new_positions[m]; -1 removes it."""
    return replace(w, model=np.where(w.model >= 0, new_positions[w.model], -1), n_models=n_models)


def sum_examples_per_model(w: Clusters, counts: Ints) -> Floats:
    """Return the weighted number of examples that train each model: sum over t, c of w[t, c, m] N[t, c]."""
    used = w.model >= 0
    return np.bincount(w.model[used], (w.weight[:, None] * counts)[used], w.n_models).astype(np.float64)


def find_least_used(w: Clusters, used: Bools, n: int) -> Ints:
    """Return up to n models that no client uses, in the order of the last time steps with training data."""
    last_time = np.full(w.n_models, -1)
    t, c = np.nonzero((w.model >= 0) & (w.weight[:, None] > 0))
    np.maximum.at(last_time, w.model[t, c], t)
    unused = np.flatnonzero(~used)
    return unused[np.argsort(last_time[unused], kind="stable")][:n]


def split_cluster(similarity: Floats, gamma: float) -> Ints | None:
    """Split a cluster in two by complete linkage and return the members of the second part.

    The split is accepted if sqrt((1 - alpha) / 2) > gamma; alpha is the highest similarity of members of different
    parts.

    Args:
        similarity: [i, j], the cosine similarity of the members' updates.
        gamma: The minimum dissimilarity of the parts.

    Returns:
        The members that leave the cluster, or None if the split is rejected.

    >>> similarity = np.array([[1.0, 0.9, -0.8], [0.9, 1.0, -0.7], [-0.8, -0.7, 1.0]])
    >>> split_cluster(similarity, gamma=0.1), split_cluster(similarity, gamma=0.95)
    (array([2]), None)
    """
    from scipy.cluster.hierarchy import cut_tree, linkage  # imported here: a third of the start-up time
    from scipy.spatial.distance import squareform

    tree = linkage(squareform(np.maximum(1 - similarity, 0), checks=False), "complete")
    part = cut_tree(tree, [2])[:, 0]
    leaves = part != part[0]  # the part of the first member keeps the old cluster
    if not leaves.any():
        return None
    alpha = similarity[np.ix_(~leaves, leaves)].max()
    return np.flatnonzero(leaves) if np.sqrt(max(0.0, (1 - alpha) / 2)) > gamma else None


def compute_distances(L: Floats) -> Floats:
    """Compute D(i, j) = max(L_ij - L_ii, L_ji - L_jj, 0); infinite on the diagonal and for models without data.

    If a model was not scored on the data of the other one (NaN), because it is not sent to those clients, the score of
    the other model on its data decides alone.
    """
    excess = L - np.diag(L)[:, None]  # loss of model i on the data of j minus that on its own
    D = np.maximum(np.fmax(excess, excess.T), 0)
    D[np.isnan(D)] = np.inf
    np.fill_diagonal(D, np.inf)
    return D


class ClosestPairs:
    """Distances D between groups of models, which are united by complete linkage."""

    def __init__(self, D: Floats) -> None:
        self.D = D.copy()
        self._nearest = self.D.argmin(axis=1)
        self._nearest_distance = self.D.min(axis=1)

    def find_closest(self) -> tuple[int, int, float]:
        """Return the closest two groups and their distance; of equal distances the first."""
        i = int(self._nearest_distance.argmin())
        return i, int(self._nearest[i]), float(self._nearest_distance[i])

    def unite(self, i: int, j: int) -> None:
        """Make group j a part of group i."""
        D = self.D
        D[i] = D[:, i] = np.maximum(D[i], D[j])
        D[i, i] = D[j, :] = D[:, j] = np.inf
        stale = np.flatnonzero((self._nearest == i) | (self._nearest == j))  # all others still have the same nearest
        for k in {i, j, *stale.tolist()}:
            self._nearest[k] = D[k].argmin()
            self._nearest_distance[k] = D[k].min()


def link_closest(D: Floats, limit: float) -> tuple[Ints, list[tuple[int, int, float]]]:
    """Unite the two closest groups while their distance is within the limit (complete linkage).

    Returns:
        For each row of D the first row of its group; and the united pairs in order, each with its distance.
    """
    pairs = ClosestPairs(D)
    group = np.arange(len(D))
    united = []
    i, j, distance = pairs.find_closest()
    while distance <= limit + TOLERANCE:
        pairs.unite(i, j)
        group[group == j] = i
        united.append((i, j, distance))
        i, j, distance = pairs.find_closest()
    return group, united


def merge_closest(
    models: Models, w: Clusters, D: Floats, counts: Ints, delta: float
) -> tuple[Models, Clusters, tuple[Event, ...]]:
    """Merge the two closest models while their distance is within delta (complete linkage), into the lower id.

    Parameters are averaged in proportion to the models' examples, and their data are united (Merge of Algorithm 4).

    Args:
        models: All models.
        w: Their training data.
        D: [i, j], the distances between models.
        counts: [t, c], the number of examples.
        delta: The maximum distance.

    Returns:
        The remaining models, their training data, and an event for each merge.
    """
    group, united = link_closest(D, delta)
    if not united:
        return models, w, ()
    events = [Event("merged", models.ids[j], {"into": models.ids[i], "distance": dist}) for i, j, dist in united]
    remaining, new_positions = np.unique(group, return_inverse=True)
    is_member = np.zeros((len(remaining), len(models)))
    is_member[new_positions, np.arange(len(models))] = 1
    share = is_member * sum_examples_per_model(w, counts)
    share[share.sum(axis=1) == 0] = is_member[share.sum(axis=1) == 0]  # no model of the group has data: equal shares
    share /= share.sum(axis=1, keepdims=True)
    merged = mix(models, share, [models.ids[k] for k in remaining])
    return merged, remap_models(w, new_positions, len(remaining)), tuple(events)
