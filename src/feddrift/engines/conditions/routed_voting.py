"""Votes for the rows of a test: those of the client, or those that a router chooses from the inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from feddrift.data import Stream
from feddrift.engines.sparse_weights import compute_offsets, iterate_groups
from feddrift.models import take
from feddrift.nets.voting import add_votes
from feddrift.router import Router
from feddrift.types import Ballot, Bools, Ints, Layer, Models, Votes

RowVotes = tuple[Votes, Ints]  # votes [v, m], the first of the clients; and [row], the position of its votes


class DataEngine(Protocol):
    """An engine with the data of its clients in this process."""

    stream: Stream

    def compute_layer(self, models: Models, rows: Ints, layer: Layer) -> Iterator[npt.NDArray[Any]]: ...

    def logits(self, models: Models, rows: Ints) -> Iterator[npt.NDArray[np.float32]]: ...


def choose_row_votes(
    host: DataEngine, votes: Votes, routers: Mapping[int, Router], rows: Ints, sizes: Ints
) -> RowVotes:
    """Choose the votes for rows of a test.

    Args:
        host: The engine.
        votes: [c, m], the votes of the clients.
        routers: By client; for clients without a router their own votes count.
        rows: The rows, sorted by client.
        sizes: [c], the number of rows of each client.
    """
    of_row = np.repeat(np.arange(len(sizes)), sizes)
    tables = [votes]
    n_votes = len(votes)
    places: dict[int, int] = {}  # position of the first votes of each router
    for c, first in zip(routers, compute_offsets(sizes)[list(routers)].tolist(), strict=True):
        router = routers[c]
        of_client = slice(first, first + int(sizes[c]))
        if id(router) not in places:
            places[id(router)] = n_votes
            n_votes += len(router.votes)
            tables.append(Votes.of(router.votes))
        choice = router.choose_centres(_describe_rows(host, router, rows[of_client]), votes[c])
        of_row[of_client] = np.where(choice >= 0, places[id(router)] + choice, c)
    return Votes.concatenate(tables), of_row


def choose_test_votes(host: DataEngine, votes: Votes, router: Router, rows: Ints, sizes: Ints) -> RowVotes:
    """Choose the votes for the rows of a test with one router for all clients that have votes.

    Args:
        host: The engine.
        votes: [c, m], the votes of the clients.
        router: The router.
        rows: The rows, sorted by client.
        sizes: [c], the number of rows of each client.
    """
    clients = np.flatnonzero(votes.has_any & (sizes > 0)).tolist()
    return choose_row_votes(host, votes, dict.fromkeys(clients, router), rows, sizes)


def find_correct_rows(host: DataEngine, models: Models, ballot: Ballot, rows: Ints, row_votes: RowVotes) -> Bools:
    """Return [row], true where the votes name the true class."""
    votes, of_row = row_votes
    _, first, of_vote = np.unique(
        np.concatenate([votes.model, votes.weight], axis=1), axis=0, return_index=True, return_inverse=True
    )
    correct = np.zeros(len(rows), dtype=bool)
    for group, at in iterate_groups(of_vote.reshape(-1)[of_row]):
        has_vote = votes.weight[first[group]] > 0
        used = votes.model[first[group]][has_vote]
        weights = votes.weight[first[group]][has_vote]
        done = 0
        voters = take(models, used, [models.ids[m] for m in used])
        for logits in host.logits(voters, rows[at]) if len(used) else ():
            block = at[done : done + logits.shape[1]]
            done += logits.shape[1]
            cast = add_votes(logits, np.broadcast_to(weights, (len(block), len(used))), ballot)
            correct[block] = cast.argmax(axis=1) == host.stream.y[rows[block]]
    return correct


def _describe_rows(host: DataEngine, router: Router, rows: Ints) -> npt.NDArray[Any]:
    """Return the inputs of these rows, or the layer of a model that the router compares with its centres."""
    if router.model is None:
        return host.stream.x[rows]
    return np.concatenate([block[0] for block in host.compute_layer(router.model, rows, router.layer)])
