"""Compatibility of server and clients: only the protocol's number decides; the version beside it is for messages.

A server supports its own number and the one before, a client only its own: so the server is updated first, and then the
clients one by one. A server sends each request in its own protocol first. A client of another protocol refuses it and
replies with its version; the server then repeats the request with that version and in that version's protocol.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from feddrift.engines.flower.messages import PROTOCOL, VERSION
from feddrift.engines.flower.model_parts import Body
from feddrift.engines.flower.serialization import InvalidMessageError

SUPPORTED_PROTOCOLS = PROTOCOL, PROTOCOL - 1  # at a server

_VERSION = re.compile(r"([0-9A-Za-z.+!-]{1,40})/([0-9]{1,6})")


@dataclass(frozen=True)
class ProtocolChange:
    """Change of the protocol with a new number, and its consequences for clients of the number before."""

    summary: str
    unknown_kinds: frozenset[str] = frozenset()  # kinds of requests that such a client does not support
    unknown_fields: Mapping[str, frozenset[str]] = field(default_factory=dict)  # by kind of request
    reply_defaults: Mapping[str, Body] = field(default_factory=dict)  # by kind, values of fields that its reply lacks


# A change that all supported clients have needs only a summary.
CHANGES: dict[int, ProtocolChange] = {
    2: ProtocolChange("the test of a client reports more scores than accuracy"),
    3: ProtocolChange("new requests: to explain an alarm, and to let teams of models compete"),
    4: ProtocolChange(
        "training pulled towards models, scores by class, feature statistics, routers that choose models by inputs"
    ),
    5: ProtocolChange(
        "each client numbers its own batches, receives the newest that the server has, and reports how many wait"
    ),
    6: ProtocolChange(
        "a client that trains a model alone may run all rounds at once",  # with protocol 5: one round per request
        unknown_fields={"train": frozenset({"more", "within"})},
        reply_defaults={"train": {"more": 0}},
    ),
    7: ProtocolChange(
        "a client may refuse a request by its policy, reports what it always refuses, and pins settings; it stores "
        "which keys were revoked, and refuses a server that lacks one of these revocations",
        unknown_fields={"hello": frozenset({"plan", "revocations"})},
        reply_defaults={"hello": {"refuses": []}},
    ),
}


def parse_protocol(version: object) -> int | None:
    """Return the protocol's number in the version of a message; None: it is not a version.

    >>> parse_protocol("0.4.0/7"), parse_protocol("0.4.0"), parse_protocol(None)
    (7, None, None)
    """
    match = _VERSION.fullmatch(version) if isinstance(version, str) else None
    return int(match[2]) if match else None


def adapt_request(version: str, kind: str, body: Body) -> Body:
    """Return the body of a request without the fields that a client of this version does not support.

    Raises:
        InvalidMessageError: The client does not support this kind of request.
    """
    for change in _list_changes_since(version):
        if kind in change.unknown_kinds:
            raise InvalidMessageError(
                f"{_format_version(version)} does not support the request '{kind}': update the client"
            )
        body = {key: value for key, value in body.items() if key not in change.unknown_fields.get(kind, ())}
    return body


def adapt_reply(version: str, kind: str, body: Body) -> Body:
    """Return the body of a reply from a client of this version, with default values of the fields that it lacks."""
    for change in _list_changes_since(version):
        body = {**change.reply_defaults.get(kind, {}), **body}
    return body


def check_client_version(version: object) -> str:
    """Return the version of a client's reply.

    Raises:
        InvalidMessageError: This server does not support it.
    """
    if isinstance(version, str) and parse_protocol(version) in SUPPORTED_PROTOCOLS:
        return version
    supported = " and ".join(map(str, sorted(SUPPORTED_PROTOCOLS)))
    side = "server" if (parse_protocol(version) or 0) > PROTOCOL else "client"
    raise InvalidMessageError(
        f"the client has version {_format_version(version)}, the server {_format_version(VERSION)}, which supports "
        f"protocols {supported}: update the {side}"
    )


def check_server_version(version: object, server: object = None) -> None:
    """Check the protocol of a request, at a client.

    Args:
        version: The version in whose protocol the request is.
        server: The server's own version; None: the same.

    Raises:
        InvalidMessageError: The request is not in this client's protocol.
    """
    if parse_protocol(version) == PROTOCOL:
        return
    server_version = version if server is None else server
    number = parse_protocol(server_version) or 0
    if number < PROTOCOL:
        consequence = "update the server"
    elif number > PROTOCOL + 1:
        consequence = "update the client"
    else:
        consequence = "the server repeats the request in this client's protocol"
    raise InvalidMessageError(
        f"the server has version {_format_version(server_version)}, this client {_format_version(VERSION)}: "
        f"{consequence}"
    )


def _list_changes_since(version: str) -> list[ProtocolChange]:
    """List the changes that a client of this version does not have."""
    return [change for number, change in CHANGES.items() if number > (parse_protocol(version) or 0)]


def _format_version(version: object) -> str:
    match = _VERSION.fullmatch(version) if isinstance(version, str) else None
    return f"{match[1]} (protocol {match[2]})" if match else repr(version)[:60]
