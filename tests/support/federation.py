"""Federations over Flower in one process: their streams, runs, messages, faults and records."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from flwr.app import ConfigRecord, Message, RecordDict

import feddrift as fd
from feddrift.data import Stream
from feddrift.deploy.server.loop import federate
from feddrift.engines.flower import serialization
from feddrift.engines.flower.client.client import Client
from feddrift.engines.flower.messages import VERSION
from feddrift.engines.flower.server.federation import Flower
from feddrift.nets import default_net
from feddrift.runs.record import Record
from feddrift.simulation import Step
from feddrift.trees import tree_leaves
from feddrift.types import Local
from tests.support.flower import InProcessFlower, OldClient

LOCAL = Local(rounds=2, steps=2, batch=8, lr=0.05)

LEARN = Local(rounds=2, steps=50, batch=20, lr=0.05)


def make_swapping_stream(n_clients: int = 3, n_steps: int = 4, n: int = 60) -> Stream:
    """Return a stream in which the labels of the last client swap at time 2."""
    draw = np.random.default_rng(3)
    concepts = np.zeros((n_steps + 1, n_clients), dtype=int)
    concepts[2:, -1] = 1
    cells = []
    for row in concepts:
        xs = [draw.random((n, 2)).astype(np.float32) for _ in row]
        cells.append([(x, ((x[:, 0] > 0.5) != bool(k)).astype(int)) for x, k in zip(xs, row, strict=True)])
    names = [chr(ord("a") + c) for c in range(n_clients)]
    return Stream.from_arrays(cells, n_classes=2, clients=names, concepts=concepts)


def make_federation(stream: Stream, local: Local = LOCAL, **kwargs: Any) -> InProcessFlower:
    return InProcessFlower(stream, default_net(stream), local, 0, **kwargs)


def run_n_steps(engine: Flower, algorithm: Any, n_steps: int, folder: Path) -> list[Step]:
    engine.n_steps = n_steps
    return list(federate(engine, algorithm, folder))


def assert_identical(a: Any, b: Any) -> None:
    for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def drop_message(message: Message) -> None:
    return None


def edit_body(change: Callable[[dict[str, Any]], Any]) -> Callable[[RecordDict], RecordDict]:
    def tamper(content: RecordDict) -> RecordDict:
        body = json.loads(str(content.config_records["body"]["json"]))
        text = change(body)
        content["body"] = ConfigRecord({"json": text if isinstance(text, str) else json.dumps(body)})
        return content

    return tamper


def make_request(engine: Flower, kind: str, body: dict[str, Any], c: int = 0, tau: int = 0, **about: Any) -> RecordDict:
    head = {"version": VERSION, "about": asdict(engine.build_context(c, tau)) | about}
    heard = {"seen": tau - 1} if kind == "hello" else {}  # of all before
    return serialization.pack_message(head | heard | body)


def get_reply(client: Client, kind: str, content: RecordDict) -> dict[str, Any]:
    return serialization.unpack_message(client.handle_message(kind, content))[0]


def replace_client(engine: InProcessFlower, kind: type[OldClient], name: str = "b") -> OldClient:
    """Replace the engine's client of this name by one of another protocol."""
    now = engine.local_grid.clients[name]
    old = kind(name, now.root, now.load, now.model)
    engine.local_grid.clients[name] = old  # type: ignore[index]
    return old


FEDDRIFT = fd.algorithm("FedDrift", delta=0.2)

SETTINGS = """\
experiment = "test"
clients = {clients}
features = [2]
classes = [0, 1]
rounds = 2
"""


def make_server_folder(folder: Path, clients: Sequence[str] = ("a", "b", "c")) -> Path:
    """Create the folder of a server with the files that its readers need."""
    server = folder / "server"
    (server / "state").mkdir(parents=True, exist_ok=True)
    (server / "federation.toml").write_text(SETTINGS.format(clients=json.dumps(list(clients))))
    return server


def select_clients(stream: Stream, n_clients: int) -> Stream:
    cells = [[stream.cell(t, c) for c in range(n_clients)] for t in range(len(stream.counts))]
    return Stream.from_arrays(cells, n_classes=2, clients=stream.clients[:n_clients])


def observe_data_requests(engine: InProcessFlower, see: Callable[[int], None]) -> None:
    """Call `see` whenever the first client loads the data of a time step."""
    client = engine.local_grid.clients["a"]
    load = client.load

    def load_and_report(t: int) -> Any:
        see(t)
        return load(t)

    client.load = load_and_report


def assert_same_record(a: Record, b: Record) -> None:
    """Compare records except for times and requests, which a second server sends again."""
    assert (a.events, a.status, a.tested) == (b.events, b.status, b.tested)
    assert a.header["clients"] == b.header["clients"] and len(a.header["times"]) == len(b.header["times"])
    for name in ("accuracy", "model", "drift", "tested", "models_sent", "received", "loss"):
        np.testing.assert_array_equal(getattr(a.rows, name), getattr(b.rows, name), err_msg=name)
