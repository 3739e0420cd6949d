"""Who may talk to whom: the protocol's number decides; the version beside it is for people.

A server speaks its own number and the one before, a client its own: so the server is updated first, and the clients
one by one. A server begins in its own words; a client that does not know them says so and which version it is, and is
asked again in that version's words and name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from feddrift.engines.flower.messages import PROTOCOL, VERSION
from feddrift.engines.flower.model_parts import Body
from feddrift.engines.flower.serialization import Refused

SPOKEN = PROTOCOL, PROTOCOL - 1  # by a server

_VERSION = re.compile(r"([0-9A-Za-z.+!-]{1,40})/([0-9]{1,6})")


@dataclass(frozen=True)
class Change:
    """What a number brought, and what a server has to know of clients of the number before; all by kind of question."""

    what: str
    questions: frozenset[str] = frozenset()  # that such a client cannot be asked
    fields: Mapping[str, frozenset[str]] = field(default_factory=dict)  # of a question, which it does not know
    instead: Mapping[str, Body] = field(default_factory=dict)  # what stands for what its answer lacks


# Of a number that no server needs to speak any more the sentence suffices.
CHANGES: dict[int, Change] = {
    2: Change("a test has more scores than accuracy"),
    3: Change("clients explain alarms, and let teams of models compete"),
    4: Change("training may be pulled to models, classes are scored apart, data described, inputs choose models"),
    5: Change(
        "each client counts its own batches, knows which of them the server has heard of, and tells how many wait"
    ),
    6: Change(
        "who trains a model alone may do all rounds at once",  # a client of 5 does one at a time
        fields={"train": frozenset({"more", "within"})},
        instead={"train": {"more": 0}},
    ),
}


def number(version: object) -> int | None:
    """The protocol's number in a version as messages have it; None: it is none.

    >>> number("0.3.0/6"), number("0.3.0"), number(None)
    (6, None, None)
    """
    match = _VERSION.fullmatch(version) if isinstance(version, str) else None
    return int(match[2]) if match else None


def asked(version: str, kind: str, body: Body) -> Body:
    """The body of a question as a client of this version knows it; refused where it knows no such question."""
    for change in _since(version):
        if kind in change.questions:
            raise Refused(f"{_named(version)} does not know the question '{kind}': update the client")
        body = {key: value for key, value in body.items() if key not in change.fields.get(kind, ())}
    return body


def answered(version: str, kind: str, body: Body) -> Body:
    """The answer of a client of this version, with what stands for what it lacks."""
    for change in _since(version):
        body = {**change.instead.get(kind, {}), **body}
    return body


def check_client(version: object) -> str:
    """The version of a client that this server speaks with; else refused."""
    if isinstance(version, str) and number(version) in SPOKEN:
        return version
    spoken = " and ".join(map(str, sorted(SPOKEN)))
    side = "server" if (number(version) or 0) > PROTOCOL else "client"
    raise Refused(
        f"the client has version {_named(version)}, the server {_named(VERSION)}, which speaks {spoken}: update the "
        f"{side}"
    )


def check_server(version: object, server: object = None) -> None:
    """Refuse, at a client, a question that is not in its own words; `server` says who asks in this version's words."""
    if number(version) == PROTOCOL:
        return
    who = version if server is None else server
    older, newer = (number(who) or 0) < PROTOCOL, (number(who) or 0) > PROTOCOL + 1
    then = "update the server" if older else "update the client" if newer else "it asks again in this client's words"
    raise Refused(f"the server has version {_named(who)}, this client {_named(VERSION)}: {then}")


def _since(version: str) -> list[Change]:
    """What a client of this version does not know."""
    return [change for at, change in CHANGES.items() if at > (number(version) or 0)]


def _named(version: object) -> str:
    match = _VERSION.fullmatch(version) if isinstance(version, str) else None
    return f"{match[1]} (protocol {match[2]})" if match else repr(version)[:60]
