"""Quarantine, which the paper does not have: a model that one client founded is on trial until its next data come."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from feddrift import clustering
from feddrift.algorithms.feddrift.detection import Detecting, DriftState
from feddrift.algorithms.feddrift.new_models import Newborn
from feddrift.clustering import Clustering
from feddrift.types import Event, Federation


def review(method: Detecting, state: DriftState, fed: Federation) -> tuple[Clustering, DriftState]:
    """End quarantines: a model that its client's new data choose is there for all, any other goes with its data.

    A client without new data lets its model wait.
    """
    if not state.waiting:
        return Clustering(state.models, state.w), state
    loss, ids = fed.evaluate(state.models, method.metric), state.models.ids
    chosen, lowest = clustering.best_models(loss, state.votes.argmax(axis=1))
    owner = {i: int(np.flatnonzero((state.w.model == ids.index(i)).any(axis=0))[0]) for i in state.waiting if i in ids}
    still = tuple(i for i, c in owner.items() if np.isnan(lowest[c]))
    gone = [i for i, c in owner.items() if i not in still and ids[chosen[c]] != i]
    kept = ~np.isin(ids, gone)
    models, w = clustering.keep(state.models, state.w, kept)
    votes = state.votes[:, kept]
    for i in gone:  # its client comes back to the best of the others
        loss_of_kept = np.where(kept, loss[owner[i]], np.inf)
        votes[owner[i]] = np.arange(len(ids))[kept] == np.nanargmin(loss_of_kept)
    events = tuple(Event("retired", i, {"reason": "not confirmed", "client": owner[i]}) for i in gone)
    newborn = tuple(i for i in state.newborn if i not in gone)
    state = replace(state, models=models, w=w, votes=votes, waiting=still, newborn=newborn)
    return Clustering(models, w, events), state


def waiting(method: Detecting, state: DriftState, born: Newborn) -> tuple[int, ...]:
    """The models in quarantine after this step."""
    alone = (i for i, clients in zip(born.models.ids, born.groups, strict=True) if len(clients) == 1)
    return (*state.waiting, *alone) if method.quarantine else ()
