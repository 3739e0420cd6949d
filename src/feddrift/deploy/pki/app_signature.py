"""Signature of the app that clients run: they refuse every other app that the server may send.

The app is signed once, with a private key that is not stored, so even an intruder at the server cannot sign another
app. Clients have the public key (Flower's trusted entities). The SuperNode verifies the signature before it runs it.
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

TRUSTED_FILE = "trusted.yaml"  # contains the public key; the clients have copies of the server's file
SIGNATURE_FILE = "app.signed.json"

_log = logging.getLogger("feddrift")


def sign_app(server: Path) -> None:
    """Sign the app in the server's folder, unless it is signed already; the private key is not stored."""
    from flwr.cli.build import build_fab_from_disk
    from flwr.supercore.primitives.asymmetric_ed25519 import create_message_to_sign

    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # from a library that Flower uses
        digest = hashlib.sha256(build_fab_from_disk(server / "app"))
    old = _read_signature(server)
    if old is not None and old["app"] == digest.hexdigest() and (server / TRUSTED_FILE).exists():
        return
    if old is not None:
        _log.warning(
            "the app has changed, so clients refuse it: if you changed it, copy %s to them", server / TRUSTED_FILE
        )
    key = ed25519.Ed25519PrivateKey.generate()
    now = int(time.time())
    name = f"feddrift_{digest.hexdigest()[:16]}"
    signature = base64.urlsafe_b64encode(key.sign(create_message_to_sign(digest.digest(), now))).decode()
    verification = {"signed_at": now, "signature": signature}
    value = {"app": digest.hexdigest(), "verifications": {"valid_license": "Valid", name: json.dumps(verification)}}
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    atomic_write(server / TRUSTED_FILE, f"{json.dumps({name: public})}\n".encode())  # JSON is YAML
    atomic_write(server / SIGNATURE_FILE, f"{json.dumps(value)}\n".encode())


def publish_signature(server: Path) -> None:
    """Write the signature into the SuperLink's database, so that it is sent with the app.

    The SuperLink itself has no signature of an app that was started from a folder.

    Raises:
        DataError: If the signature cannot be read, or the database cannot be written.
    """
    signature = _read_signature(server)
    database = server / "state" / "superlink.db"
    if signature is None or not database.exists():
        return
    try:
        with closing(sqlite3.connect(database, timeout=60)) as connection, connection:
            values = json.dumps(signature["verifications"]), signature["app"]
            connection.execute("UPDATE fab SET verifications = ? WHERE fab_hash = ?", values)
    except sqlite3.Error as error:
        raise DataError(f"cannot write the app's signature to {database}: {error}") from None


def build_trust_arguments(client: Path) -> list[str]:
    """Return the arguments that make a SuperNode refuse all other apps."""
    if (path := client / TRUSTED_FILE).exists():
        return ["--trusted-entities", str(path)]
    _log.warning("%s is missing, so this client runs any app that its server sends: copy the server's file", path)
    return []


def _read_signature(server: Path) -> dict[str, object] | None:
    """Return the content of `SIGNATURE_FILE`; None if the app is not signed yet."""
    try:
        return dict(json.loads((server / SIGNATURE_FILE).read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read {server / SIGNATURE_FILE}: {error}; move it away, then the app is signed again"
        ) from None
