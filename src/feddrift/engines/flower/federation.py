"""The server's side: a Federation whose clients are somewhere else. Identities are here, data and training there.

A client that misses an exchange, or answers with something that cannot be used, sits out the rest of the time step:
its identity is carried over, averages are formed without it, and a model without any reply stays as it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from flwr.app import Array
from flwr.serverapp import Grid

from feddrift.engines import base
from feddrift.engines.base import Engine, Entries, TimeStep
from feddrift.engines.flower import messages
from feddrift.engines.flower.exchange import QuorumError, Rules, exchange
from feddrift.engines.flower.messages import VERSION, Body, Part, Refused
from feddrift.errors import ConfigError
from feddrift.models import averaged, one, per_axis, split, take, trunk_of, unsplit
from feddrift.types import Floats, Ints, Local, Metric, Models, Net, Start, State, Stream, Tournament, Updates, Weights

Request = tuple[Body, dict[str, Part]]
Raw = Mapping[str, list[Array]]
Check = Callable[[int, Body, Raw], Any]

MAX_ROWS = 10**9  # of a cell

_log = logging.getLogger("feddrift")


@dataclass(frozen=True)
class Roster:
    """Whom the federation is made of: every place has a name and a key, whether its client has come yet or not."""

    experiment: str
    clients: tuple[str, ...]
    keys: Mapping[bytes, str]  # a node's public key, and the client that it belongs to
    features: tuple[int, ...]
    n_classes: int


class Flower(Engine):
    """Real clients, reached through a Grid."""

    def __init__(self, grid: Grid, roster: Roster, net: Net, local: Local, seed: int, rules: Rules) -> None:
        if not 1 <= rules.quorum <= len(roster.clients):
            raise ConfigError(f"quorum must be in 1..{len(roster.clients)}, got {rules.quorum}")
        self.grid, self.roster, self.rules = grid, roster, rules
        self.counts: Ints = np.zeros((2, len(roster.clients)), dtype=np.int64)  # N[t, c] as the clients said
        super().__init__(self._stream(0), net, local, seed)
        self.present: set[int] = set()  # who answered the last hello
        self.exchanges = 0
        self.trouble: dict[str, str] = {}  # by client, what went wrong last
        self._greeted = -1  # the time of the last hello
        self._started = -np.inf  # when the last time step began
        self._right: dict[int, tuple[int, int]] = {}  # by client, of the models it uses, on its newest data
        self._has: dict[int, set[str]] = {}  # by client, the parts of models that it has
        self._serves: dict[int, set[str]] = {}  # those of them that it keeps, since it serves them

    def _stream(self, tau: int) -> Stream:
        """What a server knows of the data: how many there are. The values are zeros that take no room."""
        counts = np.zeros((tau + 2, len(self.roster.clients)), dtype=np.int64)
        known = min(tau + 1, len(self.counts))
        counts[:known] = self.counts[:known]
        n = int(counts.sum())
        x = np.broadcast_to(np.zeros((), dtype=np.float32), (n, *self.roster.features))
        y = np.broadcast_to(np.zeros((), dtype=np.int32), (n,))
        return Stream(
            self.roster.experiment, x, y, counts, self.roster.n_classes, clients=self.roster.clients
        )  # fmt: skip

    def at(self, tau: int) -> FlowerStep:
        if self._greeted != tau:
            self.hello(tau)
        self.stream = self._stream(tau)
        self._started = time.monotonic()
        return FlowerStep(self, tau)

    def logits(self, models: Models, rows: Ints) -> Iterator[npt.NDArray[np.float32]]:
        raise NotImplementedError("a server has no data")

    def test(self, state: State, t: int) -> tuple[Ints, Ints]:
        """Tell the clients which models they use from now on; how those do on the data of time t."""
        self.hello(t, state)
        found = np.zeros((2, len(self.roster.clients)), dtype=np.int64)
        for c, pair in self._right.items():
            found[:, c] = pair
        return found[0], found[1]

    def hello(self, tau: int, state: State | None = None, wait: bool = True) -> None:
        """Find out who is there and what has arrived; returns when time step tau can start."""
        began = time.monotonic()
        quorum_since, told = np.inf, False
        self._right, self.present = {}, set()
        while True:
            self._greet(tau, range(len(self.roster.clients)), state)
            self._greeted, now = tau, time.monotonic()
            fresh = sum(self.counts[tau, c] > 0 for c in self.present)
            if len(self.present) < self.rules.quorum:
                if now - began > self.rules.patience:
                    self._give_up(tau, self.present, "to start with")
            elif not wait:
                return
            elif self.rules.start != "data":
                if now >= self._started + float(self.rules.start):
                    return
            else:
                quorum_since = min(quorum_since, now) if fresh >= self.rules.quorum else np.inf
                if fresh == len(self.present) or now - quorum_since > self.rules.grace:
                    return
            if not told:
                _log.info("time %d: %d of %d clients are here, %d with new data; waiting",
                          tau, len(self.present), len(self.roster.clients), fresh)  # fmt: skip
                told = True
            time.sleep(self.rules.look)

    def _greet(self, tau: int, clients: Sequence[int], state: State | None = None) -> set[int]:
        """Say hello to these clients; who answered."""
        requests = {}
        for c in clients:
            body, parts = dict[str, Any](), dict[str, Part]()
            if state is not None:
                used = np.flatnonzero(state.votes[c])
                voters = take(state.models, used, [state.models.ids[m] for m in used])
                specs, parts = messages.described(self.net, voters)
                votes = state.votes[c, used].tolist()
                body = {"serve": {"tau": tau - 1, "models": specs, "votes": votes, "ballot": state.ballot}}
            requests[c] = body, parts
        if tau >= len(self.counts):
            more = np.zeros((tau + 1 - len(self.counts), len(self.roster.clients)), dtype=np.int64)
            self.counts = np.concatenate([self.counts, more])
        found = self.ask("hello", tau, requests, lambda c, body, _: _hello(body, tau), absent_is_news=False)
        for c, (cells, right) in found.items():
            self.counts[:, c] = 0
            for t, n in cells:
                self.counts[t, c] = n
            if right is not None:
                self._right[c] = right
            if state is not None:
                self._has[c] = self._serves[c] = set(requests[c][1])
        self.present |= set(found)
        return set(found)

    def ask(
        self, kind: str, tau: int, requests: Mapping[int, Request], check: Check, round: int | None = None,
        absent_is_news: bool = True,
    ) -> dict[int, Any]:  # fmt: skip
        """One exchange: the checked replies by client, in order; others are complained about by name."""
        node, found = self._nodes(), dict[int, Any]()
        when = f"{kind} at time {tau}" + ("" if round is None else f", round {round}")
        waiting = dict(requests)
        for last in (False, True):
            contents = {}
            for c, (body, parts) in waiting.items():
                if c in node:
                    new = {name: part for name, part in parts.items() if name not in self._has.get(c, ())}
                    head = {"version": VERSION, "about": self._about(c, tau)}
                    contents[node[c]] = messages.pack(head | body, new)
                elif absent_is_news:
                    self._complain(c, when, "it is not connected")
            self.exchanges += 1
            replies = exchange(self.grid, kind, contents, getattr(self.rules, _deadline(kind)), self.rules.poll)
            again = {}
            for c, request in sorted(waiting.items()):
                if c not in node:
                    continue
                reply = replies[node[c]]
                if isinstance(reply, str):
                    self._complain(c, when, reply)
                    continue
                try:
                    body, raw = messages.unpack(reply)
                    self._checked(c, body)
                    if "missing" in body and not last:
                        self._has[c], again[c] = set(), request
                        continue
                    found[c] = check(c, body, raw)
                    self._has[c] = set(request[1]) | self._serves.get(c, set())
                    self.trouble.pop(self.roster.clients[c], None)
                except Refused as refused:
                    self._complain(c, when, f"its reply is refused: {refused}")
                except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
                    self._complain(c, when, f"its reply is refused: it is malformed ({type(error).__name__})")
            waiting = again
            if not waiting:
                break
        return dict(sorted(found.items()))

    def wait_for(self, tau: int, reachable: set[int], where: str) -> set[int]:
        """Wait until a quorum can be reached again; who has come back."""
        back: set[int] = set()
        end = time.monotonic() + self.rules.patience
        _log.warning(
            "%s: %d clients can be reached, the quorum is %d; waiting", where, len(reachable), self.rules.quorum
        )
        while True:
            rest = [c for c in range(len(self.roster.clients)) if c not in reachable | back]
            back |= self._greet(tau, rest)
            if len(reachable | back) >= self.rules.quorum:
                return back
            if time.monotonic() > end:
                self._give_up(tau, reachable | back, where)
            time.sleep(self.rules.look)

    def _give_up(self, tau: int, present: set[int], where: str) -> NoReturn:
        names = ", ".join(self.roster.clients[c] for c in sorted(present)) or "nobody"
        trouble = "; ".join(f"{name}: {what}" for name, what in sorted(self.trouble.items()))
        raise QuorumError(
            f"time {tau}, {where}: waited {self.rules.patience:g} s for a quorum of {self.rules.quorum} out of "
            f"{len(self.roster.clients)} clients, here is {names}" + (f" ({trouble})" if trouble else "")
        )

    def _nodes(self) -> dict[int, int]:
        """The node of every client that is connected: its key says whose it is."""
        index = {name: c for c, name in enumerate(self.roster.clients)}
        owners = ((self.roster.keys.get(node.public_key), node.node_id) for node in self.grid.get_nodes())
        return {index[name]: node for name, node in owners if name is not None}

    def _about(self, c: int, tau: int) -> Body:
        return {
            "experiment": self.roster.experiment, "client": self.roster.clients[c], "index": c, "tau": tau,
            "n_clients": len(self.roster.clients), "n_classes": self.roster.n_classes,
            "features": list(self.roster.features), "seed": self.seed,
        }  # fmt: skip

    def _checked(self, c: int, body: Body) -> None:
        """What every reply must say."""
        if body.get("version") != VERSION:
            raise Refused(f"the client has version {body.get('version')!r}, the server {VERSION!r}")
        if body.get("client") != self.roster.clients[c]:
            raise Refused(f"it claims to be from client {body.get('client')!r}, but its key is another's")
        if "failed" in body:
            raise Refused(f"it says {str(body['failed'])[:300]!r}")

    def _complain(self, c: int, when: str, what: str) -> None:
        name = self.roster.clients[c]
        self.trouble[name] = f"{when}: {what}"
        _log.warning("client %s, %s: %s", name, when, what)


def _deadline(kind: str) -> str:
    return "train" if kind == "tournament" else kind


def _hello(body: Body, tau: int) -> tuple[list[tuple[int, int]], tuple[int, int] | None]:
    cells = [(_whole(t, 0, tau), _whole(n, 1, MAX_ROWS)) for t, n in body["cells"]]
    if len(dict(cells)) != len(cells):
        raise Refused("it names a time step twice")
    if "right" not in body:
        return cells, None
    tested = dict(cells).get(tau, 0)
    return cells, (_whole(body["right"], 0, tested), _whole(body["tested"], tested, tested))


def _whole(number: Any, least: int, most: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        raise Refused(f"expected a whole number in {least}..{most}, got {str(number)[:40]}")
    return number


def _numbers(values: Any, n: int, most: float, whole: bool) -> list[float]:
    """n numbers in 0..most."""
    if not isinstance(values, list) or len(values) != n:
        raise Refused(f"expected {n} numbers")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise Refused(f"expected a number in 0..{most:g}, got {str(value)[:40]}")
        if whole and value != int(value):
            raise Refused(f"expected a count of mistakes, got {value}")
    return [float(value) for value in values]


class FlowerStep(TimeStep):
    """One time step over the network."""

    def __init__(self, engine: Flower, tau: int) -> None:
        super().__init__(engine, tau)
        self.engine = engine
        self.reachable = np.isin(np.arange(self.n_clients), list(engine.present))
        # By client, model and metric: the sum over the new batch, and by stored cell how many rows and their sum.
        self._scores: dict[tuple[int, str, str], tuple[float | None, dict[int, tuple[int, float]]]] = {}

    def progress(self) -> dict[str, Any]:
        return super().progress() | {"reachable": self.reachable, "counts": self.counts}

    def restore(self, progress: dict[str, Any]) -> None:
        super().restore(progress)
        self.reachable = self.reachable & progress["reachable"]
        self.counts = progress["counts"]  # what the known answers are about

    def _moments(self) -> Any:
        return None  # they are where the training is

    def _recall(self, moments: Any) -> None:
        pass

    def evaluate(self, models: Models, metric: Metric = "error") -> Floats:
        if metric not in ("error", "loss", "brier"):
            raise ConfigError(f"metric must be error, loss or brier, got {metric!r}")
        clients = self._new_data()
        self._count_scoring(clients, models)
        names = self._score(clients, models, metric)
        loss = np.full((self.n_clients, len(models)), np.nan)
        for c in np.flatnonzero(np.isin(np.arange(self.n_clients), clients) & self.reachable):
            sums = [self._scores[int(c), name, metric][0] for name in names]
            loss[c] = np.array(sums, dtype=np.float64) / self.counts[self.tau, c]
        return loss

    def confusion(self, models: Models) -> Ints:
        counts = np.zeros((self.n_clients, len(models), self.n_classes, self.n_classes), dtype=np.int64)
        clients = self._new_data()
        self._count_scoring(clients, models)
        specs, parts = messages.described(self.engine.net, models)

        def check(c: int, body: Body, raw: Raw) -> Ints:
            n, shape = int(self.counts[self.tau, c]), counts.shape[1:]
            found = np.array(body["confusion"])
            if (
                found.shape != shape
                or found.dtype.kind != "i"
                or (found < 0).any()
                or (found.sum(axis=(1, 2)) != n).any()
            ):
                raise Refused(f"expected counts of shape {shape}, each model's adding up to {n}")
            return found

        request = {"metric": "confusion", "models": specs}, parts
        for c, found in self._ask("evaluate", {int(c): request for c in clients}, check).items():
            counts[c] = found
        return counts

    def cross_evaluate(self, models: Models, w: Weights, metric: Metric = "error") -> Floats:
        entries = Entries.of(w, (self.tau + 1, self.n_clients, len(models)))
        entries = entries.only((self.counts[entries.t, entries.c] > 0) & self.reachable[entries.c])
        clients = np.unique(entries.c)
        self._count_scoring(clients, models)
        names = self._score(clients, models, metric)
        entries = entries.only(self.reachable[entries.c])
        by_model = np.lexsort([entries.t * self.n_clients + entries.c, entries.m])  # the order of all engines
        t, c, m, behind = entries.t[by_model], entries.c[by_model], entries.m[by_model], entries.value[by_model]
        behind = behind * self.counts[t, c]
        L, total = np.zeros((len(models),) * 2), np.bincount(m, behind, len(models))
        if len(m):
            stored = np.array(
                [
                    [self._scores[k, name, metric][1][at] for at, k in zip(t.tolist(), c.tolist(), strict=True)]
                    for name in names
                ]
            )  # [m, entry, (rows, sum)]
            theirs, begins = np.unique(m, return_index=True)
            L[:, theirs] += np.add.reduceat(stored[..., 1] / stored[..., 0] * behind, begins, axis=1)
        with np.errstate(invalid="ignore"):  # a model without data: 0 / 0
            return np.asarray(L / total)

    def tournament(self, models: Models, w: Weights, parent: Ints, starts: Sequence[Start]) -> Tournament:
        entries = Entries.of(w, (self.tau, self.n_clients, len(models)))
        if parent.shape != (self.n_clients,):
            raise ValueError(f"a tournament needs a parent for each of {self.n_clients} clients, got {parent.shape}")
        found = Tournament.nobody(self.n_clients, len(starts))
        clients = np.flatnonzero((parent >= 0) & (self.counts[self.tau] > 1) & self.reachable)
        specs, parts = messages.described(self.engine.net, models)

        def check(c: int, body: Body, raw: Raw) -> tuple[int, Ints]:
            rows = _whole(body["rows"], 1, int(self.counts[self.tau, c]))
            wrong = np.array(body["wrong"])
            if (
                wrong.shape != (len(starts),) * 2
                or wrong.dtype.kind != "i"
                or not ((wrong >= 0) & (wrong <= rows)).all()
            ):
                raise Refused(f"expected a table of {len(starts)} by {len(starts)} counts up to {rows}")
            return rows, wrong

        requests = {}
        for c in clients.tolist():
            here = entries.only((entries.c == c) & (self.counts[entries.t, entries.c] > 0))
            body = {
                "models": specs, "parent": int(parent[c]), "starts": list(starts), "local": asdict(self.local),
                "w": [here.t.tolist(), here.m.tolist(), here.value.tolist()],
            }  # fmt: skip
            requests[c] = body, parts
        for c, (rows, wrong) in self._ask("tournament", requests, check).items():
            found.rows[c], found.wrong[c] = rows, wrong
        return found

    def _score(self, clients: Ints, models: Models, metric: Metric) -> list[str]:
        """Have these clients score what they have not scored yet; the names under which the models' scores are kept."""
        specs, parts = messages.described(self.engine.net, models)
        names = [f"{spec['trunk']} {spec['head']} {spec['mask']}" for spec in specs]
        asked: dict[int, list[int]] = {}
        for c in clients.tolist():
            lacking = [m for m, name in enumerate(names) if (c, name, metric) not in self._scores]
            if lacking:
                asked[c] = lacking

        def check(c: int, body: Body, raw: Raw) -> Any:
            return self._checked_scores(c, body, len(asked[c]), metric)

        requests = {}
        for c, some in asked.items():
            wanted = [specs[m] for m in some]
            body = {"metric": metric, "models": wanted}
            requests[c] = body, {name: parts[name] for name in messages.named(wanted)}
        for c, (new, stored) in self._ask("evaluate", requests, check).items():
            for k, m in enumerate(asked[c]):
                cells = {t: (size, sums[k]) for t, (size, sums) in stored.items()}
                self._scores[c, names[m], metric] = None if new is None else new[k], cells
        return names

    def _checked_scores(
        self, c: int, body: Body, n_models: int, metric: Metric
    ) -> tuple[list[float] | None, dict[int, tuple[int, list[float]]]]:
        whole, new, n = metric == "error", None, int(self.counts[self.tau, c])
        if n:
            new = _numbers(body["new"], n_models, n if whole else np.finfo(np.float64).max, whole)
        stored = {}
        for t, size, sums in body["stored"]:
            known = int(self.counts[t, c]) if isinstance(t, int) and 0 <= t <= self.tau else 0
            if known:  # else it came too late for this time step
                size = _whole(size, min(known, base.SCORE_ROWS), min(known, base.SCORE_ROWS))
                stored[t] = size, _numbers(sums, n_models, size if whole else np.finfo(np.float64).max, whole)
        if set(stored) != set(np.flatnonzero(self.counts[:, c]).tolist()):
            raise Refused("expected sums for every stored time step")
        return new, stored

    def _local_updates(self, models: Models, lanes: Updates, w: Entries, local: Local) -> Updates:
        return self._round(models, lanes, w, self.round, local)

    def _train(self, models: Models, lanes: Updates, w: Entries, rounds: int, local: Local) -> Models:
        for i in range(rounds):
            models = averaged(models, self._round(models, lanes, w, self.round + i, local))
        return models

    def _round(self, models: Models, lanes: Updates, w: Entries, round: int, local: Local) -> Updates:
        """What the clients trained in one round; those that gave no usable reply are left out."""
        net = self.engine.net
        specs, parts = messages.described(net, models)
        like = messages.like(net)
        shape = trunk_of(net, like)
        trunk_shapes, head_shapes = (messages.shapes(part) for part in split(like, shape))
        lanes_of: dict[int, list[int]] = {}  # by client, the trunk that each of its models stands on, counted from 0
        requests = {}
        for c in np.unique(lanes.client[self.reachable[lanes.client]]).tolist():
            mine, here = lanes.model[lanes.client == c], w.only(w.c == c)
            families = [models.family[m] for m in mine]
            lanes_of[c] = [list(dict.fromkeys(families)).index(name) for name in families]
            wanted = [specs[m] for m in mine]
            body = {
                "round": round, "local": asdict(local), "models": wanted,
                "w": [here.t.tolist(), np.searchsorted(mine, here.m).tolist(), here.value.tolist()],
            }  # fmt: skip
            requests[c] = body, {name: parts[name] for name in messages.named(wanted)}

        def check(c: int, body: Body, raw: Raw) -> tuple[list[Part], list[Part]]:
            _whole(body["round"], round, round)
            n_trunks = (max(lanes_of[c]) + 1) * (local.trains == "all" and bool(trunk_shapes))
            n_heads = len(lanes_of[c]) * bool(head_shapes)
            legal = {f"trunk-{k}" for k in range(n_trunks)} | {f"head-{k}" for k in range(n_heads)}
            if set(raw) != legal:
                raise Refused(f"it brings {len(raw)} parts of models, expected {len(legal)}")
            return (
                [messages.arrays(raw[f"trunk-{k}"], trunk_shapes, "a trunk") for k in range(n_trunks)],
                [messages.arrays(raw[f"head-{k}"], head_shapes, "a head") for k in range(n_heads)],
            )

        found = self._ask("train", requests, check, round)
        kept = np.flatnonzero(np.isin(lanes.client, list(found)))
        lane_names, lane = np.unique(lanes.lane[kept], return_inverse=True)
        some = Updates(None, lanes.client[kept], lanes.model[kept], lanes.size[kept], lane)
        if not len(kept):
            return replace(some, params=per_axis(lambda leaf, _: leaf[:0], models, None, None))
        trunks: list[Part] = [[] for _ in lane_names]
        heads: list[Part] = []
        place = dict.fromkeys(found, 0)
        for pair, k in zip(kept.tolist(), lane.tolist(), strict=True):
            c, m = int(lanes.client[pair]), int(lanes.model[pair])
            at = place[c]
            place[c] += 1
            of_trunk, of_head = found[c]
            old, _ = split(one(models, m), shape)
            trunks[k] = of_trunk[lanes_of[c][at]] if of_trunk else old
            heads.append(of_head[at] if of_head else [])
        stacked = [[np.stack(rows) for rows in zip(*part, strict=True)] for part in (trunks, heads)]
        return replace(some, params=unsplit(stacked[0], stacked[1], shape))

    def _ask(
        self, kind: str, requests: Mapping[int, Request], check: Check, round: int | None = None
    ) -> dict[int, Any]:
        """An exchange; who fails in it is out of reach until the next time step, unless a quorum needs it back."""
        found: dict[int, Any] = {}
        waiting = dict(requests)
        while waiting:
            found |= self.engine.ask(kind, self.tau, waiting, check, round)
            lost = [c for c in waiting if c not in found]
            self.reachable[lost] = False
            if not lost or self.reachable.sum() >= self.engine.rules.quorum:
                break
            where = f"{kind}" + ("" if round is None else f" of round {round}")
            back = self.engine.wait_for(self.tau, set(np.flatnonzero(self.reachable).tolist()), where)
            self.reachable[list(back)] = True
            waiting = {c: requests[c] for c in back if c in requests}
        return dict(sorted(found.items()))
