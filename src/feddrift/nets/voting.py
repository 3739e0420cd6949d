"""Predictions of several models together: softmax, sums of votes and mean probabilities."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift import numerics
from feddrift.models import get_params
from feddrift.nets.losses import compute_logits
from feddrift.types import Ballot, Floats, Layer, Models, Net


def log_softmax(logits: npt.NDArray[Any]) -> Floats:
    """Return the logarithm of the softmax over the last axis."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    logarithms: Floats = shifted - numerics.log(numerics.exp(shifted).sum(axis=-1, keepdims=True))
    return logarithms


def softmax(logits: npt.NDArray[Any]) -> Floats:
    """Return the softmax over the last axis."""
    return numerics.exp(log_softmax(logits))


def add_votes(logits: npt.NDArray[Any], votes: Floats, ballot: Ballot) -> Floats:
    """Add the votes of models: soft votes are probabilities, hard votes name a class.

    Args:
        logits: [m, row, class], the logits of each model.
        votes: [row, m], the weight of each model.
        ballot: Soft or hard votes.

    Returns:
        The sums [row, class].

    >>> logits = np.array([[[2.0, 0.0]], [[0.0, 1.0]]])
    >>> add_votes(logits, np.array([[1.0, 3.0]]), "hard").tolist()
    [[1.0, 3.0]]
    """
    if ballot == "soft":
        return sum_ballots(map(softmax, logits), votes)
    classes = np.arange(logits.shape[2])
    return sum_ballots((scores.argmax(axis=1)[:, None] == classes for scores in logits), votes)


def sum_ballots(ballots: Iterable[npt.NDArray[Any]], votes: Floats) -> Floats:
    """Add the ballots [row, class] of each model, multiplied by votes[row, m], in the order of the models.

    The order is fixed so that the sum has the same bits everywhere. A ballot with the vote 0 may be NaN.
    """
    total: Any = np.float64(0)
    for m, ballot in enumerate(ballots):
        weight = votes[:, m, None]
        has_vote = weight > 0
        if has_vote.all():
            total = total + ballot * weight
        elif has_vote.any():
            total = total + np.where(has_vote, ballot * weight, 0.0)
    return np.asarray(total)


def compute_vote_probabilities(logits: npt.NDArray[Any], votes: Floats) -> Floats:
    """Return the mean probabilities [row, class] of models with these logits [m, row, class] and weights votes[row, m].

    >>> logits = np.array([[[0.0, 0.0]], [[0.0, np.log(3)]]])
    >>> compute_vote_probabilities(logits, np.array([[1.0, 1.0]])).round(3).tolist()
    [[0.375, 0.625]]
    """
    return average_probabilities(map(softmax, logits), votes)


def average_probabilities(by_model: Iterable[Floats], votes: Floats) -> Floats:
    """Average the probabilities [row, class] of each model with the weights votes[row, m]."""
    return sum_ballots(by_model, votes / votes.sum(axis=1, keepdims=True))


def predict_votes(net: Net, models: Models, votes: Floats, ballot: Ballot, x: npt.NDArray[Any]) -> Floats:
    """Return the votes [row, class] of models with weights votes[m] or votes[row, m] for inputs x[row, ...]."""
    return add_votes(*_compute_voter_logits(net, models, votes, x), ballot)


def predict_probabilities(net: Net, models: Models, votes: Floats, x: npt.NDArray[Any]) -> Floats:
    """Return the probabilities [row, class] of models with weights votes[m] or votes[row, m] for inputs x[row, ...]."""
    return compute_vote_probabilities(*_compute_voter_logits(net, models, votes, x))


def compute_layer(net: Net, model: Models | None, layer: Layer, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the outputs of a layer of a single model; the inputs if the model is None."""
    if model is None:
        return x
    part = net if layer == "logits" or net.hidden is None else replace(net, apply=net.hidden)
    return np.asarray(compute_logits(part, get_params(model, 0), None if model.mask is None else model.mask[0], x))


def _compute_voter_logits(
    net: Net, models: Models, votes: Floats, x: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], Floats]:
    """Return the logits [m, row, class] of the models that have a vote, and their votes [row, m]."""
    votes = np.atleast_2d(votes)
    used = np.flatnonzero(votes.any(axis=0))
    masks = [None] * len(models) if models.mask is None else models.mask
    logits = np.stack([np.asarray(compute_logits(net, get_params(models, m), masks[m], x)) for m in used.tolist()])
    return logits, np.broadcast_to(votes[:, used], (len(x), len(used)))
