"""Quarantine, which the paper does not have: a model with one founder serves only it until its next data arrive."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from feddrift import clustering
from feddrift.algorithms.feddrift.detection import DriftDetectionOptions, DriftState
from feddrift.algorithms.feddrift.new_models import NewModels
from feddrift.clustering import Clustering
from feddrift.types import Event, Federation


def end_quarantines(method: DriftDetectionOptions, state: DriftState, fed: Federation) -> tuple[Clustering, DriftState]:
    """End the quarantine of each model whose founder has new data.

    If the model is the founder's best on these data, it stays, and all clients may choose it. Otherwise it is retired,
    and the data that trained it are forgotten. Models whose founder was not scored stay in quarantine.

    Returns:
        The clusters of this time step so far, and the state of the last time step without the retired models.
    """
    if not state.waiting:
        return Clustering(state.models, state.w), state
    ids = state.models.ids
    loss = fed.evaluate(state.models, method.metric)
    best, lowest = clustering.best_models(loss, state.votes.argmax(axis=1))
    founder = {
        i: int(np.flatnonzero((state.w.model == ids.index(i)).any(axis=0))[0]) for i in state.waiting if i in ids
    }
    waiting = tuple(i for i, c in founder.items() if np.isnan(lowest[c]))
    retired = [i for i, c in founder.items() if i not in waiting and ids[best[c]] != i]
    kept = ~np.isin(ids, retired)
    models, w = clustering.keep_models(state.models, state.w, kept)
    votes = state.votes[:, kept]
    for i in retired:  # the founder returns to the best of the other models
        loss_of_kept = np.where(kept, loss[founder[i]], np.inf)
        votes[founder[i]] = np.arange(len(ids))[kept] == np.nanargmin(loss_of_kept)
    events = tuple(Event("retired", i, {"reason": "not confirmed", "client": founder[i]}) for i in retired)
    newborn = tuple(i for i in state.newborn if i not in retired)
    state = replace(state, models=models, w=w, votes=votes, waiting=waiting, newborn=newborn)
    return Clustering(models, w, events), state


def list_quarantined_models(method: DriftDetectionOptions, state: DriftState, created: NewModels) -> tuple[int, ...]:
    """Return the ids of the models that are in quarantine after this time step."""
    one_founder = (i for i, clients in zip(created.models.ids, created.groups, strict=True) if len(clients) == 1)
    return (*state.waiting, *one_founder) if method.quarantine else ()
