"""Exchange of messages with several nodes over Flower's Grid, with a deadline, and its line in the record."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from feddrift.engines.flower import serialization
from feddrift.errors import ConfigError, FeddriftError

MESSAGE_GRACE_SECONDS = 5.0  # from the deadline until a message expires; Flower deletes later replies
MAX_PAUSE_SECONDS = 60.0  # maximum interval between requests for new data while no client has any


class QuorumError(FeddriftError):
    """Too few clients can be reached to continue."""


@dataclass(frozen=True)
class WaitingRules:
    """Rules for how long a server waits, and for how many clients. All times are in seconds."""

    quorum: int = 1  # minimum number of clients; with fewer a time step waits
    patience: float = 600.0  # maximum time to wait for a quorum; after it the server stops
    hello: float = 60.0  # deadlines of the kinds of exchanges
    evaluate: float = 300.0
    train: float = 600.0
    poll: float = 0.5  # interval between polls for replies
    start: float | Literal["data"] = "data"  # start of a time step: with new data, or this time after the last start
    grace: float = 60.0  # maximum time to wait for other clients once a quorum has new data
    look: float = 10.0  # initial interval between requests for new data

    def __post_init__(self) -> None:
        if self.quorum < 1:
            raise ConfigError(f"quorum must be at least 1, got {self.quorum}")
        for name in ("patience", "hello", "evaluate", "train", "poll", "grace", "look"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0 seconds, got {getattr(self, name)}")
        if self.start != "data" and not (isinstance(self.start, int | float) and self.start >= 0):
            raise ConfigError(f"start must be 'data' or a number of seconds, got {self.start!r}")

    def compute_pause(self, waited: float) -> float:
        """Return the seconds until the next request for new data.

        They grow with the time waited, since each request costs the clients computing time.

        Args:
            waited: The seconds for which no client has had new data.
        """
        return max(self.look, min(waited / 10, MAX_PAUSE_SECONDS))


@dataclass(frozen=True)
class NodeReply:
    """Reply of a node, or a sentence with the reason why it is missing."""

    content: RecordDict | str
    seconds: float | None = None  # until it arrived


@dataclass
class ClientOutcome:
    """Outcome of an exchange for one client."""

    sent: int = 0  # bytes sent to the client, 0 if it is not connected
    answered: int = 0  # bytes of its reply
    seconds: float | None = None  # until its reply arrived; None: no reply
    trouble: str | None = None  # the reason why its reply is missing or refused
    note: str | None = None  # information for its operator; its reply is used
    backlog: int = 0  # as in HelloReply
    gap: int | None = None


@dataclass
class Exchange:
    """One request to some clients at time t, and the outcomes."""

    t: int
    asked: str  # kind of request
    round: int | None  # of training
    at: str  # when it was sent, as ISO time
    took: float = 0.0  # seconds until all replies had arrived, or the deadline had passed
    clients: dict[int, ClientOutcome] = field(default_factory=dict)

    @property
    def failed_clients(self) -> set[int]:
        """Clients whose reply is missing or refused."""
        return {c for c, outcome in self.clients.items() if outcome.trouble is not None}

    def add_outcomes(
        self,
        took: float,
        clients: Iterable[int],
        contents: Mapping[int, RecordDict],
        replies: Mapping[int, NodeReply],
        trouble: Mapping[int, str],
    ) -> None:
        """Add the outcomes for these clients; call it again for repeated requests.

        Args:
            took: The duration in seconds.
            clients: The clients of the requests.
            contents: By client, the message that was sent.
            replies: By client, the reply.
            trouble: By client, the reason why its reply is missing or refused.
        """
        for c in clients:
            outcome = self.clients.setdefault(c, ClientOutcome())
            reply = replies.get(c)
            outcome.trouble = trouble.get(c)
            if c in contents:
                outcome.sent += serialization.count_bytes(contents[c])
            if reply is not None and not isinstance(reply.content, str):
                outcome.answered += serialization.count_bytes(reply.content)
                outcome.seconds = round(self.took + (reply.seconds or 0.0), 3)
        self.took = round(self.took + took, 3)

    def to_record_line(self) -> dict[str, Any]:
        """Return the exchange as a line of the record, with lists over the clients."""
        head = {name: getattr(self, name) for name in ("t", "asked", "round", "at", "took")}
        outcomes = self.clients.values()
        columns = {f.name: [getattr(outcome, f.name) for outcome in outcomes] for f in fields(ClientOutcome)}
        if not any(columns["backlog"]):
            del columns["backlog"], columns["gap"]
        if not any(columns["note"]):
            del columns["note"]
        return {**head, "c": list(self.clients), **columns}


def exchange_messages(
    grid: Grid, action: str, contents: Mapping[int, RecordDict], deadline: float, poll: float
) -> dict[int, NodeReply]:
    """Send each node its message and collect the replies.

    Args:
        grid: The connection.
        action: The type of the messages in Flower.
        contents: The message for each node.
        deadline: Seconds to wait for replies.
        poll: Seconds between polls for replies.

    Returns:
        For each node its reply, or the reason why it is missing.
    """
    nodes = list(contents)
    if not nodes:
        return {}
    ttl = deadline + MESSAGE_GRACE_SECONDS
    messages = [
        Message(serialization.pack_inline(contents[node]), node, action, ttl=ttl, group_id=action) for node in nodes
    ]
    began = time.monotonic()
    end = began + deadline
    pushed = zip(grid.push_messages(messages), nodes, strict=False)
    waiting = {message_id: node for message_id, node in pushed if message_id}  # an empty id: it could not be sent
    replies = dict.fromkeys(set(nodes) - set(waiting.values()), NodeReply("the message could not be sent"))
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            # Flower's own errors come from another node id: the message to which they reply identifies the node.
            node = waiting.pop(reply.metadata.reply_to_message_id, None)
            if node is not None:
                content = _format_error(reply) if reply.has_error() else serialization.unpack_inline(reply.content)
                replies[node] = NodeReply(content, round(time.monotonic() - began, 3))
        if not waiting or time.monotonic() >= end:
            break
        time.sleep(min(poll, max(0.0, end - time.monotonic())))
    return replies | dict.fromkeys(waiting.values(), NodeReply(f"no reply within {deadline:g} s"))


def _format_error(reply: Message) -> str:
    return f"error {reply.error.code}: {(reply.error.reason or 'no reason given').strip().splitlines()[-1][:200]}"
