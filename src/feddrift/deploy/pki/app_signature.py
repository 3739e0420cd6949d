"""The app that clients run: the one that came with their folder, whatever the server sends.

It is signed once, with a key that is then forgotten, so that no other app can be: not even by who has the server.
Clients hold the public key (Flower's trusted entities); the SuperNode checks before anything of the app is run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import sqlite3
import time
import warnings
from contextlib import closing
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from feddrift._internal.system import atomic_write
from feddrift.errors import DataError

TRUSTED_FILE = "trusted.yaml"  # at the server, to be carried to clients, and at each client
SIGNATURE_FILE = "app.signed.json"

_log = logging.getLogger("feddrift")


def sign_app(server: Path) -> None:
    """Sign the app in the server's folder, unless it is signed already; the key is kept nowhere."""
    from flwr.cli.build import build_fab_from_disk
    from flwr.supercore.primitives.asymmetric_ed25519 import create_message_to_sign

    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of what Flower builds it with
        digest = hashlib.sha256(build_fab_from_disk(server / "app"))
    before = _read_signature(server)
    if before is not None and before["app"] == digest.hexdigest() and (server / TRUSTED_FILE).exists():
        return
    if before is not None:
        _log.warning("the app is another one now: clients refuse it until they have this %s", server / TRUSTED_FILE)
    key, now = ed25519.Ed25519PrivateKey.generate(), int(time.time())
    name = f"feddrift_{digest.hexdigest()[:16]}"
    signature = base64.urlsafe_b64encode(key.sign(create_message_to_sign(digest.digest(), now))).decode()
    verification = {"signed_at": now, "signature": signature}
    told = {"app": digest.hexdigest(), "verifications": {"valid_license": "Valid", name: json.dumps(verification)}}
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    atomic_write(server / TRUSTED_FILE, f"{json.dumps({name: public})}\n".encode())  # JSON is YAML
    atomic_write(server / SIGNATURE_FILE, f"{json.dumps(told)}\n".encode())


def publish_signature(server: Path) -> None:
    """Let the SuperLink tell clients the signature with the app: of an app from a folder it knows none itself."""
    signed, database = _read_signature(server), server / "state" / "superlink.db"
    if signed is None or not database.exists():
        return
    try:
        with closing(sqlite3.connect(database, timeout=60)) as opened, opened:
            values = json.dumps(signed["verifications"]), signed["app"]
            opened.execute("UPDATE fab SET verifications = ? WHERE fab_hash = ?", values)
    except sqlite3.Error as error:
        raise DataError(f"cannot write the app's signature to {database}: {error}") from None


def build_trust_arguments(client: Path) -> list[str]:
    """The words that make a SuperNode refuse all other apps."""
    if (path := client / TRUSTED_FILE).exists():
        return ["--trusted-entities", str(path)]
    _log.warning("%s is missing: this client runs whatever its server sends; the server's folder has the file", path)
    return []


def _read_signature(server: Path) -> dict[str, object] | None:
    try:
        return dict(json.loads((server / SIGNATURE_FILE).read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read {server / SIGNATURE_FILE}, move it away to have the app signed anew: {error}"
        ) from None
