"""Flower Grid within one process, for tests: without ports and threads, but messages are serialised and parsed."""

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
from feddrift.engines.flower.client.client import Client, make_client_app

SERVER_NODE_ID = 1  # Flower's own errors come from this node id, whichever node failed

Fault = Callable[[Message], Message | None]  # returns the reply to a message; None: no reply


@dataclass
class LocalGrid(Grid):
    """Grid on which every client is a node whose public key is its name."""

    clients: Mapping[str, Client]
    faults: dict[tuple[str, str], Fault] = field(default_factory=dict)  # by client and kind, what replies in its place
    offline: set[str] = field(default_factory=set)  # clients that are not connected
    tamper: dict[tuple[str, str], Callable[[RecordDict], RecordDict]] = field(default_factory=dict)  # change replies
    log: list[tuple[str, str, int]] = field(default_factory=list)  # client, kind, bytes of parts sent to it

    def __post_init__(self) -> None:
        TaskIdentity.run_id = 1
        TaskIdentity.node_id = SERVER_NODE_ID
        TaskIdentity.task_id = 1
        self._names = {100 + i: name for i, name in enumerate(self.clients)}
        self._apps: dict[int, ClientApp] = {
            node: make_client_app(lambda _, name=name: self.clients[name])  # type: ignore[misc]
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
            message = _serialize_and_parse(message)
            ids.append(message.metadata.message_id)
            reply = self._deliver(message)
            if reply is not None:
                self._replies[ids[-1]] = reply
        return ids

    def _deliver(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        name = self._names[node]
        kind = message.metadata.message_type.rpartition(".")[2]
        kind = {"models": "evaluate", "round": "train"}.get(kind, kind)
        parts = serialization.unpack_inline(message.content).array_records.values()
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
            reply = Message(self.tamper[name, kind](serialization.unpack_inline(reply.content)), reply_to=message)
        return _serialize_and_parse(reply)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(key) for key in reversed(list(message_ids)) if key in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def _serialize_and_parse(message: Message) -> Message:
    """Return the message as its receiver gets it."""
    with no_object_id_recompute():
        message_id = message.object_id
        contents: dict[str, bytes] = {key: part.deflate() for key, part in _list_objects(message).items()}
        parsed = inflate_object_from_contents(message_id, contents)
    assert isinstance(parsed, Message)
    parsed.metadata.__dict__["_message_id"] = message_id
    return parsed


def _list_objects(message: Message) -> dict[str, InflatableObject]:
    return dict(get_all_nested_objects(message))
