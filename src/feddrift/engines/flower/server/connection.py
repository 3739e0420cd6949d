"""Asking clients over Flower's Grid: whose node is whose, who has which parts of models, in whose words, what came.

Every exchange is accounted for; an answer is used only after it was checked, and trouble with a client has its name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from flwr.app import RecordDict
from flwr.serverapp import Grid

from feddrift.engines.flower import protocol, serialization
from feddrift.engines.flower.messages import (
    KIND_OF,
    MAX_ID,
    MAX_SIZE,
    PROTOCOL,
    REQUESTS,
    VERSION,
    About,
    Explain,
    Hello,
)
from feddrift.engines.flower.model_parts import Body
from feddrift.engines.flower.serialization import Refused, whole
from feddrift.engines.flower.server.exchange import Exchange, WaitingRules, exchange
from feddrift.engines.flower.server.remote import Asked, Check
from feddrift.errors import one_line

ABSENT = "it is not connected"
SHUT_OUT = "it is shut out: its key was taken back"
MOST_TOLD = 100  # models and batches that a client may say to have lost in one answer

_log = logging.getLogger("feddrift")


@dataclass(frozen=True)
class Roster:
    """Whom the federation is made of: every place has a name and a key, whether its client has come yet or not.

    A place whose key was taken back has none.
    """

    experiment: str
    clients: tuple[str, ...]
    keys: Mapping[bytes, str]  # a node's public key, and the client that it belongs to
    features: tuple[int, ...]
    n_classes: int


class Asking:
    """Questions to the clients of a roster."""

    def __init__(self, grid: Grid, roster: Roster, seed: int, waiting: WaitingRules) -> None:
        self.grid, self.roster, self.seed, self.waiting = grid, roster, seed, waiting
        self.on_exchange: Callable[[Exchange], None] = lambda _: None  # is told of every question, once it is answered
        self.exchanges = 0
        self.trouble: dict[str, str] = {}  # by client, what went wrong last
        self._lost: set[tuple[int, int]] = set()  # private models that are gone with their client's store
        self._has: dict[int, set[str]] = {}  # by client, the parts of models that it has
        self._serves: dict[int, set[str]] = {}  # those of them that it keeps, since it serves them
        self._heard: Any = None  # what the last hello found, if nothing was asked since
        self._versions: dict[int, str] = {}  # by client, the one in whose words it is asked
        self._notes: dict[int, list[str]] = {}  # by client, what the next line of the record has to say of it

    def ask(self, tau: int, requests: Mapping[int, Asked], check: Check, round: int | None = None) -> dict[int, Any]:
        """One exchange of one kind: the checked replies by client, in order; others are complained about by name."""
        if not requests:
            return {}
        kind = type(next(iter(requests.values()))[0])
        account = Exchange(tau, KIND_OF[kind], round, datetime.now(UTC).isoformat(timespec="milliseconds"))
        replies, again = self._asked(account, requests, check, last=False)
        if again:
            replies |= self._asked(account, again, check, last=True)[0]
        heard = (replies, account.in_trouble) if kind is Hello else None
        for c, present in replies.items() if kind is Hello else ():
            account.clients[c].backlog, account.clients[c].gap = present.backlog, present.gap
        for c, notes in self._notes.items():
            account.clients[c].note = "; ".join(notes)
        if heard is None or heard != self._heard or self._notes:  # who waits for data says hello again and again
            self.on_exchange(account)
        self._heard, self._notes = heard, {}
        return dict(sorted(replies.items()))

    def _asked(
        self, account: Exchange, requests: Mapping[int, Asked], check: Check, last: bool
    ) -> tuple[dict[int, Any], dict[int, Asked]]:
        """The checked replies, and the requests to clients that speak in other words, or lack parts of models."""
        what = REQUESTS[account.asked]
        when = f"{account.asked} at time {account.t}" + ("" if account.round is None else f", round {account.round}")
        node, contents = self._nodes(), dict[int, RecordDict]()
        checked, again, trouble = dict[int, Any](), dict[int, Asked](), dict[int, str]()
        said = {c: self._versions.get(c, VERSION) for c in requests}
        for c, (request, parts) in requests.items():
            if c not in node:
                trouble[c] = ABSENT if c in self._with_keys() else SHUT_OUT
                continue
            try:
                body = protocol.asked(said[c], account.asked, request.body())
            except Refused as refused:
                trouble[c] = f"it cannot be asked: {refused}"
                continue
            new = {name: part for name, part in parts.items() if name not in self._has.get(c, ())}
            head = {"version": said[c], "about": asdict(self.about(c, account.t))}
            head |= {} if said[c] == VERSION else {"server": VERSION}
            contents[c] = serialization.pack(head | body, new)
        self.exchanges, began = self.exchanges + 1, time.monotonic()
        by_node = {node[c]: content for c, content in contents.items()}
        replies = exchange(self.grid, what.action, by_node, getattr(self.waiting, what.deadline), self.waiting.poll)
        seconds = time.monotonic() - began
        answers = {c: replies[node[c]] for c in sorted(contents)}
        answered = sum(not isinstance(answer.content, str) for answer in answers.values())
        _log.info("%s: %d of %d clients answered in %.1f s", when, answered, len(contents), seconds)
        for c, answer in answers.items():
            if isinstance(answer.content, str):
                trouble[c] = answer.content
                continue
            try:
                body, raw = serialization.unpack(answer.content)
                if self._in_other_words(c, said[c], body, last):
                    again[c] = requests[c]
                    continue
                body = protocol.answered(said[c], account.asked, body)
                self._checked(c, body)
                if "missing" in body and not last:
                    self._has[c], again[c] = set(), requests[c]
                    continue
                checked[c] = check(c, body, raw)
                if what is not Explain:  # which changes nothing at the client
                    self._has[c] = set(requests[c][1]) | self._serves.get(c, set())
                self.trouble.pop(self.roster.clients[c], None)
            except Refused as refused:
                trouble[c] = f"its reply is refused: {refused}"
            except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
                trouble[c] = f"its reply is refused: it is malformed ({type(error).__name__})"
        trouble = {c: one_line(why) for c, why in trouble.items()}  # whatever a client may have put into it
        for c, why in trouble.items():
            if why not in (ABSENT, SHUT_OUT) or what is not Hello:  # which asks who is there
                self._complain(c, when, why)
        account.add(seconds, requests, contents, answers, trouble)
        return checked, again

    def _nodes(self) -> dict[int, int]:
        """The node of every client that is connected: its key says whose it is."""
        index = {name: c for c, name in enumerate(self.roster.clients)}
        owners = ((self.roster.keys.get(node.public_key), node.node_id) for node in self.grid.get_nodes())
        return {index[name]: node for name, node in owners if name is not None}

    def _with_keys(self) -> set[int]:
        """All clients that may come: whose key was not taken back."""
        names = set(self.roster.keys.values())
        return {c for c, name in enumerate(self.roster.clients) if name in names}

    def about(self, c: int, tau: int) -> About:
        """The part of a request to this client that all requests have."""
        roster = self.roster
        sizes = len(roster.clients), roster.n_classes, roster.features
        return About(roster.experiment, roster.clients[c], c, *sizes, self.seed, tau)

    def _in_other_words(self, c: int, said: str, body: Body, last: bool) -> bool:
        """Whether a client has to be asked again, in the words of the version that it says it is."""
        version = protocol.check_client(body.get("version"))
        if version != self._versions.get(c, VERSION) and protocol.number(version) != PROTOCOL:
            self._note(c, f"it has version {version}, this server {VERSION}: update it before the server's next one")
        self._versions[c] = version
        other = protocol.number(version) != protocol.number(said)
        if other and last:
            raise Refused(f"it answers as version {version} what it was asked as version {said}")
        return not last and version != said and (other or "failed" in body)

    def _checked(self, c: int, body: Body) -> None:
        """Refuse a reply from another client, or that says it failed."""
        nameless = "failed" in body and "client" not in body  # it failed before it knew who it is
        if body.get("client") != self.roster.clients[c] and not nameless:
            raise Refused(f"it claims to be from client {body.get('client')!r}, but its key is another's")
        for n, again in list(body.get("damaged", ()))[:MOST_TOLD]:
            what = "is taken in again" if again else "is gone, so its rows are forgotten"
            self._note(c, f"its batch {whole(n, 0, MAX_SIZE)} was damaged in its store, and {what}")
        if "failed" in body:
            raise Refused(f"it says {str(body['failed'])[:300]!r}")
        for model_id in list(body.get("lost", ()))[:MOST_TOLD]:
            self._lost.add((c, whole(model_id, 0, MAX_ID)))

    def _note(self, c: int, what: str) -> None:
        self._notes.setdefault(c, []).append(what)
        _log.warning("client %s: %s", self.roster.clients[c], what)

    def _complain(self, c: int, when: str, what: str) -> None:
        name = self.roster.clients[c]
        self.trouble[name] = f"{when}: {what}"
        _log.warning("client %s, %s: %s", name, when, what)
