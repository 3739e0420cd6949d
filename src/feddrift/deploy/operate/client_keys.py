"""The clients' keys: a new one in the place of an old one, and one that is taken back.

A client whose key was taken back keeps its place, out of reach, until it gets another. What was shut out stays in
KEYS/revoked: Flower lets none of these keys in again, for good.
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
    """A new private key, and its public part, as a client's folder has them."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode()
    return private, _format_key_line(key.public_key(), name)


def replace_client_key(client: Path, name: str) -> Path:
    """Make a new key in a client's folder, the old one is kept beside it; the file to carry to the server."""
    private, public = generate_key_pair(name)
    replace_file_pair((client / "key", private), (client / "key.pub", public))
    return client / "key.pub"


def accept_new_key(server: Path, name: str, path: Path) -> bool:
    """Take a client's new public key in, and shut its old one out; whether a server that runs has done so."""
    keys = server / "keys"
    check_client_name(server, name)
    line = _format_key_line(_read_new_key(path), name)
    new = keys / f"{name}.pub"
    for other in (*sorted(keys.glob("*.pub")), *sorted((keys / REVOKED_FOLDER).glob("*.pub"))):
        if read_public_key(other) == _encode_pem(_read_new_key(path)):
            shut_out = other.parent.name == REVOKED_FOLDER
            what = "was shut out, which is for good" if shut_out else f"is that of client {other.stem} already"
            raise ConfigError(f"the key in {path} {what}: make a new one with `feddrift deploy rotate`")
    before = _store_revoked_key(new) if new.exists() else None
    replace_file(new, line)
    then = "" if before is None else f", the old one, {before}, is shut out"
    audit_change(server, name, f"client {name} has a new key, {_hash_key(new)}{then}")
    return _update_running_server(server)


def revoke_client(server: Path, name: str) -> bool:
    """Shut a client out: its key is taken back, its place stays; whether a server that runs has done so."""
    check_client_name(server, name)
    path = server / "keys" / f"{name}.pub"
    if not path.exists():
        raise ConfigError(f"client {name} has no key in {path.parent}: it is shut out already")
    digest = _store_revoked_key(path)
    path.unlink()
    audit_change(server, name, f"client {name} is shut out, its key, {digest}, was taken back")
    return _update_running_server(server)


def find_folders(folder: Path, name: str) -> tuple[Path | None, Path | None]:
    """The server's part of a deployment and this client's, each None where it is somewhere else."""
    server = next((path for path in (folder, folder / "server") if (path / "federation.toml").exists()), None)
    client = next((path for path in (folder, folder / "clients" / name) if (path / "client.toml").exists()), None)
    if client is not None and (owner := read_client_toml(client)["name"]) != name:
        raise ConfigError(f"{client} is of client {owner}, not of {name}")
    if server is None and client is None:
        raise ConfigError(f"{folder} has neither federation.toml nor the folder of a client {name}")
    return server and server.resolve(), client and client.resolve()


def check_client_name(server: Path, name: str) -> None:
    """Refuse a name that is no client's."""
    clients = Settings.read(server / "federation.toml").clients
    if name not in clients:
        raise unknown_name_error("client", name, clients)


def _read_new_key(path: Path) -> ec.EllipticCurvePublicKey:
    """The public key in a file that was brought, if it is one as clients have them."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror or error}") from None
    if b"PRIVATE KEY" in data:
        raise ConfigError(f"{path} is a private key, which never leaves its client: bring key.pub")
    try:
        key = load_ssh_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is no public key as `feddrift deploy rotate` writes it: {error}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        kind = data.split()[0].decode(errors="replace")
        raise ConfigError(f"{path} must be of the kind ecdsa-sha2-nistp384, got {kind}")
    return key


def _store_revoked_key(path: Path) -> str:
    """Keep a copy of a client's key among those that were shut out; its digest."""
    digest, folder = _hash_key(path), path.parent / REVOKED_FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    replace_file(folder / f"{path.stem}-{digest}.pub", path.read_text())
    return digest


def _update_running_server(server: Path) -> bool:
    """Let a server that runs know the keys at once."""
    try:
        if launcher.is_server_running(server):
            launcher.register_keys(server)
            return True
    except FeddriftError as error:
        _log.warning("the server that runs was not told: %s", error)
    return False


def _format_key_line(key: ec.EllipticCurvePublicKey, name: str) -> str:
    return f"{key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()} {name}\n"


def _encode_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _hash_key(path: Path) -> str:
    return hashlib.sha256(read_public_key(path)).hexdigest()[:16]
