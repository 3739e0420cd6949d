"""Scores of predictions other than accuracy, computed for many clients at once.

Each score in `SCORES` has scikit-learn's definition, over the classes in a client's data: `log_loss`,
`brier_score_loss` (two classes: the square for the second class; more: the sum over all classes), `roc_auc_score`
(more than two classes: one against the rest, averaged), `balanced_accuracy_score` and `f1_score(average="macro")`.
`majority` is the accuracy of a constant prediction: the class that the client has received most often so far.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from feddrift import numerics
from feddrift.errors import unknown_name_error
from feddrift.types import Bools, Floats, Ints

Labels = npt.NDArray[np.integer]
MIN_PROBABILITY = float(np.finfo(np.float64).eps)  # lower probabilities are raised to it
MAX_LOG_LOSS = 37.0  # upper bound of log losses: -log(MIN_PROBABILITY) is 36.04


@dataclass(frozen=True)
class Score:
    """Name and title of a score, whether it is a share (displayed in percent), and which direction is better."""

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


def find_score(name: str) -> Score:
    """Return the score with this name, which may be `accuracy`.

    >>> find_score("auc").title
    'AUC'
    """
    known = {"accuracy": ACCURACY, **SCORES}
    if name not in known:
        raise unknown_name_error("score", name, known)
    return known[name]


def compute_scores(probability: Floats, predicted: Ints, y: Labels, sizes: Ints, received: Ints) -> dict[str, Floats]:
    """Compute all scores of each client.

    Args:
        probability: [row, class], the predicted probabilities; the rows of a client are contiguous, in client order.
        predicted: [row], the predicted class.
        y: [row], the true class.
        sizes: [c], the number of rows of each client.
        received: [c, class], the number of earlier examples of each class at each client.

    Returns:
        By name, scores [c]; NaN for clients without data, or with too few classes for the score.
    """
    n_clients = len(sizes)
    n_classes = probability.shape[1]
    owner = np.repeat(np.arange(n_clients), sizes)

    def average_by_client(values: Floats) -> Floats:
        return _divide(np.bincount(owner, values, n_clients), sizes)

    def count_by_class(classes: Labels, weights: Floats | None = None) -> Floats:
        counts = np.bincount(owner * n_classes + classes, weights, n_clients * n_classes)
        return counts.reshape(n_clients, n_classes).astype(np.float64)

    n_true = count_by_class(y)
    n_predicted = count_by_class(predicted)
    n_correct = count_by_class(y, (predicted == y).astype(np.float64))
    of_true_class = probability[np.arange(len(y)), y]
    squared_error = (probability**2).sum(axis=1) - 2 * of_true_class + 1
    majority = np.where(received.any(axis=1), received.argmax(axis=1), -1)
    return {
        "log_loss": average_by_client(-numerics.log(np.clip(of_true_class, MIN_PROBABILITY, 1.0))),
        "brier": average_by_client(squared_error / 2 if n_classes == 2 else squared_error),
        "auc": _compute_auc(probability, y, owner, n_true),
        "balanced_accuracy": _average_where(_divide(n_correct, n_true), n_true > 0),
        "f1": _average_where(_divide(2 * n_correct, n_true + n_predicted), n_true + n_predicted > 0),
        "majority": np.where(majority >= 0, _divide(n_true[np.arange(n_clients), majority], sizes), np.nan),
    }


def _compute_auc(probability: Floats, y: Labels, owner: Ints, n_true: Floats) -> Floats:
    """Compute the area under the ROC curve from the mid-ranks of the probabilities (Mann-Whitney U)."""
    n_clients, n_classes = n_true.shape
    auc = np.full(n_true.shape, np.nan)  # [c, class]
    total = n_true.sum(axis=1)
    n_before = np.cumsum(total) - total  # rows of the clients before
    for k in range(n_classes) if n_classes > 2 else range(1, n_classes):
        order = np.lexsort((probability[:, k], owner))
        value = probability[order, k]
        client = owner[order]
        is_first = np.concatenate([[True], (value[1:] != value[:-1]) | (client[1:] != client[:-1])])[: len(order)]
        first = np.flatnonzero(is_first)  # of equal values of a client
        end = np.concatenate([first[1:], [len(order)]])[: len(first)]
        rank = ((first + end + 1) / 2)[np.cumsum(is_first) - 1] - n_before[client]  # from 1 within each client
        n_class = n_true[:, k]
        rank_sum = np.bincount(client, rank * (y[order] == k), n_clients)
        auc[:, k] = _divide(rank_sum - n_class * (n_class + 1) / 2, n_class * (total - n_class))
    return _average_where(auc, ~np.isnan(auc))


def _divide(part: Floats | Ints, whole: Floats | Ints) -> Floats:
    """Divide elementwise; NaN where the divisor is 0."""
    quotient: Floats = np.divide(part, whole, out=np.full(np.shape(part), np.nan), where=whole > 0)
    return quotient


def _average_where(values: Floats, included: Bools) -> Floats:
    """Average values[c, class] over the included classes of each client."""
    return _divide(np.where(included, values, 0.0).sum(axis=1), included.sum(axis=1))
