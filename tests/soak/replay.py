"""The simulator with the recorded participation of a deployment: clients with data, replies and missing replies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from feddrift import algorithms
from feddrift.data import Cell, Stream
from feddrift.deploy.settings import Settings
from feddrift.engines.conditions.conditions import Conditions
from feddrift.engines.simulator.simulator import Simulator
from feddrift.engines.worker import TrainingPlan, Worker, WorkerProxy, concatenate_updates, run_rounds_sequentially
from feddrift.reports.exchanges import get_client_backlogs
from feddrift.runs.record import Record
from feddrift.simulation import Step, run_steps
from feddrift.types import Local, Models, Net, State, Updates

Lost = dict[int, set[int]]  # by round, -1 the evaluation: who did not answer


def read_participation(record: Record) -> list[tuple[set[int], Lost]]:
    """Of each time step, who said hello, and who was lost when; of what was asked twice, as after a kill, the last."""
    everybody = set(range(len(record.header["clients"])))
    steps: list[tuple[set[int], Lost]] = [(set(), {}) for _ in range(record.rows.steps + 1)]
    here, greeted = everybody, False
    for line in record.exchanges:
        out = {c for c, why in zip(line["c"], line["trouble"], strict=True) if why is not None}
        if line["asked"] == "hello":
            here, greeted = everybody - out, True
        if line["asked"] not in ("evaluate", "train"):
            continue
        moment, (present, lost) = -1 if line["asked"] == "evaluate" else line["round"], steps[line["t"]]
        for later in [k for k in lost if k >= moment]:
            del lost[later]
        if moment < 0:
            present.clear()
            present |= here
        elif greeted:  # taken up again inside the time step
            out |= everybody - here
        lost[moment], greeted = out, False
    return steps


class Losing(WorkerProxy):
    """Clients of a simulation, some of which do not answer in time."""

    def __init__(self, worker: Worker, present: set[int], lost: Lost) -> None:
        super().__init__(worker)
        self.lost = lost
        self._lose({c for c in range(len(self.known.clients)) if c not in present})

    def score(self, models: Models, cells: Any, *rest: Any) -> Iterator[Any]:
        self._lose(self.lost.get(-1, set()))
        which = np.flatnonzero(self.known.reachable[cells[:, 1]])
        if len(which):
            for at, sums, sizes in self.worker.score(models, cells[which], *rest):
                yield which[at], sums, sizes

    def updates(self, models: Models, work: TrainingPlan, round: int, local: Local) -> Updates:
        self._lose(self.lost.get(round, set()))
        work_left = work.select(self.known.reachable)
        parts = [self.worker.updates(models, work_left, round, local)] if len(work_left.client) else []
        return concatenate_updates(models, work, parts)

    def rounds(self, models: Models, work: TrainingPlan, first: int, last: int, local: Local) -> Any:
        return run_rounds_sequentially(self, models, work, first, last, local)

    def _lose(self, clients: set[int]) -> None:
        self.known.reachable[list(clients)] = False


def replay(record: Record, settings: Settings, net: Net, batch: Callable[[str, int], Cell]) -> Iterator[Step]:
    """The federation of this record in the simulator; `batch` is the n-th of a client, which shows them in order."""
    rows, names = record.rows, record.header["clients"]
    took_part, n_shown = read_participation(record), [0] * len(names)
    cells: list[list[Cell | None]] = [[None] * len(names) for _ in range(rows.steps + 1)]
    for t, shown in enumerate([*rows.received, rows.tested[-1]]):
        for c in np.flatnonzero(shown):
            cells[t][c] = batch(names[c], n_shown[c])
            n_shown[c] += 1

    class Replayed(Simulator):
        def worker(self, tau: int) -> Any:
            return Losing(super().worker(tau), *took_part[tau])

    stream = Stream.from_arrays(cells, n_classes=len(settings.classes), clients=names)
    engine = Replayed(stream, net, settings.local, settings.seed, Conditions(defend=settings.defend))
    yield from run_steps(engine, algorithms.algorithm(settings.algorithm, **settings.settings))


def assert_same_decisions(record: Record, step: Step) -> None:
    """A step of the simulator has the alarms, models and events of the record."""
    t, rows = step.tau, record.rows
    np.testing.assert_array_equal(step.received, rows.received[t], f"rows at time {t}")
    np.testing.assert_array_equal(step.model, rows.model[t], f"models at time {t}")
    np.testing.assert_array_equal(step.drifted, rows.drift[t], f"alarms at time {t}")
    events = [(event["event"], event["model"]) for event in record.events if event["t"] == t]
    assert [(event.kind, event.model) for event in step.events] == events, f"events at time {t}"
    tested = rows.tested[t] > 0
    np.testing.assert_allclose(step.accuracy[tested], rows.accuracy[t][tested], atol=0.02)


def assert_all_batches_used(record: Record, state: State, delivered: Mapping[str, Sequence[int]]) -> None:
    """Every batch that a client had, by its rows, is in the record, in order, and trains a model, or is told to wait.

    Those of the last time are for the test.
    """
    rows, wait, w = record.rows, get_client_backlogs(record), np.asarray(state.w)
    for c, name in enumerate(record.header["clients"]):
        shown = [n for n in (*rows.received[:, c].tolist(), int(rows.tested[-1, c])) if n]
        assert shown == list(delivered[name][: len(shown)]), f"{name} had {delivered[name]}, the record has {shown}"
        backlog = wait.get(c, (0, None))[0]
        assert len(shown) + backlog == len(delivered[name]), f"{name} had {delivered[name]}, the record has {shown}"
        trained = np.asarray(w[: rows.steps, c].any(axis=1))
        assert trained[rows.received[:, c] > 0].all(), (
            f"of {name} the batches of {np.flatnonzero(~trained)} train nothing"
        )
