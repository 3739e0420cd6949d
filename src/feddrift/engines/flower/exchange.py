"""One exchange with several nodes over Flower's Grid: who does not answer in time is named and left behind."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from feddrift.errors import ConfigError, FeddriftError

LATE = 5.0  # seconds that a message outlives its deadline: a late reply is thrown away, not worked on

_log = logging.getLogger("feddrift")


class QuorumError(FeddriftError):
    """Too few clients can be reached to go on."""


@dataclass(frozen=True)
class Rules:
    """How long a server waits, and for whom. All times are in seconds."""

    quorum: int = 1  # clients; with fewer a time step waits
    patience: float = 600.0  # and after so long it says so and stops
    hello: float = 60.0  # the deadlines of an exchange
    evaluate: float = 300.0
    train: float = 600.0
    poll: float = 0.5  # how often replies are looked for
    start: float | Literal["data"] = "data"  # a time step starts when new data are there, or so long after the last one
    grace: float = 60.0  # once a quorum has new data, so long it waits for the others
    look: float = 10.0  # how often clients are asked for new data

    def __post_init__(self) -> None:
        if self.quorum < 1:
            raise ConfigError(f"quorum must be at least 1, got {self.quorum}")
        for name in ("patience", "hello", "evaluate", "train", "poll", "grace", "look"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0 seconds, got {getattr(self, name)}")
        if self.start != "data" and not (isinstance(self.start, int | float) and self.start >= 0):
            raise ConfigError(f"start must be 'data' or a number of seconds, got {self.start!r}")


def exchange(
    grid: Grid, action: str, contents: Mapping[int, RecordDict], deadline: float, poll: float
) -> dict[int, RecordDict | str]:
    """Send each node its message and gather the replies; a sentence stands for a reply that did not come."""
    nodes, found = list(contents), dict[int, RecordDict | str]()
    if not nodes:
        return found
    sent = [Message(contents[n], n, action, ttl=deadline + LATE, group_id=action) for n in nodes]
    end = time.monotonic() + deadline
    waiting = dict(zip(grid.push_messages(sent), nodes, strict=False))
    found |= dict.fromkeys(set(nodes) - set(waiting.values()), "the message could not be sent")
    for unsent in [name for name in waiting if not name]:
        found[waiting.pop(unsent)] = "the message could not be sent"
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            # An error of Flower's own has not the node's id: the message it answers tells whose it is.
            node = waiting.pop(reply.metadata.reply_to_message_id, None)
            if node is not None:
                found[node] = _error(reply) if reply.has_error() else reply.content
        if waiting and time.monotonic() >= end:
            break
        if waiting:
            time.sleep(min(poll, max(0.0, end - time.monotonic())))
    return found | dict.fromkeys(waiting.values(), f"no reply within {deadline:g} s")


def _error(reply: Message) -> str:
    return f"error {reply.error.code}: {(reply.error.reason or 'no reason given').strip().splitlines()[-1][:200]}"
