"""Test-then-train over time: the loop that runs any algorithm on any stream and engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from feddrift.conditions import IDEAL, Conditions, grown
from feddrift.engines import engine as find_engine
from feddrift.engines.base import Engine, TimeStep
from feddrift.errors import ConfigError
from feddrift.nets import default_net
from feddrift.types import Algorithm, Bools, Event, Federation, Floats, Ints, Local, Net, State, Stream

Work = tuple[Ints, Floats, Floats, Floats]  # the fields of a Step from received to sent_scoring
Watch = Callable[[State, TimeStep], Federation]


@dataclass(frozen=True)
class Step:
    """What happened in one time step."""

    tau: int
    state: State
    accuracy: Floats  # [c], on the data of tau + 1; NaN without any
    tested: Ints  # [c], how many examples that was
    received: Ints  # [c], new examples of each client that is in reach
    loss: Floats  # [c], how the model of this id scored on them before training and merging; NaN where not asked
    sent: Floats  # [c], models to and from each client, parts of models counted as parts
    sent_scoring: Floats  # [c], those of them that were only scored
    events: tuple[Event, ...]

    @property
    def model(self) -> Ints:
        """[c], the id of the model each client uses (the heaviest vote)."""
        return in_use(self.state)

    @property
    def drifted(self) -> Bools:
        """[c], where an alarm was raised."""
        return np.zeros(len(self.tested), dtype=bool) if self.state.drifted is None else self.state.drifted


def run(
    stream: Stream,
    algorithm: Algorithm,
    *,
    net: Net | None = None,
    engine: str = "simulator",
    local: Local | None = None,
    seed: int = 0,
    conditions: Conditions = IDEAL,
) -> Iterator[Step]:
    """Train on the data of tau, test on those of tau + 1, for tau = 0, 1, ...; yields each step as it is done."""
    made = find_engine(engine)(stream, net or default_net(stream), local or stream.local, seed, conditions)
    yield from steps_on(made, algorithm)


def steps_on(
    engine: Engine, algorithm: Algorithm, *, done: int = 0, state: State | None = None, watch: Watch | None = None
) -> Iterator[Step]:
    """The same on an engine of your own making, or from the state after so many time steps.

    `watch` may put something between the algorithm and the federation of a time step, such as a journal.
    """
    if state is None:
        state = algorithm.init(engine.at(0))
    for tau in range(done, engine.stream.n_steps):
        fed = engine.at(tau)
        state = grown(state, fed.n_clients)
        before, state = state, algorithm.step(state, watch(state, fed) if watch else fed)
        _check(state, fed, f"{type(algorithm).__name__}.step at time {tau}")
        right, tested = engine.test(state, tau + 1)
        accuracy = np.divide(right, tested, out=np.full(len(tested), np.nan), where=tested > 0)
        yield Step(tau, state, accuracy, tested, *work(fed, state), lineage(before, state))


def work(fed: TimeStep, state: State) -> Work:
    """What a time step's clients received, how their models did on it, and what was sent."""
    return fed.counts[fed.tau], fed.losses(in_use(state)), fed.sent, fed.sent_scoring


def in_use(state: State) -> Ints:
    """[c], the id of the model each client uses: the heaviest vote."""
    used: Ints = np.asarray(state.models.ids)[state.votes.argmax(axis=1)]
    return used


def _check(state: State, fed: TimeStep, where: str) -> None:
    """Say what is wrong with a state before anything trips over it."""
    if not isinstance(state, State):
        raise ConfigError(f"{where} must return a State, got {type(state).__name__}")
    c, m = fed.n_clients, len(state.models)
    for name, found, shape in (("w", state.w.shape, (fed.tau + 1, c, m)), ("votes", state.votes.shape, (c, m))):
        if found != shape:
            raise ConfigError(f"{where}: {name} must have shape {shape} for {c} clients and {m} models, got {found}")


def lineage(before: State, after: State) -> tuple[Event, ...]:
    """The algorithm's own events, and the models that fell out of use or came back into it."""

    def used(state: State) -> set[int]:
        ids = np.asarray(state.models.ids)
        return {int(i) for i in ids[(state.w[-1] > 0).any(axis=0)]} if len(state.w) else set()

    told = {e.model for e in after.events if e.kind in ("merged", "retired")}
    old, new = set(before.models.ids), set(after.models.ids)
    was, now = used(before), used(after)
    events = list(after.events)
    if len(before.w):
        for i in sorted((was - now) - told):
            reason = "no client uses it" if i in new else "deleted"
            events.append(Event("retired", i, {"reason": reason}))
        for i in sorted((now - was) & old - told):
            clients = np.flatnonzero(after.w[-1][:, after.models.ids.index(i)])
            events.append(Event("revived", i, {"clients": clients.tolist()}))
    return tuple(events)
