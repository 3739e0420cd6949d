"""Engine for clients on other machines: the server assigns models, the clients store data and train."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np
from flwr.serverapp import Grid

from feddrift._internal.device_arrays import SHARED_ROWS
from feddrift.drift_explanation import Shifts, choose_reporting_clients, mark_common_shifts
from feddrift.engines.conditions.conditions import IDEAL, Conditions
from feddrift.engines.flower import model_parts
from feddrift.engines.flower.client.routers import pack_router
from feddrift.engines.flower.messages import Explain, Hello, HelloReply, read_shifts
from feddrift.engines.flower.model_parts import Body, Part
from feddrift.engines.flower.server.connection import ClientConnection, Roster
from feddrift.engines.flower.server.exchange import QuorumError, WaitingRules
from feddrift.engines.flower.server.remote import OutgoingRequest, Remote
from feddrift.engines.server.engine import Engine
from feddrift.engines.worker import FederationInfo
from feddrift.errors import ConfigError
from feddrift.models import take
from feddrift.scores import SCORES
from feddrift.types import Floats, Ints, Local, Models, Net, State, Votes

_log = logging.getLogger("feddrift")


class Flower(ClientConnection, Engine):
    """Engine whose clients are reached over a Flower Grid.

    Args:
        grid: The connection to the nodes.
        roster: The clients and their keys.
        net: The net of all clients.
        local: The settings of local training.
        seed: The seed of all random draws.
        waiting: How long to wait for clients.
        conditions: The conditions of the federation.
        n_steps: The number of time steps; None: unlimited.
        explain: Whether clients are asked what changed in their data when one raises an alarm.

    Raises:
        ConfigError: The quorum is larger than the number of clients.
    """

    def __init__(
        self,
        grid: Grid,
        roster: Roster,
        net: Net,
        local: Local,
        seed: int,
        waiting: WaitingRules,
        conditions: Conditions = IDEAL,
        n_steps: int | None = None,
        explain: bool = True,
    ) -> None:
        if not 1 <= waiting.quorum <= len(roster.clients):
            raise ConfigError(f"quorum must be in 1..{len(roster.clients)}, got {waiting.quorum}")
        ClientConnection.__init__(self, grid, roster, seed, waiting)
        self.explain = explain
        self.plan: Body | None = None  # algorithm, settings and local training, which clients pin
        self.needs: Collection[str] = ()  # what the method needs and clients may refuse, see messages.REFUSABLE
        self._refused_needs: dict[int, set[str]] = {}  # by client, those of `needs` that it refuses
        self.net = net
        self.local = local
        self.conditions = conditions
        self.n_steps = n_steps
        self.counts: Ints = np.zeros((2, len(roster.clients)), dtype=np.int64)  # N[t, c] as reported by the clients
        self.present: set[int] = set()  # clients that replied to the last hello
        self.resumed_step = -1  # time step that the server resumes and that accepts no new data; -1: none
        self._last_hello_step = -1  # the time of the last hello
        self._step_start = -np.inf  # when the last time step began
        self._hello_replies: dict[int, HelloReply] = {}  # by client, the last reply with a test of its models
        self._gaps: dict[int, int | None] = {}  # by client, `gap` of its last reply

    def worker(self, tau: int) -> Remote:
        if self._last_hello_step != tau:
            self.send_hello(tau)
        self._step_start = time.monotonic()
        present = np.isin(np.arange(len(self.roster.clients)), list(self.present))
        counts = np.zeros((tau + 1, len(self.roster.clients)), dtype=np.int64)
        counts[: len(self.counts)] = self.counts[: tau + 1]
        known = FederationInfo(self.roster.clients, self.roster.features, self.roster.n_classes, counts, present)
        return Remote(self, tau, known)

    def store_models(self, models: Models) -> Models:
        return SHARED_ROWS.store_models(models)

    def test(self, state: State, t: int) -> tuple[Ints, Ints]:
        """Send the clients the models to use from now on, and test these on the data of time t when they arrive.

        After the last time step, the server does not wait for data.
        """
        self.send_hello(t, state, wait=self.n_steps is None or t < self.n_steps)
        right, tested = np.zeros((2, len(self.roster.clients)), dtype=np.int64)
        for c, reply in self._hello_replies.items():
            right[c], tested[c] = reply.tested or (0, 0)
        return right, tested

    def scores(self, state: State, t: int) -> Mapping[str, Floats]:
        names = (*SCORES, "routed") if state.router is not None else SCORES
        scores = {name: np.full(len(self.roster.clients), np.nan) for name in names}
        for c, reply in self._hello_replies.items():
            for name in scores.keys() & reply.scores.keys():  # a client may report other scores as well
                scores[name][c] = reply.scores[name]
        return scores

    def shifts(self, tau: int, clients: Sequence[int]) -> Mapping[int, Shifts]:
        """Return the shifts that clients report; a client that does not reply remains reachable."""
        have_data = [c for c in self.present if self.counts[tau, c]]
        requests: dict[int, OutgoingRequest] = (
            {c: (Explain(), {}) for c in choose_reporting_clients(clients, have_data)} if self.explain else {}
        )
        replies = self.send_requests(tau, requests, lambda _, body, __: read_shifts(body, tau))
        n_others = len(set(have_data) - set(clients))
        return mark_common_shifts({c: shifts for c, shifts in replies.items() if shifts is not None}, clients, n_others)

    def lost_private(self) -> list[tuple[int, int]]:
        lost = sorted(self._lost)
        self._lost = set()
        return lost

    def send_hello(self, tau: int, state: State | None = None, wait: bool = True) -> None:
        """Send hellos to all clients until time step tau can start.

        Args:
            tau: The time step.
            state: The state whose models the clients use from now on; None: they keep their models.
            wait: Whether to wait for new data, and not only for a quorum.

        Raises:
            QuorumError: There was no quorum for longer than the settings permit.
        """
        began = time.monotonic()
        quorum_since = np.inf
        logged = False
        expected = self.present if self._last_hello_step >= 0 else self._find_clients_with_keys()
        self._hello_replies = {}
        while True:
            self.present = self._send_hello_once(
                tau, range(len(self.roster.clients)), state, has_begun=tau == self.resumed_step
            )
            self._last_hello_step = tau
            now = time.monotonic()
            with_new_data = {c for c in self.present if self.counts[tau, c] or tau == self.resumed_step}
            if len(self.present) < self.waiting.quorum:
                if now - began > self.waiting.patience:
                    self._raise_quorum_error(tau, self.present, "start")
            elif not wait:
                return
            elif self.waiting.start != "data":
                if now >= self._step_start + float(self.waiting.start):
                    return
            else:
                quorum_since = min(quorum_since, now) if len(with_new_data) >= self.waiting.quorum else np.inf
                if now >= quorum_since and (
                    with_new_data >= expected | self.present or now - quorum_since > self.waiting.grace
                ):
                    return
            if not logged:
                _log.info(
                    "time %d: %d of %d clients are connected, %d with new data; waiting",
                    tau,
                    len(self.present),
                    len(self.roster.clients),
                    len(with_new_data),
                )
                logged = True
            waits_for_data = self.waiting.start == "data" and not with_new_data
            time.sleep(self.waiting.compute_pause(now - began if waits_for_data else 0.0))

    def _send_hello_once(
        self, tau: int, clients: Sequence[int], state: State | None = None, has_begun: bool = False
    ) -> set[int]:
        """Send one hello to these clients, and return those that replied.

        Args:
            tau: The time step.
            clients: The clients.
            state: The state whose models the clients use from now on; None: they keep their models.
            has_begun: Whether the time step has begun, so that it is too late for new data.
        """
        requests: dict[int, OutgoingRequest] = {}
        votes = None if state is None else Votes.of(state.votes)
        shared = np.zeros(0, dtype=np.int64) if state is None else np.flatnonzero(~state.models.private)
        for c in clients:
            hello = Hello()
            parts = dict[str, Part]()
            if state is not None and votes is not None and votes.has_any[c]:
                used = votes.model[c][votes.weight[c] > 0]
                if state.models.private[used].any() and len(shared):  # used if the client has lost its private model
                    used = np.union1d(used, shared[:1])
                hello, parts = self._build_serving_hello(tau - 1, state, c, used)
            seen = max(np.flatnonzero(self.counts[:, c]).tolist(), default=-1)
            requests[c] = replace(hello, seen=None if has_begun else seen, plan=self.plan), parts
        if tau >= len(self.counts):
            new_times = np.zeros((tau + 1 - len(self.counts), len(self.roster.clients)), dtype=np.int64)
            self.counts = np.concatenate([self.counts, new_times])
        replies = self.send_requests(tau, requests, lambda c, body, _: self._read_hello_reply(c, body, tau))
        for c, reply in replies.items():
            too_late = has_begun and not self.counts[tau, c]  # the client shows this batch again in the next time step
            self.counts[:, c] = 0
            for t, n in reply.cells.items():
                self.counts[t, c] = 0 if too_late and t == tau else n
            if reply.tested is not None:
                self._hello_replies[c] = reply
            if reply.gap != self._gaps.get(c) and reply.gap is not None:
                text = "client %s: its batch %d is missing, and %d later ones wait for it: the client must provide it"
                _log.warning(text, self.roster.clients[c], reply.gap, reply.backlog)
            self._gaps[c] = reply.gap
            if state is not None and requests[c][1]:
                self._parts_at_client[c] = self._served_parts[c] = set(requests[c][1])
        return set(replies)

    def _read_hello_reply(self, c: int, body: Body, tau: int) -> HelloReply:
        """Read a reply, and report once if the client refuses something that the method needs."""
        reply = HelloReply.from_body(body, tau)
        refused = set(reply.refuses) & set(self.needs)
        for name in sorted(refused - self._refused_needs.get(c, set())):
            setting = "allow_sgd = true in its [policy]" if name == "sgd" else f"{name} = true in its client.toml"
            self._add_note(c, f"it refuses {name}, which this method needs: its operator can set {setting}")
        self._refused_needs[c] = refused
        return reply

    def _build_serving_hello(self, tau: int, state: State, c: int, used: Ints) -> tuple[Hello, dict[str, Part]]:
        """Return a hello with the models at these positions and those that the router may choose; and their parts."""
        if state.router is not None:
            used = np.union1d(used, np.flatnonzero(state.router.votes.any(axis=0)))
        used_models = take(state.models, used, [state.models.ids[m] for m in used])
        votes = Votes.of(state.votes).of_client(c, used)
        router: Body | None = None
        if state.router is not None:
            own_router = replace(state.router, votes=state.router.votes[:, used])
            used_models, votes, router = pack_router(used_models, votes, own_router)
        specs, parts = model_parts.describe_models(self.net, used_models)
        return Hello.with_models(tau, specs, votes.tolist(), state.ballot, router), parts

    def wait_for_quorum(self, tau: int, reachable: set[int], where: str, end: float) -> set[int]:
        """Wait until a quorum can be reached, and return the clients that can be reached again.

        Args:
            tau: The time step.
            reachable: The clients that can be reached.
            where: The exchange that waits, for messages.
            end: The deadline, a value of `time.monotonic()`.

        Raises:
            QuorumError: The deadline has passed.
        """
        back: set[int] = set()
        _log.warning(
            "%s: %d clients can be reached, the quorum is %d; waiting", where, len(reachable), self.waiting.quorum
        )
        while True:
            if time.monotonic() > end:  # checked here, since clients may come back and fail again each time
                self._raise_quorum_error(tau, reachable | back, where)
            absent = [c for c in range(len(self.roster.clients)) if c not in reachable | back]
            back |= self._send_hello_once(tau, absent, has_begun=True)
            self.present |= back
            if len(reachable | back) >= self.waiting.quorum:
                return back
            time.sleep(self.waiting.look)

    def _raise_quorum_error(self, tau: int, present: set[int], where: str) -> NoReturn:
        names = ", ".join(self.roster.clients[c] for c in sorted(present)) or "no client"
        trouble = "; ".join(f"{name}: {problem}" for name, problem in sorted(self.trouble.items()))
        raise QuorumError(
            f"time {tau}, {where}: waited {self.waiting.patience:g} s for a quorum of {self.waiting.quorum} out of "
            f"{len(self.roster.clients)} clients, connected: {names}"
            + (f" ({trouble})" if trouble else "")
            + "; start more clients, or lower the quorum"
        )
