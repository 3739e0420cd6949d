"""`feddrift deploy check`: what is wrong with a deployment's files, one sentence each."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from feddrift.deploy import start
from feddrift.deploy.settings import Settings
from feddrift.engines.flower.client import from_toml
from feddrift.errors import FeddriftError
from feddrift.streams.folder import listed

SOON = timedelta(days=30)


def problems(folder: Path) -> Iterator[str]:
    """One sentence for each problem of a whole deployment, of its server part, or of one client's folder."""
    version = metadata.version("flwr")
    if not version.startswith("1.41."):
        yield f"flwr {version} is installed, this feddrift is tested with 1.41"
    clients = [folder] if (folder / "client.toml").exists() else sorted((folder / "clients").glob("*"))
    server = next((path for path in (folder, folder / "server") if (path / "federation.toml").exists()), None)
    if server is None and not clients:
        yield f"{folder} is no deployment: neither federation.toml nor client.toml is there"
    if server is not None:
        yield from _server(server.resolve())
    for client in clients:
        yield from _client(client.resolve(), None if server is None else server.resolve())


def _server(server: Path) -> Iterator[str]:
    try:
        settings = Settings.read(server / "federation.toml")
        settings.roster(server / "keys")
        settings.net(server)
        strangers = {path.stem for path in (server / "keys").glob("*.pub")} - set(settings.clients)
        if strangers:
            yield f"{server / 'keys'} has keys of {', '.join(sorted(strangers))}, whom federation.toml does not name"
    except FeddriftError as error:
        yield str(error)
    for name in ("ca.key", "server.key"):
        yield from _secret(server / name)
    yield from _certificate(server)
    try:
        start.ports(server)
    except (FeddriftError, OSError) as error:
        yield str(error)
    nginx = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if nginx is None:
        yield "nginx is not installed: only clients on this machine can connect (deploy server --no-proxy)"
    else:
        command = [nginx, "-t", "-q", "-p", str(server), "-c", str(server / "nginx.conf")]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
        if answer.returncode:
            yield f"nginx does not take {server / 'nginx.conf'}: {answer.stderr.strip().splitlines()[0]}"


def _certificate(server: Path) -> Iterator[str]:
    try:
        authority = x509.load_pem_x509_certificate((server / "ca.crt").read_bytes())
        certificate = x509.load_pem_x509_certificate((server / "server.crt").read_bytes())
        certificate.verify_directly_issued_by(authority)
        key = load_pem_private_key((server / "server.key").read_bytes(), None)
    except (OSError, ValueError, TypeError, InvalidSignature) as error:
        yield f"{server}: ca.crt, server.crt and server.key do not fit together: {error!r}"
        return
    if _bytes(key.public_key()) != _bytes(certificate.public_key()):
        yield f"{server / 'server.key'} is not the key of server.crt"
    for path, crt in (("ca.crt", authority), ("server.crt", certificate)):
        left = crt.not_valid_after_utc - datetime.now(UTC)
        if left < SOON:
            when = crt.not_valid_after_utc.date()
            yield f"{server / path} {'ended' if left < timedelta(0) else 'ends'} on {when}, make a new one"


def _client(client: Path, server: Path | None) -> Iterator[str]:
    try:
        owner = from_toml(client)
    except FeddriftError as error:
        yield str(error)
        return
    yield from _secret(client / "key")
    try:
        private = load_ssh_private_key((client / "key").read_bytes(), None)
        public = load_ssh_public_key((client / "key.pub").read_bytes())
        if _bytes(private.public_key()) != _bytes(public):
            yield f"{client / 'key.pub'} is not the public part of {client / 'key'}"
        if server is not None and _bytes(load_ssh_public_key((server / "keys" / f"{owner.name}.pub").read_bytes())) != (
            _bytes(public)
        ):
            yield f"the server has another key of client {owner.name}"
        x509.load_pem_x509_certificate((client / "ca.crt").read_bytes())
        if server is not None and (client / "ca.crt").read_bytes() != (server / "ca.crt").read_bytes():
            yield f"{client / 'ca.crt'} is not the server's"
    except (OSError, ValueError, TypeError) as error:
        yield f"{client}: its key or ca.crt cannot be read: {error}"
    try:
        listed(client / "data" / "classes.txt") if (client / "data").is_dir() else None
    except FeddriftError as error:
        yield str(error)


def _secret(path: Path) -> Iterator[str]:
    if not path.exists():
        if path.name != "ca.key":  # it may, and should, be kept elsewhere
            yield f"{path} is missing"
    elif path.stat().st_mode & 0o077:
        yield f"{path} can be read by others: chmod 600 {path}"


def _bytes(key: object) -> bytes:
    pem: bytes = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined]
    return pem
