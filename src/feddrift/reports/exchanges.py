"""What the questions to clients of real machines took: by time step, by client, and who sat out why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from feddrift.runs.record import Record

KINDS = ("hello", "evaluate", "describe", "reroute", "contest", "tournament", "train", "explain")
REFUSED = "its reply is refused"  # how the trouble with a client begins whose answer cannot be used
MAX_LISTED = 1000  # of those who sat out, the newest


def for_page(record: Record) -> dict[str, Any] | None:
    """The exchanges of a record as plain values for the page; None where nothing was asked over a network."""
    if not record.exchanges:
        return None
    out = sorted([*sat_out(record), *noted(record)], key=lambda entry: entry[0])
    return {
        "seconds": seconds(record),
        "clients": by_client(record),
        "out": [list(entry) for entry in out[-MAX_LISTED:]],
        "n_out": len(out),
        "last": record.exchanges[-1]["at"],
    }


def seconds(record: Record) -> dict[str, list[float]]:
    """By kind of question, [t], how long the clients were waited for; the last may be a time step under way."""
    last = max(line["t"] for line in record.exchanges)
    by_kind = {kind: [0.0] * (last + 1) for kind in KINDS}
    for line in record.exchanges:
        by_kind.setdefault(line["asked"], [0.0] * (last + 1))[line["t"]] += line["took"]
    return {kind: [round(value, 1) for value in values] for kind, values in by_kind.items()}


def sat_out(record: Record) -> Iterator[tuple[str, int, int, str, int | None, str]]:
    """When (the clock's, and the time step), who, what was asked, in which round, and why there was no use of it."""
    for line in record.exchanges:
        for c, why in zip(line["c"], line["trouble"], strict=True):
            if why is not None and line["asked"] != "explain":  # who did not answer that went on training
                yield line["at"], line["t"], c, line["asked"], line["round"], why


def noted(record: Record) -> Iterator[tuple[str, int, int, str, int | None, str]]:
    """As `sat_out`, what was noticed of clients, whether they took part or not: damaged data, an old version."""
    for line in record.exchanges:
        for c, what in zip(line["c"], line.get("note") or (), strict=False):
            if what is not None:
                yield line["at"], line["t"], c, line["asked"], line["round"], what


def absent(record: Record, t: int) -> list[int]:
    """Who did not take part in the training of time t to its end: whose last answer at that time was missing.

    Who missed a hello and answered the next one took part.
    """
    trouble: dict[int, bool] = {}
    for line in record.exchanges:
        if line["t"] == t and line["asked"] != "explain":
            trouble |= {c: why is not None for c, why in zip(line["c"], line["trouble"], strict=True)}
    return sorted(c for c, out in trouble.items() if out)


def last_words(record: Record) -> dict[int, str | None]:
    """By client, the trouble with the last question to it; None: it answered."""
    trouble: dict[int, str | None] = {}
    for line in record.exchanges:
        trouble |= dict(zip(line["c"], line["trouble"], strict=True))
    return trouble


def waiting(record: Record) -> dict[int, tuple[int, int | None]]:
    """By client, as of its last hello, how many batches wait to be shown, and the missing one that they wait for."""
    found: dict[int, tuple[int, int | None]] = {}
    for line in record.exchanges:
        for k, c in enumerate(line["c"]):
            if line["asked"] == "hello" and line["trouble"][k] is None:
                nobody = line.get("backlog") is None or line.get("gap") is None
                found[c] = (0, None) if nobody else (line["backlog"][k], line["gap"][k])
    return found


def by_client(record: Record) -> list[dict[str, Any]]:
    """Of each client how often it was asked and answered, how fast, bytes to and from it, and the last trouble."""
    entries = [{"asked": 0, "answered": 0, "to": 0, "from": 0} for _ in record.header["clients"]]
    waited: list[list[float]] = [[] for _ in entries]
    for line in record.exchanges:
        for c, sent, answered, seconds, trouble in zip(
            *(line[name] for name in ("c", "sent", "answered", "seconds", "trouble")), strict=True
        ):
            entries[c]["asked"] += 1
            entries[c]["answered"] += trouble is None
            entries[c]["to"] += sent
            entries[c]["from"] += answered
            if seconds is not None:
                waited[c].append(seconds)
    last = last_words(record)
    return [
        {
            **entry,
            "median": round(float(np.median(times)), 1) if times else None,
            "slowest": round(max(times), 1) if times else None,
            "trouble": last.get(c),
        }
        for c, (entry, times) in enumerate(zip(entries, waited, strict=True))
    ]
