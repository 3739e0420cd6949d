"""One exchange with several nodes over Flower's Grid: who does not answer in time is named and left behind."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from feddrift.engines.flower import serialization
from feddrift.errors import ConfigError, FeddriftError

LATE = 5.0  # seconds that a message outlives its deadline: a late reply is thrown away, not worked on
LONGEST = 60.0  # seconds between questions for new data that never come


class QuorumError(FeddriftError):
    """Too few clients can be reached to go on."""


@dataclass(frozen=True)
class WaitingRules:
    """How long a server waits, and for whom. All times are in seconds."""

    quorum: int = 1  # clients; with fewer a time step waits
    patience: float = 600.0  # and after so long it says so and stops
    hello: float = 60.0  # the deadlines of an exchange
    evaluate: float = 300.0
    train: float = 600.0
    poll: float = 0.5  # how often replies are looked for
    start: float | Literal["data"] = "data"  # a time step starts when new data are there, or so long after the last one
    grace: float = 60.0  # once a quorum has new data, so long it waits for the others
    look: float = 10.0  # how often clients are asked for new data, at first

    def __post_init__(self) -> None:
        if self.quorum < 1:
            raise ConfigError(f"quorum must be at least 1, got {self.quorum}")
        for name in ("patience", "hello", "evaluate", "train", "poll", "grace", "look"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0 seconds, got {getattr(self, name)}")
        if self.start != "data" and not (isinstance(self.start, int | float) and self.start >= 0):
            raise ConfigError(f"start must be 'data' or a number of seconds, got {self.start!r}")

    def pause(self, waited: float) -> float:
        """Seconds until clients are asked again, when for so long none has had new data: a question costs them."""
        return max(self.look, min(waited / 10, LONGEST))


@dataclass(frozen=True)
class Reply:
    """What a node answered, or a sentence that says why there is nothing; and after how many seconds it was there."""

    content: RecordDict | str
    seconds: float | None = None


@dataclass
class Answer:
    """What became of one client's share of an exchange."""

    sent: int = 0  # bytes to the client, 0 where it is not connected
    answered: int = 0  # bytes from it
    seconds: float | None = None  # until its answer was there; None: none came
    trouble: str | None = None  # why it sits out
    note: str | None = None  # what its operator should know, and is no reason to sit out
    backlog: int = 0  # of a hello: batches that have come and are not shown yet
    gap: int | None = None  # and the number of the missing one that they wait for


@dataclass
class Exchange:
    """One question to some clients at time t, and what came back."""

    t: int
    asked: str  # what
    round: int | None  # of training
    at: str  # when it was asked, as ISO time
    took: float = 0.0  # seconds until all had answered, or had had their time
    clients: dict[int, Answer] = field(default_factory=dict)

    @property
    def in_trouble(self) -> set[int]:
        """The clients that gave no answer, or one that was refused."""
        return {c for c, answer in self.clients.items() if answer.trouble is not None}

    def add(
        self,
        took: float,
        clients: Iterable[int],
        contents: Mapping[int, RecordDict],
        replies: Mapping[int, Reply],
        trouble: Mapping[int, str],
    ) -> None:
        """Note what was sent to these clients and what came; a second call is for those that had lacked parts."""
        for c in clients:
            answer, reply = self.clients.setdefault(c, Answer()), replies.get(c)
            answer.trouble = trouble.get(c)
            if c in contents:
                answer.sent += serialization.size(contents[c])
            if reply is not None and not isinstance(reply.content, str):
                answer.answered += serialization.size(reply.content)
                answer.seconds = round(self.took + (reply.seconds or 0.0), 3)
        self.took = round(self.took + took, 3)

    def line(self) -> dict[str, Any]:
        """The exchange as a line of the record, in lists over the clients."""
        head = {name: getattr(self, name) for name in ("t", "asked", "round", "at", "took")}
        columns = {f.name: [getattr(answer, f.name) for answer in self.clients.values()] for f in fields(Answer)}
        if not any(columns["backlog"]):
            del columns["backlog"], columns["gap"]
        if not any(columns["note"]):
            del columns["note"]
        return {**head, "c": list(self.clients), **columns}


def exchange(
    grid: Grid, action: str, contents: Mapping[int, RecordDict], deadline: float, poll: float
) -> dict[int, Reply]:
    """Send each node its message and gather the replies."""
    nodes, replies = list(contents), dict[int, Reply]()
    if not nodes:
        return replies
    sent = [Message(serialization.sealed(contents[n]), n, action, ttl=deadline + LATE, group_id=action) for n in nodes]
    began = time.monotonic()
    end = began + deadline
    waiting = dict(zip(grid.push_messages(sent), nodes, strict=False))
    unsent = Reply("the message could not be sent")
    replies |= dict.fromkeys(set(nodes) - set(waiting.values()), unsent)
    for name in [name for name in waiting if not name]:
        replies[waiting.pop(name)] = unsent
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            # An error of Flower's own has not the node's id: the message it answers tells whose it is.
            node = waiting.pop(reply.metadata.reply_to_message_id, None)
            if node is not None:
                content = _error(reply) if reply.has_error() else serialization.opened(reply.content)
                replies[node] = Reply(content, round(time.monotonic() - began, 3))
        if waiting and time.monotonic() >= end:
            break
        if waiting:
            time.sleep(min(poll, max(0.0, end - time.monotonic())))
    return replies | dict.fromkeys(waiting.values(), Reply(f"no reply within {deadline:g} s"))


def _error(reply: Message) -> str:
    return f"error {reply.error.code}: {(reply.error.reason or 'no reason given').strip().splitlines()[-1][:200]}"
