"""Client of a federation over Flower: it replies to the requests of a server, with the data in its own store.

Rows and labels are not sent. The client sends losses, counts, parameters and, if its operator permits it, feature
statistics. Its policy decides which requests it answers, and each request is written to its request log. Each handler
computes its reply before it changes the store, so a repeated request gets the same reply.
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
from feddrift.drift_explanation import Shift, Shifts, find_shifts
from feddrift.engines.external_model import make_simulator
from feddrift.engines.flower import model_parts, serialization
from feddrift.engines.flower.client import evaluation, feature_statistics, training
from feddrift.engines.flower.client.agreement import PINNED_LOCAL_SETTINGS, Agreement
from feddrift.engines.flower.client.batches import Load, ReadNames, StepFiles
from feddrift.engines.flower.client.client_toml import read_client_toml
from feddrift.engines.flower.client.policy import (
    COPIES_IN_SCORING,
    COPIES_IN_TRAINING,
    Policy,
    RequestRefusedError,
    choose_sent_groups,
    count_weights,
)
from feddrift.engines.flower.client.request_log import REQUEST_LOG_FILE, RequestEntry, RequestLog
from feddrift.engines.flower.client.routers import read_router
from feddrift.engines.flower.client.store import Store, check_name
from feddrift.engines.flower.messages import (
    MAX_MODEL_ID,
    MAX_NAME_LENGTH,
    MAX_SIZE,
    REQUESTS,
    VERSION,
    Contest,
    Describe,
    Evaluate,
    Explain,
    Hello,
    HelloReply,
    RawParts,
    Request,
    RequestContext,
    Reroute,
    Train,
    Trial,
    unpack_entries,
)
from feddrift.engines.flower.model_parts import Body, Part
from feddrift.engines.flower.protocol import check_server_version
from feddrift.engines.flower.revocations import ClientRevocations, MissingRevocationsError
from feddrift.engines.flower.serialization import InvalidMessageError, check_int
from feddrift.engines.local.engine import InProcess
from feddrift.engines.local.sampling import count_training_rows
from feddrift.engines.local.trials import HOLD_OUT_SHARE
from feddrift.errors import ConfigError
from feddrift.nets import build_client_net, import_model
from feddrift.trees import mark_trunk, split_trunk_and_head
from feddrift.types import Local, Models, Net, State

_log = logging.getLogger("feddrift")


class MissingPartsError(Exception):
    """The client lacks parts of models that the server expects it to have."""


class Client:
    """One client of a federation.

    Args:
        name: The name of the client.
        root: The folder of its stores, one for each experiment.
        load: Its batches.
        model: The model that it trains, as for `nets.build_client_net`; the same at all clients.
        max_rows: The maximum number of rows in a store; None: no limit.
        max_age: The age in time steps from which batches are deleted; None: no limit.
        read_names: Returns the names of the features and of the classes of the n-th batch.
        explain: Whether the client reports to the server what changed in its data when there is an alarm.
        describe: Whether the client sends feature statistics of its data to the server, also by class.
        revocations: The revocations that it stores; None: it stores none.
        policy: The limits of what the server may request.
    """

    def __init__(  # noqa: PLR0913
        self,
        name: str,
        root: Path,
        load: Load,
        model: Any = None,
        max_rows: int | None = None,
        max_age: int | None = None,
        read_names: ReadNames = lambda n: ((), ()),
        explain: bool = True,
        describe: bool = False,
        revocations: ClientRevocations | None = None,
        policy: Policy = Policy(),  # noqa: B008  # it cannot be changed
    ) -> None:
        self.name = check_name(name, "a client")
        self.root = Path(root)
        self.load = load
        self.model = model
        self.max_rows = max_rows
        self.max_age = max_age
        self.read_names = read_names
        self.explain = explain
        self.describe = describe
        self.revocations = revocations
        self.policy = policy
        self.request_log = RequestLog(self.root / f"{name}.requests")
        self._entry = RequestEntry("")  # of the current request, for the log
        self._lost: list[int] = []  # ids of private models that the current request needs and the store lacks
        self._damaged: dict[int, bool] = {}  # by number, damaged batches, and whether they could be loaded again
        self._last_engine: tuple[Any, InProcess] | None = None  # with its key, for the next request

    def handle_message(self, kind: str, content: RecordDict) -> RecordDict:
        """Return the reply to a message.

        Errors are logged here in full; the server gets only their type, since their text may quote data.
        """
        head: Body = {"version": VERSION, "client": self.name}
        self._lost = []
        self._damaged = {}
        self._entry = RequestEntry(kind)
        parts = dict[str, Part]()
        try:
            body, raw = serialization.unpack_message(content)
            check_server_version(body.get("version"), body.get("server"))
            context = RequestContext.from_body(body.get("about"))
            if context.client != self.name:
                raise InvalidMessageError(f"it is for client {context.client!r}")
            self._entry.experiment = check_name(context.experiment, "an experiment")
            self._entry.t = context.tau
            request = REQUESTS[kind].from_body(body)
            report: Body = {}
            if isinstance(request, Hello) and request.revocations is not None and self.revocations is not None:
                report = {"revocations": self.revocations.receive(request.revocations)}
            reply, parts = self._handle_request(context, request, raw)
            reply |= ({"lost": self._lost} if self._lost else {}) | report
        except MissingPartsError as error:
            reply = {"missing": list(error.args)}
        except MissingRevocationsError as error:
            _log.error("client %s refused a message (%s): %s", self.name, kind, error)
            reply = {"refused": str(error), "revocations": error.to_report()}
            self._entry.refused = str(error)
        except RequestRefusedError as error:
            _log.warning("client %s refuses a request (%s): %s", self.name, kind, error)
            reply = {"refused": str(error)}
            self._entry.refused = str(error)
        except InvalidMessageError as error:
            _log.error("client %s refused a message (%s): %s", self.name, kind, error)
            reply = {"failed": str(error)}
        except BaseException as error:  # libraries may raise more than Exception, and the server needs a reply
            if isinstance(error, KeyboardInterrupt):
                raise
            reply = _log_failure(error, f"client {self.name} failed ({kind})")
        self._entry.failed = reply.get("failed")
        reply |= {"damaged": list(self._damaged.items())} if self._damaged else {}
        content = serialization.pack_message(head | reply, parts)
        self._entry.bytes = serialization.count_bytes(content)
        self.request_log.append(self._entry)
        return content

    def open_store(self, experiment: str) -> Store:
        """Return the client's store of an experiment."""
        return Store(self.root, experiment, self.name)

    def build_net(self, context: RequestContext) -> Net:
        """Return the net that all clients train: by default a perceptron with one hidden layer."""
        return build_client_net(self.model, context.features, context.n_classes)

    def _handle_request(self, context: RequestContext, request: Request, raw: RawParts) -> tuple[Body, dict[str, Part]]:
        """Return the reply and its parts, and pin the settings of the request.

        Raises:
            RequestRefusedError: The policy does not allow the request.
        """
        store = self.open_store(context.experiment)
        self._entry.settings = _list_settings(request)
        agreement = Agreement(store.path)
        pinned = self._list_pinned_settings(context, request) if self.policy.pin else {}
        agreement.check(pinned)
        self._check_limits(context, store, request)
        answer = self._compute_reply(context, store, request, raw)
        if new := agreement.pin(pinned):
            text = "client %s: experiment %s has pinned the settings %s; the operator must accept a change"
            _log.info(text, self.name, context.experiment, ", ".join(new))
        return answer

    def _compute_reply(
        self, context: RequestContext, store: Store, request: Request, raw: RawParts
    ) -> tuple[Body, dict[str, Part]]:
        """Return the reply and its parts; the store is changed only after both are computed."""
        if isinstance(request, Hello):
            return self._handle_hello(context, store, request, raw), {}
        if isinstance(request, Explain):
            self._entry.refused = None if self.explain else "client.toml has explain = false"
            return {"shifts": self._explain_alarm(context, store) if self.explain else None}, {}
        assert isinstance(request, Evaluate | Train | Trial | Contest | Describe | Reroute)
        targets = request.to if isinstance(request, Train) else []
        raw_targets = {name: raw[name] for name in model_parts.collect_part_names(targets) & raw.keys()}
        names = model_parts.collect_part_names(request.models) | raw.keys() - raw_targets.keys()
        raw_models = {name: raw[name] for name in names & raw.keys()}
        models, new = self._load_models(context, store, request.models, raw_models)
        parts: dict[str, Part] = {}
        if isinstance(request, Evaluate):
            times = list(self._count_usable_rows(store, context.tau))
            worker = self._build_engine(context, store).worker(context.tau)
            reply = evaluation.handle_evaluate(worker, context, times, request, models)
        elif isinstance(request, Train):
            target_models = None
            if targets:
                target_models, new_targets = self._load_models(context, store, targets, raw_targets)
                new |= new_targets
            engine = self._build_engine(context, store)
            self._entry.round = int(request.round)
            reply, parts = training.handle_train(
                engine, store, context, request, models, target_models, self.policy, self._entry
            )
        elif isinstance(request, Trial):
            reply = self._handle_trial(context, store, request, models)
        elif isinstance(request, Describe):
            engine = self._build_engine(context, store)
            reply = {"count": None}
            self._entry.refused = None if self.describe else "client.toml has describe = false"
            if self.describe:
                reply = feature_statistics.handle_describe(engine, context, request, models, self.policy.min_group_rows)
        elif isinstance(request, Reroute):
            reply = self._handle_reroute(context, store, request, models)
        else:
            reply = self._handle_contest(context, store, request, models)
        store.put_parts(new)
        self._delete_unused_parts(store, [*request.models, *targets])
        return reply, parts

    def _handle_hello(self, context: RequestContext, store: Store, request: Hello, raw: RawParts) -> Body:
        if request.seen is not None:
            store.move_unseen_batch(context.tau, request.seen, self.policy.min_rows)
            new_batch = store.take_next_batch(self.load, context.tau, context.features, context.n_classes)
            if new_batch is not None and 0 < new_batch.rows < self.policy.min_rows:
                text = "client %s: batch %d has %d rows and is not used, the policy requires at least %d (min_rows)"
                _log.warning(text, self.name, new_batch.n, new_batch.rows, self.policy.min_rows)
        store.delete_old_batches(context.tau, self.max_rows, self.max_age)
        cells = self._count_usable_rows(store, context.tau)
        self._entry.rows = cells.get(context.tau, 0)
        backlog, gap = store.count_waiting_batches(self.load, context.tau)
        permissions = {"explain": self.explain, "describe": self.describe, "sgd": self.policy.allow_sgd}
        refuses = tuple(name for name, is_permitted in permissions.items() if not is_permitted)
        reply = HelloReply(cells, backlog=backlog, gap=gap, refuses=refuses)
        serve = request.serve
        if serve is None:
            return reply.to_body()
        models, new = self._load_models(context, store, serve["models"], raw)
        tested = None
        scores = dict[str, float]()
        if cells.get(context.tau):
            votes = np.tile(np.array(serve["votes"], dtype=np.float64), (context.n_clients, 1))
            router = read_router(serve["router"], models) if "router" in serve else None
            state = State(models, np.zeros((0, *votes.shape)), votes, serve["ballot"], router=router)
            engine = self._build_engine(context, store)
            c = context.index
            right, n = engine.test(state, context.tau)
            tested = int(right[c]), int(n[c])
            all_scores = {name: float(values[c]) for name, values in engine.scores(state, context.tau).items()}
            scores = {name: value for name, value in all_scores.items() if np.isfinite(value)}
        store.put_parts(new)
        serving = {key: serve[key] for key in ("models", "votes", "ballot", "tau", "router") if key in serve}
        store.write_serving(serving | {"features": list(context.features), "n_classes": context.n_classes})
        self._delete_unused_parts(store, serve["models"])
        return replace(reply, tested=tested, scores=scores).to_body()

    def _explain_alarm(self, context: RequestContext, store: Store) -> Body | None:
        """Return what changed in the client's data, with names; None without earlier data."""
        engine = self._build_engine(context, store)
        batches = store.list_batches()
        columns, classes = self.read_names(batches[context.tau].n if context.tau in batches else context.tau)
        columns = columns if len(columns) == math.prod(context.features) else ()
        classes = classes if len(classes) == context.n_classes else ()
        stream = replace(engine.stream, columns=columns, classes=classes)
        shifts = find_shifts(stream, context.tau, context.index, stream.counts[:, context.index])
        if shifts is None:
            return None
        moved = self._select_sent_shifts(shifts, stream, context)
        shortened = [
            replace(shift, name=shift.name[:MAX_NAME_LENGTH], within=shift.within and shift.within[:MAX_NAME_LENGTH])
            for shift in moved
        ]
        self._entry.rows = sum(shifts.rows)
        return replace(shifts, moved=tuple(shortened)).to_dict()

    def _select_sent_shifts(self, shifts: Shifts, stream: Stream, context: RequestContext) -> list[Shift]:
        """Select the shifts that describe no class with few rows, also none that is the rest of all rows."""
        names = [str(name) for name in stream.classes] or [str(k) for k in range(stream.n_classes)]
        labels = [stream.cell(t, context.index)[1] for t in (shifts.since, context.tau)]
        counts = [np.bincount(y, minlength=len(names)).tolist() for y in labels]
        sent = [choose_sent_groups(count, self.policy.min_group_rows) for count in counts]
        is_sent = {name: all(flags[k] for flags in sent) for k, name in enumerate(names)}
        return [shift for shift in shifts.moved if shift.within is None or is_sent.get(shift.within, True)]

    def _handle_reroute(self, context: RequestContext, store: Store, request: Reroute, models: Models) -> Body:
        engine = self._build_engine(context, store)
        self._entry.rows = int(engine.stream.counts[context.tau, context.index])
        votes = np.zeros((context.n_clients, len(models)))
        if not engine.stream.counts[context.tau, context.index]:
            raise InvalidMessageError("it requests a router's votes on data that this client does not have")
        votes[context.index] = request.votes
        router = read_router(request.router, models)
        counts = engine.worker(context.tau).reroute(models, votes, request.ballot, {context.index: router})
        rows, *wrong = counts[context.index].tolist()
        return {"rows": rows, "wrong": wrong}

    def _handle_trial(self, context: RequestContext, store: Store, request: Trial, models: Models) -> Body:
        older = unpack_entries(request.w, context.index, (context.tau, context.n_clients, len(models)))
        engine = self._build_engine(context, store)
        counts = engine.stream.counts
        older = older.select(counts[older.t, older.c] > 0)
        parent = np.full(context.n_clients, -1)
        if counts[context.tau, context.index] > 1:
            parent[context.index] = request.parent
        n_rows = int(counts[context.tau, context.index])
        self._entry.rows = n_rows
        self.policy.check_scored_rows(n_rows - int(count_training_rows(np.array(n_rows), HOLD_OUT_SHARE)))
        worker = engine.worker(context.tau)
        tournament = worker.trial(models, older, parent, request.starts, Local(**request.local))
        return {"rows": int(tournament.rows[context.index]), "wrong": tournament.wrong[context.index].tolist()}

    def _handle_contest(self, context: RequestContext, store: Store, request: Contest, models: Models) -> Body:
        held_by = None if request.held_by is None else Local(**request.held_by)
        if held_by is not None and not held_by.hold_out:
            raise InvalidMessageError("it requests a contest on held-out rows, but its settings hold none out")
        teams = np.full((len(request.teams), context.n_clients, max(map(len, request.teams), default=0)), -1)
        for k, team in enumerate(request.teams):
            teams[k, context.index, : len(team)] = [check_int(m, 0, len(models) - 1) for m in team]
        if not (len(teams) and all(request.teams)):
            raise InvalidMessageError("it requests a contest without contestants, or with one that has no models")
        engine = self._build_engine(context, store)
        n_rows = int(engine.stream.counts[context.tau, context.index])
        if n_rows < (1 if held_by is None else 2):
            raise InvalidMessageError("it requests a contest on data that this client does not have")
        if held_by is not None:
            n_rows -= int(count_training_rows(np.array(n_rows), held_by.hold_out))
            self.policy.check_scored_rows(n_rows)
        self._entry.rows = n_rows
        tournament = engine.worker(context.tau).contest(models, teams, held_by)
        return {"rows": int(tournament.rows[context.index]), "wrong": tournament.wrong[context.index].tolist()}

    def _count_usable_rows(self, store: Store, tau: int) -> dict[int, int]:
        """Return the rows of each time step up to tau, without batches that are too small for the policy."""
        return {t: n for t, n in store.count_rows().items() if t <= tau and n >= self.policy.min_rows}

    def _list_pinned_settings(self, context: RequestContext, request: Request) -> Body:
        """List the settings of a request that must not change in an experiment, as plain values of JSON."""
        n_weights = count_weights(self.model, context.features, context.n_classes)
        if n_weights is not None:  # checked before the net is built
            self.policy.check_memory(4.0 * n_weights * COPIES_IN_TRAINING)
        values: Body = {
            "features": list(context.features),
            "n_classes": context.n_classes,
            "seed": context.seed,
        }
        local: Body = {}
        if isinstance(request, Hello):
            values["net"] = model_parts.describe_net(self.build_net(context))
            values |= {name: request.plan[name] for name in ("algorithm", "settings")} if request.plan else {}
            local = request.plan["local"] if request.plan else {}
        elif isinstance(request, Train) and not request.keep:
            local = request.local
        if local and local["optimizer"] == "adam":  # methods that train with sgd choose its settings at each time step
            values |= {name: local.get(name, getattr(Local, name)) for name in PINNED_LOCAL_SETTINGS}
        return values

    def _check_limits(self, context: RequestContext, store: Store, request: Request) -> None:
        """Count a request, and refuse it if it exceeds the limits of its time step or the memory of the policy."""
        specs: list[Body] = []
        n_models = 1
        n_steps = 0
        key = ""
        copies = COPIES_IN_SCORING
        if isinstance(request, Hello):
            specs = request.serve["models"] if request.serve is not None else []
            n_models = len(specs)
            key = model_parts.compute_digest([np.array(sorted(model_parts.collect_part_names(specs)))]) if specs else ""
        elif not isinstance(request, Explain):
            assert isinstance(request, Evaluate | Train | Trial | Contest | Describe | Reroute)
            specs = request.models
            n_models = len(specs)
        if isinstance(request, Train):
            copies = COPIES_IN_TRAINING
            more = check_int(request.more, 0, MAX_SIZE)
            rounds = check_int(request.rounds, 1, MAX_SIZE)
            n_steps = Local(**request.local).steps * n_models * (rounds if request.keep else 1 + more)
            n_models *= 1 + more
        elif isinstance(request, Trial):
            copies = COPIES_IN_TRAINING
            local = Local(**request.local)
            n_steps = local.rounds * local.steps * len(request.starts)
        n_weights = count_weights(self.model, context.features, context.n_classes) or 0
        n_rows = sum(self._count_usable_rows(store, context.tau).values())
        n_values = (
            4.0 * n_weights * copies * max(1, len(specs))
            + 8.0 * context.n_clients * (context.tau + 2 + len(specs))
            + 4.0 * n_rows * math.prod(context.features)
        )
        self.policy.check_memory(n_values)
        if n_models or n_steps:
            Agreement(store.path).count_request(self.policy, store.get_next_batch_number(), n_models, n_steps, key)

    def _build_engine(self, context: RequestContext, store: Store) -> InProcess:
        """Return an engine for a stream of all clients in which only this one has data.

        Its random draws are therefore those of a simulation with all clients.
        """
        cells = self._count_usable_rows(store, context.tau)
        key = context, tuple(cells.items())
        if self._last_engine is None or self._last_engine[0] != key:
            counts = np.zeros((context.tau + 2, context.n_clients), dtype=np.int64)
            stored = [store.read_or_repair_batch(self.load, t, context.features, context.n_classes) for t in cells]
            self._damaged |= store.damaged
            counts[list(cells), context.index] = [len(y) for _, y in stored]
            x = np.concatenate([np.zeros((0, *context.features), dtype=np.float32), *(x for x, _ in stored)])
            y = np.concatenate([np.zeros(0, dtype=np.int32), *(y for _, y in stored)])
            stream = Stream(context.experiment, x, y, counts, context.n_classes)
            self._last_engine = key, make_simulator(stream, self.build_net(context), Local(), context.seed)
            self._last_engine[1].programs = store.path / "programs"
        return self._last_engine[1]

    def _load_models(
        self, context: RequestContext, store: Store, specs: list[Body], raw: RawParts
    ) -> tuple[Models, dict[str, Part]]:
        """Return the models of a message, and those of their parts that it contains or that replace lost ones."""
        net = self.build_net(context)
        expected = model_parts.collect_part_shapes(net, specs, context.features)
        for spec in specs:
            check_int(spec["id"], 0, MAX_MODEL_ID)
        missing = [name for name in expected if name not in raw and not store.has_part(name)]
        missing_shared = [name for name in missing if not name.startswith(model_parts.PRIVATE_PREFIX)]
        if missing_shared:
            raise MissingPartsError(*missing_shared)
        new = {}
        for name, part in raw.items():
            if name not in expected:
                raise InvalidMessageError("it contains parts that none of its models has")
            new[name] = serialization.read_arrays(part, expected[name], "a part of a model")
            if model_parts.compute_digest(new[name]) != name:
                raise InvalidMessageError("the name of a part of a model is not the digest of its content")
        if missing:
            lost = [spec for spec in specs if {spec["trunk"], spec["head"]} & set(missing)]
            self._lost = sorted({spec["id"] for spec in lost})
            text = "client %s: its store has lost the private models %s; a shared or an initial model replaces them"
            _log.warning(text, self.name, ", ".join(map(str, self._lost)))
            parts = [spec[kind] for spec in lost for kind in ("trunk", "head") if spec[kind]]  # also if one exists
            new |= self._replace_lost_parts(net, context, store, specs, new, parts)

        def get_part(name: str) -> Part:
            return new[name] if name in new else store.read_part(name)

        return model_parts.assemble_models(net, specs, get_part), new

    def _replace_lost_parts(
        self, net: Net, context: RequestContext, store: Store, specs: list[Body], new: dict[str, Part], lost: list[str]
    ) -> dict[str, Part]:
        """Return replacements of lost parts of private models: those of the first shared model, or initial ones."""
        params = net.init(rng.derive_key(context.seed, "init", 0))
        initial = dict(zip(("trunk", "head"), split_trunk_and_head(params, mark_trunk(net, params)), strict=True))
        shared = next((spec for spec in specs if not spec["head"].startswith(model_parts.PRIVATE_PREFIX)), None)

        def get_replacement(kind: str) -> Part:
            name = shared and shared[kind]
            if not name:
                return initial[kind]
            return new[name] if name in new else store.read_part(name)

        kinds = {spec[kind]: kind for spec in specs for kind in ("trunk", "head")}
        return {name: [np.asarray(array) for array in get_replacement(kinds[name])] for name in lost}

    def _delete_unused_parts(self, store: Store, specs: list[Body]) -> None:
        """Delete all parts except those of these models, of those in use, and of recent versions of private models."""
        serving = store.serving
        parts = set(store.list_parts())
        private = {name for name in parts if name.startswith(model_parts.PRIVATE_PREFIX)}
        private -= model_parts.find_old_private_parts(parts)
        in_use = model_parts.collect_part_names(serving["models"] if serving else [])
        store.keep_parts(model_parts.collect_part_names(specs) | in_use | private)


def _list_settings(request: Request) -> Body:
    """List the settings of a request for the log, without models and data."""
    body = request.to_body()
    serve = body.pop("serve", None)
    models = body.pop("models", [] if serve is None else serve["models"])
    for name in ("w", "votes", "router", "project", "to", "teams", "plan", "seen"):
        body.pop(name, None)
    return body | ({"models": len(models)} if models else {})


def _log_failure(error: BaseException, summary: str) -> Body:
    """Log an error, and return the reply that reports its type only, since its text may quote data."""
    _log.error(summary, exc_info=error)
    return {"failed": f"{type(error).__name__}, see the client's log"}


def make_client_app(find_client: Callable[[Context], Client]) -> ClientApp:
    """Return a Flower app of the client that `find_client` returns for a context."""
    app = ClientApp()

    def build_reply(kind: str, message: Message, context: Context) -> RecordDict:
        try:
            client = find_client(context)
        except BaseException as error:  # raised by the client's own modules; Flower would send its text to the server
            if isinstance(error, KeyboardInterrupt):
                raise
            summary = f"the client cannot be created ({kind}): correct client.toml, or the module that it names"
            return serialization.pack_message({"version": VERSION} | _log_failure(error, summary))
        return serialization.pack_inline(client.handle_message(kind, serialization.unpack_inline(message.content)))

    def make_handler(kind: str) -> Callable[[Message, Context], Message]:
        return lambda message, context: Message(build_reply(kind, message, context), reply_to=message)

    for kind, request in REQUESTS.items():
        category, action = request.action.split(".")
        getattr(app, category)(action)(make_handler(kind))
    return app


def load_client(folder: Path) -> Client:
    """Return the client that client.toml in its folder describes.

    Raises:
        ConfigError: The file is not valid, or its function or model cannot be imported.
    """
    settings = read_client_toml(folder)
    files = StepFiles(folder / settings.get("data", "data"), settings.get("label", "label"))
    load: Load = plugins.load_object("load", settings["load"], folder) if "load" in settings else files
    model = import_model(settings.get("model"), folder)
    limits: dict[str, Any] = {key: settings.get(key) for key in ("max_rows", "max_age")}
    client = Client(
        settings["name"],
        folder / "store",
        load,
        model,
        **limits,
        read_names=files.read_names,
        explain=settings.get("explain", True),
        describe=settings.get("describe", False),
        policy=settings["policy"],
        revocations=ClientRevocations(folder),
    )
    client.request_log = RequestLog(folder / REQUEST_LOG_FILE)
    return client


def _find_client(context: Context) -> Client:
    """Return the client whose folder the node config names, or the variable FEDDRIFT_CLIENT."""
    folder = context.node_config.get("folder") or os.environ.get("FEDDRIFT_CLIENT")
    if not folder:
        raise ConfigError("the node config has no client folder: start the client with `feddrift deploy client`")
    return load_client(Path(str(folder)))


app = make_client_app(_find_client)
