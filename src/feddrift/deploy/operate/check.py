"""Check of a deployment's files, for `feddrift deploy check`: one sentence for each problem."""

from __future__ import annotations

import http.client
import shlex
import shutil
import ssl
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
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
from feddrift.deploy.operate.client_requests import list_agreements
from feddrift.deploy.pki import app_signature
from feddrift.deploy.pki.certificates import find_issuer, read_authorities, read_authority_key
from feddrift.deploy.pki.revocations import (
    find_unsigned_entries,
    get_copy_path,
    hash_key,
    read_reported_serials,
    require_key_confirmation,
)
from feddrift.deploy.processes import launcher
from feddrift.deploy.settings import Settings
from feddrift.engines.flower.client.batches import StepFiles
from feddrift.engines.flower.client.client import Client, load_client
from feddrift.engines.flower.client.client_toml import read_client_toml
from feddrift.engines.flower.client.store import Store, check_batch
from feddrift.engines.flower.revocations import (
    REVOCATIONS_FILE,
    ClientRevocations,
    Revocation,
    find_highest_serial,
    read_revocations,
)
from feddrift.errors import FeddriftError, to_one_line
from feddrift.streams.folder import read_class_list

EXPIRY_WARNING = timedelta(days=30)
# Flower's limits for a client's clock compared with the server's.
MAX_CLOCK_AHEAD = timedelta(seconds=5)
MAX_CLOCK_BEHIND = timedelta(seconds=300)


def find_problems(folder: Path, ca_key: Path | None = None) -> Iterator[str]:
    """Yield a sentence for each problem of a whole deployment, of its server's folder, or of one client's folder.

    Args:
        folder: The folder.
        ca_key: The private key of the authority, if it is not in the server's folder: the list of revocations is
            compared with the copy beside it.
    """
    if (flwr_problem := find_flwr_problem()) is not None:
        yield flwr_problem
    clients = [folder] if (folder / "client.toml").exists() else sorted((folder / "clients").glob("*"))
    server = next((path for path in (folder, folder / "server") if (path / "federation.toml").exists()), None)
    if server is None and not clients:
        yield f"{folder} is not a deployment: it has neither federation.toml nor client.toml"
    if server is not None:
        yield from _check_server(server.resolve())
        yield from _check_revocations(server.resolve(), ca_key)
    for client in clients:
        yield from _check_client(client.resolve(), None if server is None else server.resolve())


def _check_server(server: Path) -> Iterator[str]:
    try:
        settings = Settings.read(server / "federation.toml")
        n_keys = len(settings.read_roster(server / "keys").keys)
        if settings.quorum > n_keys:
            quorum = f"quorum = {settings.quorum}"
            yield f"{server / 'federation.toml'}: {quorum}, but only {n_keys} clients have keys: lower the quorum"
        settings.create_net(server)  # raises an error if the net does not fit the features
        yield from (f"{server / 'federation.toml'}: {text}" for text in _check_notify_targets(settings.notify, server))
        keys = {path.stem for path in (server / "keys").glob("*.pub")}
        for name in (name for name in settings.clients if name not in keys):
            yield f"client {name} has no key at the server, so it cannot connect: `feddrift deploy rotate` creates one"
        unlisted = ", ".join(sorted(keys - set(settings.clients)))
        if unlisted:
            yield f"{server / 'keys'} has keys of {unlisted}, which federation.toml does not list: add or delete them"
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
        yield "nginx is not installed, so only clients on this machine can connect: install it, or use --no-proxy"
    else:
        command = [nginx, "-t", "-q", "-p", str(server), "-c", str(server / "nginx.conf")]
        result = subprocess.run(command, capture_output=True, text=True, timeout=30)
        if result.returncode:
            yield f"nginx rejects {server / 'nginx.conf'}: {result.stderr.strip().splitlines()[0]}"


def _check_revocations(server: Path, ca_key: Path | None) -> Iterator[str]:
    """Yield differences between the keys, the list of revocations, the authority's copy, and what clients have seen."""
    path = server / REVOCATIONS_FILE
    command = f"`feddrift deploy keys {server}"
    try:
        require_key_confirmation(server)
    except FeddriftError as error:
        yield str(error)
    try:
        entries = read_revocations(path)[0]
        unsigned = find_unsigned_entries(server, entries)
        copied = [] if ca_key is None else read_revocations(get_copy_path(ca_key))[0]
        if ca_key is not None:
            read_authority_key(server, ca_key)  # raises an error if it is another authority's key
    except FeddriftError as error:
        yield str(error)
        return
    revoked = {entry.key: entry for entry in entries}
    for key_file in sorted((server / "keys").glob("*.pub")):
        with suppress(FeddriftError):  # an unreadable key is another problem
            if (entry := revoked.get(hash_key(key_file))) is not None:
                yield f"{key_file} was revoked ({entry}), so the client cannot connect: {command}` removes it"
    if unsigned:
        number = "1 revocation is" if len(unsigned) == 1 else f"{len(unsigned)} revocations are"
        yield f"{path}: {number} not signed, so clients do not store them: {command} --ca-key PATH` signs them"
    if ca_key is not None and ca_key.resolve().parent != server:
        for entry in (entry for entry in copied if entry.key not in revoked):
            yield f"{path} lacks {entry}, which is in {get_copy_path(ca_key)}: {command} --ca-key {ca_key}` adds it"
        copied_keys = {entry.key for entry in copied}
        for entry in (entry for entry in entries if entry.key not in copied_keys):
            yield f"{get_copy_path(ca_key)} lacks {entry}: {command} --ca-key {ca_key}` adds it"
    highest = find_highest_serial(entries)
    for client, serial in sorted(read_reported_serials(server).items()):
        if serial > highest:
            yield (
                f"client {client} has seen revocation {serial}, but {path} ends at {highest}: if this server was "
                f"restored, revoke again what was revoked after the backup, or add it with {command} --ca-key PATH`"
            )


def _check_certificates(server: Path) -> Iterator[str]:
    try:
        certificate = x509.load_pem_x509_certificate((server / "server.crt").read_bytes())
        authority = find_issuer(certificate, read_authorities(server))
        if authority is None:
            raise ValueError("server.crt is not signed by an authority in ca.crt")
        key = load_pem_private_key((server / "server.key").read_bytes(), None)
    except (OSError, ValueError, TypeError, FeddriftError) as error:
        yield f"{server}: ca.crt, server.crt and server.key do not fit together: {error}"
        return
    if _encode_public_key(key.public_key()) != _encode_public_key(certificate.public_key()):
        yield f"{server / 'server.key'} is not the key of server.crt: `feddrift deploy renew` creates both"
    for name, crt in (("ca.crt", authority), ("server.crt", certificate)):
        yield from _check_dates(server / name, crt)


def _check_notify_targets(targets: Sequence[str], server: Path) -> Iterator[str]:
    """Yield a sentence for each command in `notify` that cannot be run as it is written."""
    for target in targets:
        if target.startswith(("http://", "https://")):
            continue
        try:
            words = shlex.split(target)
        except ValueError as error:
            yield f"notify has {target!r}, which cannot be read: {error}"
            continue
        if not words or (shutil.which(words[0]) is None and shutil.which(str(server / words[0])) is None):
            yield f"notify has {target!r}, but this program does not exist"
        if shell := {">", ">>", "|", "&&", ";", "&"} & set(words):
            yield f"notify has {target!r}, but commands run without a shell, which {min(shell)} needs: use a script"


def _check_dates(path: Path, crt: x509.Certificate) -> Iterator[str]:
    now = _read_clock()
    time_left = crt.not_valid_after_utc - now
    if now < crt.not_valid_before_utc:
        yield (
            f"the clock of this machine is wrong: it shows {now:%Y-%m-%d %H:%M} UTC, but {path} was created at "
            f"{crt.not_valid_before_utc:%Y-%m-%d %H:%M}; set the clock"
        )
    if time_left < EXPIRY_WARNING:
        end = crt.not_valid_after_utc.date()
        command = "renew --ca" if path.name == "ca.crt" else "renew"
        verb = "ended" if time_left < timedelta(0) else "ends"
        yield f"{path} {verb} on {end}: run `feddrift deploy {command}` at the server"


def _read_clock() -> datetime:
    return datetime.now(UTC)


def _check_client(client: Path, server: Path | None) -> Iterator[str]:
    try:
        app = load_client(client)
    except FeddriftError as error:
        yield str(error)
        return
    yield from _check_private_file(client / "key")
    yield from _check_access(client, server)
    try:
        private = load_ssh_private_key((client / "key").read_bytes(), None)
        public = load_ssh_public_key((client / "key.pub").read_bytes())
        if _encode_public_key(private.public_key()) != _encode_public_key(public):
            yield f"{client / 'key.pub'} does not belong to {client / 'key'}: `feddrift deploy rotate` creates both"
        registered = None if server is None else server / "keys" / f"{app.name}.pub"
        if (
            registered is not None
            and registered.exists()
            and _encode_public_key(load_ssh_public_key(registered.read_bytes())) != _encode_public_key(public)
        ):
            yield f"the server has another key of client {app.name}: `feddrift deploy rotate` registers key.pub"
        yield from _check_own_key(client, server)
        yield from _check_dates(client / "ca.crt", x509.load_pem_x509_certificate((client / "ca.crt").read_bytes()))
        if server is not None and (client / "ca.crt").read_bytes() != (server / "ca.crt").read_bytes():
            yield f"{client / 'ca.crt'} is not the server's: copy the server's file"
    except (OSError, ValueError, TypeError) as error:
        yield f"{client}: its key or ca.crt cannot be read: {error}"
    try:
        if (client / "data").is_dir():
            read_class_list(client / "data" / "classes.txt")
    except FeddriftError as error:
        yield str(error)
    for experiment, agreement in list_agreements(client):
        if changes := ", ".join(agreement.find_changes()):
            yield (
                f"the server of experiment {experiment} wants to change pinned settings ({changes}), which the client "
                f"refuses: `feddrift deploy client {client} --accept` shows and accepts them"
            )
    stores = [app.open_store(path.name) for path in app.root.glob("*") if path.is_dir()]
    if isinstance(app.load, StepFiles):
        yield from _find_missing_batches(app.load, stores)
    yield from _check_next_batch(app, stores, client, server)
    if server is None:  # on the client's own machine
        yield from _check_clock(client)


def _check_own_key(client: Path, server: Path | None) -> Iterator[str]:
    """Yield problems with the revocations that a client has stored: of its own key, and unknown to the server."""
    entries = ClientRevocations(client).read()[0]
    at_server: list[Revocation] = []
    if server is not None:
        with suppress(FeddriftError):  # a problem of the server
            at_server = read_revocations(server / REVOCATIONS_FILE)[0]
            known_keys = {entry.key for entry in at_server}
            for entry in (entry for entry in entries if entry.key not in known_keys):
                yield f"{server / REVOCATIONS_FILE} lacks {entry}, which {client} has: it refuses this server"
    digest = hash_key(client / "key.pub")
    for entry in (entry for entry in (*entries, *at_server) if entry.key == digest):
        yield f"the key in {client} was revoked on {entry.day}: `feddrift deploy rotate` creates a new one"
        return


def _check_access(client: Path, server: Path | None) -> Iterator[str]:
    """Yield problems that expose the client's data to other users of its machine or to another app of the server."""
    if client.stat().st_mode & 0o077:
        yield f"other users can open {client}: chmod 700 {client}"
    trusted = client / app_signature.TRUSTED_FILE
    if not trusted.exists():
        yield f"{trusted} is missing, so this client runs any app that the server sends: copy the server's file"
        return
    server_file = None if server is None else server / app_signature.TRUSTED_FILE
    if server_file is not None and server_file.exists() and server_file.read_bytes() != trusted.read_bytes():
        yield f"{trusted} is not the server's, so the client refuses the server's app: if you changed the app, copy it"


def _find_missing_batches(files: StepFiles, stores: Sequence[Store]) -> Iterator[str]:
    for n in sorted({store.get_next_batch_number() for store in stores} or {0}):
        later = [number for number in files.list_numbers() if number >= n]
        if later and n not in later:
            yield f"{files.directory} has step_{later[0]} and no step_{n}, for which the client waits: add it"


def _check_next_batch(app: Client, stores: Sequence[Store], client: Path, server: Path | None) -> Iterator[str]:
    """Yield the problem for which the client would refuse its next batch, if the batch has arrived."""
    n = max((store.get_next_batch_number() for store in stores), default=0)
    where = str(app.load.find_file(n)) if isinstance(app.load, StepFiles) else f"{client}: load({n})"
    try:
        settings = None if server is None else Settings.read(server / "federation.toml")
        batch = app.load(n)
        if batch is None:
            return
        last_hello = next((store.serving for store in stores if store.serving), {})  # request of the server
        features = last_hello.get("features") if settings is None else settings.features
        n_classes = last_hello.get("n_classes") if settings is None else len(settings.classes)
        shape = None if features is None else tuple(features)
        check_batch(batch, n, shape, n_classes or len(read_class_list(client / "data" / "classes.txt")))
    except FeddriftError as error:
        yield str(error) if where in str(error) else f"{where}: {error}"
    except Exception as error:  # the client's own code may raise anything
        yield f"{where} fails: {type(error).__name__}: {to_one_line(str(error))}"


def _check_clock(client: Path) -> Iterator[str]:
    """Compare the clock with the server's, if the server can be reached: Flower refuses clients with a wrong clock."""
    host, _, port = read_client_toml(client).get("server", "").rpartition(":")
    request_time = _read_clock()
    try:
        tls = ssl.create_default_context(cafile=str(client / "ca.crt"))
        connection = http.client.HTTPSConnection(host, int(port), timeout=5, context=tls)
        connection.request("GET", "/")
        server_time = parsedate_to_datetime(connection.getresponse().headers["Date"] or "")
    except (OSError, ValueError, http.client.HTTPException):  # the server is not running yet, or another server replies
        return
    ahead = request_time - server_time - timedelta(seconds=1)  # the server's time has no fraction of a second
    behind = server_time - _read_clock()
    if ahead > MAX_CLOCK_AHEAD or behind > MAX_CLOCK_BEHIND:
        difference = (
            f"{ahead.total_seconds():.0f} s ahead of"
            if ahead > MAX_CLOCK_AHEAD
            else f"{behind.total_seconds():.0f} s behind"
        )
        yield (
            f"the clock of this machine is {difference} that of the server, which refuses clients more than "
            f"{MAX_CLOCK_AHEAD.seconds} s ahead or {MAX_CLOCK_BEHIND.seconds} s behind: set it"
        )


def _check_private_file(path: Path) -> Iterator[str]:
    if not path.exists():
        if path.name != "ca.key":  # may be kept on another machine
            yield f"{path} is missing"
    elif path.stat().st_mode & 0o077:
        yield f"{path} can be read by others: chmod 600 {path}"


def _encode_public_key(key: object) -> bytes:
    pem: bytes = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined]
    return pem
