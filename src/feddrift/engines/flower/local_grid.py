"""A Grid within one process, for tests: no ports, no threads, but messages are written out and read back.

All use of Flower's private parts is here. Faults are injected by client, kind of message and count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_all_nested_objects,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from feddrift.engines.flower import serialization
from feddrift.engines.flower.client.client import Client, client_app

SERVER = 1  # Flower's own errors come from this node id, whoever failed

Fault = Callable[[Message], Message | None]  # the message to a client; the reply in its place, or None: never one


@dataclass
class LocalGrid(Grid):
    """Every client is a node whose key is its name; `faults[name, kind]` answers in a client's place."""

    clients: Mapping[str, Client]
    faults: dict[tuple[str, str], Fault] = field(default_factory=dict)
    offline: set[str] = field(default_factory=set)
    tamper: dict[tuple[str, str], Callable[[RecordDict], RecordDict]] = field(default_factory=dict)
    log: list[tuple[str, str, int]] = field(default_factory=list)  # client, kind, bytes to it

    def __post_init__(self) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SERVER, 1
        self._names = {100 + i: name for i, name in enumerate(self.clients)}
        self._apps: dict[int, ClientApp] = {
            node: client_app(lambda _, name=name: self.clients[name])  # type: ignore[misc]
            for node, name in self._names.items()
        }
        self._replies: dict[str, Message] = {}

    def set_run(self, run: Run) -> None:
        pass

    @property
    def run(self) -> Run:
        return Run.create_empty(1)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError("deprecated by Flower")

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [
            NodeInfo(node_id=node, public_key=name.encode())
            for node, name in self._names.items()
            if name not in self.offline
        ]

    def get_node_ids(self) -> Iterable[int]:
        return [node.node_id for node in self.get_nodes()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message = _through_the_wire(message)
            ids.append(message.metadata.message_id)
            reply = self._answered(message)
            if reply is not None:
                self._replies[ids[-1]] = reply
        return ids

    def _answered(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        name, kind = self._names[node], message.metadata.message_type.rpartition(".")[2]
        kind = {"models": "evaluate", "round": "train"}.get(kind, kind)
        parts = serialization.opened(message.content).array_records.values()
        size = sum(len(a.data) for record in parts for a in record.values())
        self.log.append((name, kind, size))
        if name in self.offline:
            return Message(Error(5, "node unavailable"), reply_to=message)
        if (name, kind) in self.faults:
            return self.faults[name, kind](message)
        context = Context(1, node, {}, RecordDict(), {})
        try:
            reply = self._apps[node](message, context)
        except Exception as error:
            return Message(Error(2, str(error)), reply_to=message)
        if (name, kind) in self.tamper:
            reply = Message(self.tamper[name, kind](serialization.opened(reply.content)), reply_to=message)
        return _through_the_wire(reply)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(name) for name in reversed(list(message_ids)) if name in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def _through_the_wire(message: Message) -> Message:
    """The message as the other side gets it."""
    with no_object_id_recompute():
        name = message.object_id
        contents: dict[str, bytes] = {key: part.deflate() for key, part in _nested(message).items()}
        read = inflate_object_from_contents(name, contents)
    assert isinstance(read, Message)
    read.metadata.__dict__["_message_id"] = name
    return read


def _nested(message: Message) -> dict[str, InflatableObject]:
    return dict(get_all_nested_objects(message))
