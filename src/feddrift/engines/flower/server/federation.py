"""The server's side: clients that are somewhere else. Identities are here, data and training there."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np
from flwr.serverapp import Grid

from feddrift._internal.device_arrays import SHARED_ROWS
from feddrift.drift_explanation import Shifts, asked, told
from feddrift.engines.conditions.conditions import IDEAL, Conditions
from feddrift.engines.flower import model_parts
from feddrift.engines.flower.client.routers import sent_with
from feddrift.engines.flower.messages import (
    Explain,
    Hello,
    Present,
    read_shifts,
)
from feddrift.engines.flower.model_parts import Body, Part
from feddrift.engines.flower.server.connection import Asking, Roster
from feddrift.engines.flower.server.exchange import QuorumError, WaitingRules
from feddrift.engines.flower.server.remote import Asked, Remote
from feddrift.engines.server.engine import Engine
from feddrift.engines.worker import Known
from feddrift.errors import ConfigError
from feddrift.models import take
from feddrift.scores import SCORES
from feddrift.types import Floats, Ints, Local, Models, Net, State, Votes

_log = logging.getLogger("feddrift")


class Flower(Asking, Engine):
    """Real clients, reached through a Grid."""

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
        Asking.__init__(self, grid, roster, seed, waiting)
        self.explain = explain  # whether clients are asked what moved in their data when they raise an alarm
        self.net, self.local, self.conditions, self.n_steps = net, local, conditions, n_steps
        self.counts: Ints = np.zeros((2, len(roster.clients)), dtype=np.int64)  # N[t, c] as the clients said
        self.present: set[int] = set()  # who answered the last hello
        self.begun = -1  # a time step that is taken up again: it is too late for new data of that time
        self._greeted = -1  # the time of the last hello
        self._started = -np.inf  # when the last time step began
        self._tested: dict[int, Present] = {}  # by client: how the models it uses do on its newest data
        self._gaps: dict[int, int | None] = {}  # by client, the batch that is missing before others that have come

    def worker(self, tau: int) -> Remote:
        if self._greeted != tau:
            self.hello(tau)
        self._started = time.monotonic()
        present = np.isin(np.arange(len(self.roster.clients)), list(self.present))
        counts = np.zeros((tau + 1, len(self.roster.clients)), dtype=np.int64)
        counts[: len(self.counts)] = self.counts[: tau + 1]
        known = Known(self.roster.clients, self.roster.features, self.roster.n_classes, counts, present)
        return Remote(self, tau, known)

    def store_models(self, models: Models) -> Models:
        return SHARED_ROWS.store(models)

    def test(self, state: State, t: int) -> tuple[Ints, Ints]:
        """Tell the clients which models they use from now on; how those do on the data of time t, once these come.

        After the last time step nobody waits for more data.
        """
        self.hello(t, state, wait=self.n_steps is None or t < self.n_steps)
        right, tested = np.zeros((2, len(self.roster.clients)), dtype=np.int64)
        for c, present in self._tested.items():
            right[c], tested[c] = present.tested or (0, 0)
        return right, tested

    def scores(self, state: State, t: int) -> Mapping[str, Floats]:
        names = (*SCORES, "routed") if state.router is not None else SCORES
        scores = {name: np.full(len(self.roster.clients), np.nan) for name in names}
        for c, present in self._tested.items():
            for name in scores.keys() & present.scores.keys():  # a client may tell what nobody asked
                scores[name][c] = present.scores[name]
        return scores

    def shifts(self, tau: int, clients: Sequence[int]) -> Mapping[int, Shifts]:
        """What moved by the clients' own account; who does not answer misses nothing else."""
        have_data = [c for c in self.present if self.counts[tau, c]]
        requests: dict[int, Asked] = {c: (Explain(), {}) for c in asked(clients, have_data)} if self.explain else {}
        answers = self.ask(tau, requests, lambda _, body, __: read_shifts(body, tau))
        return told({c: answer for c, answer in answers.items() if answer is not None}, clients)

    def lost_private(self) -> list[tuple[int, int]]:
        lost, self._lost = sorted(self._lost), set()
        return lost

    def hello(self, tau: int, state: State | None = None, wait: bool = True) -> None:
        """Find out who is there and what has arrived; returns when time step tau can start."""
        began = time.monotonic()
        quorum_since, logged = np.inf, False
        expected = self.present if self._greeted >= 0 else self._with_keys()
        self._tested = {}
        while True:
            self.present = self._greet(tau, range(len(self.roster.clients)), state, inside=tau == self.begun)
            self._greeted, now = tau, time.monotonic()
            fresh = {c for c in self.present if self.counts[tau, c] or tau == self.begun}
            if len(self.present) < self.waiting.quorum:
                if now - began > self.waiting.patience:
                    self._give_up(tau, self.present, "to start with")
            elif not wait:
                return
            elif self.waiting.start != "data":
                if now >= self._started + float(self.waiting.start):
                    return
            else:
                quorum_since = min(quorum_since, now) if len(fresh) >= self.waiting.quorum else np.inf
                if now >= quorum_since and (
                    fresh >= expected | self.present or now - quorum_since > self.waiting.grace
                ):
                    return
            if not logged:
                _log.info(
                    "time %d: %d of %d clients are here, %d with new data; waiting",
                    tau,
                    len(self.present),
                    len(self.roster.clients),
                    len(fresh),
                )
                logged = True
            time.sleep(self.waiting.pause(now - began if self.waiting.start == "data" and not fresh else 0.0))

    def _greet(self, tau: int, clients: Sequence[int], state: State | None = None, inside: bool = False) -> set[int]:
        """Say hello to these clients, perhaps inside a time step, when it is too late for new data; who answered."""
        requests: dict[int, Asked] = {}
        votes = None if state is None else Votes.of(state.votes)
        shared = np.zeros(0, dtype=np.int64) if state is None else np.flatnonzero(~state.models.private)
        for c in clients:
            hello, parts = Hello(), dict[str, Part]()
            if state is not None and votes is not None and votes.has_any[c]:
                used = votes.model[c][votes.weight[c] > 0]
                if state.models.private[used].any() and len(shared):  # what it falls back on where it has lost its own
                    used = np.union1d(used, shared[:1])
                hello, parts = self._serving(tau - 1, state, c, used)
            seen = max(np.flatnonzero(self.counts[:, c]).tolist(), default=-1)
            requests[c] = replace(hello, seen=None if inside else seen), parts
        if tau >= len(self.counts):
            new_times = np.zeros((tau + 1 - len(self.counts), len(self.roster.clients)), dtype=np.int64)
            self.counts = np.concatenate([self.counts, new_times])
        answers = self.ask(tau, requests, lambda c, body, _: Present.read(body, tau))
        for c, present in answers.items():
            late = inside and not self.counts[tau, c]  # what it took in unheard, it shows again in the next time step
            self.counts[:, c] = 0
            for t, n in present.cells.items():
                self.counts[t, c] = 0 if late and t == tau else n
            if present.tested is not None:
                self._tested[c] = present
            if present.gap != self._gaps.get(c) and present.gap is not None:
                what = "client %s: its batch %d is missing, and %d later ones wait for it"
                _log.warning(what, self.roster.clients[c], present.gap, present.backlog)
            self._gaps[c] = present.gap
            if state is not None and requests[c][1]:
                self._has[c] = self._serves[c] = set(requests[c][1])
        return set(answers)

    def _serving(self, tau: int, state: State, c: int, used: Ints) -> tuple[Hello, dict[str, Part]]:
        """A hello with these models, and those that the client's inputs may choose."""
        if state.router is not None:
            used = np.union1d(used, np.flatnonzero(state.router.votes.any(axis=0)))
        voters = take(state.models, used, [state.models.ids[m] for m in used])
        votes = Votes.of(state.votes).of_client(c, used)
        router: Body | None = None
        if state.router is not None:
            chosen = replace(state.router, votes=state.router.votes[:, used])
            voters, votes, router = sent_with(voters, votes, chosen)
        specs, parts = model_parts.described(self.net, voters)
        return Hello.serving(tau, specs, votes.tolist(), state.ballot, router), parts

    def wait_for(self, tau: int, reachable: set[int], where: str, end: float) -> set[int]:
        """Wait until a quorum can be reached again, or time is up; who has come back."""
        back: set[int] = set()
        _log.warning(
            "%s: %d clients can be reached, the quorum is %d; waiting", where, len(reachable), self.waiting.quorum
        )
        while True:
            if time.monotonic() > end:  # also where clients come back only to fail again
                self._give_up(tau, reachable | back, where)
            absent = [c for c in range(len(self.roster.clients)) if c not in reachable | back]
            back |= self._greet(tau, absent, inside=True)
            self.present |= back
            if len(reachable | back) >= self.waiting.quorum:
                return back
            time.sleep(self.waiting.look)

    def _give_up(self, tau: int, present: set[int], where: str) -> NoReturn:
        names = ", ".join(self.roster.clients[c] for c in sorted(present)) or "nobody"
        trouble = "; ".join(f"{name}: {what}" for name, what in sorted(self.trouble.items()))
        raise QuorumError(
            f"time {tau}, {where}: waited {self.waiting.patience:g} s for a quorum of {self.waiting.quorum} out of "
            f"{len(self.roster.clients)} clients, here is {names}" + (f" ({trouble})" if trouble else "")
        )
