"""How good predictions are, besides accuracy: what scikit-learn computes, for many clients at once.

Each function of a name in `SCORES` has scikit-learn's definition, over the classes that a client's data have:
`log_loss`, `brier_score_loss` (of two classes the square for the second, of more the sum over all), `roc_auc_score` (of
more than two classes one against the rest, averaged), `balanced_accuracy_score` and `f1_score(average="macro")`.
`majority` is the accuracy of always naming the class that the client has received most often so far.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from feddrift import numerics
from feddrift.errors import unknown
from feddrift.types import Bools, Floats, Ints

Labels = npt.NDArray[np.integer]
MAX_LOG_LOSS = 37.0  # log loss of predictions that are certain and wrong
LEAST = float(np.finfo(np.float64).eps)  # a probability of 0 counts as this


@dataclass(frozen=True)
class Score:
    """What a number says: how it is called, whether it is a share (and shown in percent), and which way is better."""

    name: str
    title: str
    share: bool = True
    higher_is_better: bool = True


ACCURACY = Score("accuracy", "accuracy")
SCORES = {
    score.name: score
    for score in (
        Score("log_loss", "log loss", share=False, higher_is_better=False),
        Score("brier", "Brier score", share=False, higher_is_better=False),
        Score("auc", "AUC"),
        Score("balanced_accuracy", "balanced accuracy"),
        Score("f1", "F1"),
        Score("majority", "accuracy of the majority class"),
    )
}


def score(name: str) -> Score:
    """The score of this name, `accuracy` among them.

    >>> score("auc").title
    'AUC'
    """
    known = {"accuracy": ACCURACY, **SCORES}
    if name not in known:
        raise unknown("score", name, known)
    return known[name]


def measure(chances: Floats, predicted: Ints, y: Labels, sizes: Ints, received: Ints) -> dict[str, Floats]:
    """All scores [c] by name; NaN where a client has no data, or too few classes to tell.

    Parameters:
        chances: [row, class], the probabilities of the rows, which lie one client after the other.
        predicted: [row], the class that was named.
        y: [row], the true class.
        sizes: [c], how many rows each client has.
        received: [c, class], how often each client has seen each class before.
    """
    n_clients, n_classes = len(sizes), chances.shape[1]
    owner, rows = np.repeat(np.arange(n_clients), sizes), np.arange(len(y))

    def per_client(values: Floats) -> Floats:
        return _ratio(np.bincount(owner, values, n_clients), sizes)

    def by_class(classes: Labels, weights: Floats | None = None) -> Floats:
        counts = np.bincount(owner * n_classes + classes, weights, n_clients * n_classes)
        return counts.reshape(n_clients, n_classes).astype(np.float64)

    true, named, hits = by_class(y), by_class(predicted), by_class(y, (predicted == y).astype(np.float64))
    squares = (chances**2).sum(axis=1) - 2 * chances[rows, y] + 1
    usual = np.where(received.any(axis=1), received.argmax(axis=1), -1)
    return {
        "log_loss": per_client(-numerics.log(np.clip(chances[rows, y], LEAST, 1.0))),
        "brier": per_client(squares / 2 if n_classes == 2 else squares),
        "auc": _auc(chances, y, owner, true),
        "balanced_accuracy": _mean_where(_ratio(hits, true), true > 0),
        "f1": _mean_where(_ratio(2 * hits, true + named), true + named > 0),
        "majority": np.where(usual >= 0, _ratio(true[np.arange(n_clients), usual], sizes), np.nan),
    }


def _auc(chances: Floats, y: Labels, owner: Ints, true: Floats) -> Floats:
    """How often a row of a class gets a higher probability of it than one of the rest: ranks, ties in the middle."""
    n_clients, n_classes = true.shape
    of_class = np.full(true.shape, np.nan)
    total = true.sum(axis=1)
    begins = np.cumsum(total) - total
    for k in range(n_classes) if n_classes > 2 else range(1, n_classes):
        order = np.lexsort((chances[:, k], owner))
        value, client = chances[order, k], owner[order]
        new = np.concatenate([[True], (value[1:] != value[:-1]) | (client[1:] != client[:-1])])[: len(order)]
        group = np.cumsum(new) - 1
        first = np.flatnonzero(new)
        last = np.concatenate([first[1:], [len(order)]])[: len(first)]
        rank = ((first + last + 1) / 2)[group] - begins[client]  # from 1 within each client
        mine, rest = true[:, k], total - true[:, k]
        ranks = np.bincount(client, rank * (y[order] == k), n_clients)
        of_class[:, k] = _ratio(ranks - mine * (mine + 1) / 2, mine * rest)
    return _mean_where(of_class, ~np.isnan(of_class))


def _ratio(part: Floats | Ints, whole: Floats | Ints) -> Floats:
    """The quotient, NaN where there is nothing to divide by."""
    quotient: Floats = np.divide(part, whole, out=np.full(np.shape(part), np.nan), where=whole > 0)
    return quotient


def _mean_where(values: Floats, there: Bools) -> Floats:
    """[c], the mean over the classes that are there."""
    return _ratio(np.where(there, values, 0.0).sum(axis=1), there.sum(axis=1))
