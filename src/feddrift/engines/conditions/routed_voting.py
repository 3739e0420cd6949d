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

RowVotes = tuple[Votes, Ints]  # votes [v, m], first those of the clients; and [row], the position v of the row's votes


class DataEngine(Protocol):
    """An engine with the data of its clients in this process."""

    stream: Stream

    def compute_layer(self, models: Models, rows: Ints, layer: Layer) -> Iterator[npt.NDArray[Any]]: ...

    def logits(self, models: Models, rows: Ints) -> Iterator[npt.NDArray[np.float32]]: ...


def choose_row_votes(
    engine: DataEngine, votes: Votes, routers: Mapping[int, Router], rows: Ints, sizes: Ints
) -> RowVotes:
    """Choose the votes for rows of a test.

    Args:
        engine: The engine that has the data.
        votes: [c, m], the votes of the clients.
        routers: The routers of clients; the rows of other clients have the votes of their client.
        rows: The rows, sorted by client.
        sizes: [c], the number of rows of each client.
    """
    vote_of_row = np.repeat(np.arange(len(sizes)), sizes)
    tables = [votes]
    n_votes = len(votes)
    first_votes: dict[int, int] = {}  # by id() of a router, the position of its first votes
    for c, first in zip(routers, compute_offsets(sizes)[list(routers)].tolist(), strict=True):
        router = routers[c]
        client_rows = slice(first, first + int(sizes[c]))
        if id(router) not in first_votes:
            first_votes[id(router)] = n_votes
            n_votes += len(router.votes)
            tables.append(Votes.of(router.votes))
        choice = router.choose_centres(_describe_rows(engine, router, rows[client_rows]), votes[c])
        vote_of_row[client_rows] = np.where(choice >= 0, first_votes[id(router)] + choice, c)
    return Votes.concatenate(tables), vote_of_row


def choose_test_votes(engine: DataEngine, votes: Votes, router: Router, rows: Ints, sizes: Ints) -> RowVotes:
    """Choose the votes for the rows of a test with one router for all clients that have votes.

    Args:
        engine: The engine that has the data.
        votes: [c, m], the votes of the clients.
        router: The router.
        rows: The rows, sorted by client.
        sizes: [c], the number of rows of each client.
    """
    clients = np.flatnonzero(votes.has_any & (sizes > 0)).tolist()
    return choose_row_votes(engine, votes, dict.fromkeys(clients, router), rows, sizes)


def find_correct_rows(engine: DataEngine, models: Models, ballot: Ballot, rows: Ints, row_votes: RowVotes) -> Bools:
    """Return [row], true where the class with the most votes is the true class."""
    votes, vote_of_row = row_votes
    _, first, group_of_vote = np.unique(
        np.concatenate([votes.model, votes.weight], axis=1), axis=0, return_index=True, return_inverse=True
    )
    correct = np.zeros(len(rows), dtype=bool)
    for group, group_rows in iterate_groups(group_of_vote.reshape(-1)[vote_of_row]):
        has_vote = votes.weight[first[group]] > 0
        voters = votes.model[first[group]][has_vote]
        weights = votes.weight[first[group]][has_vote]
        n_done = 0
        voting_models = take(models, voters, [models.ids[m] for m in voters])
        for logits in engine.logits(voting_models, rows[group_rows]) if len(voters) else ():
            block = group_rows[n_done : n_done + logits.shape[1]]
            n_done += logits.shape[1]
            total = add_votes(logits, np.broadcast_to(weights, (len(block), len(voters))), ballot)
            correct[block] = total.argmax(axis=1) == engine.stream.y[rows[block]]
    return correct


def _describe_rows(engine: DataEngine, router: Router, rows: Ints) -> npt.NDArray[Any]:
    """Return what the router compares with its centres: the inputs of these rows, or the output of a model's layer."""
    if router.model is None:
        return engine.stream.x[rows]
    return np.concatenate([block[0] for block in engine.compute_layer(router.model, rows, router.layer)])
