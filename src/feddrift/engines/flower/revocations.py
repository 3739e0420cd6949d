"""Revocations of client keys: entries with serial numbers, which the certificate authority signs.

The server's list is in its folder. Each client stores the entries that it has received with a valid signature, so that
a server that was restored from a backup gets back the entries that the backup lacks. A revocation is permanent.
"""

from __future__ import annotations

import base64
import json
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from feddrift._internal.system import atomic_write
from feddrift.engines.flower.model_parts import Body
from feddrift.engines.flower.serialization import InvalidMessageError, check_int
from feddrift.errors import DataError

REVOCATIONS_FILE = "revocations.json"  # in the folder of the server, and of each client
RESTORED_MARKER = "restored"  # in the folder of a client whose key no server has accepted since it was restored
FORMAT = 1
MAX_SERIAL = 10**9
MAX_REVOCATIONS = 50_000  # in one message or file
SHOWN_DIGITS = 16  # of a key's digest in messages and names of files

_DIGEST = re.compile(r"[0-9a-f]{64}")
_CLIENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

_log = logging.getLogger("feddrift")


@dataclass(frozen=True, order=True)
class Revocation:
    """A key that the server never accepts again."""

    serial: int  # counted from 1 in each federation
    client: str
    key: str  # SHA-256 of the public key
    time: str
    signature: str = ""  # of the certificate authority, in base64; empty: its key was not available

    def __str__(self) -> str:
        return f"revocation {self.serial}, of key {self.short_key} of client {self.client}"

    @property
    def short_key(self) -> str:
        """Beginning of the key's digest, as it is shown."""
        return self.key[:SHOWN_DIGITS]

    @property
    def day(self) -> str:
        """Day of the revocation."""
        return str(datetime.fromisoformat(self.time).date())

    @classmethod
    def from_dict(cls, value: Any) -> Self:
        """Read and check an entry; raise InvalidMessageError if it is not valid."""
        names = {field.name for field in fields(cls)}
        if (
            not isinstance(value, dict)
            or set(value) != names
            or not all(isinstance(value[n], str) for n in names - {"serial"})
        ):
            raise InvalidMessageError(f"a revocation must consist of {', '.join(sorted(names))}")
        check_int(value["serial"], 1, MAX_SERIAL)
        if not is_client_name(value["client"]) or not _DIGEST.fullmatch(value["key"]):
            raise InvalidMessageError("a revocation must name a client and the SHA-256 of its key")
        try:
            datetime.fromisoformat(value["time"])
            base64.b64decode(value["signature"], validate=True)
        except ValueError as error:
            raise InvalidMessageError(f"a revocation has an invalid time or signature: {error}") from None
        return cls(**value)

    def encode_for_signature(self) -> bytes:
        """Return the bytes that the certificate authority signs."""
        return b"feddrift revocation\n" + json.dumps(asdict(replace(self, signature="")), sort_keys=True).encode()

    def is_signed_by(self, authorities: Iterable[x509.Certificate]) -> bool:
        """Return whether one of these authorities has signed the entry."""
        signature = base64.b64decode(self.signature)
        for authority in authorities if signature else ():
            key = authority.public_key()
            try:
                if isinstance(key, ec.EllipticCurvePublicKey):
                    key.verify(signature, self.encode_for_signature(), ec.ECDSA(hashes.SHA256()))
                    return True
            except InvalidSignature:
                continue
        return False


class RevocationBook(Protocol):
    """The server's revocations, as its connection to the clients uses them."""

    def read(self) -> Sequence[Revocation]:
        """Return all revocations."""

    def adopt(self, client: str, revocations: Sequence[Revocation]) -> None:
        """Add revocations that a client has reported and the list lacks, and exclude their keys.

        Raises:
            InvalidMessageError: If the certificate authority of the server has not signed one of them.
        """

    def note_serial(self, client: str, serial: int) -> None:
        """Store the highest serial number that a client has received."""


def is_client_name(text: str) -> bool:
    """Return whether a revocation may contain this name of a client."""
    return _CLIENT.fullmatch(text) is not None


def find_highest_serial(revocations: Iterable[Revocation]) -> int:
    """Return the highest serial number; 0: the list is empty."""
    return max((revocation.serial for revocation in revocations), default=0)


def parse_revocations(values: Any) -> list[Revocation]:
    """Read and check a list of entries, at most one per key; raise InvalidMessageError if it is not valid."""
    if not isinstance(values, list) or len(values) > MAX_REVOCATIONS:
        raise InvalidMessageError(f"revocations must be a list of at most {MAX_REVOCATIONS}")
    revocations = [Revocation.from_dict(value) for value in values]
    if len({revocation.key for revocation in revocations}) < len(revocations):
        raise InvalidMessageError("a key is revoked twice")
    return sorted(revocations)


def read_revocations(path: Path) -> tuple[list[Revocation], int]:
    """Read a file of revocations; a missing file is an empty list.

    Returns:
        The entries in the order of their serial numbers, and the highest serial number that its owner has received.

    Raises:
        DataError: If the file cannot be read or is damaged.
    """
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise InvalidMessageError(f"it must have format {FORMAT}")
        revocations = parse_revocations(content.get("revocations"))
        return revocations, max(check_int(content.get("serial"), 0, MAX_SERIAL), find_highest_serial(revocations))
    except FileNotFoundError:
        return [], 0
    except (OSError, ValueError, RecursionError, InvalidMessageError) as error:
        raise DataError(
            f"cannot read the revocations in {path}: {error}; restore the file, or move it away, then it is made again"
        ) from None


def write_revocations(path: Path, revocations: Iterable[Revocation], serial: int = 0) -> None:
    """Write a file of revocations atomically.

    Args:
        path: The file.
        revocations: The entries.
        serial: The highest serial number that the owner of the file has received, if it is not that of an entry.
    """
    entries = sorted(revocations)
    content: Body = {"format": FORMAT, "serial": max(serial, find_highest_serial(entries))}
    content |= {"revocations": [asdict(entry) for entry in entries]}
    atomic_write(path, f"{json.dumps(content, indent=1)}\n".encode())


class MissingRevocationsError(InvalidMessageError):
    """A server lacks revocations that the client has received with a valid signature."""

    def __init__(self, revocations: Sequence[Revocation]) -> None:
        one = len(revocations) == 1
        super().__init__(
            f"the server lacks {revocations[0]}" + ("" if one else f", and {len(revocations) - 1} more")
            + ": it was probably restored from an old backup, and must first exclude "
            + ("this key" if one else "these keys") + " again"
        )  # fmt: skip
        self.revocations = revocations

    def to_report(self) -> Body:
        """Return the part of the client's reply with the entries."""
        entries = [asdict(entry) for entry in self.revocations]
        return {"serial": find_highest_serial(self.revocations), "missing": entries}


class ClientRevocations:
    """Revocations that a client has received, in its folder.

    Args:
        folder: The client's folder, which also contains the certificates of the authorities, ca.crt.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / REVOCATIONS_FILE
        self.authority_file = folder / "ca.crt"
        self.restored_marker = folder / RESTORED_MARKER

    def read(self) -> tuple[list[Revocation], int]:
        """Return the entries that an authority of ca.crt has signed, and the highest serial number; log damage."""
        try:
            revocations, serial = read_revocations(self.path)
        except DataError as error:
            _log.warning("%s", error)
            return [], 0
        authorities = self._read_authorities() if revocations else []
        return [entry for entry in revocations if entry.is_signed_by(authorities)], serial

    def receive(self, content: Body) -> Body:
        """Store the revocations of a hello, and return the reply.

        Args:
            content: The highest serial number at the server, and perhaps the list of all its revocations.

        Raises:
            MissingRevocationsError: If the server's list lacks entries that this client has.
            InvalidMessageError: If the content is not valid.
        """
        self.restored_marker.unlink(missing_ok=True)  # the server has accepted the key
        server_serial = check_int(content["serial"], 0, MAX_SERIAL)
        revocations, serial = self.read()
        new_serial = max(serial, server_serial) if "list" in content else serial  # if lower, the server sends its list
        new: list[Revocation] = []
        if "list" in content:
            listed = parse_revocations(content["list"])
            listed_keys = {entry.key for entry in listed}
            missing = [entry for entry in revocations if entry.key not in listed_keys]
            if missing:
                raise MissingRevocationsError(missing)
            stored = {entry.key for entry in revocations}
            candidates = [entry for entry in listed if entry.key not in stored and entry.signature]
            authorities = self._read_authorities() if candidates else []
            new = [entry for entry in candidates if entry.is_signed_by(authorities)]
            if len(new) < len(candidates):
                text = "%d revocations of the server are not signed by an authority in %s, and are not stored"
                _log.warning(text, len(candidates) - len(new), self.authority_file)
        if new or new_serial > serial:
            try:
                write_revocations(self.path, [*revocations, *new], new_serial)
            except DataError as error:  # perhaps the disk is full: the server sends the list again
                _log.warning("revocations were received and are not stored: %s", error)
                return {"serial": serial}
        return {"serial": new_serial}

    def _read_authorities(self) -> list[x509.Certificate]:
        try:
            return x509.load_pem_x509_certificates(self.authority_file.read_bytes())
        except (OSError, ValueError) as error:
            _log.warning(
                "cannot read the authorities in %s, so no revocation is stored: %s", self.authority_file, error
            )
            return []
