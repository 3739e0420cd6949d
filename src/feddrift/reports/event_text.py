"""A record told in words: why a model was born, merged or left, what was decided, and which command made the run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from feddrift import algorithms
from feddrift.drift_explanation import FEW, rank
from feddrift.reports.labels import describe, moved

# How the reason begins of all that follows from it in the record; the number of that time comes behind.
WENT_BACK = "an operator went back to the models of time"


def letter(k: int) -> str:
    """A, B, C, ... for concepts 0, 1, 2, ...

    >>> letter(2), letter(26)
    ('C', '26')
    """
    return chr(ord("A") + k) if k < 26 else str(k)


def event_sentence(event: Mapping[str, Any]) -> str:
    """The cause of an event as a sentence; what it says beyond the usual follows in brackets.

    >>> cause = {"clients": [7], "error": 0.86, "reference": 0.12, "delta": 0.1, "from": 0}
    >>> event_sentence({"event": "created", "model": 2, "cause": cause})
    "the best model's error rose from 0.120 to 0.860, by more than delta 0.1; model 2 starts as a copy of model 0"
    """
    cause = {key: value for key, value in event["cause"].items() if key != "clients"}
    tell = {"created": _created, "merged": _merged, "decided": _decided}.get(event["event"], _turned)
    parts = tell(event["model"], cause)
    sentence = "; ".join(part for part in parts if part)
    return f"{sentence} ({describe(cause)})" if sentence and cause else sentence or describe(cause)


def event_line(event: Mapping[str, Any], clients: Sequence[str]) -> str:
    """An event in one line: what became of which model for whom, or was decided for whom, and why.

    >>> cause = {"clients": [1], "reason": "goes back to model 0", "rows": 250}
    >>> event_line({"event": "decided", "model": 0, "cause": cause}, ["north", "south"])
    'decided for client south: goes back to model 0 (rows=250)'
    """
    why, users = event_sentence(event), event["cause"].get("clients")
    if event["event"] == "merged":
        return why
    line = "decided" if event["event"] == "decided" else f"model {event['model']} {event['event']}"
    if event["event"] == "decided" and not users:
        line += " for all clients"
    elif isinstance(users, list) and users:
        one = len(users) == 1 and users[0] in range(len(clients))
        line += f" for client {clients[users[0]]}" if one else f" for {len(users)} clients"
    return f"{line}: {why}" if why else line


def alarm_sentence(shifts: Mapping[str, Any], t: int) -> str:
    """What moved in the data of a client that raised an alarm at time t, counted from 0.

    >>> shift = {"what": "class", "name": "rain", "before": 0.12, "after": 0.4, "distance": 0.28}
    >>> alarm_sentence({"since": 3, "rows": [90, 90], "moved": [shift], "more": 0}, 4)
    'the inputs are as before: what changed is which class they belong to (class rain: 40 %, before 12 %)'
    """
    named, more = shifts["moved"], shifts["more"]
    inputs = [s for s in named if s["what"] != "class"]
    in_order = sorted(named, key=lambda s: rank(s["what"], s.get("within"), s.get("common", False)))
    text = "; ".join([*map(moved, in_order), *[f"{more} input{'s' * (more > 1)} more"] * (more > 0)])
    if not named and not more and min(shifts["rows"]) < FEW:
        text = f"of fewer than {FEW} rows it is not told what moved"
    elif not named and not more:
        text = "neither the inputs nor the class shares differ from before by more than chance, also within classes"
    elif (inputs or not more) and all(s.get("within") is not None for s in inputs):  # none moved among all rows
        same = "the inputs are" if len(named) > len(inputs) else "the inputs and the class shares are"
        text = f"{same} as before: what changed is which class they belong to ({text})"
    elif named and all(s.get("common") for s in named):
        text = f"nothing is seen that moved at this client only: {text}"
    return text if shifts["since"] == t - 1 else f"{text}; before is time {shifts['since'] + 1}"


def _created(model: int, cause: dict[str, Any]) -> list[str]:
    """Sentences of a birth; what they use is taken out of the cause."""
    parts = []
    metric = next((name for name in ("error", "loss") if name in cause), None)
    if metric and _numbers(cause, metric, "reference"):
        rise = f"the best model's {metric} rose from {cause.pop('reference'):.3f} to {cause.pop(metric):.3f}"
        parts.append(rise + (f", by more than delta {cause.pop('delta'):g}" if _numbers(cause, "delta") else ""))
    if cause.get("reason") == "reactive phase" and _numbers(cause, "accuracy", "best", "delta"):
        fell = f"accuracy {cause.pop('accuracy'):.3f} fell below the best so far, {cause.pop('best'):.3f}"
        parts.append(f"{fell}, by more than delta {cause.pop('delta'):g}")
    if isinstance(cause.get("concept"), int):
        parts.append(f"Oracle was told of concept {letter(cause.pop('concept'))}")
    if "round" in cause and cause.get("from") is not None:
        parts.append(f"in round {cause.pop('round')} the updates of model {cause.pop('from')}'s clients pointed apart")
        parts.append("both halves start over")
    if "reason" in cause:
        parts.append(str(cause.pop("reason")))
    if "start" in cause and isinstance(cause.get("starts"), list):
        parts.append(
            f"of {', '.join(map(str, cause.pop('starts')))} a trial on the client's own data chose {cause['start']}"
        )
        for key in ("rows", "wrong", "wins"):
            cause.pop(key, None)
    parent, start, family = cause.pop("from", None), cause.pop("start", None), cause.pop("family", None)
    if parent is not None:
        on = f" on trunk {family}" if family is not None else ""
        parts.append(f"model {model} starts as a copy of model {parent}{on}")
    elif start == "fresh" or metric:
        parts.append(f"model {model} starts afresh")
    return parts


def _merged(model: int, cause: dict[str, Any]) -> list[str]:
    keys = "into", "distance", "unit", "kept", "family"
    into, distance, unit, kept, family = (cause.pop(key, None) for key in keys)
    far = f"{distance:.3f} {unit}" if unit else f"{distance:.3f}"
    on = f" on trunk {family}" if family is not None else ""
    of = f"; {kept} was kept" if kept is not None else ""
    return [f"model {model} merged into model {into}{on}: on each other's data they are {far} apart{of}"]


def _decided(model: int, cause: dict[str, Any]) -> list[str]:
    cause |= {key: f"{value:.4g}" for key, value in cause.items() if isinstance(value, float)}
    return _turned(model, cause)


def _turned(model: int, cause: dict[str, Any]) -> list[str]:
    return [str(cause.pop("reason", ""))]


def _numbers(cause: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(value := cause.get(name), int | float) and abs(value) <= 1e15 for name in names)


def command(header: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The command that runs it again, and what the record knows by a digest only.

    Settings are spelt out where they differ from the algorithm's own default or where a stream may bring another.
    """
    if header["n_steps"] is None:
        return "feddrift deploy run DIR", ["DIR is the folder of this deployment; it goes on where it stopped"]
    words = ["feddrift", "run", "--stream", header["stream"], "--algorithm", header["algorithm"]]
    entry, notes = algorithms.ALGORITHMS.get(header["algorithm"]), []
    defaults = {name: field.default for name, field in algorithms.options(entry.cls).items()} if entry else {}
    on_fmow = algorithms.ON_FMOW.get(header["algorithm"], {}) if header["stream"].startswith("fmow") else {}
    varies = {"n_models", *on_fmow}
    varies |= set(algorithms.by_family(entry.cls)) if entry else set()
    for key, value in header["settings"].items():
        if key not in defaults or value != defaults[key] or key in varies:
            words += ["--set", f"{key}={_word(value)}"]
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
            words += [f"--{key.replace('_', '-')}", _word(value)]
    words += ["--seed", str(header["seed"])]
    return shlex.join(words), notes


def _word(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
