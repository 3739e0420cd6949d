"""Replacement and revocation of the clients' keys.

A client with a revoked key stays in the federation, and is unreachable until it gets a new key. Revoked keys are kept
in keys/revoked, since Flower never accepts a revoked key again.
"""

from __future__ import annotations

import hashlib
import logging
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
from feddrift.deploy.processes import launcher
from feddrift.deploy.settings import REVOKED_FOLDER, Settings, read_public_key
from feddrift.engines.flower.client.client_toml import read_client_toml
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


def accept_new_key(server: Path, name: str, path: Path) -> bool:
    """Accept a new public key of a client and revoke its old one.

    Args:
        server: The server's folder.
        name: The client.
        path: The file with the public key that was created at the client.

    Returns:
        True if a running server has registered the key; otherwise this happens when the server starts.

    Raises:
        ConfigError: If the client is unknown, or the key is unusable, revoked or already in use.
    """
    keys = server / "keys"
    check_client_name(server, name)
    line = _format_key_line(_read_new_key(path), name)
    key_file = keys / f"{name}.pub"
    for other in (*sorted(keys.glob("*.pub")), *sorted((keys / REVOKED_FOLDER).glob("*.pub"))):
        if read_public_key(other) == _encode_pem(_read_new_key(path)):
            is_revoked = other.parent.name == REVOKED_FOLDER
            problem = "was revoked permanently" if is_revoked else f"is already that of client {other.stem}"
            raise ConfigError(f"the key in {path} {problem}: create a new one with `feddrift deploy rotate`")
    old_digest = _store_revoked_key(key_file) if key_file.exists() else None
    replace_file(key_file, line)
    revocation = "" if old_digest is None else f"; the old key, {old_digest}, was revoked"
    audit_change(server, name, f"client {name} has a new key, {_hash_key(key_file)}{revocation}")
    return _update_running_server(server)


def revoke_client(server: Path, name: str) -> bool:
    """Revoke the key of a client, which stays in the federation.

    Args:
        server: The server's folder.
        name: The client.

    Returns:
        True if a running server has revoked the key; otherwise this happens when the server starts.

    Raises:
        ConfigError: If the client is unknown or has no key.
    """
    check_client_name(server, name)
    path = server / "keys" / f"{name}.pub"
    if not path.exists():
        raise ConfigError(f"client {name} has no key in {path.parent}: it is revoked already")
    digest = _store_revoked_key(path)
    path.unlink()
    audit_change(server, name, f"the key of client {name}, {digest}, was revoked: the client cannot connect")
    return _update_running_server(server)


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


def _store_revoked_key(path: Path) -> str:
    """Copy a client's key to the folder of revoked keys, and return its digest."""
    digest = _hash_key(path)
    folder = path.parent / REVOKED_FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    replace_file(folder / f"{path.stem}-{digest}.pub", path.read_text())
    return digest


def _update_running_server(server: Path) -> bool:
    """Register the keys at the SuperLink if it is running, and return whether this was successful."""
    try:
        if launcher.is_server_running(server):
            launcher.register_keys(server)
            return True
    except FeddriftError as error:
        _log.warning("the running server could not register the keys, it does so at its next start: %s", error)
    return False


def _format_key_line(key: ec.EllipticCurvePublicKey, name: str) -> str:
    return f"{key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()} {name}\n"


def _encode_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _hash_key(path: Path) -> str:
    return hashlib.sha256(read_public_key(path)).hexdigest()[:16]
