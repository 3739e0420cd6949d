"""Texts about a record: causes of events, explanations of alarms, and the command that repeats the run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from feddrift import algorithms
from feddrift.drift_explanation import MIN_ROWS_PER_TEST, rank_shift
from feddrift.errors import format_count
from feddrift.reports.labels import describe_shift, format_settings

# Beginning of the reasons of all events of a rollback in records; the number of the time step follows.
ROLLBACK_REASON_PREFIX = "an operator went back to the models of time"


def format_concept(k: int) -> str:
    """Return the letters A, B, C, ... for concepts 0, 1, 2, ..., and numbers from 26 on.

    >>> format_concept(2), format_concept(26)
    ('C', '26')
    """
    return chr(ord("A") + k) if k < 26 else str(k)


def explain_event(event: Mapping[str, Any]) -> str:
    """Describe the cause of an event in a sentence; other values of the cause follow in brackets.

    >>> cause = {"clients": [7], "error": 0.86, "reference": 0.12, "delta": 0.1, "from": 0}
    >>> explain_event({"event": "created", "model": 2, "cause": cause})
    "the best model's error rose from 0.120 to 0.860, by more than delta 0.1; model 2 starts as a copy of model 0"
    """
    cause = {key: value for key, value in event["cause"].items() if key != "clients"}
    describers = {"created": _describe_creation, "merged": _describe_merge, "decided": _describe_decision}
    parts = describers.get(event["event"], _describe_reason)(event["model"], cause)
    sentence = "; ".join(part for part in parts if part)
    return f"{sentence} ({format_settings(cause)})" if sentence and cause else sentence or format_settings(cause)


def format_event_line(event: Mapping[str, Any], clients: Sequence[str]) -> str:
    """Format an event as one line: the change of a model or the decision, the clients concerned, and the reason.

    >>> cause = {"clients": [], "reason": "alarms were reviewed", "alarms": 3, "confirmed": 2, "contradicted": 0}
    >>> format_event_line({"event": "decided", "model": 0, "cause": cause}, ["north", "south"])
    'decision for all clients: alarms were reviewed; of 3 alarms, 2 confirmed and 0 contradicted'
    >>> cause = {"clients": [1], "reason": "goes back to model 0", "rows": 250}
    >>> format_event_line({"event": "decided", "model": 0, "cause": cause}, ["north", "south"])
    'decision for client south: goes back to model 0 (rows=250)'
    """
    reason = explain_event(event)
    users = event["cause"].get("clients")
    if event["event"] == "merged":
        return reason
    line = "decision" if event["event"] == "decided" else f"model {event['model']} {event['event']}"
    if event["event"] == "decided" and not users:
        line += " for all clients"
    elif isinstance(users, list) and users:
        has_name = len(users) == 1 and users[0] in range(len(clients))
        line += f" for client {clients[users[0]]}" if has_name else f" for {len(users)} clients"
    return f"{line}: {reason}" if reason else line


def explain_alarm(shifts: Mapping[str, Any], t: int) -> str:
    """Describe what changed in the data of a client that raised an alarm.

    Args:
        shifts: The recorded shifts of the alarm.
        t: The time step of the alarm, counted from 0.

    >>> shift = {"what": "class", "name": "rain", "before": 0.12, "after": 0.4, "distance": 0.28}
    >>> explain_alarm({"since": 3, "rows": [90, 90], "moved": [shift], "more": 0}, 4)
    'the inputs are as before: what changed is which class they belong to (class rain: 40 %, before 12 %)'
    """
    named = shifts["moved"]
    more = shifts["more"]
    inputs = [s for s in named if s["what"] != "class"]
    in_order = sorted(named, key=lambda s: rank_shift(s["what"], s.get("within"), s.get("common", False)))
    text = "; ".join([*map(describe_shift, in_order), *[f"{more} input{'s' * (more > 1)} more"] * (more > 0)])
    if not named and not more and min(shifts["rows"]) < MIN_ROWS_PER_TEST:
        text = f"fewer than {MIN_ROWS_PER_TEST} rows are not enough to find what changed"
    elif not named and not more:
        text = "neither the inputs nor the class shares differ from before by more than chance, also within classes"
    elif (inputs or not more) and all(s.get("within") is not None for s in inputs):  # changed only within classes
        same = "the inputs are" if len(named) > len(inputs) else "the inputs and the class shares are"
        text = f"{same} as before: what changed is which class they belong to ({text})"
    elif named and all(s.get("common") for s in named):
        text = f"everything that changed also changed at most clients: {text}"
    return text if shifts["since"] == t - 1 else f"{text}; before is time {shifts['since'] + 1}"


def _describe_creation(model: int, cause: dict[str, Any]) -> list[str]:
    """Describe the creation of a model in several parts, and remove their values from the cause."""
    parts = []
    metric = next((name for name in ("error", "loss") if name in cause), None)
    if metric and _has_numbers(cause, metric, "reference"):
        rise = f"the best model's {metric} rose from {cause.pop('reference'):.3f} to {cause.pop(metric):.3f}"
        parts.append(rise + (f", by more than delta {cause.pop('delta'):g}" if _has_numbers(cause, "delta") else ""))
    if cause.get("reason") == "reactive phase" and _has_numbers(cause, "accuracy", "best", "delta"):
        drop = f"accuracy {cause.pop('accuracy'):.3f} fell below the best so far, {cause.pop('best'):.3f}"
        parts.append(f"{drop}, by more than delta {cause.pop('delta'):g}")
    if isinstance(cause.get("concept"), int):
        parts.append(f"Oracle received concept {format_concept(cause.pop('concept'))}")
    if "round" in cause and cause.get("from") is not None:
        parts.append(
            f"in round {cause.pop('round')} the updates of model {cause.pop('from')}'s clients pointed in different "
            "directions"
        )
        parts.append("both parts start again from the initial model")
    if "reason" in cause:
        parts.append(str(cause.pop("reason")))
    if "start" in cause and isinstance(cause.get("starts"), list):
        starts = ", ".join(map(str, cause.pop("starts")))
        parts.append(f"a trial on the client's data chose the start {cause['start']} among {starts}")
        for key in ("rows", "wrong", "wins"):
            cause.pop(key, None)
    parent, start, family = (cause.pop(key, None) for key in ("from", "start", "family"))
    if parent is not None:
        trunk = f" on trunk {family}" if family is not None else ""
        parts.append(f"model {model} starts as a copy of model {parent}{trunk}")
    elif start == "fresh" or metric:
        parts.append(f"model {model} starts with new random parameters")
    return parts


def _describe_merge(model: int, cause: dict[str, Any]) -> list[str]:
    """Describe a merge in one sentence, and remove its values from the cause."""
    keys = "into", "distance", "unit", "kept", "family"
    into, distance, unit, kept, family = (cause.pop(key, None) for key in keys)
    gap = f"{distance:.3f} {unit}" if unit else f"{distance:.3f}"
    trunk = f" on trunk {family}" if family is not None else ""
    note = f"; {kept} was kept" if kept is not None else ""
    return [f"model {model} merged into model {into}{trunk}: on each other's data they differ by {gap}{note}"]


def _describe_decision(model: int, cause: dict[str, Any]) -> list[str]:
    """Return the reason of a decision, and round the other values of its cause."""
    if _has_numbers(cause, "alarms", "confirmed", "contradicted"):
        alarms, confirmed, contradicted = (cause.pop(key) for key in ("alarms", "confirmed", "contradicted"))
        outcome = f"of {format_count(alarms, 'alarm')}, {confirmed} confirmed and {contradicted} contradicted"
        return [*_describe_decision(model, cause), outcome]
    cause |= {key: f"{value:.4g}" for key, value in cause.items() if isinstance(value, float)}
    return _describe_reason(model, cause)


def _describe_reason(model: int, cause: dict[str, Any]) -> list[str]:
    """Remove the reason from a cause and return it."""
    return [str(cause.pop("reason", ""))]


def _has_numbers(cause: Mapping[str, Any], *names: str) -> bool:
    values = [cause.get(name) for name in names]
    return all(isinstance(value, int | float) and abs(value) <= 1e15 for value in values)


def build_run_command(header: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Build the command that repeats a run.

    The command contains the settings that differ from the algorithm's defaults, and the settings with a default that
    depends on the stream.

    Args:
        header: The header of the run's record.

    Returns:
        The command, and notes about missing parts, such as files of which the record has only a digest.
    """
    if header["n_steps"] is None:
        return "feddrift deploy run DIR", ["DIR is the folder of this deployment; it goes on where it stopped"]
    words = ["feddrift", "run", "--stream", header["stream"], "--algorithm", header["algorithm"]]
    notes = []
    entry = algorithms.ALGORITHMS.get(header["algorithm"])
    defaults = {name: field.default for name, field in algorithms.get_options(entry.cls).items()} if entry else {}
    on_fmow = algorithms.FMOW_DEFAULTS.get(header["algorithm"], {}) if header["stream"].startswith("fmow") else {}
    depends_on_stream = {"n_models", *on_fmow}
    depends_on_stream |= set(algorithms.get_family_defaults(entry.cls)) if entry else set()
    for key, value in header["settings"].items():
        if key not in defaults or value != defaults[key] or key in depends_on_stream:
            words += ["--set", f"{key}={_format_option_value(value)}"]
    for key, value in header["overrides"].items():
        if key == "data":
            notes.append(f"the data had the digest {value}")
        elif key == "weights":
            notes.append(f"add --weights FILE, whose digest was {value}")
        elif key == "scale":
            words.append("--no-scale")
        elif key == "balance" and value:
            words.append("--balance")
        elif key == "balance":
            notes.append("from Python, with balance=False: its stream balances classes by itself")
        elif key == "pattern" and "@" in str(value):
            name, _, digest = str(value).partition("@")
            words += ["--pattern", name]
            notes.append(f"the pattern file {name} had the digest {digest}")
        else:
            words += [f"--{key.replace('_', '-')}", _format_option_value(value)]
    words += ["--seed", str(header["seed"])]
    return shlex.join(words), notes


def _format_option_value(value: Any) -> str:
    """Format a value as the command line takes it."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
