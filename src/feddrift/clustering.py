"""Clustering clients over time: choose, detect, make room, measure distances, merge, split. NumPy and SciPy only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from feddrift import rng
from feddrift.models import join, mix, take
from feddrift.types import Bools, Clusters, Event, Floats, Ints, Models

# Errors are counts over sizes; two that differ by less than this are the same number of mistakes.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Clustering:
    """Models, the data that train them (w), and what has happened to them in this time step."""

    models: Models
    w: Clusters
    events: tuple[Event, ...] = ()

    def tell(self, events: Sequence[Event]) -> Clustering:
        """The same clustering with these events behind those it has."""
        return replace(self, events=(*self.events, *events))

    def assign(self, home: Ints) -> Clustering:
        """Client c's new data train the model at position home[c], or none where it is -1."""
        return replace(self, w=assign(self.w, home))

    def add(self, models: Models, owners: Sequence[Sequence[int]]) -> Clustering:
        """The clustering with these models behind its own, each trained by the newest data of its owners."""
        return replace(self, models=join(self.models, models), w=widen(self.w, owners))

    def drop(self, leaving: Ints, reason: str) -> Clustering:
        """The clustering without the models at these positions and the data that trained them; each is an event."""
        gone = [Event("retired", self.models.ids[m], {"reason": reason}) for m in leaving]
        models, w = keep(self.models, self.w, ~np.isin(np.arange(len(self.models)), leaving))
        return Clustering(models, w, self.events).tell(gone)

    def forget(self, memory: Callable[[int], Floats]) -> Clustering:
        """The clustering with its memory faded, and without the models whose data are all forgotten."""
        w = fade(self.w, memory(len(self.w) - 1))
        forgotten = np.setdiff1d(np.arange(w.n_models), w.model[w.weight > 0])
        return replace(self, w=w).drop(forgotten, "its data left the window")


def best_models(loss: Floats, current: Ints, tie_keys: Sequence[rng.Words] | None = None) -> tuple[Ints, Floats]:
    """Each client's best model and its loss; a client without a score (a row of NaN) keeps its current one.

    Ties go to the lowest position, or to a random one where keys are given.

    >>> best_models(np.array([[0.3, 0.1], [np.nan, np.nan]]), current=np.array([0, 1]))
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


def rises(lowest: Floats, reference: Floats, delta: float) -> Bools:
    """Eq. 4: the best model's loss is above the last one by more than delta; never where either is missing."""
    with np.errstate(invalid="ignore"):  # inf - inf
        return np.asarray(lowest - reference > delta + TOLERANCE)


def nobody(n_clients: int, n_models: int = 1) -> Clusters:
    """The w of a run before its first time step, which has no rows yet."""
    return Clusters(np.zeros((0, n_clients), dtype=np.int64), n_models)


def assign(w: Clusters, cluster: Ints) -> Clusters:
    """w with one more row: client c's new data train the model at position cluster[c], or none where it is -1.

    What still counts of the older rows counts fully again: fading is for the memory, anew at each step.
    """
    remembered = np.where(w.weight[:, None] > 0, w.model, -1)
    return Clusters(np.concatenate([remembered, cluster[None]]), w.n_models)


def fade(w: Clusters, memory: Floats) -> Clusters:
    """w in which time step t counts memory[t] times as much."""
    return replace(w, weight=w.weight * memory)


def beats(wrong: Ints, a: int, b: int) -> bool:
    """Whether start a is better than start b by a one-sided sign test at 5 %, on the rows that only one gets right.

    wrong[a, b] counts the rows that both get wrong, the diagonal each one's own mistakes.

    >>> beats(np.array([[3, 3], [3, 9]]), 0, 1), beats(np.array([[3, 1], [1, 6]]), 0, 1)
    (True, False)
    """
    won, lost = decisive(wrong, a, b)
    return won > lost and _at_most(lost, won + lost, 0.5) <= 0.05


def decisive(wrong: Ints, a: int, b: int) -> tuple[int, int]:
    """How many rows only a gets right, and how many only b."""
    return int(wrong[b, b] - wrong[a, b]), int(wrong[a, a] - wrong[a, b])


def below(wrong: int, rows: int, limit: float) -> bool:
    """Whether so many mistakes on so many rows show an error below the limit, at 5 %.

    >>> below(0, 28, 0.1), below(0, 29, 0.1), below(8, 150, 0.1)
    (False, True, True)
    """
    return rows > 0 and _at_most(wrong, rows, limit) <= 0.05


def _at_most(k: int, n: int, p: float) -> float:
    """The chance of at most k hits in n trials, each with chance p."""
    from scipy.special import bdtr  # here, since SciPy takes a while to import

    return float(bdtr(k, n, p))


def widen(w: Clusters, owners: Sequence[Sequence[int]]) -> Clusters:
    """w with one more model per entry of owners, trained by the newest data of those clients."""
    model = w.model.copy()
    for k, clients in enumerate(owners):
        model[-1, list(clients)] = w.n_models + k
    return replace(w, model=model, n_models=w.n_models + len(owners))


def keep(models: Models, w: Clusters, kept: Bools) -> tuple[Models, Clusters]:
    """The models that are kept, and w with the data of all others trained on by nobody."""
    positions = np.flatnonzero(kept)
    if len(positions) == len(models):
        return models, w
    new = np.where(kept, np.cumsum(kept) - 1, -1)
    return take(models, positions, [models.ids[m] for m in positions]), moved(w, new, len(positions))


def moved(w: Clusters, new: Ints, n_models: int) -> Clusters:
    """w after the model at position m has gone to new[m], or nowhere where that is -1."""
    return replace(w, model=np.where(w.model >= 0, new[w.model], -1), n_models=n_models)


def mass(w: Clusters, counts: Ints) -> Floats:
    """The data behind each model: sum over t, c of w[t, c, m] N[t, c]."""
    used = w.model >= 0
    return np.bincount(w.model[used], (w.weight[:, None] * counts)[used], w.n_models).astype(np.float64)


def least_used(w: Clusters, used: Bools, n: int) -> Ints:
    """Up to n models that nobody uses now, the longest unused first."""
    last = np.full(w.n_models, -1)
    t, c = np.nonzero((w.model >= 0) & (w.weight[:, None] > 0))
    np.maximum.at(last, w.model[t, c], t)
    idle = np.flatnonzero(~used)
    return idle[np.argsort(last[idle], kind="stable")][:n]


def bipartition(similarity: Floats, gamma: float) -> Ints | None:
    """The members that leave when a cluster splits in two by complete linkage, or None where gamma forbids it.

    The split stands if sqrt((1 - alpha) / 2) > gamma, alpha being the highest similarity across the parts.

    >>> apart = np.array([[1.0, 0.9, -0.8], [0.9, 1.0, -0.7], [-0.8, -0.7, 1.0]])
    >>> bipartition(apart, gamma=0.1), bipartition(apart, gamma=0.95)
    (array([2]), None)
    """
    from scipy.cluster.hierarchy import cut_tree, linkage  # here, since a third of the start-up time is theirs
    from scipy.spatial.distance import squareform

    apart = np.maximum(1 - similarity, 0)
    tree = linkage(squareform(apart, checks=False), "complete")
    part = cut_tree(tree, [2])[:, 0]
    leavers = np.flatnonzero(part != part[0])  # the first member's part keeps the old cluster
    if not len(leavers):
        return None
    alpha = similarity[np.ix_(part == part[0], part != part[0])].max()
    return leavers if np.sqrt(max(0.0, (1 - alpha) / 2)) > gamma else None


def distances(L: Floats) -> Floats:
    """D(i, j) = max(L_ij - L_ii, L_ji - L_jj, 0); infinite on the diagonal and where a model has no data."""
    own = np.diag(L)
    worse = L - own[:, None]  # model i on the data of j against its own
    D = np.maximum(np.maximum(worse, worse.T), 0)
    D[np.isnan(D)] = np.inf
    np.fill_diagonal(D, np.inf)
    return D


class Pairs:
    """The distances D between groups, closest first; groups unite by complete linkage, into the first of two."""

    def __init__(self, D: Floats) -> None:
        self.D = D.copy()
        self._nearest, self._distance = self.D.argmin(axis=1), self.D.min(axis=1)  # of each row

    def closest(self) -> tuple[int, int, float]:
        """The closest two and their distance, the first in order of several."""
        i = int(self._distance.argmin())
        return i, int(self._nearest[i]), float(self._distance[i])

    def unite(self, i: int, j: int) -> None:
        """j becomes a part of i."""
        D = self.D
        D[i] = D[:, i] = np.maximum(D[i], D[j])
        D[i, i] = D[j, :] = D[:, j] = np.inf
        stale = np.flatnonzero((self._nearest == i) | (self._nearest == j))  # all others are as near as they were
        for k in {i, j, *stale.tolist()}:
            self._nearest[k], self._distance[k] = D[k].argmin(), D[k].min()


def linked(D: Floats, limit: float) -> tuple[Ints, list[tuple[int, int, float]]]:
    """Unite the two closest while they are within the limit: the first of each one's group, and every pair united."""
    pairs, into, united = Pairs(D), np.arange(len(D)), []
    while (closest := pairs.closest())[2] <= limit + TOLERANCE:
        i, j, _ = closest
        pairs.unite(i, j)
        into[into == j] = i
        united.append(closest)
    return into, united


def merge_closest(
    models: Models, w: Clusters, D: Floats, counts: Ints, delta: float
) -> tuple[Models, Clusters, tuple[Event, ...]]:
    """Merge the two closest models while they are within delta (complete linkage), into the lower id.

    Parameters are averaged by the data behind them, and the data are united (Merge of Algorithm 4).
    """
    into, united = linked(D, delta)
    if not united:
        return models, w, ()
    events = [Event("merged", models.ids[j], {"into": models.ids[i], "distance": apart}) for i, j, apart in united]
    left, new = np.unique(into, return_inverse=True)
    behind = mass(w, counts)
    member = np.zeros((len(left), len(models)))
    member[new, np.arange(len(models))] = 1
    share = member * behind
    share[share.sum(axis=1) == 0] = member[share.sum(axis=1) == 0]  # no data behind any: equal parts
    share /= share.sum(axis=1, keepdims=True)
    return mix(models, share, [models.ids[k] for k in left]), moved(w, new, len(left)), tuple(events)
