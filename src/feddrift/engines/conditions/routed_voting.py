"""Whose votes count for which rows of a test: the clients' own, or those that their inputs choose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from feddrift.data import Stream
from feddrift.engines.sparse_weights import begins_of, by_group
from feddrift.models import take
from feddrift.nets.voting import totals
from feddrift.router import Router
from feddrift.types import Ballot, Bools, Ints, Layer, Models, State, Votes

Polled = tuple[Votes, Ints]  # votes [v, m], and [row] which of them count: below the number of clients its own


class Host(Protocol):
    """An engine that holds its clients' data."""

    stream: Stream

    def layer(self, models: Models, rows: Ints, layer: Layer) -> Iterator[npt.NDArray[Any]]: ...

    def logits(self, models: Models, rows: Ints) -> Iterator[npt.NDArray[np.float32]]: ...


def polled(host: Host, votes: Votes, routers: Mapping[int, Router], rows: Ints, sizes: Ints) -> Polled:
    """Whose votes count for these rows, which lie one client after the other; clients without a router have none."""
    of_row, tables, n_votes = np.repeat(np.arange(len(sizes)), sizes), [votes], len(votes)
    places: dict[int, int] = {}  # of each router's votes among all
    for c, first in zip(routers, begins_of(sizes)[list(routers)].tolist(), strict=True):
        router, mine = routers[c], slice(first, first + int(sizes[c]))
        if id(router) not in places:
            places[id(router)], n_votes = n_votes, n_votes + len(router.votes)
            tables.append(Votes.of(router.votes))
        choice = router.choose(_seen(host, router, rows[mine]), votes[c])
        of_row[mine] = np.where(choice >= 0, places[id(router)] + choice, c)
    return Votes.concatenate(tables), of_row


def at_test(host: Host, state: State, rows: Ints, sizes: Ints) -> Polled:
    """Whose votes count at a test; who has not joined yet has none."""
    votes = Votes.of(state.votes)
    if len(votes) < len(sizes):
        nothing = np.zeros((len(sizes) - len(votes), 0))
        votes = Votes.concatenate([votes, Votes(nothing.astype(np.int64), nothing, votes.n_models)])
    clients = np.flatnonzero(votes.has_any & (sizes > 0)).tolist() if state.router is not None else ()
    return polled(host, votes, {c: state.router for c in clients if state.router is not None}, rows, sizes)


def right(host: Host, models: Models, ballot: Ballot, rows: Ints, ways: Polled) -> Bools:
    """[row], whether its votes name the true class."""
    votes = ways[0]
    _, first, of_vote = np.unique(
        np.concatenate([votes.model, votes.weight], axis=1), axis=0, return_index=True, return_inverse=True
    )
    hit = np.zeros(len(rows), dtype=bool)
    for group, at in by_group(of_vote.reshape(-1)[ways[1]]):
        has_vote = votes.weight[first[group]] > 0
        used = votes.model[first[group]][has_vote]
        weights = votes.weight[first[group]][has_vote]
        done = 0
        voters = take(models, used, [models.ids[m] for m in used])
        for logits in host.logits(voters, rows[at]) if len(used) else ():
            block = at[done : done + logits.shape[1]]
            done += logits.shape[1]
            cast = totals(logits, np.broadcast_to(weights, (len(block), len(used))), ballot)
            hit[block] = cast.argmax(axis=1) == host.stream.y[rows[block]]
    return hit


def _seen(host: Host, router: Router, rows: Ints) -> npt.NDArray[Any]:
    """What a router describes of these rows."""
    if router.model is None:
        return host.stream.x[rows]
    return np.concatenate([block[0] for block in host.layer(router.model, rows, router.layer)])
