"""Trials: each client compares starts of a new model on its new data. See `Federation.tournament`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Protocol, Self

import numpy as np

from feddrift.engines.local import sampling
from feddrift.engines.sparse_weights import Entries, compute_offsets
from feddrift.engines.worker import TrainingPlan, Worker, run_rounds_sequentially
from feddrift.models import restore_untrained_part, take
from feddrift.types import Bools, Ints, Local, Models, Start, Tournament

HOLD_OUT_SHARE = 0.3  # of a client's new data, on which trained models are compared
MAX_PAIRWISE_CONTESTANTS = 12  # with more contestants, common mistakes are counted client by client
TRIAL_ID_OFFSET = 2**31  # smallest id of a family of a trial, so that random keys differ from those of the run


class TrialWorker(Worker, Protocol):
    """The methods of a worker that trials use."""

    tau: int

    def make_scratch_worker(self) -> Self: ...
    def make_fresh_model(self) -> Models: ...
    def shuffle_cell(self, t: int, c: int) -> Ints: ...
    def find_mistakes(self, models: Models, rows: Ints, sizes: Ints, model_of_cell: Ints) -> Bools: ...


def run_trials(
    worker: TrialWorker, models: Models, older: Entries, parent: Ints, starts: Sequence[Start], local: Local
) -> Tournament:
    """Train each start at every client that takes part, and count mistakes on rows that the training holds out.

    Args:
        worker: The worker of the clients; it does not change.
        models: The models.
        older: The entries of w before tau, for the start "joint".
        parent: [c], the position of the model that the new one is compared with; -1: the client takes no part.
        starts: The starts to compare.
        local: The settings of local training.

    Returns:
        By client, the number of held-out rows and the common mistakes of each two starts.
    """
    clients = np.flatnonzero(parent >= 0)
    if not len(clients):
        return Tournament.empty(len(parent), len(starts))
    held_out = [worker.shuffle_cell(worker.tau, int(c)) for c in clients]
    held_out = [rows[sampling.get_held_out_slice(len(rows), HOLD_OUT_SHARE, "last")] for rows in held_out]
    sizes = np.array([len(rows) for rows in held_out])
    mistakes: list[Bools] = []  # [start][row]
    for start in starts:
        contestants, data, new_models = _build_contestants(worker, models, older, parent, clients, start)
        trains: Literal["all", "head"] = "head" if start == "head" else "all"
        settings = replace(local, hold_out=HOLD_OUT_SHARE, holds="last", bags=False, trains=trains, patience=0.0)
        plan = TrainingPlan.of(contestants, data, worker.known.counts)
        trained = _train_contestants(worker.make_scratch_worker(), contestants, plan, settings)
        mistakes.append(worker.find_mistakes(trained, np.concatenate(held_out), sizes, new_models))
    return count_common_mistakes(len(parent), clients, sizes, mistakes)


def count_common_mistakes(n_clients: int, clients: Ints, sizes: Ints, mistakes: Sequence[Bools] | Bools) -> Tournament:
    """Return the number of common mistakes of each two contestants at each client.

    Args:
        n_clients: The number of all clients.
        clients: The clients that took part.
        sizes: The number of rows of each of `clients`.
        mistakes: [contestant][row], whether the prediction is wrong; the rows of a client follow each other.
    """
    tournament = Tournament.empty(n_clients, len(mistakes))
    tournament.rows[clients] = sizes
    begins = compute_offsets(sizes)
    if len(mistakes) > MAX_PAIRWISE_CONTESTANTS:
        table = np.asarray(mistakes, dtype=np.float32)  # whole numbers below 2^24: products are exact in any order
        for c, begin, size in zip(clients.tolist(), begins.tolist(), sizes.tolist(), strict=True):
            client_table = table[:, begin : begin + size]
            tournament.wrong[c] = client_table @ client_table.T
        return tournament
    for a in range(len(mistakes)):
        for b in range(a, len(mistakes)):
            common = np.add.reduceat(mistakes[a] & mistakes[b], begins, dtype=np.int64)
            tournament.wrong[clients, a, b] = common
            tournament.wrong[clients, b, a] = common
    return tournament


def _train_contestants(worker: Worker, models: Models, plan: TrainingPlan, local: Local) -> Models:
    if local.average == "mean":
        trained, _ = worker.rounds(models, plan, 0, local.rounds, local)
    else:
        trained, _ = run_rounds_sequentially(worker, models, plan, 0, local.rounds, local)
    return restore_untrained_part(models, trained, local.trains)


def _build_contestants(
    worker: TrialWorker, models: Models, w: Entries, parent: Ints, clients: Ints, start: Start
) -> tuple[Models, Entries, Ints]:
    """Return the models that clients train in the trial of a start, their data, and the position of each new model."""
    index = np.full(len(parent), -1)  # [c], the position of the client in `clients`
    index[clients] = np.arange(len(clients))
    family = np.asarray(models.family)
    is_joint = np.zeros(len(w.t), dtype=bool)  # data of models with the parent's trunk, which train with the new model
    if start == "joint":
        is_joint = (index[w.c] >= 0) & (family[w.m] == family[parent[w.c]])
    old = w.select(is_joint)
    # A client has a block of slots: the first is for the new model, the others are for copies of existing models.
    width = len(models) + 1
    old_slots = index[old.c] * width + old.m + 1
    new_slots = np.arange(len(clients)) * width
    slots = np.unique(np.concatenate([new_slots, old_slots]))
    owner = slots // width
    slot_in_block = slots % width
    source = models
    positions = np.where(slot_in_block == 0, parent[clients[owner]], slot_in_block - 1)
    if start == "fresh":
        source = worker.make_fresh_model()
        positions = np.zeros_like(positions)
    # The ids of families depend on the client only, so that its random draws do not depend on other clients.
    copies = take(source, positions, range(len(slots)), (TRIAL_ID_OFFSET + clients[owner]).tolist())
    new_models = np.searchsorted(slots, new_slots)
    data = Entries(
        np.concatenate([old.t, np.full(len(clients), worker.tau)]),
        np.concatenate([old.c, clients]),
        np.concatenate([np.searchsorted(slots, old_slots), new_models]),
        np.concatenate([old.value, np.ones(len(clients))]),
        (worker.tau + 1, len(parent), len(slots)),
    )
    return copies, data, new_models
