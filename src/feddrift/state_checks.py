"""Checks of the states that an algorithm returns. Errors contain the method, the time step and the problem."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import get_args

import numpy as np

from feddrift._internal.device_arrays import find_distinct_rows
from feddrift.engines.sparse_weights import find_weight_problem
from feddrift.errors import ConfigError, FeddriftError
from feddrift.trees import tree_leaves
from feddrift.types import Algorithm, Ballot, Event, Federation, Kind, Models, State, Votes

STALE_EVENTS_ADVICE = "events and drifted belong to one step, set them again in each"


@contextmanager
def explain_errors(algorithm: Algorithm, where: str) -> Iterator[None]:
    """Convert errors inside a user's own algorithm to ConfigErrors with the file and line.

    Errors of built-in algorithms are not converted, nor are FeddriftErrors that are not ConfigErrors.

    Args:
        algorithm: The algorithm.
        where: The method and the time step: the first words of the message.

    Raises:
        ConfigError: The code in the context raised an error.
    """
    try:
        yield
    except Exception as error:
        packages = {base.__module__.partition(".")[0] for base in type(algorithm).__mro__} - {"feddrift", "builtins"}
        if not packages or (isinstance(error, FeddriftError) and not isinstance(error, ConfigError)):
            raise
        why = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{where}: {why} ({_locate_error(error, packages)})") from error


def _locate_error(error: Exception, packages: set[str]) -> str:
    """Return the innermost line of these packages in the traceback, and the line that raised the error if it differs.

    A ValueError or ConfigError rejects an argument, so the line of these packages is enough.
    """
    calls = list(traceback.walk_tb(error.__traceback__))
    own_calls = [call for call in calls if str(call[0].f_globals.get("__name__")).partition(".")[0] in packages]
    places = [f"{frame.f_code.co_filename}, line {line}" for frame, line in (*own_calls[-1:], calls[-1])]
    if isinstance(error, ConfigError | ValueError) and own_calls:
        return places[0]
    return "; raised in ".join(dict.fromkeys(places))


def check_state(state: State, before: State | None, fed: Federation, where: str) -> None:
    """Raise ConfigError if the state returned by init() or step() is invalid.

    Args:
        state: The returned state.
        before: The state that step() received, extended by newcomers; None for init().
        fed: The federation at this time step.
        where: The class, the method and the time step: the first words of the message.

    Raises:
        ConfigError: The state is invalid; the message describes the first problem.
    """
    if not isinstance(state, State):
        raise ConfigError(f"{where} must return a State, got {type(state).__name__}")
    for problem in _find_problems(state, before, fed):
        raise ConfigError(f"{where}: {problem}")


def _find_problems(state: State, before: State | None, fed: Federation) -> Iterator[str]:
    models = state.models
    if not isinstance(models, Models):
        yield f"models must be Models, got {type(models).__name__}"
    if len(set(models.ids)) < len(models.ids):
        yield f"models must have different ids, got {models.ids}"
    c = fed.n_clients
    m = len(models)
    n_times = 0 if before is None else fed.tau + 1
    for name, value, shape in (("w", state.w, (n_times, c, m)), ("votes", state.votes, (c, m))):
        got = getattr(value, "shape", type(value).__name__)
        if got != shape:
            yield f"{name} must have shape {shape} for {c} clients and {m} models, got {got}"
    if problem := find_weight_problem(state.w):
        yield problem
    if problem := find_weight_problem(state.votes, "votes", "c, m"):
        yield problem
    has_votes = np.any(state.votes.weight if isinstance(state.votes, Votes) else state.votes, axis=1)
    if not has_votes.all():
        yield f"every client needs a model to vote with, client {has_votes.argmin()} has none"
    if state.ballot not in get_args(Ballot):
        yield f"ballot must be hard or soft, got {state.ballot!r}"
    for leaf in tree_leaves(models.params):
        stack, index = find_distinct_rows(leaf)
        if not np.isfinite(stack).all():
            row = np.arange(m) if len(leaf) == m else models.trunk_index
            is_wrong = ~np.isfinite(stack).reshape(len(stack), -1).all(axis=1)[index][row]
            is_wrong &= np.array(models.held) == 0  # only the owners have the parameters of the other models
            if is_wrong.any():
                yield f"parameters must be finite, those of model {models.ids[is_wrong.argmax()]} are not"
    if state.router is not None and state.router.votes.shape[1] != m:
        yield f"a router must have votes for {m} models, got {state.router.votes.shape[1]}"
    if state.router is not None and state.router.votes[:, models.private].any():
        yield "a router must vote for shared models only, got votes for private ones"
    yield from _find_event_problems(state, before, c)


def _find_event_problems(state: State, before: State | None, n_clients: int) -> Iterator[str]:
    """Yield the problems of the alarms and events of a step."""
    drifted = state.drifted
    events = state.events
    is_mask = isinstance(drifted, np.ndarray) and drifted.shape == (n_clients,) and drifted.dtype.kind == "b"
    if drifted is not None and not is_mask:
        yield f"drifted must be None or an array of {n_clients} truth values, got {_summarize(drifted)}"
    if not isinstance(events, tuple | list) or not all(isinstance(event, Event) for event in events):
        yield f"events must be a tuple of Event, got {_summarize(events)}"
    for event in events:
        if event.kind not in get_args(Kind) or not isinstance(event.cause, Mapping):
            yield f"an event is one of {', '.join(get_args(Kind))}, with a dictionary as its cause, got {event}"
        clients = event.cause.get("clients")
        names_clients = isinstance(clients, list) and all(
            isinstance(c, int | np.integer) and 0 <= c < n_clients for c in clients
        )
        if event.kind == "decided" and not (names_clients and event.cause.get("reason")):
            yield f"a decision must name its clients, of 0 to {n_clients - 1}, and a reason, got {event.cause}"
    if before is None:
        return
    if drifted is not None and drifted is before.drifted and drifted.any():
        yield f"these alarms are those of the step before: {STALE_EVENTS_ADVICE}"
    old = set(before.models.ids)
    created = {event.model for event in events if event.kind == "created"}
    if len(before.w) and created & old:
        yield f"model {min(created & old)} is created, but was there before: {STALE_EVENTS_ADVICE}"
    removed = {event.model for event in events if event.kind in ("merged", "retired")}
    if unknown := removed - old - created:
        yield f"model {min(unknown)} is merged or retired, but was not there before: {STALE_EVENTS_ADVICE}"


def _summarize(value: object) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{getattr(value, 'dtype', '')} of shape {shape}"
