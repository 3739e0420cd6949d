"""A user-defined engine that divides the clients among several simulators, each in a thread.

Put the machines of a cluster in place of the threads. An engine creates a Worker for each time step, and tests models.
On the command line: feddrift run --stream sine-2 --algorithm FedDrift --engine own_engine:ThreadedEngine
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import feddrift as fd
from feddrift.engines.server.engine import Engine
from feddrift.engines.simulator.simulator import Simulator
from feddrift.engines.worker import (
    CellScores,
    StatisticsRequest,
    TrainingPlan,
    Worker,
    concatenate_updates,
    run_rounds_sequentially,
)
from feddrift.simulation import run_steps
from feddrift.types import Ints, Local, Metric, Models, Moments, Parting, State, Tournament, Updates

N_THREADS = 2
POOL = ThreadPoolExecutor(N_THREADS)


class ThreadedEngine(Engine):
    """Engine with one simulator per thread; each simulator has all data and uses those of its own clients."""

    def __init__(self, stream: fd.Stream, *settings: Any) -> None:
        self.simulators = [Simulator(stream, *settings) for _ in range(N_THREADS)]
        first = self.simulators[0]
        self.net = first.net
        self.local = first.local
        self.seed = first.seed
        self.conditions = first.conditions
        self.n_steps = stream.n_steps

    def worker(self, tau: int) -> Worker:
        return ThreadedWorker([simulator.worker(tau) for simulator in self.simulators])

    def test(self, state: State, t: int) -> tuple[Ints, Ints]:
        return self.simulators[0].test(state, t)


class ThreadedWorker(Worker):
    """Worker that sends each request to the workers of all simulators, and combines their replies."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers
        self.known = workers[0].known
        self.thread_of = np.arange(len(self.known.clients)) % N_THREADS  # [c]

    def _run_all(self, request: Callable[[int, Worker], Any]) -> list[Any]:
        """Call request(k, worker k) for all workers at once, and return the replies in order."""
        return list(POOL.map(request, range(N_THREADS), self.workers))

    def _sort_replies(self, replies: Sequence[Any], clients: Ints) -> Any:
        """Join replies with a row per client, and sort the rows in the order of `clients`."""
        client_order = np.argsort(self.thread_of[clients], kind="stable")  # the replies are in this order
        return np.concatenate(replies)[np.argsort(client_order)]

    def score(
        self, models: Models, cells: Ints, metric: Metric, max_rows: int | None = None, by: Parting | None = None
    ) -> Iterator[CellScores]:
        for k, worker in enumerate(self.workers):
            own_cells = np.flatnonzero(self.thread_of[cells[:, 1]] == k)
            for which, sums, sizes in worker.score(models, cells[own_cells], metric, max_rows, by):
                yield own_cells[which], sums, sizes

    def confusion(self, models: Models, clients: Ints) -> Ints:
        own_clients = [clients[self.thread_of[clients] == k] for k in range(N_THREADS)]
        replies = self._run_all(lambda k, worker: worker.confusion(models, own_clients[k]))
        return np.asarray(self._sort_replies(replies, clients))

    def describe(self, models: Models, clients: Ints, question: StatisticsRequest) -> Moments:
        own_clients = [clients[self.thread_of[clients] == k] for k in range(N_THREADS)]
        replies = self._run_all(lambda k, worker: worker.describe(models, own_clients[k], question))
        fields = ("count", "mean", "std")
        return Moments(*(self._sort_replies([getattr(reply, name) for reply in replies], clients) for name in fields))

    def reroute(self, models: Models, votes: Any, ballot: Any, routers: Any) -> Ints:
        own = [{c: router for c, router in routers.items() if self.thread_of[c] == k} for k in range(N_THREADS)]
        return np.asarray(sum(self._run_all(lambda k, worker: worker.reroute(models, votes, ballot, own[k]))))

    def updates(self, models: Models, plan: TrainingPlan, round: int, local: Local) -> Updates:
        plans = [plan.select(self.thread_of == k) for k in range(N_THREADS)]
        replies = self._run_all(lambda k, worker: plans[k].n_lanes and worker.updates(models, plans[k], round, local))
        return concatenate_updates(models, plan, [reply for reply in replies if reply])

    def rounds(self, models: Models, plan: TrainingPlan, first: int, last: int, local: Local) -> tuple[Models, Ints]:
        return run_rounds_sequentially(self, models, plan, first, last, local)

    def trial(self, models: Models, older: Any, parent: Ints, starts: Any, local: Local) -> Tournament:
        parents = [np.where(self.thread_of == k, parent, -1) for k in range(N_THREADS)]
        replies = self._run_all(lambda k, worker: worker.trial(models, older, parents[k], starts, local))
        return Tournament(sum(reply.rows for reply in replies), sum(reply.wrong for reply in replies))

    def contest(self, models: Models, teams: Ints, held_by: Local | None) -> Tournament:
        own_teams = [np.where((self.thread_of == k)[:, None], teams, -1) for k in range(N_THREADS)]
        replies = self._run_all(lambda k, worker: worker.contest(models, own_teams[k], held_by))
        return Tournament(sum(reply.rows for reply in replies), sum(reply.wrong for reply in replies))

    def save(self) -> list[Any]:
        return self._run_all(lambda k, worker: worker.save())

    def load(self, saved: list[Any]) -> None:
        self._run_all(lambda k, worker: worker.load(saved[k]))


if __name__ == "__main__":
    sine = fd.stream("sine-2")
    engine = ThreadedEngine(sine, fd.mlp(2, 4, 2), fd.Local(rounds=10), 2)  # the seed is 2
    for step in run_steps(engine, fd.algorithm("FedDrift", sine)):
        print(f"time {step.tau}: accuracy {step.accuracy.mean():.3f}, models {step.model}")
