"""Test-then-train over time: the loop that runs any algorithm on any stream and engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from feddrift._internal.checkpoint import Checkpoint
from feddrift._internal.device_arrays import move_to_host
from feddrift._renamed import forward_renamed_names
from feddrift.algorithms import RECOMMENDED
from feddrift.algorithms import algorithm as find_algorithm
from feddrift.data import Stream
from feddrift.drift_explanation import Shifts
from feddrift.engines import engine as find_engine
from feddrift.engines.conditions.conditions import IDEAL, Conditions, Defend, S
from feddrift.engines.conditions.idle_models import find_idle_models
from feddrift.engines.conditions.robust import AlarmFilter
from feddrift.engines.conditions.routing import update_routing
from feddrift.engines.server.engine import Engine
from feddrift.engines.server.federation import TimeStep
from feddrift.engines.simulator.lanes import start_devices
from feddrift.errors import ConfigError
from feddrift.nets import default_net, named_net
from feddrift.nets.external import ExternalNet
from feddrift.router import Route, Routing
from feddrift.state_checks import check_state, explain_errors
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
    Params,
    State,
    Votes,
)

LOST_MODEL_REASON = "the client lost its private model with its store, and this model replaces it"

StepStatistics = tuple[Ints, Floats, Floats, Floats]  # received, loss, sent and sent_scoring of a TrainedStep

if not TYPE_CHECKING:  # a type checker must report names that do not exist
    __getattr__ = forward_renamed_names(__name__)


@dataclass(frozen=True, eq=False)
class LoopState:
    """Data of conditions that the run loop carries from one time step to the next, besides the algorithm's state.

    A checkpoint stores the fields by their names. A field is None if its condition is not used.
    """

    routing: Routing | None = None  # of the condition `route`
    alarm_times: Ints | None = None  # [c], time step of the last accepted alarm, of the condition `defend`
    served: Floats | None = None  # see `SharingLimits`, of the condition `share_from`

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are set, for a checkpoint."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def from_checkpoint(cls, saved: Checkpoint, stored: Sequence[Mapping[str, Any]], like: Params) -> LoopState:
        """Read the data from a checkpoint.

        Args:
            saved: The checkpoint.
            stored: A list whose only item is the result of `to_dict`; empty in checkpoints of version 0.3, which have
                these data as fields of `State`.
            like: A tree of parameters of the run's net.
        """
        return cls(**stored[0]) if stored else cls(**saved.decode_moved_fields(like))


NO_LOOP_STATE = LoopState()


@dataclass(frozen=True, repr=False)
class TrainedStep:
    """One time step up to the end of its training: the state, statistics of the clients, and events with reasons."""

    tau: int
    state: State
    received: Ints  # [c], number of new examples; 0 for unreachable clients
    loss: Floats  # [c], error of the model in use on them, before training and merging; NaN if not scored
    sent: Floats  # [c], number of models sent to and from each client; a part of a model counts as a fraction
    sent_scoring: Floats  # [c], the part of `sent` for scoring only
    events: tuple[Event, ...]
    shifts: Mapping[int, Shifts] = field(default_factory=dict, kw_only=True)  # by client with an alarm: what changed
    loop: LoopState = field(default=NO_LOOP_STATE, kw_only=True)  # after this time step

    @property
    def model(self) -> Ints:
        """[c], the id of the model that each client uses: the one with the largest vote."""
        return find_models_in_use(self.state)

    @property
    def drifted(self) -> Bools:
        """[c], True for clients with an alarm."""
        return np.zeros(len(self.received), dtype=bool) if self.state.drifted is None else self.state.drifted

    @property
    def statistics(self) -> StepStatistics:
        """The fields received, loss, sent and sent_scoring."""
        return self.received, self.loss, self.sent, self.sent_scoring


@dataclass(frozen=True, repr=False)
class Step(TrainedStep):
    """One time step, trained and tested.

    >>> step = next(run("sine-2", "FedDrift", local=Local(rounds=1)))
    >>> step.tau, step.accuracy.shape, step.model.tolist(), step.drifted.any()
    (0, (10,), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0], np.False_)
    """

    accuracy: Floats  # [c], on the data of tau + 1; NaN without any
    tested: Ints  # [c], number of test examples
    scores: Mapping[str, Floats] = field(default_factory=dict)  # by name: [c], of the same test; see `feddrift.scores`

    def __repr__(self) -> str:
        known = self.accuracy[self.tested > 0]
        accuracy = f"{known.mean():.4f}" if len(known) else "none"
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
    defend: Defend = False,
) -> Iterator[Step]:
    """Train on the data of tau and test on those of tau + 1, for tau = 0, 1, ...

    Args:
        stream: The clients' data, or a name from `feddrift list`.
        algorithm: The method, or its name with the default settings for this stream. The default has no settings.
        net: The model: a Net, or a name such as linear or mlp:64,64; by default the one that suits the stream.
        engine: The engine that trains the clients: simulator, reference, or your own at ``package.module:Name``.
        local: The settings of local training; by default those of the stream.
        seed: The seed of initial models and minibatches, and of a stream that is given by name.
        conditions: Dropout, participation and Byzantine clients; by default all clients take part and are honest.
        route: Let test inputs choose the voting model, as soon as this saves mistakes: each `row` for itself, the rows
            so far (`running`), or all rows together (`batch`).
        defend: Limit the influence of each client on the others: `robust`, or True for the limits of version 0.3; see
            docs/faults.md.

    Yields:
        Each time step when it is tested.

    >>> for step in run("sine-2", "FedDrift", local=Local(rounds=1)):
    ...     if step.tau == 1:
    ...         print(len(step.accuracy), step.state.models.ids)
    10 (0,)
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**63:
        raise ConfigError(f"seed must be a whole number from 0 on, got {seed!r}")
    if isinstance(stream, str):
        if engine == "simulator" and not isinstance(net, ExternalNet):
            start_devices()
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
    if defend is not False:
        conditions = replace(conditions, defend=defend)
    runner = find_engine(engine)(stream, net or default_net(stream), local or stream.local, int(seed), conditions)
    return run_steps(runner, algorithm)


def run_steps(
    engine: Engine,
    algorithm: Algorithm,
    *,
    done: int = 0,
    state: State | None = None,
    loop: LoopState = NO_LOOP_STATE,
    untested: TrainedStep | None = None,
    journal: Callable[[State, LoopState, TimeStep], Federation] | None = None,
    sink: Callable[[TrainedStep], None] | None = None,
) -> Iterator[Step]:
    """Run the loop over time of all runs and federations, on any engine.

    Args:
        engine: The clients.
        algorithm: The method.
        done: The number of time steps that are trained already.
        state: The state after these time steps.
        loop: The data of conditions after these time steps.
        untested: The last of these time steps if it is not tested yet: its test comes first.
        journal: A function that wraps the federation which the algorithm receives, to save progress within a time
            step. Its arguments are the state and the data of conditions before the step, and the federation.
        sink: A function that receives each step after its training, maybe long before the data for its test arrive.

    Yields:
        Each time step when it is tested.
    """
    name = type(algorithm).__name__
    conditions = engine.conditions
    conditions.check_algorithm(algorithm)
    if state is None:
        fed = engine.at(0)
        with explain_errors(algorithm, f"{name}.init"):
            state = algorithm.init(fed)
        check_state(state, None, fed, f"{name}.init")
    if untested is not None:
        yield _test_step(engine, untested, untested.state)
    for tau in itertools.count(done) if engine.n_steps is None else range(done, engine.n_steps):
        fed = engine.at(tau)
        before = add_newcomers(state, fed.n_clients)
        if conditions.rest:
            fed.idle_models = find_idle_models(before, conditions.rest)
        if conditions.limits_sharing:
            fed.limit_sharing(before, loop.served)
        if conditions.defend:
            fed.alarm_filter = AlarmFilter(loop.alarm_times, fed.n_clients, tau)
        with explain_errors(algorithm, f"{name}.step at tau={tau}"):
            state = algorithm.step(
                before if loop.routing is None else replace(before, router=None),
                journal(before, loop, fed) if journal else fed,
            )
        check_state(state, before, fed, f"{name}.step at tau={tau}")
        if fed.alarm_filter is not None:
            loop = replace(loop, alarm_times=fed.alarm_filter.last_times)
        if fed.sharing is not None:
            loop = replace(loop, served=fed.sharing.served)
        if conditions.route != "none":
            state, routing = update_routing(before, state, loop.routing, fed, conditions.route)
            loop = replace(loop, routing=routing)
        if state.router is not None and conditions.limits_sharing:
            raise ConfigError(
                f"share_from={conditions.share_from} does not work with {name}, which returned a router: a router "
                "sends models to all clients; leave out share_from, or choose another algorithm"
            )
        if state.router is not None:
            fed.send_router(state.models, state.router)
        owner = dict(zip(state.models.ids, state.models.owner, strict=True))
        lost = [(c, i) for c, i in engine.lost_private() if owner.get(i) == c]
        alarmed = [] if state.drifted is None else np.flatnonzero(state.drifted).tolist()
        trained = TrainedStep(
            tau=tau,
            state=replace(state, models=move_to_host(state.models)),  # the loop continues with models on a device
            received=fed.received,
            loss=fed.get_losses(find_models_in_use(state)),
            sent=fed.sent,
            sent_scoring=fed.sent_scoring,
            events=find_model_events(before, state)
            + tuple(Event("created", i, {"reason": LOST_MODEL_REASON, "clients": [c]}) for c, i in lost),
            shifts=engine.shifts(tau, alarmed) if alarmed else {},
            loop=loop,
        )
        if sink is not None:
            sink(trained)
        yield _test_step(engine, trained, state)


def _test_step(engine: Engine, step: TrainedStep, state: State) -> Step:
    """Test a step on the data of the next time step. In a deployment, the engine waits for these data.

    Args:
        engine: The clients.
        step: The step.
        state: The state of the step, with models where they were trained, maybe on a device.
    """
    n_correct, tested = engine.test(state, step.tau + 1)
    accuracy = np.divide(n_correct, tested, out=np.full(len(tested), np.nan), where=tested > 0)
    scores = engine.scores(state, step.tau + 1)
    return Step(**vars(step), accuracy=accuracy, tested=tested, scores=scores)


def find_models_in_use(state: State) -> Ints:
    """Return [c], the id of the model that each client uses: the one with the largest vote."""
    used: Ints = np.asarray(state.models.ids)[state.votes.argmax(axis=1)]
    return used


def count_models(state: State) -> int:
    """Count the shared models, and the private models with training data in w.

    Private models without such data vote together with a shared one, or are on trial.
    """
    w = state.w
    has_data = np.isin(np.arange(len(state.models)), w.model) if isinstance(w, Clusters) else (w > 0).any(axis=(0, 1))
    return int((has_data | ~state.models.private).sum())


def find_model_events(before: State, after: State) -> tuple[Event, ...]:
    """Return the algorithm's events, and events for shared models that clients no longer train, or train again."""

    def find_trained_ids(state: State) -> set[int]:
        if not len(state.w):
            return set()
        if isinstance(state.w, Clusters):
            is_trained = np.isin(np.arange(len(state.models)), state.w.model[-1]) & (state.w.weight[-1] > 0)
        else:
            is_trained = (state.w[-1] > 0).any(axis=0)
        return set(np.asarray(state.models.ids)[is_trained & ~state.models.private].tolist())

    explained = {event.model for event in after.events if event.kind in ("merged", "retired")}
    trained_before = find_trained_ids(before)
    trained_after = find_trained_ids(after)
    events = list(after.events)
    if len(before.w):
        for i in sorted(trained_before - trained_after - explained):
            reason = "no client uses it" if i in after.models.ids else "deleted"
            events.append(Event("retired", i, {"reason": reason}))
        for i in sorted((trained_after - trained_before - explained) & set(before.models.ids)):
            clients = np.flatnonzero(after.w[-1][:, after.models.ids.index(i)])
            events.append(Event("revived", i, {"clients": clients.tolist()}))
    return tuple(events)


def add_newcomers(state: S, n_clients: int) -> S:
    """Extend a state by the clients that have joined since.

    They have no training data yet. Until they are scored, they use the model that most other clients use. A field of
    your own State whose last axis is that of clients has the value of a newcomer in its metadata:
    ``field(metadata={"newcomer": np.nan})``.

    Raises:
        ValueError: The state has more clients than that.
    """
    n_new = n_clients - len(state.votes)
    if n_new < 0:
        raise ValueError(f"a state cannot lose clients: {len(state.votes)} are known, got {n_clients}")
    if not n_new:
        return state
    w = state.w
    if isinstance(w, Clusters):
        w = replace(w, model=np.pad(w.model, ((0, 0), (0, n_new)), constant_values=-1))
    else:
        w = np.pad(w, ((0, 0), (0, n_new), (0, 0)))
    changes: dict[str, Any] = {}
    for f in fields(state):
        value = getattr(state, f.name)
        if "newcomer" in f.metadata and np.shape(value)[-1:] == (len(state.votes),):
            value = np.asarray(value)
            added = np.full((*value.shape[:-1], n_new), f.metadata["newcomer"], dtype=value.dtype)
            changes[f.name] = np.concatenate([value, added], axis=-1)
    if state.drifted is not None:
        changes["drifted"] = np.concatenate([state.drifted, np.zeros(n_new, dtype=bool)])
    votes: Floats | Votes
    newcomer_votes = _compute_newcomer_votes(state)[None]
    if isinstance(state.votes, Votes):
        votes = Votes.concatenate([state.votes, *[Votes.of(newcomer_votes)] * n_new])
    else:
        votes = np.concatenate([state.votes, np.repeat(newcomer_votes, n_new, axis=0)])
    return replace(state, w=w, votes=votes, **changes)


def _compute_mean_votes(votes: Floats | Votes) -> Floats:
    """Return [m], the mean votes of all clients."""
    if not isinstance(votes, Votes):
        return np.asarray(votes.mean(axis=0))
    filled = votes.model >= 0
    return np.bincount(votes.model[filled], votes.weight[filled], votes.n_models) / len(votes)


def add_skipped_steps(state: S, n_steps: int) -> S:
    """Extend an earlier state to this number of time steps; the data of the added steps train no model.

    A field of your own State whose first axis is time has the value of an added time step in its metadata:
    ``field(metadata={"passed_over": np.nan})``.

    Raises:
        ValueError: The state has more time steps than that.
    """
    n_more = n_steps - len(state.w)
    w = state.w
    if n_more < 0:
        raise ValueError(f"a state cannot lose time steps: {len(state.w)} time steps are known, got {n_steps}")
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
            added = np.full((n_more, *value.shape[1:]), f.metadata["passed_over"], dtype=value.dtype)
            changes[f.name] = np.concatenate([value, added])
    return replace(state, w=w, **changes)


def _compute_newcomer_votes(state: State) -> Floats:
    """Return [m], one vote for the shared model that most clients use; the mean votes if clients use several models."""
    private = state.models.private
    mean: Floats = np.where(private, 0.0, _compute_mean_votes(state.votes))
    several = (Votes.of(state.votes).weight > 0).sum(axis=1).max(initial=0) > 1
    if private.all() or (mean.any() and several):
        return mean
    most_used = np.where(private, -1.0, mean).argmax()
    return np.asarray(np.arange(len(mean)) == most_used, dtype=np.float64)
