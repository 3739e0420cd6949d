"""Models that stay with their clients: which there are, how they learn, and who of them votes.

At every client learn, beside the shared model of its home,

    tuned   a copy of the shared model that learns from the client's own data of this home, anew at every step,
    own     a model of the client's own over time, from all of its data: it remembers what the clusters forget.

They vote as the team that would have done best so far, over all clients: the shared model alone, with tuned, or with
both. A team's probabilities are the mean of its members'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from feddrift.errors import ConfigError
from feddrift.models import join, take
from feddrift.types import Clusters, Federation, Ints, Local, Models, Tournament, Votes

STAY, NEW, FRESH, TUNED, OWN = 0, 2, 4, 6, 7  # kinds of private models; those of trials are two, one for each half
Gain = tuple[float, float]  # of tuned, and of tuned and own, over the shared model alone
IDS_PER_KIND = 2**20  # ids of private models are (kind + 1) * IDS_PER_KIND + client


def check_client_count(n_clients: int) -> None:
    """Raise ConfigError if there are more clients than ids for the private models of a kind."""
    if n_clients > IDS_PER_KIND:
        advice = "choose another algorithm, such as FedDrift"
        limit = f"at most {IDS_PER_KIND} clients, got {n_clients}"
        raise ConfigError(f"FedDrift-Auto has private models for {limit}: {advice}")


def private_id(kind: int, c: int | np.integer[Any]) -> int:
    """Return the id of a client's private model of a kind; see `check_client_count`."""
    return (kind + 1) * IDS_PER_KIND + int(c)


def copies(models: Models, at: Ints, kind: int, clients: Ints) -> Models:
    """Private copies of the models at these positions, one for each client."""
    ids = [private_id(kind, c) for c in clients]
    return take(models, at, ids, ids, clients.tolist())


def positions(models: Models) -> dict[int, int]:
    """Where the model of each id stands."""
    return {i: m for m, i in enumerate(models.ids)}


def only(models: Models, ids: Sequence[int]) -> Models:
    """The models with these ids, as far as there are any."""
    place = positions(models)
    kept = [i for i in ids if i in place]
    return take(models, [place[i] for i in kept], kept)


def learn(
    before: Models | None, shared: Models, w: Clusters, at_home: Ints, rounds: tuple[int, int], fed: Federation,
    local: Local | None = None,
) -> Models:  # fmt: skip
    """The private models tuned and own of all clients after this time step, of which `before` has the last ones.

    A client that cannot learn keeps what it has; one that never has follows its shared model.
    """
    n, who = fed.n_clients, np.arange(fed.n_clients)
    cells = Clusters(np.where(w.model == at_home, who, -1), n)
    learns = fed.reachable & ((fed.counts * (cells.model >= 0)).sum(axis=0) > 0)
    stack = join(shared, before) if before is not None else shared
    place = positions(stack)
    kept = [place.get(private_id(TUNED, c), at_home[c]) if not learns[c] else at_home[c] for c in who]
    old = [place.get(private_id(OWN, c), at_home[c]) for c in who]
    tuned = fed.train(copies(stack, np.array(kept), TUNED, who), cells, rounds[0], local)
    everything = Clusters(np.tile(who, (fed.tau + 1, 1)), n)
    return join(tuned, fed.train(copies(stack, np.array(old), OWN, who), everything, rounds[1], local))


def first_gain(shared: Models, w: Clusters, at_home: Ints, rounds: tuple[int, int], fed: Federation) -> Gain:
    """What private models would gain at the first time step, when no other data are there to tell: those trained on
    half of the rows, on the other half. The shared models have seen these, so it takes much to be worth it."""
    local = replace(fed.local, hold_out=0.5)
    stack = join(shared, learn(None, shared, w, at_home, rounds, fed, local))
    place, teams = positions(stack), np.full((3, fed.n_clients, 3), -1)
    for c in range(fed.n_clients):
        for k in range(3):
            teams[k, c, : k + 1] = team(place, int(at_home[c]), c)[: k + 1]
    return gained(fed.contest(stack, teams, local))


def gained(result: Tournament) -> Gain:
    """What contestants 1 and 2 gained over contestant 0, as shares of right rows summed over clients."""
    took_part = result.rows > 0
    wrong, rows = result.wrong[took_part], result.rows[took_part]
    tuned, both = (float(((wrong[:, 0, 0] - wrong[:, k, k]) / rows).sum()) for k in (1, 2))
    return tuned, both


def team(place: dict[int, int], shared: int, c: int | np.integer[Any]) -> list[int]:
    """The client's shared model, tuned and own, as positions."""
    return [shared, place[private_id(TUNED, c)], place[private_id(OWN, c)]]


def team_size(helped: Gain) -> int:
    """How many of a team vote: as many as would have gained most, the larger of equals.

    >>> team_size((0.4, 0.1)), team_size((-0.1, 0.2)), team_size((-0.1, -0.2))
    (2, 3, 1)
    """
    tuned, both = helped
    return 3 if both >= max(tuned, 0.0) else 2 if tuned >= 0 else 1


def votes(models: Models, at_home: Ints, size: int) -> Votes:
    """Return equal votes for the first `size` members of each client's team."""
    place = positions(models)
    teams = np.array([team(place, int(shared), c)[:size] for c, shared in enumerate(at_home)])
    members = np.sort(teams.reshape(len(at_home), size), axis=1)
    return Votes(members, np.full(members.shape, 1 / size), len(models))
