"""Clustering clients over time: choose, detect, make room, measure distances, merge, split. NumPy and SciPy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import bdtr

from feddrift import rng
from feddrift.models import mix, take
from feddrift.types import Bools, Event, Floats, Ints, Models

# Errors are counts over sizes; two that differ by less than this are the same number of mistakes.
TOLERANCE = 1e-9


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
    """Eq. 3: the best model's loss is above the last one by more than delta; never where either is missing."""
    with np.errstate(invalid="ignore"):  # inf - inf
        return np.asarray(lowest - reference > delta + TOLERANCE)


def assign(w: Floats, cluster: Ints) -> Floats:
    """w with one more row: client c's new data train the model at position cluster[c], or none where it is -1.

    Older rows are 0 or 1 again: how strongly they count is for the memory to say, anew at each step.
    """
    row = np.zeros((1, w.shape[1], w.shape[2]))
    members = np.flatnonzero(cluster >= 0)
    row[0, members, cluster[members]] = 1
    return np.concatenate([(w > 0).astype(np.float64), row])


def beats(wrong: Ints, a: int, b: int) -> bool:
    """Whether start a is better than start b by a one-sided sign test at 5 %, on the rows that only one gets right.

    wrong[a, b] counts the rows that both get wrong, the diagonal each one's own mistakes.

    >>> beats(np.array([[3, 3], [3, 9]]), 0, 1), beats(np.array([[3, 1], [1, 6]]), 0, 1)
    (True, False)
    """
    won, lost = int(wrong[b, b] - wrong[a, b]), int(wrong[a, a] - wrong[a, b])
    return won > lost and bool(bdtr(lost, won + lost, 0.5) <= 0.05)


def below(wrong: int, rows: int, limit: float) -> bool:
    """Whether so many mistakes on so many rows show an error below the limit, at 5 %.

    >>> below(0, 28, 0.1), below(0, 29, 0.1), below(8, 150, 0.1)
    (False, True, True)
    """
    return rows > 0 and bool(bdtr(wrong, rows, limit) <= 0.05)


def widen(w: Floats, owners: Sequence[Sequence[int]]) -> Floats:
    """w with one more model per entry of owners, trained by the newest data of those clients."""
    columns = np.zeros((*w.shape[:2], len(owners)))
    for k, clients in enumerate(owners):
        columns[-1, list(clients), k] = 1
    return np.concatenate([w, columns], axis=2)


def keep(models: Models, w: Floats, kept: Bools) -> tuple[Models, Floats]:
    """Only these models; what they alone knew is forgotten."""
    positions = np.flatnonzero(kept)
    if len(positions) == len(models):
        return models, w
    return take(models, positions, [models.ids[m] for m in positions]), w[:, :, positions]


def least_used(w: Floats, in_use: Bools, n: int) -> Ints:
    """Up to n models that nobody uses now, the longest unused first."""
    last = np.where((w > 0).any(axis=1), np.arange(len(w))[:, None], -1).max(axis=0, initial=-1)
    idle = np.flatnonzero(~in_use)
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


def merge_closest(
    models: Models, w: Floats, D: Floats, counts: Ints, delta: float
) -> tuple[Models, Floats, tuple[Event, ...]]:
    """Merge the two closest models while they are within delta (complete linkage), into the lower id.

    Parameters are averaged by the data behind them, and the data are united (Merge of Algorithm 4).
    """
    D = D.copy()
    n = len(models)
    mass = np.einsum("tcm,tc->m", w, counts)
    member = np.eye(n)  # member[k, m]: model m is now part of k
    events = []
    while np.isfinite(D.min()) and D.min() <= delta + TOLERANCE:
        i, j = divmod(int(D.argmin()), n)  # the first minimum lies above the diagonal: i < j
        events.append(Event("merged", models.ids[j], {"into": models.ids[i], "distance": float(D[i, j])}))
        D[i] = D[:, i] = np.maximum(D[i], D[j])
        D[i, i] = D[j, :] = D[:, j] = np.inf
        member[i] += member[j]
        member[j] = 0
    if not events:
        return models, w, ()
    left = np.flatnonzero(member.any(axis=1))
    share = member[left] * mass
    share[share.sum(axis=1) == 0] = member[left][share.sum(axis=1) == 0]  # no data behind any: equal parts
    share /= share.sum(axis=1, keepdims=True)
    united = np.einsum("tcm,km->tck", w, member[left])
    return mix(models, share, [models.ids[k] for k in left]), united, tuple(events)
