"""One exchange with several nodes over Flower's Grid: who does not answer in time is named and left behind."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from feddrift.engines.flower.wire import size
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


@dataclass(frozen=True)
class Reply:
    """What a node answered, or a sentence that says why there is nothing; and after how many seconds it was there."""

    content: RecordDict | str
    seconds: float | None = None


@dataclass(frozen=True)
class Exchange:
    """One question to some clients at time t, and what came back, in lists over these clients."""

    t: int
    asked: str  # what
    round: int | None  # of training
    at: str  # when it was asked, as ISO time
    took: float  # seconds until all had answered, or had had their time
    c: list[int]
    sent: list[int]  # bytes to the client, 0 where it is not connected
    answered: list[int]  # bytes from it
    seconds: list[float | None]  # until its answer was there; None: none came
    trouble: list[str | None]  # why it sits out

    @classmethod
    def of(
        cls,
        t: int,
        asked: str,
        round: int | None,
        at: datetime,
        took: float,
        clients: Sequence[int],
        contents: Mapping[int, RecordDict],
        replies: Mapping[int, Reply],
        trouble: Mapping[int, str],
    ) -> Exchange:
        """What was sent to these clients, and what came, by client."""
        answers = {c: reply.content for c, reply in replies.items() if not isinstance(reply.content, str)}
        return cls(
            t,
            asked,
            round,
            at.isoformat(timespec="milliseconds"),
            took,
            list(clients),
            [size(contents[c]) if c in contents else 0 for c in clients],
            [size(answers[c]) if c in answers else 0 for c in clients],
            [replies[c].seconds if c in answers else None for c in clients],
            [trouble.get(c) for c in clients],
        )


def exchange(
    grid: Grid, action: str, contents: Mapping[int, RecordDict], deadline: float, poll: float
) -> dict[int, Reply]:
    """Send each node its message and gather the replies."""
    nodes, found = list(contents), dict[int, Reply]()
    if not nodes:
        return found
    sent = [Message(contents[n], n, action, ttl=deadline + LATE, group_id=action) for n in nodes]
    began = time.monotonic()
    end = began + deadline
    waiting = dict(zip(grid.push_messages(sent), nodes, strict=False))
    unsent = Reply("the message could not be sent")
    found |= dict.fromkeys(set(nodes) - set(waiting.values()), unsent)
    for name in [name for name in waiting if not name]:
        found[waiting.pop(name)] = unsent
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            # An error of Flower's own has not the node's id: the message it answers tells whose it is.
            node = waiting.pop(reply.metadata.reply_to_message_id, None)
            if node is not None:
                content = _error(reply) if reply.has_error() else reply.content
                found[node] = Reply(content, round(time.monotonic() - began, 3))
        if waiting and time.monotonic() >= end:
            break
        if waiting:
            time.sleep(min(poll, max(0.0, end - time.monotonic())))
    return found | dict.fromkeys(waiting.values(), Reply(f"no reply within {deadline:g} s"))


def _error(reply: Message) -> str:
    return f"error {reply.error.code}: {(reply.error.reason or 'no reason given').strip().splitlines()[-1][:200]}"
