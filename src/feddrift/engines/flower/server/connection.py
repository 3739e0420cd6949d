"""Connection of a server to its clients over Flower's Grid.

The connection stores the node of each client, the parts of models that the client has, and its version. Each exchange
is reported to `on_exchange`. A reply is used only after it was checked. Problems are logged with the client's name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from flwr.app import RecordDict
from flwr.serverapp import Grid

from feddrift.engines.flower import protocol, serialization
from feddrift.engines.flower.messages import (
    KIND_BY_REQUEST,
    MAX_MODEL_ID,
    MAX_SIZE,
    PROTOCOL,
    REQUESTS,
    VERSION,
    Explain,
    Hello,
    Request,
    RequestContext,
)
from feddrift.engines.flower.model_parts import Body
from feddrift.engines.flower.revocations import (
    MAX_SERIAL,
    Revocation,
    RevocationBook,
    find_highest_serial,
    parse_revocations,
)
from feddrift.engines.flower.serialization import InvalidMessageError, check_int
from feddrift.engines.flower.server.exchange import Exchange, WaitingRules, exchange_messages
from feddrift.engines.flower.server.remote import OutgoingRequest, ReplyReader
from feddrift.errors import to_one_line

NOT_CONNECTED = "it is not connected"
KEY_REVOKED = "its key was revoked"
MAX_REPORTED_PROBLEMS = 100  # maximum number of lost models, and of damaged batches, that are read from one reply

_log = logging.getLogger("feddrift")


class RequestRefusedError(InvalidMessageError):
    """A reply that refuses the request, with the rule of the client's policy that the request breaks."""


@dataclass(frozen=True)
class Roster:
    """Clients of a federation, also those that have never connected, and their public keys.

    A client whose key was revoked has no key here.
    """

    experiment: str
    clients: tuple[str, ...]  # their names
    keys: Mapping[bytes, str]  # by public key of a node, the name of its client
    features: tuple[int, ...]
    n_classes: int
    revocations: RevocationBook | None = None  # None: the server has no list of revoked keys


class ClientConnection:
    """Connection to the clients of a roster."""

    def __init__(self, grid: Grid, roster: Roster, seed: int, waiting: WaitingRules) -> None:
        self.grid = grid
        self.roster = roster
        self.seed = seed
        self.waiting = waiting
        self.on_exchange: Callable[[Exchange], None] = lambda _: None  # called after each exchange
        self.n_exchanges = 0
        self.trouble: dict[str, str] = {}  # by client name, its last problem; a valid reply deletes it
        self._lost: set[tuple[int, int]] = set()  # (c, model id) of private models that their client has lost
        self._parts_at_client: dict[int, set[str]] = {}  # by client, the parts of models that it has
        self._served_parts: dict[int, set[str]] = {}  # by client, the parts of the models that it predicts with
        self._last_hello: Any = None  # outcome of the last exchange if that was a hello
        self._versions: dict[int, str] = {}  # by client, the version of its last reply
        self._notes: dict[int, list[str]] = {}  # by client, notes on the current exchange
        self._sent_revocations: dict[int, tuple[Revocation, ...]] = {}  # by client, the list at the last hello
        self._received_revocations: dict[int, tuple[Revocation, ...]] = {}  # by client, the list that it has stored
        self._serials: dict[int, int] = {}  # by client, the highest serial number that it has reported
        self._has_adopted = False  # whether a client has reported revocations during the current exchange

    def send_requests(
        self, tau: int, requests: Mapping[int, OutgoingRequest], read_reply: ReplyReader, round: int | None = None
    ) -> dict[int, Any]:
        """Send requests of one kind to clients, and collect their replies.

        Args:
            tau: The time step.
            requests: The requests by client.
            read_reply: Checks a reply and returns its content.
            round: The round of training, if the requests belong to one.

        Returns:
            The checked replies in the order of the clients. Missing and refused ones are left out and reported.
        """
        if not requests:
            return {}
        kind = type(next(iter(requests.values()))[0])
        exchange = Exchange(tau, KIND_BY_REQUEST[kind], round, datetime.now(UTC).isoformat(timespec="milliseconds"))
        replies, repeated = self._send_once(exchange, requests, read_reply, is_last_attempt=False)
        if repeated:
            replies |= self._send_once(exchange, repeated, read_reply, is_last_attempt=True)[0]
        hello = None
        if kind is Hello:
            hello = replies, exchange.failed_clients
            for c, reply in replies.items():
                exchange.clients[c].backlog = reply.backlog
                exchange.clients[c].gap = reply.gap
        for c, notes in self._notes.items():
            exchange.clients[c].note = "; ".join(notes)
        if hello is None or hello != self._last_hello or self._notes:  # a server that waits for data repeats its hello
            self.on_exchange(exchange)
        self._last_hello = hello
        self._notes = {}
        return dict(sorted(replies.items()))

    def _send_once(
        self,
        exchange: Exchange,
        requests: Mapping[int, OutgoingRequest],
        read_reply: ReplyReader,
        is_last_attempt: bool,
    ) -> tuple[dict[int, Any], dict[int, OutgoingRequest]]:
        """Send requests once, and add the outcomes to the exchange.

        Returns:
            The checked replies, and the requests to repeat, since their clients have another protocol or lack parts of
            models. In the last attempt none is repeated.
        """
        request_type = REQUESTS[exchange.asked]
        description = f"{exchange.asked} at time {exchange.t}"
        description += "" if exchange.round is None else f", round {exchange.round}"
        nodes = self._find_nodes()
        contents = dict[int, RecordDict]()
        checked = dict[int, Any]()
        repeated = dict[int, OutgoingRequest]()
        trouble = dict[int, str]()
        versions = {c: self._versions.get(c, VERSION) for c in requests}
        for c, (request, parts) in requests.items():
            if c not in nodes:
                trouble[c] = NOT_CONNECTED if c in self._find_clients_with_keys() else KEY_REVOKED
                continue
            try:
                request = self._add_revocations(c, request)
                body = protocol.adapt_request(versions[c], exchange.asked, request.to_body())
            except InvalidMessageError as error:
                trouble[c] = f"the request was not sent: {error}"
                continue
            new = {name: part for name, part in parts.items() if name not in self._parts_at_client.get(c, ())}
            head = {"version": versions[c], "about": asdict(self.build_context(c, exchange.t))}
            head |= {} if versions[c] == VERSION else {"server": VERSION}
            contents[c] = serialization.pack_message(head | body, new)
        self.n_exchanges += 1
        began = time.monotonic()
        by_node = {nodes[c]: content for c, content in contents.items()}
        deadline = getattr(self.waiting, request_type.deadline)
        replies_by_node = exchange_messages(self.grid, request_type.action, by_node, deadline, self.waiting.poll)
        seconds = time.monotonic() - began
        replies = {c: replies_by_node[nodes[c]] for c in sorted(contents)}
        n_replies = sum(not isinstance(reply.content, str) for reply in replies.values())
        _log.info("%s: %d of %d clients replied in %.1f s", description, n_replies, len(contents), seconds)
        for c, reply in replies.items():
            if isinstance(reply.content, str):
                trouble[c] = reply.content
                continue
            try:
                body, raw = serialization.unpack_message(reply.content)
                answer = self._read_reply_head(c, versions[c], exchange.asked, body, is_last_attempt)
                if answer is None:
                    repeated[c] = requests[c]
                    continue
                checked[c] = read_reply(c, answer, raw)
                if request_type is not Explain:  # it does not change the client's store
                    self._parts_at_client[c] = set(requests[c][1]) | self._served_parts.get(c, set())
                self.trouble.pop(self.roster.clients[c], None)
            except RequestRefusedError as error:
                trouble[c] = f"it refuses the request: {error}"
            except InvalidMessageError as error:
                trouble[c] = f"its reply is refused: {error}"
            except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
                trouble[c] = f"its reply is refused: it is malformed ({type(error).__name__})"
        for c in self._find_excluded_clients(checked):
            del checked[c]
            trouble[c] = KEY_REVOKED
        trouble = {c: to_one_line(problem) for c, problem in trouble.items()}  # it may quote text of a client
        for c, problem in trouble.items():
            if problem not in (NOT_CONNECTED, KEY_REVOKED) or request_type is not Hello:  # a hello finds out who is
                self._report_problem(c, description, problem)
        exchange.add_outcomes(seconds, requests, contents, replies, trouble)
        return checked, repeated

    def _find_nodes(self) -> dict[int, int]:
        """Return the node of every client that is connected; a node's key identifies its client."""
        index = {name: c for c, name in enumerate(self.roster.clients)}
        owners = ((self.roster.keys.get(node.public_key), node.node_id) for node in self.grid.get_nodes())
        return {index[name]: node for name, node in owners if name is not None}

    def _find_clients_with_keys(self) -> set[int]:
        """Return all clients that may connect, since their key is not revoked."""
        names = set(self.roster.keys.values())
        return {c for c, name in enumerate(self.roster.clients) if name in names}

    def build_context(self, c: int, tau: int) -> RequestContext:
        """Return the part of a request to client c that all requests contain."""
        roster = self.roster
        return RequestContext(
            experiment=roster.experiment,
            client=roster.clients[c],
            index=c,
            n_clients=len(roster.clients),
            n_classes=roster.n_classes,
            features=roster.features,
            seed=self.seed,
            tau=tau,
        )

    def _read_reply_head(self, c: int, version: str, kind: str, body: Body, is_last_attempt: bool) -> Body | None:
        """Check the part of a reply that all replies contain.

        Args:
            c: The client.
            version: The version of the request.
            kind: The kind of the request.
            body: The body of the reply.
            is_last_attempt: Whether the request was repeated already.

        Returns:
            The body with default values; None: the request must be repeated.
        """
        if self._needs_other_version(c, version, body, is_last_attempt):
            return None
        body = protocol.adapt_reply(version, kind, body)
        self._check_sender(c, body)
        if self._receive_revocations(c, body.get("revocations")) and not is_last_attempt:
            return None
        self._check_reply_head(c, body)
        if "missing" in body and not is_last_attempt:
            self._parts_at_client[c] = set()
            return None
        return body

    def _needs_other_version(self, c: int, sent_version: str, body: Body, is_last_attempt: bool) -> bool:
        """Return whether the request must be repeated with the version of the client's reply.

        Args:
            c: The client.
            sent_version: The version of the request.
            body: The body of the reply.
            is_last_attempt: Whether the request was repeated already.
        """
        version = protocol.check_client_version(body.get("version"))
        if version != self._versions.get(c, VERSION) and protocol.parse_protocol(version) != PROTOCOL:
            note = f"it has version {version}, this server {VERSION}: update it before the next update of the server"
            self._add_note(c, note)
        self._versions[c] = version
        other_protocol = protocol.parse_protocol(version) != protocol.parse_protocol(sent_version)
        if other_protocol and is_last_attempt:
            raise InvalidMessageError(f"it replies with version {version} to a request with version {sent_version}")
        return not is_last_attempt and version != sent_version and (other_protocol or "failed" in body)

    def _add_revocations(self, c: int, request: Request) -> Request:
        """Return a hello with the highest serial number of a revocation, and with the list if the client needs it."""
        if not isinstance(request, Hello) or self.roster.revocations is None:
            return request
        revocations = tuple(self.roster.revocations.read())
        content: Body = {"serial": find_highest_serial(revocations)}
        self._sent_revocations[c] = revocations
        if self._received_revocations.get(c) != revocations:
            content["list"] = [asdict(entry) for entry in revocations]
        return replace(request, revocations=content)

    def _receive_revocations(self, c: int, report: Any) -> bool:
        """Read what a client reports about revocations, and return whether the server's list lacked some of them.

        Args:
            c: The client.
            report: The part of its reply; None: it reports nothing.
        """
        book = self.roster.revocations
        if book is None or report is None:
            return False
        name = self.roster.clients[c]
        serial = check_int(report["serial"], 0, MAX_SERIAL)
        reported = parse_revocations(report.get("missing", []))
        known_keys = {entry.key for entry in book.read()} if reported else set()
        if missing := [entry for entry in reported if entry.key not in known_keys]:
            book.adopt(name, missing)
            self._has_adopted = True
            number = "a revocation" if len(missing) == 1 else f"{len(missing)} revocations"
            self._add_note(c, f"it reported {number} that this server lacked: {'; '.join(map(str, missing[:10]))}")
        sent = self._sent_revocations.get(c, ())
        if not reported and serial >= find_highest_serial(sent):
            self._received_revocations[c] = sent
        else:
            self._received_revocations.pop(c, None)
        if self._serials.get(c) != serial:
            self._serials[c] = serial
            book.note_serial(name, serial)
        return bool(reported)

    def _find_excluded_clients(self, clients: Iterable[int]) -> list[int]:
        """Return those of these clients whose key was revoked since another client has reported this."""
        if not self._has_adopted:
            return []
        self._has_adopted = False
        return sorted(set(clients) - self._find_clients_with_keys())

    def _check_sender(self, c: int, body: Body) -> None:
        """Refuse a reply of another client."""
        is_nameless = "failed" in body and "client" not in body  # it failed before it had read its name
        if body.get("client") != self.roster.clients[c] and not is_nameless:
            raise InvalidMessageError(
                f"it claims to be from client {body.get('client')!r}, but its key belongs to {self.roster.clients[c]!r}"
            )

    def _check_reply_head(self, c: int, body: Body) -> None:
        """Refuse a reply of a client that failed or refuses; store lost models, and notes on damaged batches."""
        for n, is_repaired in list(body.get("damaged", ()))[:MAX_REPORTED_PROBLEMS]:
            consequence = "was loaded again" if is_repaired else "is lost: its rows are deleted"
            self._add_note(c, f"its batch {check_int(n, 0, MAX_SIZE)} was damaged in its store, and {consequence}")
        if "refused" in body:
            raise RequestRefusedError(str(body["refused"])[:300])
        if "failed" in body:
            raise InvalidMessageError(f"the client reports {str(body['failed'])[:300]!r}")
        for model_id in list(body.get("lost", ()))[:MAX_REPORTED_PROBLEMS]:
            self._lost.add((c, check_int(model_id, 0, MAX_MODEL_ID)))

    def _add_note(self, c: int, note: str) -> None:
        self._notes.setdefault(c, []).append(note)
        _log.warning("client %s: %s", self.roster.clients[c], note)

    def _report_problem(self, c: int, description: str, problem: str) -> None:
        name = self.roster.clients[c]
        self.trouble[name] = f"{description}: {problem}"
        _log.warning("client %s, %s: %s", name, description, problem)
