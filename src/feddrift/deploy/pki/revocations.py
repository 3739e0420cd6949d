"""The server's list of revoked keys: numbered, signed by the certificate authority, and copied beside its key.

The folder `keys/revoked` has the keys themselves. A revocation moves a key there first, which excludes its client; the
entry in the list follows. An entry that is missing after an interruption, or in the folder of an older version, is
added at the next update. The key of the authority is not needed to revoke a key: an entry may be signed later.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from feddrift._internal.system import lock_folder
from feddrift.deploy.files import replace_file
from feddrift.deploy.pki.certificates import read_authorities, read_authority_key
from feddrift.deploy.settings import REVOKED_FOLDER, read_public_key
from feddrift.engines.flower.revocations import (
    REVOCATIONS_FILE,
    SHOWN_DIGITS,
    Revocation,
    find_highest_serial,
    is_client_name,
    read_revocations,
    write_revocations,
)
from feddrift.errors import ConfigError, DataError

UNCONFIRMED_MARKER = "unconfirmed_keys"  # file in the folder `state` of a server that was restored from a backup
REPORTED_SERIALS_FILE = "reported_serials.json"  # in the folder `state`: by client, the highest that it has received
LOCK_SECONDS = 20.0  # maximum time to wait for another command that changes the keys

_log = logging.getLogger("feddrift")


def hash_key(path: Path) -> str:
    """Return the SHA-256 of the public key in a file."""
    return hashlib.sha256(read_public_key(path)).hexdigest()


def store_revoked_key(path: Path) -> str:
    """Copy a client's key to the folder of revoked keys, and return its digest as it is shown."""
    digest = hash_key(path)[:SHOWN_DIGITS]
    folder = path.parent / REVOKED_FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    replace_file(folder / f"{path.stem}-{digest}.pub", path.read_text())
    return digest


def remove_revoked_keys(server: Path) -> list[Revocation]:
    """Move keys that the list revokes, but that clients still have at this server, to the folder of revoked keys."""
    revocations = {entry.key: entry for entry in read_revocations(server / REVOCATIONS_FILE)[0]}
    removed = []
    for path in sorted((server / "keys").glob("*.pub")) if revocations else ():
        try:
            entry = revocations.get(hash_key(path))
        except ConfigError:  # `feddrift deploy check` reports a damaged key
            continue
        if entry is not None:
            store_revoked_key(path)
            path.unlink()
            removed.append(replace(entry, client=path.stem))
    return removed


def get_copy_path(ca_key: Path) -> Path:
    """Return the file beside the key of the authority that has a copy of the revocations.

    >>> str(get_copy_path(Path("safe/ca.key")))
    'safe/ca-revocations.json'
    """
    return ca_key.with_name(f"{ca_key.stem}-{REVOCATIONS_FILE}")


def update_revocations(
    server: Path, ca_key: Path | None = None, reported: Sequence[Revocation] = ()
) -> list[Revocation]:
    """Complete and sign the server's list of revocations, and return it.

    Entries are added for all keys in `keys/revoked`, and those from the copy of the authority and from clients.

    Args:
        server: The server's folder.
        ca_key: The private key of the authority, if it is not in the server's folder. The copy beside it is updated.
        reported: Signed entries from clients.

    Raises:
        ConfigError: If `ca_key` is given and cannot be used.
        DataError: If the list cannot be read or written, or no authority in ca.crt has signed a reported entry.
    """
    signer = None if ca_key is None else read_authority_key(server, ca_key)[1]
    if signer is None and (server / "ca.key").exists():
        try:
            signer = read_authority_key(server, server / "ca.key")[1]
        except ConfigError as error:
            _log.warning("revocations are not signed: %s", error)
    authorities = read_authorities(server) if (server / "ca.crt").exists() else []
    for entry in reported:
        if not entry.is_signed_by(authorities):
            raise DataError(f"{entry}, is not signed by an authority in {server / 'ca.crt'}")
    has_copy = ca_key is not None and ca_key.resolve().parent != server.resolve()
    copy = get_copy_path(ca_key) if ca_key is not None and has_copy else None
    with lock_folder(server / "keys", f"another command changes the keys of {server}: try again", LOCK_SECONDS):
        before = read_revocations(server / REVOCATIONS_FILE)[0]
        copied = [] if copy is None else read_revocations(copy)[0]
        entries = _merge([*before, *reported, *copied], authorities)
        for time, client, digest in _list_stored_keys(server):
            if digest not in entries:
                serial = find_highest_serial(entries.values()) + 1
                entries[digest] = Revocation(serial, client, digest, time)
        if signer is not None:
            entries = {
                key: entry if entry.is_signed_by(authorities) else _sign(entry, signer)
                for key, entry in entries.items()
            }
        after = sorted(entries.values())
        if after != before:
            write_revocations(server / REVOCATIONS_FILE, after)
        if copy is not None and after != copied:
            write_revocations(copy, after)
    return after


def read_reported_serials(server: Path) -> dict[str, int]:
    """Return the highest serial number that each client has reported; a damaged file counts as empty."""
    try:
        serials = json.loads((server / "state" / REPORTED_SERIALS_FILE).read_bytes())
        return {str(client): int(serial) for client, serial in serials.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def needs_key_confirmation(server: Path) -> bool:
    """Return whether the server was restored from a backup, and its keys are not confirmed."""
    return (server / "state" / UNCONFIRMED_MARKER).exists()


def require_key_confirmation(server: Path) -> None:
    """Raise ConfigError if the keys of a restored server are not confirmed."""
    if needs_key_confirmation(server):
        raise ConfigError(
            f"{server} was restored from a backup, which may bring back keys that were revoked or replaced since: list "
            f"them with `feddrift deploy keys {server}`, revoke those that must not connect, and then run "
            f"`feddrift deploy keys {server} --confirm`"
        )


def find_unsigned_entries(server: Path, revocations: Iterable[Revocation]) -> list[Revocation]:
    """Return the entries that no authority in ca.crt has signed, which clients therefore do not store."""
    authorities = read_authorities(server)
    return [entry for entry in revocations if not entry.is_signed_by(authorities)]


def _merge(entries: Iterable[Revocation], authorities: Sequence[x509.Certificate]) -> dict[str, Revocation]:
    """Return one entry per key; a signed one replaces others."""
    merged: dict[str, Revocation] = {}
    for entry in entries:
        old = merged.get(entry.key)
        if old is None or (not old.is_signed_by(authorities) and entry.is_signed_by(authorities)):
            merged[entry.key] = entry
    return merged


def _list_stored_keys(server: Path) -> list[tuple[str, str, str]]:
    """Return the time, the client and the digest of each key in the folder of revoked keys, the oldest first."""
    keys = []
    for path in (server / "keys" / REVOKED_FOLDER).glob("*.pub"):
        match = re.fullmatch(rf"(.+)-[0-9a-f]{{{SHOWN_DIGITS}}}", path.stem)
        try:
            digest = hash_key(path)
        except ConfigError as error:
            _log.warning("%s: it is left out of the list of revocations", error)
            continue
        time = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
        client = match[1] if match else path.stem
        keys.append((time, client if is_client_name(client) else "unknown", digest))
    return sorted(keys)


def _sign(entry: Revocation, key: ec.EllipticCurvePrivateKey) -> Revocation:
    signature = key.sign(entry.encode_for_signature(), ec.ECDSA(hashes.SHA256()))
    return replace(entry, signature=base64.b64encode(signature).decode())
