"""A client: it answers what a server may ask, from its own store. Losses, counts and parameters leave it, no data.

Every handler computes first and commits last, so a question that comes twice gets the same answer twice.
"""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from feddrift import plugins
from feddrift.data import Stream
from feddrift.engines import base
from feddrift.engines.base import Engine, TimeStep
from feddrift.engines.entries import Entries
from feddrift.engines.flower import messages
from feddrift.engines.flower import parts as model_parts
from feddrift.engines.flower.messages import VERSION, Refused
from feddrift.engines.flower.own import Own, OwnModel, net_of
from feddrift.engines.flower.parts import Body, Part
from feddrift.engines.flower.store import Load, Store, checked_name, from_folder
from feddrift.engines.simulator import Simulator
from feddrift.errors import ConfigError
from feddrift.nets.perceptron import usual
from feddrift.trees import split, trunk_of
from feddrift.types import Floats, Local, Models, Net, State, Updates

_log = logging.getLogger("feddrift")


class Missing(Exception):
    """Parts of models that the server takes to be here are not."""


@dataclass(frozen=True)
class Task:
    """What every message says about the federation, and the time it is about."""

    experiment: str
    client: str
    index: int
    n_clients: int
    n_classes: int
    features: tuple[int, ...]
    seed: int
    tau: int

    @classmethod
    def of(cls, about: Any) -> Task:
        """From a message's body."""
        if not isinstance(about, dict) or set(about) != set(cls.__dataclass_fields__):
            raise Refused("it does not say what federation it is about")
        names = ("index", "n_clients", "n_classes", "seed", "tau")
        numbers = [about[name] for name in names] + list(about["features"])
        if not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise Refused(f"it is about {about}, expected whole numbers")
        return cls(**{**about, "features": tuple(about["features"])})


class Client:
    """One client: its name, its data, the model it trains, and how much history it keeps."""

    def __init__(
        self,
        name: str,
        root: Path,
        load: Load,
        model: Net | OwnModel | None = None,
        max_rows: int | None = None,
        max_age: int | None = None,
    ) -> None:
        self.name, self.root, self.load, self.model = checked_name(name, "a client"), Path(root), load, model
        self.max_rows, self.max_age = max_rows, max_age
        self._held: tuple[Any, Engine] | None = None  # the last engine, where a process answers more than once

    def answer(self, kind: str, content: RecordDict) -> RecordDict:
        """The reply to a message. What goes wrong is told in full here only: a sentence may quote data."""
        says: Body = {"version": VERSION, "client": self.name}
        try:
            body, raw = messages.unpack(content)
            if body.get("version") != VERSION:
                raise Refused(f"the server has version {body.get('version')!r}, this client {VERSION!r}")
            task = Task.of(body.get("about"))
            if task.client != self.name:
                raise Refused(f"it is for client {task.client!r}")
            reply, parts = getattr(self, f"_{kind}")(task, body, raw)
            return messages.pack(says | reply, parts)
        except Missing as missing:
            return messages.pack(says | {"missing": list(missing.args)})
        except Refused as refused:
            _log.error("client %s refused a message (%s): %s", self.name, kind, refused)
            return messages.pack(says | {"failed": str(refused)})
        except Exception as error:  # whatever it is, its text stays on this machine
            _log.exception("client %s failed (%s)", self.name, kind)
            return messages.pack(says | {"failed": f"{type(error).__name__}, see the client's log"})

    def store(self, experiment: str) -> Store:
        """The client's store of an experiment."""
        return Store(self.root, experiment, self.name)

    def net(self, task: Task) -> Net:
        """The net that all clients train: by default a perceptron with one hidden layer."""
        if self.model is None:
            return usual(task.features, task.n_classes)
        return self.model if isinstance(self.model, Net) else net_of(self.model)

    def _hello(self, task: Task, body: Body, raw: Mapping[str, list[Array]]) -> tuple[Body, dict[str, Part]]:
        store = self.store(task.experiment)
        store.take_in(self.load, task.tau, task.features, task.n_classes)
        store.limit(task.tau, self.max_rows, self.max_age)
        cells, serve, reply = store.cells(), body.get("serve"), {}
        if serve is not None:
            models, new = self._models(task, store, serve["models"], raw)
            if cells.get(task.tau):
                votes = np.tile(np.array(serve["votes"], dtype=np.float64), (task.n_clients, 1))
                state = State(models, np.zeros((0, task.n_clients, len(models))), votes, serve["ballot"])
                right, tested = self._engine(task, store).test(state, task.tau)
                reply = {"right": int(right[task.index]), "tested": int(tested[task.index])}
            store.put_parts(new)
            store.serve(
                {key: serve[key] for key in ("models", "votes", "ballot", "tau")}
                | {"features": list(task.features), "n_classes": task.n_classes}
            )
            self._forget(store, serve["models"])
        return {"cells": [[t, n] for t, n in cells.items() if t <= task.tau]} | reply, {}

    def _evaluate(self, task: Task, body: Body, raw: Mapping[str, list[Array]]) -> tuple[Body, dict[str, Part]]:
        store = self.store(task.experiment)
        models, new = self._models(task, store, body["models"], raw)
        engine = self._engine(task, store)
        fed, c = engine.at(task.tau), task.index
        cells = np.array([(t, c) for t in store.cells() if t <= task.tau], dtype=np.int64).reshape(-1, 2)
        metric, reply = body["metric"], {}
        if metric == "confusion":
            reply = {"confusion": fed.confusion(models)[c].tolist()}
        else:
            if fed.counts[task.tau, c]:
                sums = _sums(fed, models, cells[cells[:, 0] == task.tau], metric, None)
                reply = {"new": sums[0][1]}
            stored = _sums(fed, models, cells, metric, base.SCORE_ROWS)
            reply["stored"] = [[int(t), size, found] for (t, _), (size, found) in zip(cells, stored, strict=True)]
        store.put_parts(new)
        self._forget(store, body["models"])
        return reply, {}

    def _train(self, task: Task, body: Body, raw: Mapping[str, list[Array]]) -> tuple[Body, dict[str, Part]]:
        store, c = self.store(task.experiment), task.index
        models, new = self._models(task, store, body["models"], raw)
        local, round = Local(**body["local"]), int(body["round"])
        w = _entries(task, body["w"], task.tau + 1, len(models))
        engine = self._engine(task, store)
        behind = engine.stream.counts[w.t, w.c]
        if not (len(behind) and all(behind > 0)):
            raise Refused("it asks for training on data that this client does not hold")
        fed = engine.at(task.tau)
        fed.round = round
        before = _before(store.moments(), task.tau, round, self.name)
        if before is not None:
            fed._recall(before)
        position = np.unique(w.m)
        size: Floats = np.bincount(w.m, w.value * behind, len(models))[position].astype(np.float64)
        lane = np.unique(models.stands_on[position], return_inverse=True)[1]
        lanes = Updates(None, np.full_like(position, c), position, size, lane)
        updates = fed._local_updates(models, lanes, w, local)
        trunk, head = split(updates.params, trunk_of(engine.net, updates.params))
        parts = {f"head-{k}": [leaf[k] for leaf in head] for k in range(len(position)) if head}
        if local.trains == "all":
            parts |= {f"trunk-{k}": [leaf[k] for leaf in trunk] for k in range(int(lanes.lane.max()) + 1) if trunk}
        store.put_moments({"tau": task.tau, "round": round, "before": before, "after": fed._moments()})
        store.put_parts(new)
        self._forget(store, body["models"])
        return {"round": round}, parts

    def _tournament(self, task: Task, body: Body, raw: Mapping[str, list[Array]]) -> tuple[Body, dict[str, Part]]:
        store, c = self.store(task.experiment), task.index
        models, new = self._models(task, store, body["models"], raw)
        w = _entries(task, body["w"], task.tau, len(models))
        parent = np.full(task.n_clients, -1)
        parent[c] = body["parent"]
        engine = self._engine(task, store)
        engine.local = Local(**body["local"])
        found = engine.at(task.tau).tournament(models, w, parent, body["starts"])  # type: ignore[arg-type]
        store.put_parts(new)
        self._forget(store, body["models"])
        return {"rows": int(found.rows[c]), "wrong": found.wrong[c].tolist()}, {}

    def _engine(self, task: Task, store: Store) -> Engine:
        """This client's data as a stream in which all other clients have none: its draws are those of a simulation."""
        cells = {t: n for t, n in store.cells().items() if t <= task.tau}
        key = task, tuple(cells.items())
        if self._held is None or self._held[0] != key:
            counts = np.zeros((task.tau + 2, task.n_clients), dtype=np.int64)
            counts[list(cells), task.index] = list(cells.values())
            held = [store.cell(t) for t in cells]
            x = np.concatenate([np.zeros((0, *task.features), dtype=np.float32), *(x for x, _ in held)])
            y = np.concatenate([np.zeros(0, dtype=np.int32), *(y for _, y in held)])
            stream = Stream(task.experiment, x, y, counts, task.n_classes)
            own = self.model is not None and not isinstance(self.model, Net)
            made = Own(stream, self.model, Local(), task.seed) if own else None  # type: ignore[arg-type]
            self._held = key, made or Simulator(stream, self.net(task), Local(), task.seed)
        return self._held[1]

    def _models(
        self, task: Task, store: Store, specs: list[Body], raw: Mapping[str, list[Array]]
    ) -> tuple[Models, dict[str, Part]]:
        """The models of a message, and those of their parts that came with it."""
        net = self.net(task)
        expected = model_parts.expected(net, specs, task.features)
        missing = [name for name in expected if name not in raw and not store.has(name)]
        if missing:
            raise Missing(*missing)
        new = {}
        for name, part in raw.items():
            if name not in expected:
                raise Refused("it brings parts that no model of it has")
            new[name] = messages.arrays(part, expected[name], "a part of a model")
            if model_parts.digest(new[name]) != name:
                raise Refused("a part of a model is not what its name says")
        return model_parts.assembled(net, specs, lambda name: new[name] if name in new else store.part(name)), new

    def _forget(self, store: Store, specs: list[Body]) -> None:
        """Keep the parts that the last message named, and those of the models in use."""
        serving = store.serving
        store.keep_parts(model_parts.named(specs) | model_parts.named(serving["models"] if serving else []))


def _sums(fed: TimeStep, models: Models, cells: Any, metric: Any, most: int | None) -> list[tuple[int, list[float]]]:
    """Of each cell: how many rows were looked at, and each model's mistakes or losses on them."""
    found: list[tuple[int, list[float]]] = []
    for _, rows, sizes in fed._blocks(cells, len(models), most):
        sums = fed._sums(models, rows, sizes, metric)
        found += [(int(size), column.tolist()) for size, column in zip(sizes, sums.T, strict=True)]
    return found


def _entries(task: Task, w: list[list[Any]], steps: int, n_models: int) -> Entries:
    """This client's slice of w."""
    t, m = (np.array(part, dtype=np.int64) for part in w[:2])
    shape = steps, task.n_clients, n_models
    return Entries(t, np.full_like(t, task.index), m, np.array(w[2], dtype=np.float64), shape)


def _before(past: dict[str, Any] | None, tau: int, round: int, name: str) -> Any:
    """The optimiser's moments at the start of this round; they live for one time step."""
    if past is None or past["tau"] != tau or not round:
        return None
    if past["round"] < round:
        return past["after"]
    if past["round"] > round:
        _log.warning(
            "client %s: round %d of time %d comes after round %d, its moments start anew",
            name,
            round,
            tau,
            past["round"],
        )
        return None
    return past["before"]


def client_app(find: Callable[[Context], Client]) -> ClientApp:
    """A Flower app of the client that `find` gives for a context."""
    app = ClientApp()

    def answer(kind: str) -> Callable[[Message, Context], Message]:
        return lambda message, context: Message(find(context).answer(kind, message.content), reply_to=message)

    for kind, name in messages.KINDS.items():
        category, action = name.split(".")
        getattr(app, category)(action)(answer(kind))
    return app


def from_toml(folder: Path) -> Client:
    """The client whose folder this is, as its client.toml describes it."""
    path = folder / "client.toml"
    try:
        settings = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    legal = {"name", "server", "data", "label", "load", "model", "max_rows", "max_age"}
    if set(settings) - legal or "name" not in settings:
        raise ConfigError(f"{path} must name the client; legal are {', '.join(sorted(legal))}, got {sorted(settings)}")
    if "load" in settings:
        load: Load = plugins.load("load", settings["load"], folder)
    else:
        load = from_folder(folder / settings.get("data", "data"), settings.get("label", "label"))
    model = plugins.load("model", settings["model"], folder) if "model" in settings else None
    limits = {key: settings.get(key) for key in ("max_rows", "max_age")}
    return Client(settings["name"], folder / "store", load, model, **limits)


def _from_context(context: Context) -> Client:
    folder = context.node_config.get("folder") or os.environ.get("FEDDRIFT_CLIENT")
    if not folder:
        raise ConfigError("the node config must name the client's folder, as `feddrift deploy client` does")
    return from_toml(Path(str(folder)))


app = client_app(_from_context)
