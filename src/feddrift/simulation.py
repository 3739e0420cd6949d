"""Test-then-train over time: the loop that runs any algorithm on any stream and engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from feddrift._internal.device_arrays import on_host
from feddrift.algorithms import RECOMMENDED
from feddrift.algorithms import algorithm as find_algorithm
from feddrift.data import Stream
from feddrift.drift_explanation import Shifts
from feddrift.engines import engine as find_engine
from feddrift.engines.conditions.conditions import IDEAL, Conditions, S
from feddrift.engines.conditions.idle_models import idle
from feddrift.engines.conditions.robust import QUIET, last_acted
from feddrift.engines.conditions.routing import with_route, without_route
from feddrift.engines.server.engine import Engine
from feddrift.engines.server.federation import TimeStep
from feddrift.engines.simulator.lanes import wake
from feddrift.errors import ConfigError
from feddrift.nets import default_net, named_net
from feddrift.nets.external import OwnNet
from feddrift.router import Route
from feddrift.state_checks import check_state, told
from feddrift.streams import stream as find_stream
from feddrift.types import (
    Algorithm,
    Bools,
    Clusters,
    Event,
    Federation,
    Floats,
    Ints,
    Local,
    Net,
    State,
    Votes,
)

LOST = "the client had lost it with its store, another stands for it"

Work = tuple[Ints, Floats, Floats, Floats]  # the fields of a Trained from received to sent_scoring


@dataclass(frozen=True, repr=False)
class Trained:
    """One time step up to the end of its training: which models there are now, who uses them, and why."""

    tau: int
    state: State
    received: Ints  # [c], new examples of each client that is in reach
    loss: Floats  # [c], how the model of this id scored on them before training and merging; NaN where not asked
    sent: Floats  # [c], models to and from each client, parts of models counted as parts
    sent_scoring: Floats  # [c], those of them that were only scored
    events: tuple[Event, ...]
    shifts: Mapping[int, Shifts] = field(default_factory=dict, kw_only=True)  # by client: what moved where it alarmed

    @property
    def model(self) -> Ints:
        """[c], the id of the model each client uses (the heaviest vote)."""
        return models_in_use(self.state)

    @property
    def drifted(self) -> Bools:
        """[c], where an alarm was raised."""
        return np.zeros(len(self.received), dtype=bool) if self.state.drifted is None else self.state.drifted

    @property
    def work(self) -> Work:
        """What its clients received, how their models did on it, and what was sent."""
        return self.received, self.loss, self.sent, self.sent_scoring


@dataclass(frozen=True, repr=False)
class Step(Trained):
    """One time step, trained and tested: what `run` yields.

    >>> step = next(run("sine-2", "FedDrift", local=Local(rounds=1)))
    >>> step.tau, step.accuracy.shape, step.model.tolist(), step.drifted.any()
    (0, (10,), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], np.False_)
    """

    accuracy: Floats  # [c], on the data of tau + 1; NaN without any
    tested: Ints  # [c], how many examples that was
    scores: Mapping[str, Floats] = field(default_factory=dict)  # [c] by name, of the same test: see `feddrift.scores`

    def __repr__(self) -> str:
        seen = self.accuracy[self.tested > 0]
        accuracy = f"{seen.mean():.4f}" if len(seen) else "none"
        news = f"alarms={int(self.drifted.sum())}, events={[event.kind for event in self.events]}"
        return f"Step(tau={self.tau}, accuracy={accuracy}, models={self.state.models.ids}, {news})"


def run(
    stream: Stream | str,
    algorithm: Algorithm | str = RECOMMENDED,
    *,
    net: Net | str | None = None,
    engine: str = "simulator",
    local: Local | None = None,
    seed: int = 0,
    conditions: Conditions = IDEAL,
    route: Route = "none",
    defend: bool = False,
) -> Iterator[Step]:
    """Train on the data of tau, test on those of tau + 1, for tau = 0, 1, ...; yields each step as it is done.

    Parameters:
        stream: What the clients receive, or a name as `feddrift list` has it.
        algorithm: The method, or its name; a name stands for its defaults on this stream. The default has no settings.
        net: What is trained: a Net, or its name, such as linear or mlp:64,64; by default the one that suits the stream.
        engine: Where the clients live: simulator, reference, or your own at ``package.module:Name``.
        local: How clients train; by default as the stream says.
        seed: Of initial models and minibatches, and of a stream that is given by name.
        conditions: Who is in reach, who takes part, who lies; by default all are, all do, and nobody lies.
        route: By what inputs choose the model that votes at a test, where that has paid: row, running or batch.
        defend: Whether the server bounds what one client can do to the others: see docs/faults.md.

    >>> for step in run("sine-2", "FedDrift", local=Local(rounds=1)):
    ...     if step.tau == 1:
    ...         print(len(step.accuracy), step.state.models.ids)
    10 (0,)
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**63:
        raise ConfigError(f"seed must be a whole number from 0 on, got {seed!r}")
    if isinstance(stream, str):
        if engine == "simulator" and not isinstance(net, OwnNet):
            wake()
        stream = find_stream(stream, seed=int(seed))
    if not isinstance(stream, Stream):
        raise ConfigError(f"stream must be a Stream or the name of one, got {type(stream).__name__}")
    if isinstance(algorithm, str):
        algorithm = find_algorithm(algorithm, stream)
    if isinstance(algorithm, type) or not all(callable(getattr(algorithm, name, None)) for name in ("init", "step")):
        raise ConfigError(f"algorithm must be an object with init and step, or the name of one, got {algorithm!r}")
    for name, value, kind in (("local", local, Local), ("conditions", conditions, Conditions)):
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
    if isinstance(net, str):
        net = named_net(net, stream)
    if route != "none":
        conditions = replace(conditions, route=route)
    if defend:
        conditions = replace(conditions, defend=defend)
    runner = find_engine(engine)(stream, net or default_net(stream), local or stream.local, int(seed), conditions)
    return steps_on(runner, algorithm)


def steps_on(
    engine: Engine,
    algorithm: Algorithm,
    *,
    done: int = 0,
    state: State | None = None,
    untested: Trained | None = None,
    journal: Callable[[State, TimeStep], Federation] | None = None,
    sink: Callable[[Trained], None] | None = None,
) -> Iterator[Step]:
    """The loop over time of all runs and federations, on any engine; yields each step once it is tested.

    Parameters:
        done: Go on after so many time steps, with the `state` after them.
        untested: The last of these, where it has not been tested yet: that comes first.
        journal: What stands between the algorithm and the federation of a time step, to save how far it has come.
        sink: Is told of each step when its training ends, which may be long before the data come to test it on.
    """
    name = type(algorithm).__name__
    if state is None:
        fed = engine.at(0)
        with told(algorithm, f"{name}.init"):
            state = algorithm.init(fed)
        check_state(state, None, fed, f"{name}.init")
    if untested is not None:
        yield _tested(engine, untested, untested.state)
    for tau in itertools.count(done) if engine.n_steps is None else range(done, engine.n_steps):
        fed = engine.at(tau)
        before, route = with_newcomers(state, fed.n_clients), engine.conditions.route
        fed.resting, acted = idle(before, engine.conditions.rest), last_acted(before, fed.n_clients)
        if engine.conditions.defend:
            fed.quiet = tau - acted < QUIET
        with told(algorithm, f"{name}.step at tau={tau}"):
            state = algorithm.step(without_route(before), journal(before, fed) if journal else fed)
        check_state(state, before, fed, f"{name}.step at tau={tau}")
        if engine.conditions.defend:
            state = replace(state, acted=np.where(fed.alarms & ~fed.quiet, tau, acted))
        if route != "none":
            state = with_route(before, state, fed, route)
        if state.router is not None:
            fed.serve(state.models, state.router)
        received, loss = fed.received, fed.losses(models_in_use(state))
        owner = dict(zip(state.models.ids, state.models.owner, strict=True))
        lost = [(c, i) for c, i in engine.lost_private() if owner.get(i) == c]
        events = lineage(before, state) + tuple(Event("created", i, {"reason": LOST, "clients": [c]}) for c, i in lost)
        alarmed = [] if state.drifted is None else np.flatnonzero(state.drifted).tolist()
        shifts = engine.shifts(tau, alarmed) if alarmed else {}
        seen = replace(state, models=on_host(state.models))  # the loop's own may lie on a device, and go on there
        trained = Trained(tau, seen, received, loss, fed.sent, fed.sent_scoring, events, shifts=shifts)
        if sink is not None:
            sink(trained)
        yield _tested(engine, trained, state)


def _tested(engine: Engine, step: Trained, state: State) -> Step:
    """The step with its test on the next data, for which a federation of real machines waits.

    The state is that of the step, as it lies where it was trained.
    """
    right, tested = engine.test(state, step.tau + 1)
    accuracy = np.divide(right, tested, out=np.full(len(tested), np.nan), where=tested > 0)
    scores = engine.scores(state, step.tau + 1)
    return Step(step.tau, step.state, *step.work, step.events, accuracy, tested, scores, shifts=step.shifts)


def models_in_use(state: State) -> Ints:
    """[c], the id of the model each client uses: the heaviest vote."""
    used: Ints = np.asarray(state.models.ids)[state.votes.argmax(axis=1)]
    return used


def n_models(state: State) -> int:
    """How many models there are: shared ones, and private ones that have data of their own by w.

    Private models without such data vote along with a shared one, or are on trial.
    """
    w = state.w
    data = np.isin(np.arange(len(state.models)), w.model) if isinstance(w, Clusters) else (w > 0).any(axis=(0, 1))
    return int((data | ~state.models.private).sum())


def lineage(before: State, after: State) -> tuple[Event, ...]:
    """The algorithm's own events, and the shared models that fell out of use or came back into it."""

    def used(state: State) -> set[int]:
        if not len(state.w):
            return set()
        if isinstance(state.w, Clusters):
            in_use = np.isin(np.arange(len(state.models)), state.w.model[-1]) & (state.w.weight[-1] > 0)
        else:
            in_use = (state.w[-1] > 0).any(axis=0)
        return set(np.asarray(state.models.ids)[in_use & ~state.models.private].tolist())

    explained = {e.model for e in after.events if e.kind in ("merged", "retired")}
    old, new = set(before.models.ids), set(after.models.ids)
    was, now = used(before), used(after)
    events = list(after.events)
    if len(before.w):
        for i in sorted((was - now) - explained):
            reason = "no client uses it" if i in new else "deleted"
            events.append(Event("retired", i, {"reason": reason}))
        for i in sorted((now - was) & old - explained):
            clients = np.flatnonzero(after.w[-1][:, after.models.ids.index(i)])
            events.append(Event("revived", i, {"clients": clients.tolist()}))
    return tuple(events)


def with_newcomers(state: S, n_clients: int) -> S:
    """The state with room for clients that have joined since.

    They bring no history, and until they are scored use what most others use. A field of your own State whose last axis
    is that of clients names the value of a newcomer in its metadata: ``field(metadata={"newcomer": np.nan})``.
    """
    n_new = n_clients - len(state.votes)
    if n_new < 0:
        raise ValueError(f"clients never leave the axis: {len(state.votes)} are known, got {n_clients}")
    if not n_new:
        return state
    w, drifted = state.w, state.drifted
    if isinstance(w, Clusters):
        w = replace(w, model=np.pad(w.model, ((0, 0), (0, n_new)), constant_values=-1))
    else:
        w = np.pad(w, ((0, 0), (0, n_new), (0, 0)))
    changes: dict[str, Any] = {}
    for f in fields(state):
        value = getattr(state, f.name)
        if "newcomer" in f.metadata and np.shape(value)[-1:] == (len(state.votes),):
            value = np.asarray(value)
            room = np.full((*value.shape[:-1], n_new), f.metadata["newcomer"], dtype=value.dtype)
            changes[f.name] = np.concatenate([value, room], axis=-1)
    if drifted is not None:
        changes["drifted"] = np.concatenate([drifted, np.zeros(n_new, dtype=bool)])
    votes: Floats | Votes
    if isinstance(state.votes, Votes):
        votes = Votes.concatenate([state.votes, *[Votes.of(_usual(state)[None])] * n_new])
    else:
        votes = np.concatenate([state.votes, np.repeat(_usual(state)[None], n_new, axis=0)])
    return replace(state, w=w, votes=votes, **changes)


def _mean_votes(votes: Floats | Votes) -> Floats:
    """[m], the mean over all clients."""
    if not isinstance(votes, Votes):
        return np.asarray(votes.mean(axis=0))
    named = votes.model >= 0
    return np.bincount(votes.model[named], votes.weight[named], votes.n_models) / len(votes)


def passed_over(state: S, n_steps: int) -> S:
    """The state after so many time steps, those that it has not seen left out: what came in them trains nothing.

    A field of your own State whose first axis is time names the value of a time step that is left out in its metadata:
    ``field(metadata={"passed_over": np.nan})``.
    """
    n_more, w = n_steps - len(state.w), state.w
    if n_more < 0:
        raise ValueError(f"time does not go back: {len(state.w)} time steps are known, got {n_steps}")
    if not n_more:
        return state
    if isinstance(w, Clusters):
        model = np.pad(w.model, ((0, n_more), (0, 0)), constant_values=-1)
        w = replace(w, model=model, weight=np.pad(w.weight, (0, n_more), constant_values=1.0))
    else:
        w = np.pad(w, ((0, n_more), (0, 0), (0, 0)))
    changes: dict[str, Any] = {}
    for f in fields(state):
        if "passed_over" in f.metadata:
            value = np.asarray(getattr(state, f.name))
            room = np.full((n_more, *value.shape[1:]), f.metadata["passed_over"], dtype=value.dtype)
            changes[f.name] = np.concatenate([value, room])
    return replace(state, w=w, **changes)


def _usual(state: State) -> Floats:
    """The shared model that most clients use, or where models vote together the mean of the votes; no private one."""
    private = state.models.private
    mean: Floats = np.where(private, 0.0, _mean_votes(state.votes))
    if private.all():
        return mean
    if mean.any() and (Votes.of(state.votes).weight > 0).sum(axis=1).max(initial=0) > 1:
        return mean
    usual = np.where(private, -1.0, mean).argmax()
    return np.asarray(np.arange(len(mean)) == usual, dtype=np.float64)
