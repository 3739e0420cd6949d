"""Statistics of the requests to clients on real machines: times, traffic, and missing replies with their reasons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from feddrift.runs.record import Record

REQUEST_KINDS = ("hello", "evaluate", "describe", "reroute", "contest", "tournament", "train", "explain")
# Beginnings of the trouble if a reply cannot be used, or if the client's policy does not allow the request.
REFUSED_REPLY_PREFIXES = "its reply is refused", "it refuses the request"
MAX_LISTED_PROBLEMS = 1000  # the newest missing replies and notes on the page


def collect_exchanges(record: Record) -> dict[str, Any] | None:
    """Return the exchanges of a record as plain values for the page; None if no request was sent over a network."""
    if not record.exchanges:
        return None
    problems = sorted([*find_missing_replies(record), *find_client_notes(record)], key=lambda entry: entry[0])
    return {
        "seconds": sum_waiting_seconds(record),
        "clients": summarise_clients(record),
        "out": [list(entry) for entry in problems[-MAX_LISTED_PROBLEMS:]],
        "n_out": len(problems),
        "last": record.exchanges[-1]["at"],
    }


def sum_waiting_seconds(record: Record) -> dict[str, list[float]]:
    """Return the seconds of waiting for clients in each time step, by kind of request."""
    last = max(line["t"] for line in record.exchanges)
    by_kind = {kind: [0.0] * (last + 1) for kind in REQUEST_KINDS}
    for line in record.exchanges:
        by_kind.setdefault(line["asked"], [0.0] * (last + 1))[line["t"]] += line["took"]
    return {kind: [round(value, 1) for value in values] for kind, values in by_kind.items()}


def find_missing_replies(record: Record) -> Iterator[tuple[str, int, int, str, int | None, str]]:
    """Yield the requests without a usable reply.

    Yields:
        The clock time, the time step, the client, the kind of the request, the round, and the reason.
    """
    for line in record.exchanges:
        for c, reason in zip(line["c"], line["trouble"], strict=True):
            if reason is not None and line["asked"] != "explain":  # a client without this reply still trains
                yield line["at"], line["t"], c, line["asked"], line["round"], reason


def find_client_notes(record: Record) -> Iterator[tuple[str, int, int, str, int | None, str]]:
    """Yield notes about clients, whether they replied or not, such as damaged data or an old version.

    Yields:
        The same values as `find_missing_replies`, with the note in place of the reason.
    """
    for line in record.exchanges:
        for c, note in zip(line["c"], line.get("note") or (), strict=False):
            if note is not None:
                yield line["at"], line["t"], c, line["asked"], line["round"], note


def find_absent_clients(record: Record, t: int) -> list[int]:
    """Return the clients that were absent at the end of the training of time t.

    These are the clients without a reply to their last request of the time step; earlier missing replies do not count.
    """
    is_absent: dict[int, bool] = {}
    for line in record.exchanges:
        if line["t"] == t and line["asked"] != "explain":
            is_absent |= {c: reason is not None for c, reason in zip(line["c"], line["trouble"], strict=True)}
    return sorted(c for c, absent in is_absent.items() if absent)


def get_last_problems(record: Record) -> dict[int, str | None]:
    """Return by client the problem with its last request; None: it replied."""
    problems: dict[int, str | None] = {}
    for line in record.exchanges:
        problems |= dict(zip(line["c"], line["trouble"], strict=True))
    return problems


def get_client_backlogs(record: Record) -> dict[int, tuple[int, int | None]]:
    """Return by client, as of its last hello, the number of waiting batches and the missing batch or None."""
    backlogs: dict[int, tuple[int, int | None]] = {}
    for line in record.exchanges:
        for k, c in enumerate(line["c"]):
            if line["asked"] == "hello" and line["trouble"][k] is None:
                is_unknown = line.get("backlog") is None or line.get("gap") is None
                backlogs[c] = (0, None) if is_unknown else (line["backlog"][k], line["gap"][k])
    return backlogs


def summarise_clients(record: Record) -> list[dict[str, Any]]:
    """Return for each client its requests and replies, bytes to and from it, waiting times, and last problem."""
    entries = [{"asked": 0, "answered": 0, "to": 0, "from": 0} for _ in record.header["clients"]]
    waiting_times: list[list[float]] = [[] for _ in entries]
    for line in record.exchanges:
        for c, sent, answered, seconds, trouble in zip(
            *(line[name] for name in ("c", "sent", "answered", "seconds", "trouble")), strict=True
        ):
            entries[c]["asked"] += 1
            entries[c]["answered"] += trouble is None
            entries[c]["to"] += sent
            entries[c]["from"] += answered
            if seconds is not None:
                waiting_times[c].append(seconds)
    last_problems = get_last_problems(record)
    return [
        {
            **entry,
            "median": round(float(np.median(times)), 1) if times else None,
            "slowest": round(max(times), 1) if times else None,
            "trouble": last_problems.get(c),
        }
        for c, (entry, times) in enumerate(zip(entries, waiting_times, strict=True))
    ]
