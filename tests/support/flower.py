"""A whole federation over Flower in one process: a stream's clients, each with its own folder."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from flwr.app import ConfigRecord, RecordDict

from feddrift.data import Cell, Stream
from feddrift.engines.conditions.conditions import IDEAL, Conditions
from feddrift.engines.flower import protocol, serialization
from feddrift.engines.flower.client.client import Client
from feddrift.engines.flower.client.policy import PERMISSIVE
from feddrift.engines.flower.local_grid import LocalGrid
from feddrift.engines.flower.messages import VERSION
from feddrift.engines.flower.server.connection import Roster
from feddrift.engines.flower.server.exchange import WaitingRules
from feddrift.engines.flower.server.federation import Flower
from feddrift.types import Local, Net, State

SHORT_WAITING = WaitingRules(
    start=0, hello=0.05, evaluate=0.05, train=0.05, poll=0.01, patience=0.05, look=0.01, grace=0.01
)
MEMORY_FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None  # every file of a store is synced: slow on a disk


@contextmanager
def open_link_state(database: Path) -> Iterator[Any]:
    """Open the database of a SuperLink with Flower's own code, and close its connections in the end.

    Flower itself keeps them open until its process ends. Python 3.13 warns when they are garbage-collected.
    """
    from flwr.server.superlink.linkstate import LinkStateFactory
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager

    link: Any = LinkStateFactory(str(database), NoOpFederationManager(), ObjectStoreFactory()).state()
    try:
        yield link
    finally:
        link._engine.dispose()


def make_batch_loader(stream: Stream, c: int) -> Any:
    """Return a function that loads the batches of client c: one for each time step, possibly empty."""

    def load(n: int) -> Cell | None:
        return stream.cell(n, c) if n < len(stream.counts) else None

    return load


def make_clients(stream: Stream, root: Path, model: Any) -> dict[str, Client]:
    """Return the clients of a stream, which permit everything: tests train on few rows with few steps."""
    return {
        name: Client(name, root, make_batch_loader(stream, c), model, describe=True, policy=PERMISSIVE)
        for c, name in enumerate(stream.clients)
    }


class InProcessFlower(Flower):
    """The Flower engine with the clients of a stream, made as the other engines are."""

    def __init__(
        self, stream: Stream, net: Net, local: Local, seed: int, conditions: Conditions = IDEAL,
        waiting: WaitingRules = SHORT_WAITING, root: Path | None = None,
    ) -> None:  # fmt: skip
        self.passes_over = root is None  # a test begins where it likes
        if root is None:
            root = Path(tempfile.mkdtemp(dir=MEMORY_FOLDER))
            weakref.finalize(self, shutil.rmtree, root)
        self.local_grid = LocalGrid(make_clients(stream, root, net))
        keys = {name.encode(): name for name in stream.clients}
        roster = Roster("test", stream.clients, keys, stream.x.shape[1:], stream.n_classes)
        super().__init__(self.local_grid, roster, net, local, seed, waiting, conditions)

    def send_hello(self, tau: int, state: State | None = None, wait: bool = True) -> None:
        """Send it also for time steps that a test skips: a client shows one batch at each."""
        for t in range(self._last_hello_step + 1, tau if self.passes_over else 0):
            super().send_hello(t)
        super().send_hello(tau, state, wait)


class OldClient(Client):
    """A client of protocol 6, as it was: it has no policy."""

    version = "0.3.0/6"

    def __init__(self, name: str, root: Path, load: Any, model: Any) -> None:
        super().__init__(name, root, load, model, describe=True, policy=PERMISSIVE)
        self.heard: list[tuple[str, dict[str, Any]]] = []

    def handle_message(self, kind: str, content: RecordDict) -> RecordDict:
        body, _ = serialization.unpack_message(content)
        self.heard.append((kind, body))
        if protocol.parse_protocol(body.get("version")) != protocol.parse_protocol(self.version):
            sentence = f"the server has version {body.get('version')!r}, this client {self.version!r}"
            return serialization.pack_message({"version": self.version, "client": self.name, "failed": sentence})
        reply = super().handle_message(kind, _with(content, body | {"version": VERSION} | self.unknown))
        fields, _ = serialization.unpack_message(reply)
        fields = {key: value for key, value in fields.items() if key != "refuses"}
        return _with(reply, fields | {"version": self.version})

    unknown: ClassVar[dict[str, Any]] = {}  # values of fields of requests that it does not read


def _with(content: RecordDict, body: dict[str, Any]) -> RecordDict:
    return RecordDict({**content, "body": ConfigRecord({"json": json.dumps(body)})})
