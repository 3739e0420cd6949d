"""How several models decide together: the one place where probabilities are made and votes are added."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift import numerics
from feddrift.models import params_of
from feddrift.nets.losses import masked
from feddrift.types import Ballot, Floats, Layer, Models, Net


def log_probabilities(logits: npt.NDArray[Any]) -> Floats:
    """The logarithms of the softmax over the last axis."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    logarithms: Floats = shifted - numerics.log(numerics.exp(shifted).sum(axis=-1, keepdims=True))
    return logarithms


def probabilities(logits: npt.NDArray[Any]) -> Floats:
    """The softmax over the last axis."""
    return numerics.exp(log_probabilities(logits))


def totals(logits: npt.NDArray[Any], votes: Floats, ballot: Ballot) -> Floats:
    """The votes [row, class] that models with these logits [m, row, class] cast, each weighing votes[row, m].

    >>> logits = np.array([[[2.0, 0.0]], [[0.0, 1.0]]])
    >>> totals(logits, np.array([[1.0, 3.0]]), "hard").tolist()
    [[1.0, 3.0]]
    """
    if ballot == "soft":
        return weighted_sum(map(probabilities, logits), votes)
    classes = np.arange(logits.shape[2])
    return weighted_sum((scores.argmax(axis=1)[:, None] == classes for scores in logits), votes)


def weighted_sum(ballots: Iterable[npt.NDArray[Any]], votes: Floats) -> Floats:
    """Add the ballots [row, class] of each model, multiplied by votes[row, m], in the order of the models.

    The order is fixed so that the sum has the same bits everywhere. A ballot without a vote may be NaN.
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


def chances(logits: npt.NDArray[Any], votes: Floats) -> Floats:
    """The probabilities [row, class] of models with these logits [m, row, class]: their mean, each weighing
    votes[row, m], also where they name classes by hard votes.

    >>> chances(np.array([[[0.0, 0.0]], [[0.0, np.log(3)]]]), np.array([[1.0, 1.0]])).round(3).tolist()
    [[0.375, 0.625]]
    """
    return mean_probabilities(map(probabilities, logits), votes)


def mean_probabilities(of_models: Iterable[Floats], votes: Floats) -> Floats:
    """Average the probabilities [row, class] of each model, each weighing votes[row, m]."""
    return weighted_sum(of_models, votes / votes.sum(axis=1, keepdims=True))


def poll(net: Net, models: Models, votes: Floats, ballot: Ballot, x: npt.NDArray[Any]) -> Floats:
    """The votes [row, class] of models that weigh votes[m] each, or votes[row, m], on inputs x[row, ...]."""
    return totals(*_of_voters(net, models, votes, x), ballot)


def poll_chances(net: Net, models: Models, votes: Floats, x: npt.NDArray[Any]) -> Floats:
    """The probabilities [row, class] by models that weigh votes[m] each, or votes[row, m], on inputs x[row, ...]."""
    return chances(*_of_voters(net, models, votes, x))


def layer_of(net: Net, model: Models | None, layer: Layer, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What a layer of a stack of one model makes of inputs; without a model the inputs themselves."""
    if model is None:
        return x
    how = net if layer == "logits" or net.hidden is None else replace(net, apply=net.hidden)
    return np.asarray(masked(how, params_of(model, 0), None if model.mask is None else model.mask[0], x))


def _of_voters(net: Net, models: Models, votes: Floats, x: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Floats]:
    """The logits [m, row, class] of the models that have a vote, and their votes [row, m]."""
    votes = np.atleast_2d(votes)
    used = np.flatnonzero(votes.any(axis=0))
    masks = [None] * len(models) if models.mask is None else models.mask
    logits = np.stack([np.asarray(masked(net, params_of(models, m), masks[m], x)) for m in used.tolist()])
    return logits, np.broadcast_to(votes[:, used], (len(x), len(used)))
