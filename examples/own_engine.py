"""An engine of your own: clients are dealt to several hands, each of which works for its own, in a thread.

Put the machines of a cluster in place of the threads. An engine makes a Worker for each time step, and tests.
On the command line: feddrift run --stream sine-2 --algorithm FedDrift --engine own_engine:Crew
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
from feddrift.types import Ints, Local, Metric, Models, Moments, State, Tournament, Updates

POOL = ThreadPoolExecutor(HANDS := 2)


class Crew(Engine):
    def __init__(self, stream: fd.Stream, *how: Any) -> None:
        self.hands = [Simulator(stream, *how) for _ in range(HANDS)]
        one, self.n_steps = self.hands[0], stream.n_steps
        self.net, self.local, self.seed, self.conditions = one.net, one.local, one.seed, one.conditions

    def worker(self, tau: int) -> Worker:
        return CrewWorker([hand.worker(tau) for hand in self.hands])

    def test(self, state: State, t: int) -> tuple[Ints, Ints]:
        return self.hands[0].test(state, t)


class CrewWorker(Worker):
    def __init__(self, hands: Sequence[Worker]) -> None:
        self.hands, self.known = hands, hands[0].known
        self.hand_of = np.arange(len(self.known.clients)) % HANDS  # [c]

    def each(self, ask: Callable[[int, Worker], Any]) -> list[Any]:
        return list(POOL.map(ask, range(HANDS), self.hands))

    def score(
        self, models: Models, cells: Ints, metric: Metric, most: Any = None, by: Any = None
    ) -> Iterator[CellScores]:
        for k, hand in enumerate(self.hands):
            mine = np.flatnonzero(self.hand_of[cells[:, 1]] == k)
            for which, sums, sizes in hand.score(models, cells[mine], metric, most, by):
                yield mine[which], sums, sizes

    def confusion(self, models: Models, clients: Ints) -> Ints:
        found = self.each(lambda k, hand: hand.confusion(models, clients[self.hand_of[clients] == k]))
        return np.asarray(np.concatenate(found)[np.argsort(np.argsort(self.hand_of[clients], kind="stable"))])

    def describe(self, models: Models, clients: Ints, question: StatisticsRequest) -> Moments:
        found = self.each(lambda k, hand: hand.describe(models, clients[self.hand_of[clients] == k], question))
        order = np.argsort(np.argsort(self.hand_of[clients], kind="stable"))
        parts = zip(*((part.count, part.mean, part.std) for part in found), strict=True)
        return Moments(*(np.concatenate(part)[order] for part in parts))

    def reroute(self, models: Models, votes: Any, ballot: Any, routers: Any) -> Ints:
        mine = [{c: router for c, router in routers.items() if self.hand_of[c] == k} for k in range(HANDS)]
        return np.asarray(sum(self.each(lambda k, hand: hand.reroute(models, votes, ballot, mine[k]))))

    def updates(self, models: Models, work: TrainingPlan, round: int, local: Local) -> Updates:
        mine = [work.select(self.hand_of == k) for k in range(HANDS)]
        found = self.each(lambda k, hand: mine[k].n_lanes and hand.updates(models, mine[k], round, local))
        return concatenate_updates(models, work, [part for part in found if part])

    def rounds(self, models: Models, work: TrainingPlan, first: int, last: int, local: Local) -> tuple[Models, Ints]:
        return run_rounds_sequentially(self, models, work, first, last, local)

    def trial(self, models: Models, older: Any, parent: Ints, starts: Any, local: Local) -> Tournament:
        mine = [np.where(self.hand_of == k, parent, -1) for k in range(HANDS)]
        found = self.each(lambda k, hand: hand.trial(models, older, mine[k], starts, local))
        return Tournament(sum(part.rows for part in found), sum(part.wrong for part in found))

    def contest(self, models: Models, teams: Ints, held_by: Local | None) -> Tournament:
        mine = [np.where((self.hand_of == k)[:, None], teams, -1) for k in range(HANDS)]
        found = self.each(lambda k, hand: hand.contest(models, mine[k], held_by))
        return Tournament(sum(part.rows for part in found), sum(part.wrong for part in found))

    def save(self) -> list[Any]:
        return self.each(lambda k, hand: hand.save())

    def load(self, saved: list[Any]) -> None:
        self.each(lambda k, hand: hand.load(saved[k]))


if __name__ == "__main__":
    crew = Crew(stream := fd.stream("sine-2"), fd.mlp(2, 4, 2), fd.Local(rounds=10), 2)
    for step in run_steps(crew, fd.algorithm("FedDrift", stream)):
        print(f"time {step.tau}: accuracy {step.accuracy.mean():.3f}, models {step.model}")
