"""Private models: models that stay with their client, and the ensembles in which they vote.

In addition to the shared model that it is assigned to, every client has two private models:

    tuned   a copy of the shared model, trained on the client's data of that model, and copied again at every time step;
    own     a model that the client trains on all of its data over all time steps.

A client predicts with an ensemble: the shared model alone, with the tuned one, or with the tuned and the own one. The
probabilities of its members are averaged. All clients have ensembles of the same size: the one with the highest
accuracy so far, averaged over clients. The models of a client's trial (`trials`) are also private; they do not vote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from feddrift.errors import ConfigError
from feddrift.models import join, take
from feddrift.types import Clusters, Federation, Ints, Local, Models, Tournament, Votes

# Kinds of private models. A trial trains two models of each of its kinds, one for each half of the data: STAY and
# STAY + 1, and likewise for NEW and FRESH.
STAY = 0
NEW = 2
FRESH = 4
TUNED = 6
OWN = 7
IDS_PER_KIND = 2**20  # ids of private models are (kind + 1) * IDS_PER_KIND + client; those of shared models are smaller

# Contestants in a comparison of ensembles: the shared model alone, with the tuned one, with the tuned and the own one.
N_ENSEMBLES = 3
SHARED_ONLY, WITH_TUNED, WITH_TUNED_AND_OWN = range(N_ENSEMBLES)

# Gain of the ensembles of two and of three models over the shared model: shares of correct rows, summed over clients.
EnsembleGain = tuple[float, float]


def check_client_count(n_clients: int) -> None:
    """Raise ConfigError if there are more clients than ids for the private models of a kind."""
    if n_clients > IDS_PER_KIND:
        advice = "choose another algorithm, such as FedDrift"
        limit = f"at most {IDS_PER_KIND} clients, got {n_clients}"
        raise ConfigError(f"FedDrift-Auto has private models for {limit}: {advice}")


def check_shared_ids(next_id: int, n_models: int) -> None:
    """Raise ConfigError if new shared models would get ids of private models.

    Args:
        next_id: The next free id of a shared model.
        n_models: The number of new shared models.
    """
    if next_id + n_models > IDS_PER_KIND:
        raise ConfigError(
            f"FedDrift-Auto has ids for at most {IDS_PER_KIND} shared models, got {next_id + n_models}: "
            "start a new run, or choose another algorithm, such as FedDrift"
        )


def get_private_id(kind: int, client: int | np.integer[Any]) -> int:
    """Return the id of a client's private model of a kind; see `check_client_count`."""
    return (kind + 1) * IDS_PER_KIND + int(client)


def get_trial_ids(kind: int, client: int | np.integer[Any]) -> list[int]:
    """Return the ids of a client's two models of a kind in a trial, one for each half."""
    return [get_private_id(kind + half, client) for half in range(2)]


def copy_for_clients(models: Models, positions: Ints, kind: int, clients: Ints) -> Models:
    """Return a private copy of a model for each client.

    Args:
        models: The models to copy.
        positions: For each client, the position of its model.
        kind: Kind of the private models.
        clients: The clients.
    """
    ids = [get_private_id(kind, c) for c in clients]
    return take(models, positions, ids, family=ids, owner=clients.tolist())


def index_by_id(models: Models) -> dict[int, int]:
    """Return the position of the model of each id."""
    return {i: m for m, i in enumerate(models.ids)}


def select_by_id(models: Models, ids: Sequence[int]) -> Models:
    """Return the models with these ids; ids without a model are left out."""
    position = index_by_id(models)
    present = [i for i in ids if i in position]
    return take(models, [position[i] for i in present], present)


def train_private_models(
    previous: Models | None, shared: Models, w: Clusters, assigned: Ints, rounds: tuple[int, int], fed: Federation,
    local: Local | None = None,
) -> Models:  # fmt: skip
    """Train the tuned and own models of all clients, and return them.

    A client that cannot train keeps its private models. If it never trained, they are copies of its shared model.

    Args:
        previous: The private models of the last time step, if there was one.
        shared: The shared models after training.
        w: The cells that train each shared model.
        assigned: [c], position of the shared model that each client is assigned to.
        rounds: Rounds of training of tuned and of own models.
        fed: The federation.
        local: Settings of local training; None: those of the federation.
    """
    n = fed.n_clients
    clients = np.arange(n)
    cells = Clusters(np.where(w.model == assigned, clients, -1), n)
    can_train = fed.reachable & ((fed.counts * (cells.model >= 0)).sum(axis=0) > 0)
    stack = join(shared, previous) if previous is not None else shared
    position = index_by_id(stack)
    starts = [assigned[c] if can_train[c] else position.get(get_private_id(TUNED, c), assigned[c]) for c in clients]
    tuned = fed.train(copy_for_clients(stack, np.array(starts), TUNED, clients), cells, rounds[0], local)
    starts = [position.get(get_private_id(OWN, c), assigned[c]) for c in clients]
    all_cells = Clusters(np.tile(clients, (fed.tau + 1, 1)), n)
    own = fed.train(copy_for_clients(stack, np.array(starts), OWN, clients), all_cells, rounds[1], local)
    return join(tuned, own)


def measure_first_gain(
    shared: Models, w: Clusters, assigned: Ints, rounds: tuple[int, int], fed: Federation
) -> EnsembleGain:
    """Return the gain of private models at the first time step, at which there are no later data to measure it on.

    Private models are trained on half of the rows, and all models are evaluated on the other half. The shared models
    were trained on both halves, so private models must be much better to have a gain.

    Args:
        shared: The shared models after training.
        w: The cells that train each shared model.
        assigned: [c], position of the shared model that each client is assigned to.
        rounds: Rounds of training of tuned and of own models.
        fed: The federation.
    """
    local = replace(fed.local, hold_out=0.5)
    stack = join(shared, train_private_models(None, shared, w, assigned, rounds, fed, local))
    position = index_by_id(stack)
    contestants = np.full((N_ENSEMBLES, fed.n_clients, 3), -1)
    for c in range(fed.n_clients):
        ensemble = list_ensemble(position, int(assigned[c]), c)
        for contestant in (SHARED_ONLY, WITH_TUNED, WITH_TUNED_AND_OWN):
            size = contestant + 1
            contestants[contestant, c, :size] = ensemble[:size]
    return sum_ensemble_gain(fed.contest(stack, contestants, local))


def sum_ensemble_gain(result: Tournament) -> EnsembleGain:
    """Return the gain of the larger ensembles over the shared model; the first contestants are the three ensembles."""
    evaluated = result.rows > 0
    wrong = result.wrong[evaluated]
    rows = result.rows[evaluated]

    def sum_gain(contestant: int) -> float:
        saved = wrong[:, SHARED_ONLY, SHARED_ONLY] - wrong[:, contestant, contestant]
        return float((saved / rows).sum())

    return sum_gain(WITH_TUNED), sum_gain(WITH_TUNED_AND_OWN)


def list_ensemble(position: dict[int, int], assigned: int, client: int | np.integer[Any]) -> list[int]:
    """Return the positions of a client's shared, tuned and own model.

    Args:
        position: The position of the model of each id.
        assigned: Position of the shared model that the client is assigned to.
        client: The client.
    """
    return [assigned, position[get_private_id(TUNED, client)], position[get_private_id(OWN, client)]]


def choose_ensemble_size(gain: EnsembleGain) -> int:
    """Return the number of members of the ensembles with the largest gain, of equal gains the larger number.

    >>> choose_ensemble_size((0.4, 0.1)), choose_ensemble_size((-0.1, 0.2)), choose_ensemble_size((-0.1, -0.2))
    (2, 3, 1)
    """
    tuned, both = gain
    return 3 if both >= max(tuned, 0.0) else 2 if tuned >= 0 else 1


def share_votes_equally(models: Models, assigned: Ints, size: int) -> Votes:
    """Return votes that are equal for the first `size` members of each client's ensemble, and 0 for all others."""
    position = index_by_id(models)
    ensembles = np.array([list_ensemble(position, int(m), c)[:size] for c, m in enumerate(assigned)])
    members = np.sort(ensembles.reshape(len(assigned), size), axis=1)
    return Votes(members, np.full(members.shape, 1 / size), len(models))
