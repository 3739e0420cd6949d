"""What a method returns, held to the contract: one sentence says what is wrong, of which method, when and where."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import get_args

import numpy as np

from feddrift._internal.device_arrays import distinct_rows
from feddrift.engines.sparse_weights import wrong_weights
from feddrift.errors import ConfigError, FeddriftError
from feddrift.trees import leaves
from feddrift.types import Algorithm, Ballot, Event, Federation, Kind, Models, State, Votes

STALE = "events and drifted belong to one step, give them anew in each"


@contextmanager
def told(algorithm: Algorithm, where: str) -> Iterator[None]:
    """What goes wrong inside a method of somebody's own is one sentence with its file and line; our own say theirs."""
    try:
        yield
    except Exception as error:
        own = {base.__module__.partition(".")[0] for base in type(algorithm).__mro__} - {"feddrift", "builtins"}
        if not own or (isinstance(error, FeddriftError) and not isinstance(error, ConfigError)):
            raise
        why = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{where}: {why} ({_place(error, own)})") from error


def _place(error: Exception, modules: set[str]) -> str:
    """The innermost line of these modules that an error passed through; and where it was raised, if that is elsewhere
    and nobody there was checking what he is given."""
    lines = list(traceback.walk_tb(error.__traceback__))
    of_modules = [at for at in lines if str(at[0].f_globals.get("__name__")).partition(".")[0] in modules]
    places = [f"{frame.f_code.co_filename}, line {line}" for frame, line in (*of_modules[-1:], lines[-1])]
    if isinstance(error, ConfigError | ValueError) and of_modules:
        return places[0]
    return "; raised in ".join(dict.fromkeys(places))


def check_state(state: State, before: State | None, fed: Federation, where: str) -> None:
    """Say what is wrong with the state that a step made of the one before, or init of none, ere anything trips over it.

    Parameters:
        state: What the method returned.
        before: What it was given, with room for newcomers; none: it is the first state, before any data.
        fed: The federation at this time.
        where: The method, its verb and the time, with which the sentence begins.
    """
    if not isinstance(state, State):
        raise ConfigError(f"{where} must return a State, got {type(state).__name__}")
    for problem in _problems(state, before, fed):
        raise ConfigError(f"{where}: {problem}")


def _problems(state: State, before: State | None, fed: Federation) -> Iterator[str]:
    models = state.models
    if not isinstance(models, Models):
        yield f"models must be Models, got {type(models).__name__}"
    if len(set(models.ids)) < len(models.ids):
        yield f"every model needs an id of its own, got {models.ids}"
    c, m, n_times = fed.n_clients, len(models), 0 if before is None else fed.tau + 1
    for name, value, shape in (("w", state.w, (n_times, c, m)), ("votes", state.votes, (c, m))):
        got = getattr(value, "shape", type(value).__name__)
        if got != shape:
            yield f"{name} must have shape {shape} for {c} clients and {m} models, got {got}"
    if problem := wrong_weights(state.w):
        yield problem
    if problem := wrong_weights(state.votes, "votes", "c, m"):
        yield problem
    has_votes = np.any(state.votes.weight if isinstance(state.votes, Votes) else state.votes, axis=1)
    if not has_votes.all():
        yield f"every client needs a model to vote with, client {has_votes.argmin()} has none"
    if state.ballot not in get_args(Ballot):
        yield f"ballot must be hard or soft, got {state.ballot!r}"
    for leaf in leaves(models.params):
        stack, index = distinct_rows(leaf)
        if not np.isfinite(stack).all():
            row = np.arange(m) if len(leaf) == m else models.trunk_index
            wrong = ~np.isfinite(stack).reshape(len(stack), -1).all(axis=1)[index][row]
            wrong &= np.array(models.held) == 0  # of the others only their owners have the parameters
            if wrong.any():
                yield f"parameters must be finite, those of model {models.ids[wrong.argmax()]} are not"
    if state.router is not None and state.router.votes.shape[1] != m:
        yield f"a router votes for {m} models here, got {state.router.votes.shape[1]}"
    if state.router is not None and state.router.votes[:, models.private].any():
        yield "a router votes for shared models only, private ones are their owner's"
    yield from _wrong_news(state, before, c)


def _wrong_news(state: State, before: State | None, n_clients: int) -> Iterator[str]:
    """What is wrong with the alarms and events of a step."""
    drifted, events = state.drifted, state.events
    right = isinstance(drifted, np.ndarray) and drifted.shape == (n_clients,) and drifted.dtype.kind == "b"
    if drifted is not None and not right:
        yield f"drifted must be None or an array of {n_clients} truth values, got {_short(drifted)}"
    if not isinstance(events, tuple | list) or not all(isinstance(event, Event) for event in events):
        yield f"events must be a tuple of Event, got {_short(events)}"
    for event in events:
        if event.kind not in get_args(Kind) or not isinstance(event.cause, Mapping):
            yield f"an event is one of {', '.join(get_args(Kind))}, with a dictionary as its cause, got {event}"
        clients = event.cause.get("clients")
        named = isinstance(clients, list) and all(
            isinstance(c, int | np.integer) and 0 <= c < n_clients for c in clients
        )
        if event.kind == "decided" and not (named and event.cause.get("reason")):
            yield f"a decision must name its clients, of 0 to {n_clients - 1}, and a reason, got {event.cause}"
    if before is None:
        return
    if drifted is not None and drifted is before.drifted and drifted.any():
        yield f"these alarms are those of the step before: {STALE}"
    was = set(before.models.ids)
    created = {event.model for event in events if event.kind == "created"}
    if len(before.w) and created & was:
        yield f"model {min(created & was)} is created, but was there before: {STALE}"
    left = {event.model for event in events if event.kind in ("merged", "retired")}
    if unknown := left - was - created:
        yield f"model {min(unknown)} is merged or retired, but was not there before: {STALE}"


def _short(value: object) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{getattr(value, 'dtype', '')} of shape {shape}"
