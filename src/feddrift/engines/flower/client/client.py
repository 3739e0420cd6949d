"""A client: it answers what a server may ask, from its own store. No data leave it: losses, counts,
parameters and, where a method asks for them, moments.

Every handler computes first and commits last, so a question that comes twice gets the same answer twice.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from feddrift import rng
from feddrift._internal import plugins
from feddrift.data import Stream
from feddrift.drift_explanation import shifts
from feddrift.engines.external_model import simulated
from feddrift.engines.flower import model_parts, serialization
from feddrift.engines.flower.client import described, scored, training
from feddrift.engines.flower.client.batches import Load, Named, StepFiles
from feddrift.engines.flower.client.client_toml import settings_of
from feddrift.engines.flower.client.routers import read_router
from feddrift.engines.flower.client.store import Store, checked_name
from feddrift.engines.flower.messages import (
    MAX_ID,
    MAX_NAME,
    REQUESTS,
    VERSION,
    About,
    Contest,
    Describe,
    Evaluate,
    Explain,
    Hello,
    Present,
    Raw,
    Request,
    Reroute,
    Train,
    Trial,
    entries_of,
)
from feddrift.engines.flower.model_parts import Body, Part
from feddrift.engines.flower.protocol import check_server
from feddrift.engines.flower.serialization import Refused, whole
from feddrift.engines.local.engine import InProcess
from feddrift.errors import ConfigError
from feddrift.nets import imported, net_for
from feddrift.trees import split, trunk_of
from feddrift.types import Local, Models, Net, State

_log = logging.getLogger("feddrift")


class Missing(Exception):
    """This client lacks parts of models that the server takes it to have."""


class Client:
    """One client: its name, its data, the model it trains, and how much history it keeps."""

    def __init__(
        self,
        name: str,
        root: Path,
        load: Load,
        model: Any = None,  # a Net, its name, or what makes one: see nets.net_for
        max_rows: int | None = None,
        max_age: int | None = None,
        named: Named = lambda n: ((), ()),  # what the features and classes of the n-th batch are called
        explain: bool = True,  # whether the server may know what moved in the data when there is an alarm
        describe: bool = True,  # whether it may know how the data look, by class
    ) -> None:
        self.name, self.root, self.load, self.model = checked_name(name, "a client"), Path(root), load, model
        self.max_rows, self.max_age, self.named = max_rows, max_age, named
        self.explain, self.describe = explain, describe
        self._lost: list[int] = []  # the private models that this answer had to do without
        self._damaged: dict[int, bool] = {}  # the batches that it found damaged, and whether they are whole again
        self._last_engine: tuple[Any, InProcess] | None = None  # for the next question to this process

    def answer(self, kind: str, content: RecordDict) -> RecordDict:
        """The reply to a message; errors are logged in full here, the server gets their type: a text may quote data."""
        says: Body = {"version": VERSION, "client": self.name}
        self._lost, self._damaged, parts = [], {}, dict[str, Part]()
        try:
            body, raw = serialization.unpack(content)
            check_server(body.get("version"), body.get("server"))
            task = About.read(body.get("about"))
            if task.client != self.name:
                raise Refused(f"it is for client {task.client!r}")
            reply, parts = self._answer(task, REQUESTS[kind].read(body), raw)
            reply |= {"lost": self._lost} if self._lost else {}
        except Missing as missing:
            reply = {"missing": list(missing.args)}
        except Refused as refused:
            _log.error("client %s refused a message (%s): %s", self.name, kind, refused)
            reply = {"failed": str(refused)}
        except BaseException as error:  # of a library's own kind, too, without which nobody would answer
            if isinstance(error, KeyboardInterrupt):
                raise
            reply = _failed(error, f"client {self.name} failed ({kind})")
        reply |= {"damaged": list(self._damaged.items())} if self._damaged else {}
        return serialization.pack(says | reply, parts)

    def store(self, experiment: str) -> Store:
        """The client's store of an experiment."""
        return Store(self.root, experiment, self.name)

    def net(self, task: About) -> Net:
        """The net that all clients train: by default a perceptron with one hidden layer."""
        return net_for(self.model, task.features, task.n_classes)

    def _answer(self, task: About, request: Request, raw: Raw) -> tuple[Body, dict[str, Part]]:
        """The reply and its parts; the store changes only after all is computed."""
        store = self.store(task.experiment)
        if isinstance(request, Hello):
            return self._hello(task, store, request, raw), {}
        if isinstance(request, Explain):
            return {"shifts": self._shifts(task, store) if self.explain else None}, {}
        assert isinstance(request, Evaluate | Train | Trial | Contest | Describe | Reroute)
        to = request.to if isinstance(request, Train) else []
        beside = {name: raw[name] for name in model_parts.named(to) & raw.keys()}
        names = model_parts.named(request.models) | raw.keys() - beside.keys()
        models, new = self._models(task, store, request.models, {name: raw[name] for name in names & raw.keys()})
        parts: dict[str, Part] = {}
        if isinstance(request, Evaluate):
            times = [t for t in store.cells() if t <= task.tau]
            reply = scored.answer(self._engine(task, store).worker(task.tau), task, times, request, models)
        elif isinstance(request, Train):
            pulled_to, more = self._models(task, store, to, beside) if to else (None, {})
            new |= more
            reply, parts = training.answer(self._engine(task, store), store, task, request, models, pulled_to)
        elif isinstance(request, Trial):
            reply = self._trial(task, store, request, models)
        elif isinstance(request, Describe):
            engine = self._engine(task, store)
            reply = described.answer(engine, task, request, models) if self.describe else {"count": None}
        elif isinstance(request, Reroute):
            reply = self._reroute(task, store, request, models)
        else:
            reply = self._contest(task, store, request, models)
        store.put_parts(new)
        self._forget(store, [*request.models, *to])
        return reply, parts

    def _hello(self, task: About, store: Store, request: Hello, raw: Raw) -> Body:
        if request.seen is not None:
            store.show_again(task.tau, request.seen)
            store.take_in(self.load, task.tau, task.features, task.n_classes)
        store.limit(task.tau, self.max_rows, self.max_age)
        cells = {t: n for t, n in store.cells().items() if t <= task.tau}
        backlog, gap = store.waiting(self.load, task.tau)
        present = Present(cells, backlog=backlog, gap=gap)
        if (serve := request.serve) is None:
            return present.body()
        models, new = self._models(task, store, serve["models"], raw)
        tested, scores = None, dict[str, float]()
        if cells.get(task.tau):
            votes = np.tile(np.array(serve["votes"], dtype=np.float64), (task.n_clients, 1))
            router = read_router(serve["router"], models) if "router" in serve else None
            state = State(models, np.zeros((0, *votes.shape)), votes, serve["ballot"], router=router)
            engine, c = self._engine(task, store), task.index
            right, n = engine.test(state, task.tau)
            tested = int(right[c]), int(n[c])
            every = {name: float(values[c]) for name, values in engine.scores(state, task.tau).items()}
            scores = {name: value for name, value in every.items() if np.isfinite(value)}
        store.put_parts(new)
        served = {key: serve[key] for key in ("models", "votes", "ballot", "tau", "router") if key in serve}
        store.serve(served | {"features": list(task.features), "n_classes": task.n_classes})
        self._forget(store, serve["models"])
        return replace(present, tested=tested, scores=scores).body()

    def _shifts(self, task: About, store: Store) -> Body | None:
        """Means and shares of what moved, with names; None without earlier data."""
        engine = self._engine(task, store)
        columns, classes = self.named(store.held()[task.tau].n if task.tau in store.held() else task.tau)
        columns = columns if len(columns) == math.prod(task.features) else ()
        classes = classes if len(classes) == task.n_classes else ()
        stream = replace(engine.stream, columns=columns, classes=classes)
        moved = shifts(stream, task.tau, task.index, stream.counts[:, task.index])
        if moved is None:
            return None
        short = [replace(s, name=s.name[:MAX_NAME], within=s.within and s.within[:MAX_NAME]) for s in moved.moved]
        return replace(moved, moved=tuple(short)).plain()

    def _reroute(self, task: About, store: Store, request: Reroute, models: Models) -> Body:
        engine, votes = self._engine(task, store), np.zeros((task.n_clients, len(models)))
        if not engine.stream.counts[task.tau, task.index]:
            raise Refused("it asks for a choice by inputs that this client does not hold")
        votes[task.index] = request.votes
        router = read_router(request.router, models)
        counts = engine.worker(task.tau).reroute(models, votes, request.ballot, {task.index: router})[task.index]
        return {"rows": int(counts[0]), "wrong": counts[1:].tolist()}

    def _trial(self, task: About, store: Store, request: Trial, models: Models) -> Body:
        older = entries_of(request.w, task.index, (task.tau, task.n_clients, len(models)))
        engine = self._engine(task, store)
        counts = engine.stream.counts
        older = older.select(counts[older.t, older.c] > 0)
        parent = np.full(task.n_clients, -1)
        if counts[task.tau, task.index] > 1:
            parent[task.index] = request.parent
        worker = engine.worker(task.tau)
        tournament = worker.trial(models, older, parent, request.starts, Local(**request.local))
        return {"rows": int(tournament.rows[task.index]), "wrong": tournament.wrong[task.index].tolist()}

    def _contest(self, task: About, store: Store, request: Contest, models: Models) -> Body:
        held_by = None if request.held_by is None else Local(**request.held_by)
        if held_by is not None and not held_by.hold_out:
            raise Refused("it asks for a contest on held-out rows, and holds none out")
        teams = np.full((len(request.teams), task.n_clients, max(map(len, request.teams), default=0)), -1)
        for k, team in enumerate(request.teams):
            teams[k, task.index, : len(team)] = [whole(m, 0, len(models) - 1) for m in team]
        if not (len(teams) and all(request.teams)):
            raise Refused("it asks for a contest with nobody in it")
        engine = self._engine(task, store)
        if engine.stream.counts[task.tau, task.index] < (1 if held_by is None else 2):
            raise Refused("it asks for a contest on data that this client does not hold")
        tournament = engine.worker(task.tau).contest(models, teams, held_by)
        return {"rows": int(tournament.rows[task.index]), "wrong": tournament.wrong[task.index].tolist()}

    def _engine(self, task: About, store: Store) -> InProcess:
        """This client's data as a stream in which all other clients have none: its draws are those of a simulation."""
        cells = {t: n for t, n in store.cells().items() if t <= task.tau}
        key = task, tuple(cells.items())
        if self._last_engine is None or self._last_engine[0] != key:
            counts = np.zeros((task.tau + 2, task.n_clients), dtype=np.int64)
            stored = [store.mended(self.load, t, task.features, task.n_classes) for t in cells]
            self._damaged |= store.damaged
            counts[list(cells), task.index] = [len(y) for _, y in stored]
            x = np.concatenate([np.zeros((0, *task.features), dtype=np.float32), *(x for x, _ in stored)])
            y = np.concatenate([np.zeros(0, dtype=np.int32), *(y for _, y in stored)])
            stream = Stream(task.experiment, x, y, counts, task.n_classes)
            self._last_engine = key, simulated(stream, self.net(task), Local(), task.seed)
            self._last_engine[1].programs = store.path / "programs"
        return self._last_engine[1]

    def _models(self, task: About, store: Store, specs: list[Body], raw: Raw) -> tuple[Models, dict[str, Part]]:
        """The models of a message, and those of their parts that came with it, or stand for what was lost."""
        net = self.net(task)
        expected = model_parts.expected(net, specs, task.features)
        for spec in specs:
            whole(spec["id"], 0, MAX_ID)
        missing = [name for name in expected if name not in raw and not store.has(name)]
        if sent := [name for name in missing if not name.startswith(model_parts.PRIVATE)]:
            raise Missing(*sent)
        new = {}
        for name, part in raw.items():
            if name not in expected:
                raise Refused("it brings parts that no model of it has")
            new[name] = serialization.arrays(part, expected[name], "a part of a model")
            if model_parts.digest(new[name]) != name:
                raise Refused("a part of a model is not what its name says")
        if missing:
            _log.warning("client %s: its private models are gone with its store, others stand for them", self.name)
            lost = [spec for spec in specs if {spec["trunk"], spec["head"]} & set(missing)]
            self._lost = sorted({spec["id"] for spec in lost})
            parts = [spec[kind] for spec in lost for kind in ("trunk", "head") if spec[kind]]  # all, or none
            new |= self._instead(net, task, store, specs, new, parts)
        return model_parts.assembled(net, specs, lambda name: new[name] if name in new else store.part(name)), new

    def _instead(
        self, net: Net, task: About, store: Store, specs: list[Body], new: dict[str, Part], lost: list[str]
    ) -> dict[str, Part]:
        """What stands for lost parts of private models: those of the message's first shared model, or a fresh one's."""
        params = net.init(rng.derive(task.seed, "init", 0))
        fresh = dict(zip(("trunk", "head"), split(params, trunk_of(net, params)), strict=True))
        shared = next((spec for spec in specs if not spec["head"].startswith(model_parts.PRIVATE)), None)

        def part(kind: str) -> Part:
            name = shared and shared[kind]
            return fresh[kind] if not name else new[name] if name in new else store.part(name)

        kinds = {spec[kind]: kind for spec in specs for kind in ("trunk", "head")}
        return {name: [np.asarray(array) for array in part(kinds[name])] for name in lost}

    def _forget(self, store: Store, specs: list[Body]) -> None:
        """Keep the parts that the last message named, those of the models in use, and private ones for a while."""
        serving, parts = store.serving, set(store.parts())
        private = {name for name in parts if name.startswith(model_parts.PRIVATE)} - model_parts.older_private(parts)
        in_use = model_parts.named(serving["models"] if serving else [])
        store.keep_parts(model_parts.named(specs) | in_use | private)


def _failed(error: BaseException, what: str) -> Body:
    """What the server gets to know of an error: its type. Whatever the text says stays in the log of this machine."""
    _log.error(what, exc_info=error)
    return {"failed": f"{type(error).__name__}, see the client's log"}


def client_app(find: Callable[[Context], Client]) -> ClientApp:
    """A Flower app of the client that `find` gives for a context."""
    app = ClientApp()

    def answered(kind: str, message: Message, context: Context) -> RecordDict:
        try:
            client = find(context)
        except BaseException as error:  # of the client's own modules; Flower would send its text on
            if isinstance(error, KeyboardInterrupt):
                raise
            return serialization.pack({"version": VERSION} | _failed(error, f"the client cannot be made ({kind})"))
        return serialization.sealed(client.answer(kind, serialization.opened(message.content)))

    def answer(kind: str) -> Callable[[Message, Context], Message]:
        return lambda message, context: Message(answered(kind, message, context), reply_to=message)

    for kind, request in REQUESTS.items():
        category, action = request.action.split(".")
        getattr(app, category)(action)(answer(kind))
    return app


def from_toml(folder: Path) -> Client:
    """The client whose folder this is, as its client.toml describes it."""
    settings = settings_of(folder)
    files = StepFiles(folder / settings.get("data", "data"), settings.get("label", "label"))
    load: Load = plugins.load("load", settings["load"], folder) if "load" in settings else files
    model = imported(settings.get("model"), folder)
    limits: dict[str, Any] = {key: settings.get(key) for key in ("max_rows", "max_age")}
    says: dict[str, bool] = {key: settings.get(key, True) for key in ("explain", "describe")}
    return Client(settings["name"], folder / "store", load, model, **limits, named=files.named, **says)


def _from_context(context: Context) -> Client:
    folder = context.node_config.get("folder") or os.environ.get("FEDDRIFT_CLIENT")
    if not folder:
        raise ConfigError("the node config must name the client's folder, as `feddrift deploy client` does")
    return from_toml(Path(str(folder)))


app = client_app(_from_context)
