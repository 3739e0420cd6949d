"""Replacement and revocation of the clients' keys, and their confirmation after a restore.

A client with a revoked key stays in the federation, and is unreachable until it gets a new key. Revoked keys are kept
in keys/revoked, since Flower never accepts a revoked key again, and have an entry in the list of revocations.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_public_key,
)

from feddrift.deploy.files import replace_file, replace_file_pair
from feddrift.deploy.monitor.alerts import audit_change
from feddrift.deploy.pki.revocations import (
    UNCONFIRMED_MARKER,
    find_unsigned_entries,
    hash_key,
    store_revoked_key,
    update_revocations,
)
from feddrift.deploy.processes import launcher
from feddrift.deploy.settings import REVOKED_FOLDER, Settings, read_public_key
from feddrift.engines.flower.client.client_toml import read_client_toml
from feddrift.engines.flower.revocations import REVOCATIONS_FILE, SHOWN_DIGITS, Revocation, read_revocations
from feddrift.errors import ConfigError, FeddriftError, unknown_name_error

_log = logging.getLogger("feddrift")


def generate_key_pair(name: str) -> tuple[str, str]:
    """Generate a key pair of a client.

    Returns:
        The texts of the private and the public key in OpenSSH's formats, for the files `key` and `key.pub`.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode()
    return private, _format_key_line(key.public_key(), name)


def replace_client_key(client: Path, name: str) -> Path:
    """Create a new key in a client's folder, keep a copy of the old one, and return the file to copy to the server."""
    private, public = generate_key_pair(name)
    replace_file_pair((client / "key", private), (client / "key.pub", public))
    return client / "key.pub"


def accept_new_key(server: Path, name: str, path: Path, ca_key: Path | None = None) -> bool:
    """Accept a new public key of a client and revoke its old one.

    Args:
        server: The server's folder.
        name: The client.
        path: The file with the public key that was created at the client.
        ca_key: The private key of the authority, which signs the revocation, if it is not in the server's folder.

    Returns:
        True if a running server has registered the key; otherwise this happens when the server starts.

    Raises:
        ConfigError: If the client is unknown, or the key is unusable, revoked or already in use.
    """
    keys = server / "keys"
    check_client_name(server, name)
    line = _format_key_line(_read_new_key(path), name)
    key_file = keys / f"{name}.pub"
    advice = "create a new one with `feddrift deploy rotate`"
    for other in (*sorted(keys.glob("*.pub")), *sorted((keys / REVOKED_FOLDER).glob("*.pub"))):
        if read_public_key(other) == _encode_pem(_read_new_key(path)):
            is_revoked = other.parent.name == REVOKED_FOLDER
            problem = "was revoked permanently" if is_revoked else f"is already that of client {other.stem}"
            raise ConfigError(f"the key in {path} {problem}: {advice}")
    if hash_key(path) in {entry.key for entry in read_revocations(server / REVOCATIONS_FILE)[0]}:
        raise ConfigError(f"the key in {path} was revoked permanently: {advice}")
    old_digest = store_revoked_key(key_file) if key_file.exists() else None
    replace_file(key_file, line)
    revocation = "" if old_digest is None else f"; the old key, {old_digest}, was revoked"
    audit_change(server, name, f"client {name} has a new key, {hash_key(key_file)[:SHOWN_DIGITS]}{revocation}")
    _enter_revocation(server, ca_key)
    return launcher.update_running_server(server)


def revoke_client(server: Path, name: str, ca_key: Path | None = None) -> bool:
    """Revoke the key of a client, which stays in the federation.

    Args:
        server: The server's folder.
        name: The client.
        ca_key: The private key of the authority, which signs the revocation, if it is not in the server's folder.

    Returns:
        True if a running server has revoked the key; otherwise this happens when the server starts.

    Raises:
        ConfigError: If the client is unknown or has no key.
    """
    check_client_name(server, name)
    path = server / "keys" / f"{name}.pub"
    if not path.exists():
        raise ConfigError(f"client {name} has no key in {path.parent}: it is revoked already")
    digest = store_revoked_key(path)
    path.unlink()
    audit_change(server, name, f"the key of client {name}, {digest}, was revoked: the client cannot connect")
    _enter_revocation(server, ca_key)
    return launcher.update_running_server(server)


@dataclass(frozen=True)
class ClientKey:
    """The key of a client at the server."""

    client: str
    digest: str  # SHA-256 of the public key
    since: str  # the day on which the server got it

    @property
    def short_digest(self) -> str:
        """Beginning of the digest, as it is shown."""
        return self.digest[:SHOWN_DIGITS]


def list_client_keys(server: Path) -> list[ClientKey]:
    """List the keys that the server accepts, by client; a key that cannot be read is an error."""
    keys = []
    for path in sorted((server / "keys").glob("*.pub")):
        day = datetime.fromtimestamp(path.stat().st_mtime, UTC).date()
        keys.append(ClientKey(path.stem, hash_key(path), str(day)))
    return keys


def sign_revocations(server: Path, ca_key: Path | None = None) -> tuple[list[Revocation], list[Revocation]]:
    """Complete and sign the list of revocations, compare it with the copy of the authority, and exclude revoked keys.

    Args:
        server: The server's folder.
        ca_key: The private key of the authority, if it is not in the server's folder.

    Returns:
        All revocations, and those that are not signed.

    Raises:
        ConfigError: If `ca_key` is given and cannot be used.
        DataError: If a list cannot be read or written.
    """
    launcher.exclude_revoked_keys(server, ca_key)
    revocations = read_revocations(server / REVOCATIONS_FILE)[0]
    return revocations, find_unsigned_entries(server, revocations)


def confirm_keys(server: Path) -> bool:
    """Confirm the keys of a restored server, so that it may start.

    Returns:
        False if they need no confirmation.
    """
    marker = server / "state" / UNCONFIRMED_MARKER
    if not marker.exists():
        return False
    names = ", ".join(f"{key.client} ({key.short_digest})" for key in list_client_keys(server)) or "no client"
    audit_change(server, None, f"the keys that a backup has brought back were confirmed: {names}")
    marker.unlink()
    return True


def _enter_revocation(server: Path, ca_key: Path | None) -> None:
    """Add a revocation to the list, and sign it if possible; the key is excluded already, so a failure is logged."""
    advice = f"`feddrift deploy keys {server} --ca-key PATH` signs it, which lets clients store it"
    try:
        try:
            revocations = update_revocations(server, ca_key)
        except FeddriftError as error:
            if ca_key is None:
                raise
            _log.warning("%s", error)
            revocations = update_revocations(server)
        if find_unsigned_entries(server, revocations):
            _log.warning("the key is excluded, but the authority has not signed the revocation: %s", advice)
    except (FeddriftError, OSError) as error:
        _log.warning("the key is excluded; the server enters it in %s at its next start: %s", REVOCATIONS_FILE, error)


def find_folders(folder: Path, name: str) -> tuple[Path | None, Path | None]:
    """Return the server's folder and this client's folder in a deployment; None for one that is on another machine.

    Args:
        folder: The whole deployment, or one of the two folders.
        name: The client.

    Raises:
        ConfigError: If neither exists, or the folder belongs to another client.
    """
    server = next((path for path in (folder, folder / "server") if (path / "federation.toml").exists()), None)
    client = next((path for path in (folder, folder / "clients" / name) if (path / "client.toml").exists()), None)
    owner = name if client is None else read_client_toml(client)["name"]
    if owner != name:
        raise ConfigError(f"{client} belongs to client {owner}, not to {name}")
    if server is None and client is None:
        raise ConfigError(f"{folder} has neither federation.toml nor the folder of a client {name}")
    return server and server.resolve(), client and client.resolve()


def check_client_name(server: Path, name: str) -> None:
    """Raise ConfigError if the federation has no client of this name."""
    clients = Settings.read(server / "federation.toml").clients
    if name not in clients:
        raise unknown_name_error("client", name, clients)


def _read_new_key(path: Path) -> ec.EllipticCurvePublicKey:
    """Return the public key in a file; raise ConfigError if the file or the type of key is wrong."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror or error}") from None
    if b"PRIVATE KEY" in data:
        raise ConfigError(f"{path} is a private key, which must never leave its client: use key.pub")
    try:
        key = load_ssh_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is not a public key in the format of `feddrift deploy rotate`: {error}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        kind = data.split()[0].decode(errors="replace")
        raise ConfigError(f"{path} must be of type ecdsa-sha2-nistp384, as of `feddrift deploy rotate`, got {kind}")
    return key


def _format_key_line(key: ec.EllipticCurvePublicKey, name: str) -> str:
    return f"{key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()} {name}\n"


def _encode_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
