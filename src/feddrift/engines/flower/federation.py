"""The server's side: clients that are somewhere else. Identities are here, data and training there."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from flwr.serverapp import Grid

from feddrift.data import Stream
from feddrift.engines.base import Engine
from feddrift.engines.conditions import IDEAL, Conditions
from feddrift.engines.flower import messages
from feddrift.engines.flower import parts as model_parts
from feddrift.engines.flower.exchange import QuorumError, Rules, exchange
from feddrift.engines.flower.messages import VERSION, Refused, whole
from feddrift.engines.flower.parts import Body, Part
from feddrift.engines.flower.step import Check, FlowerStep, Request
from feddrift.errors import ConfigError
from feddrift.models import take
from feddrift.types import Ints, Local, Models, Net, State

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

    def __init__(
        self,
        grid: Grid,
        roster: Roster,
        net: Net,
        local: Local,
        seed: int,
        rules: Rules,
        conditions: Conditions = IDEAL,
    ) -> None:
        if not 1 <= rules.quorum <= len(roster.clients):
            raise ConfigError(f"quorum must be in 1..{len(roster.clients)}, got {rules.quorum}")
        self.grid, self.roster, self.rules = grid, roster, rules
        self.counts: Ints = np.zeros((2, len(roster.clients)), dtype=np.int64)  # N[t, c] as the clients said
        super().__init__(self._stream(0), net, local, seed, conditions)
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
        return Stream(self.roster.experiment, x, y, counts, self.roster.n_classes, clients=self.roster.clients)

    def at(self, tau: int) -> FlowerStep:
        if self._greeted != tau:
            self.hello(tau)
        self.stream = self._stream(tau)
        self.in_reach = np.ones((tau + 1, len(self.roster.clients)), dtype=bool)  # who is, a time step finds out
        self._started = time.monotonic()
        return FlowerStep(self, tau)

    def logits(self, models: Models, rows: Ints) -> Iterator[npt.NDArray[np.float32]]:
        raise NotImplementedError("a server has no data")

    def test(self, state: State, t: int, wait: bool = True) -> tuple[Ints, Ints]:
        """Tell the clients which models they use from now on; how those do on the data of time t, once these come."""
        self.hello(t, state, wait)
        found = np.zeros((2, len(self.roster.clients)), dtype=np.int64)
        for c, pair in self._right.items():
            found[:, c] = pair
        return found[0], found[1]

    def hello(self, tau: int, state: State | None = None, wait: bool = True) -> None:
        """Find out who is there and what has arrived; returns when time step tau can start."""
        began = time.monotonic()
        quorum_since, told = np.inf, False
        expected = self.present if self._greeted >= 0 else set(range(len(self.roster.clients)))
        self._right = {}
        while True:
            self.present = self._greet(tau, range(len(self.roster.clients)), state)
            self._greeted, now = tau, time.monotonic()
            fresh = {c for c in self.present if self.counts[tau, c]}
            if len(self.present) < self.rules.quorum:
                if now - began > self.rules.patience:
                    self._give_up(tau, self.present, "to start with")
            elif not wait:
                return
            elif self.rules.start != "data":
                if now >= self._started + float(self.rules.start):
                    return
            else:
                quorum_since = min(quorum_since, now) if len(fresh) >= self.rules.quorum else np.inf
                if now >= quorum_since and (fresh >= expected | self.present or now - quorum_since > self.rules.grace):
                    return
            if not told:
                _log.info(
                    "time %d: %d of %d clients are here, %d with new data; waiting",
                    tau,
                    len(self.present),
                    len(self.roster.clients),
                    len(fresh),
                )
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
                specs, parts = model_parts.described(self.net, voters)
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
        return set(found)

    def ask(
        self,
        kind: str,
        tau: int,
        requests: Mapping[int, Request],
        check: Check,
        round: int | None = None,
        absent_is_news: bool = True,
    ) -> dict[int, Any]:
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
            self.exchanges, began = self.exchanges + 1, time.monotonic()
            replies = exchange(self.grid, kind, contents, getattr(self.rules, _deadline(kind)), self.rules.poll)
            answered = sum(not isinstance(reply, str) for reply in replies.values())
            seconds = time.monotonic() - began
            _log.info("%s: %d of %d clients answered in %.1f s", when, answered, len(contents), seconds)
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

    def wait_for(self, tau: int, reachable: set[int], where: str, end: float) -> set[int]:
        """Wait until a quorum can be reached again, or time is up; who has come back."""
        back: set[int] = set()
        _log.warning(
            "%s: %d clients can be reached, the quorum is %d; waiting", where, len(reachable), self.rules.quorum
        )
        while True:
            if time.monotonic() > end:  # also where clients come back only to fail again
                self._give_up(tau, reachable | back, where)
            rest = [c for c in range(len(self.roster.clients)) if c not in reachable | back]
            back |= self._greet(tau, rest)
            self.present |= back
            if len(reachable | back) >= self.rules.quorum:
                return back
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
            "experiment": self.roster.experiment,
            "client": self.roster.clients[c],
            "index": c,
            "tau": tau,
            "n_clients": len(self.roster.clients),
            "n_classes": self.roster.n_classes,
            "features": list(self.roster.features),
            "seed": self.seed,
        }

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
    cells = [(whole(t, 0, tau), whole(n, 1, MAX_ROWS)) for t, n in body["cells"]]
    if len(dict(cells)) != len(cells):
        raise Refused("it names a time step twice")
    if "right" not in body:
        return cells, None
    tested = dict(cells).get(tau, 0)
    return cells, (whole(body["right"], 0, tested), whole(body["tested"], tested, tested))
