"""How several models decide together: the one place where probabilities are made and votes are added."""

from __future__ import annotations

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


def totals(logits: npt.NDArray[Any], votes: Floats, ballot: Ballot) -> Floats:
    """The votes [row, class] that models with these logits [m, row, class] cast, each weighing votes[row, m].

    >>> logits = np.array([[[2.0, 0.0]], [[0.0, 1.0]]])
    >>> totals(logits, np.array([[1.0, 3.0]]), "hard").tolist()
    [[1.0, 3.0]]
    """
    hard = ballot == "hard"
    total: Floats = np.zeros(logits.shape[1:])
    classes = np.arange(logits.shape[2])
    for m, scores in enumerate(logits):  # in this order: the sum has the same bits everywhere
        ballots = scores.argmax(axis=1)[:, None] == classes if hard else numerics.exp(log_probabilities(scores))
        total += ballots * votes[:, m, None]
    return total


def chances(logits: npt.NDArray[Any], votes: Floats) -> Floats:
    """The probabilities [row, class] of models with these logits [m, row, class]: their mean, each weighing
    votes[row, m], also where they name classes by hard votes.

    >>> chances(np.array([[[0.0, 0.0]], [[0.0, np.log(3)]]]), np.array([[1.0, 1.0]])).round(3).tolist()
    [[0.375, 0.625]]
    """
    return totals(logits, votes / votes.sum(axis=1, keepdims=True), "soft")


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
