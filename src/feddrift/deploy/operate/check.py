"""`feddrift deploy check`: what is wrong with a deployment's files, one sentence each."""

from __future__ import annotations

import http.client
import shlex
import shutil
import ssl
import subprocess
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from feddrift.deploy.flower_version import find_flwr_problem
from feddrift.deploy.pki import app_signature
from feddrift.deploy.pki.certificates import find_issuer, read_authorities
from feddrift.deploy.processes import launcher
from feddrift.deploy.settings import Settings
from feddrift.engines.flower.client.batches import StepFiles
from feddrift.engines.flower.client.client import Client, from_toml
from feddrift.engines.flower.client.client_toml import read_client_toml
from feddrift.engines.flower.client.store import Store, check_batch
from feddrift.errors import FeddriftError, to_one_line
from feddrift.streams.folder import read_class_list

EXPIRY_WARNING = timedelta(days=30)
MAX_CLOCK_AHEAD, MAX_CLOCK_BEHIND = (
    timedelta(seconds=5),
    timedelta(seconds=300),
)  # how far a client's clock may be off, by Flower


def find_problems(folder: Path) -> Iterator[str]:
    """One sentence for each problem of a whole deployment, of its server part, or of one client's folder."""
    if (sentence := find_flwr_problem()) is not None:
        yield sentence
    clients = [folder] if (folder / "client.toml").exists() else sorted((folder / "clients").glob("*"))
    server = next((path for path in (folder, folder / "server") if (path / "federation.toml").exists()), None)
    if server is None and not clients:
        yield f"{folder} is no deployment: neither federation.toml nor client.toml is there"
    if server is not None:
        yield from _check_server(server.resolve())
    for client in clients:
        yield from _check_client(client.resolve(), None if server is None else server.resolve())


def _check_server(server: Path) -> Iterator[str]:
    try:
        settings = Settings.read(server / "federation.toml")
        here = len(settings.read_roster(server / "keys").keys)
        if settings.quorum > here:
            yield f"{server / 'federation.toml'}: quorum = {settings.quorum}, and only {here} clients have keys"
        settings.create_net(server)
        yield from (f"{server / 'federation.toml'}: {text}" for text in _check_notify_targets(settings.notify, server))
        keys = {path.stem for path in (server / "keys").glob("*.pub")}
        for name in (name for name in settings.clients if name not in keys):
            yield f"client {name} has no key at the server and cannot come: `feddrift deploy rotate` gives it a new one"
        if strangers := keys - set(settings.clients):
            yield f"{server / 'keys'} has keys of {', '.join(sorted(strangers))}, whom federation.toml does not name"
    except FeddriftError as error:
        yield str(error)
    for name in ("ca.key", "server.key"):
        yield from _check_private_file(server / name)
    yield from _check_certificates(server)
    try:
        launcher.read_ports(server)
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


def _check_certificates(server: Path) -> Iterator[str]:
    try:
        certificate = x509.load_pem_x509_certificate((server / "server.crt").read_bytes())
        authority = find_issuer(certificate, read_authorities(server))
        if authority is None:
            raise ValueError("server.crt is not of an authority in ca.crt")
        key = load_pem_private_key((server / "server.key").read_bytes(), None)
    except (OSError, ValueError, TypeError, FeddriftError) as error:
        yield f"{server}: ca.crt, server.crt and server.key do not fit together: {error}"
        return
    if _encode_public_key(key.public_key()) != _encode_public_key(certificate.public_key()):
        yield f"{server / 'server.key'} is not the key of server.crt"
    for name, crt in (("ca.crt", authority), ("server.crt", certificate)):
        yield from _check_dates(server / name, crt)


def _check_notify_targets(targets: Sequence[str], server: Path) -> Iterator[str]:
    """What is wrong with the commands that are to be told."""
    for target in targets:
        if target.startswith(("http://", "https://")):
            continue
        try:
            words = shlex.split(target)
        except ValueError as error:
            yield f"notify has {target!r}, which cannot be read: {error}"
            continue
        if not words or (shutil.which(words[0]) is None and shutil.which(str(server / words[0])) is None):
            yield f"notify names a program that is not there, {target!r}"
        if shell := {">", ">>", "|", "&&", ";", "&"} & set(words):
            yield f"notify has {target!r}, and commands are given to no shell, which {min(shell)} needs: name a script"


def _check_dates(path: Path, crt: x509.Certificate) -> Iterator[str]:
    now = _read_clock()
    left = crt.not_valid_after_utc - now
    if now < crt.not_valid_before_utc:
        yield (
            f"the clock of this machine is off: it says {now:%Y-%m-%d %H:%M} UTC, and {path} was made at "
            f"{crt.not_valid_before_utc:%Y-%m-%d %H:%M}; set it"
        )
    if left < EXPIRY_WARNING:
        when = crt.not_valid_after_utc.date()
        how = "renew --ca" if path.name == "ca.crt" else "renew"
        yield f"{path} {'ended' if left < timedelta(0) else 'ends'} on {when}: `feddrift deploy {how}` at the server"


def _read_clock() -> datetime:
    return datetime.now(UTC)


def _check_client(client: Path, server: Path | None) -> Iterator[str]:
    try:
        owner = from_toml(client)
    except FeddriftError as error:
        yield str(error)
        return
    yield from _check_private_file(client / "key")
    yield from _check_access(client, server)
    try:
        private = load_ssh_private_key((client / "key").read_bytes(), None)
        public = load_ssh_public_key((client / "key.pub").read_bytes())
        if _encode_public_key(private.public_key()) != _encode_public_key(public):
            yield f"{client / 'key.pub'} is not the public part of {client / 'key'}"
        known = None if server is None else server / "keys" / f"{owner.name}.pub"
        if (
            known is not None
            and known.exists()
            and _encode_public_key(load_ssh_public_key(known.read_bytes())) != _encode_public_key(public)
        ):
            yield f"the server has another key of client {owner.name}"
        yield from _check_dates(client / "ca.crt", x509.load_pem_x509_certificate((client / "ca.crt").read_bytes()))
        if server is not None and (client / "ca.crt").read_bytes() != (server / "ca.crt").read_bytes():
            yield f"{client / 'ca.crt'} is not the server's"
    except (OSError, ValueError, TypeError) as error:
        yield f"{client}: its key or ca.crt cannot be read: {error}"
    try:
        read_class_list(client / "data" / "classes.txt") if (client / "data").is_dir() else None
    except FeddriftError as error:
        yield str(error)
    stores = [owner.open_store(path.name) for path in owner.root.glob("*") if path.is_dir()]
    if isinstance(owner.load, StepFiles):
        yield from _find_missing_batches(owner.load, stores)
    yield from _check_next_batch(owner, stores, client, server)
    if server is None:  # on the client's own machine
        yield from _check_clock(client)


def _check_access(client: Path, server: Path | None) -> Iterator[str]:
    """What keeps the data from others who use the machine, and from who has the server."""
    if client.stat().st_mode & 0o077:
        yield f"others can look into {client}: chmod 700 {client}"
    trusted = client / app_signature.TRUSTED_FILE
    if not trusted.exists():
        yield f"{trusted} is missing: this client runs whatever the server sends, copy the server's file"
        return
    servers = None if server is None else server / app_signature.TRUSTED_FILE
    if servers is not None and servers.exists() and servers.read_bytes() != trusted.read_bytes():
        yield f"{trusted} trusts another app than the server's, which the client will refuse"


def _find_missing_batches(files: StepFiles, stores: Sequence[Store]) -> Iterator[str]:
    for n in sorted({store.next_batch_number() for store in stores} or {0}):
        later = [number for number in files.list_numbers() if number >= n]
        if later and n not in later:
            yield f"{files.directory} has step_{later[0]} and no step_{n}, for which the client waits"


def _check_next_batch(owner: Client, stores: Sequence[Store], client: Path, server: Path | None) -> Iterator[str]:
    """What would be refused of the batch that the client shows next, if it has come."""
    n = max((store.next_batch_number() for store in stores), default=0)
    where = str(owner.load.find_file(n)) if isinstance(owner.load, StepFiles) else f"{client}: load({n})"
    try:
        settings = None if server is None else Settings.read(server / "federation.toml")
        if (batch := owner.load(n)) is None:
            return
        told = next((store.serving for store in stores if store.serving), {})  # by the server, at the last hello
        features = told.get("features") if settings is None else settings.features
        n_classes = told.get("n_classes") if settings is None else len(settings.classes)
        shape = None if features is None else tuple(features)
        check_batch(batch, n, shape, n_classes or len(read_class_list(client / "data" / "classes.txt")))
    except FeddriftError as error:
        yield str(error) if where in str(error) else f"{where}: {error}"
    except Exception as error:  # whatever the client's own code says, on its own machine
        yield f"{where} fails: {type(error).__name__}: {to_one_line(str(error))}"


def _check_clock(client: Path) -> Iterator[str]:
    """A clock that is off by the server's, where that can be reached: Flower would refuse this client."""
    host, _, port = read_client_toml(client).get("server", "").rpartition(":")
    began = _read_clock()
    try:
        trusts = ssl.create_default_context(cafile=str(client / "ca.crt"))
        line = http.client.HTTPSConnection(host, int(port), timeout=5, context=trusts)
        line.request("GET", "/")
        told = parsedate_to_datetime(line.getresponse().headers["Date"] or "")
    except (OSError, ValueError, http.client.HTTPException):  # it does not run yet, or is not what it should be
        return
    ahead, behind = began - told - timedelta(seconds=1), told - _read_clock()  # it tells whole seconds
    if ahead > MAX_CLOCK_AHEAD or behind > MAX_CLOCK_BEHIND:
        how = (
            f"{ahead.total_seconds():.0f} s ahead of"
            if ahead > MAX_CLOCK_AHEAD
            else f"{behind.total_seconds():.0f} s behind"
        )
        yield (
            f"the clock of this machine is {how} that of the server, which refuses clients more than "
            f"{MAX_CLOCK_AHEAD.seconds} s ahead or {MAX_CLOCK_BEHIND.seconds} s behind: set it"
        )


def _check_private_file(path: Path) -> Iterator[str]:
    if not path.exists():
        if path.name != "ca.key":  # it may, and should, be kept elsewhere
            yield f"{path} is missing"
    elif path.stat().st_mode & 0o077:
        yield f"{path} can be read by others: chmod 600 {path}"


def _encode_public_key(key: object) -> bytes:
    pem: bytes = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined]
    return pem
