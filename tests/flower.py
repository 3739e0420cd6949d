"""A whole federation over Flower in one process: a stream's clients, each with its own folder."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from flwr.app import ConfigRecord, RecordDict

from feddrift.data import Cell, Stream
from feddrift.engines.conditions import IDEAL, Conditions
from feddrift.engines.flower import wire
from feddrift.engines.flower.client import Client
from feddrift.engines.flower.exchange import WaitingRules
from feddrift.engines.flower.federation import Flower, Roster
from feddrift.engines.flower.local_grid import LocalGrid
from feddrift.engines.flower.messages import VERSION, About
from feddrift.engines.flower.store import Held
from feddrift.types import Local, Net, State

QUICK = WaitingRules(start=0, hello=0.05, evaluate=0.05, train=0.05, poll=0.01, patience=0.05, look=0.01, grace=0.01)
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # every file of a store is synced: slow on a disk


def load_of(stream: Stream, c: int) -> Any:
    """The batches of client c of a stream: one for each time step, those without data are empty."""

    def load(n: int) -> Cell | None:
        return stream.cell(n, c) if n < len(stream.counts) else None

    return load


def clients_of(stream: Stream, root: Path, model: Any) -> dict[str, Client]:
    return {name: Client(name, root, load_of(stream, c), model) for c, name in enumerate(stream.clients)}


class OverFlower(Flower):
    """The Flower engine with the clients of a stream, made as the other engines are."""

    def __init__(
        self, stream: Stream, net: Net, local: Local, seed: int, conditions: Conditions = IDEAL,
        waiting: WaitingRules = QUICK, root: Path | None = None,
    ) -> None:  # fmt: skip
        self.passes_over = root is None  # a test begins where it likes
        if root is None:
            root = Path(tempfile.mkdtemp(dir=MEMORY))
            weakref.finalize(self, shutil.rmtree, root)
        self.local_grid = LocalGrid(clients_of(stream, root, net))
        keys = {name.encode(): name for name in stream.clients}
        roster = Roster("test", stream.clients, keys, stream.x.shape[1:], stream.n_classes)
        super().__init__(self.local_grid, roster, net, local, seed, waiting, conditions)

    def hello(self, tau: int, state: State | None = None, wait: bool = True) -> None:
        """Of the times that a test passes over, too: a client shows one batch at each."""
        for t in range(self._greeted + 1, tau if self.passes_over else 0):
            super().hello(t)
        super().hello(tau, state, wait)


class OldClient(Client):
    """A client of protocol 4, as it was: it takes its own version only, and the numbers of files for times."""

    version = "0.1.9/4"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.heard: list[tuple[str, dict[str, Any]]] = []

    def answer(self, kind: str, content: RecordDict) -> RecordDict:
        body, _ = wire.unpack(content)
        self.heard.append((kind, body))
        if body.get("version") != self.version:
            sentence = f"the server has version {body.get('version')!r}, this client {self.version!r}"
            return wire.pack({"version": self.version, "client": self.name, "failed": sentence})
        if kind == "hello":
            self.take_in(About.read(body["about"]))
            body = self.words(body)
        reply = super().answer(kind, _with(content, body | {"version": VERSION}))
        told, _ = wire.unpack(reply)
        told = {key: value for key, value in told.items() if key not in ("backlog", "gap")}
        return _with(reply, told | {"version": self.version})

    def words(self, hello: dict[str, Any]) -> dict[str, Any]:
        """A hello of its protocol in ours: it has taken in what there is."""
        return hello | {"seen": None}

    def take_in(self, task: About) -> None:
        """All that has arrived up to time tau, each at the time that is its number."""
        store = self.store(task.experiment)
        for t in set(range(task.tau + 1)) - store.held().keys():
            cell = self.load(t)
            if cell is not None and (rows := len(np.asarray(cell[1]))):
                store._write(store.path / "cells" / Held(t, rows, t).file, {"x": cell[0], "y": cell[1]})


def _with(content: RecordDict, body: dict[str, Any]) -> RecordDict:
    return RecordDict({**content, "body": ConfigRecord({"json": json.dumps(body)})})
