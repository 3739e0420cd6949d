"""Protection of a SuperNode's runtime API, on the loopback interface, from other users of the machine.

Flower's SuperNode authenticates its SuperExec only if the two are started separately, with a shared secret. The
SuperExec runs what the API sends, so TLS protects it from another program that listens on the same port.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import NameOID

from feddrift.deploy.pki.certificates import build_key_usage

RUNTIME_CERTIFICATE_VALID_DAYS = 3650
MIN_DAYS_LEFT = 365  # a certificate with fewer days is replaced when the client starts
SECRET_BYTES = 32


def prepare_runtime_files(folder: Path) -> None:
    """Create a client's secret and certificate if they are missing or too old, and delete installed apps."""
    home = folder / "flwr"
    home.mkdir(exist_ok=True)
    shutil.rmtree(home / "apps", ignore_errors=True)  # Flower does not verify installed apps again
    if _has_valid_files(home):
        return
    key = ec.generate_private_key(ec.SECP256R1())
    _write_private_file(home / "runtime.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    _write_private_file(home / "runtime.crt", _create_certificate(key).public_bytes(Encoding.PEM))
    _write_private_file(home / "runtime.secret", secrets.token_bytes(SECRET_BYTES))


def _has_valid_files(home: Path) -> bool:
    try:
        certificate = x509.load_pem_x509_certificate((home / "runtime.crt").read_bytes())
        private = load_pem_private_key((home / "runtime.key").read_bytes(), None)
        secret = (home / "runtime.secret").read_bytes()
    except (OSError, ValueError, TypeError):
        return False
    time_left = certificate.not_valid_after_utc - datetime.now(UTC)
    return (
        private.public_key() == certificate.public_key()
        and len(secret) == SECRET_BYTES
        and time_left > timedelta(days=MIN_DAYS_LEFT)
    )


def build_supernode_arguments(folder: Path) -> list[str]:
    """Return the arguments that make a SuperNode protect its runtime API."""
    home = folder / "flwr"
    return [
        "--isolation", "process", "--superexec-auth-secret-file", str(home / "runtime.secret"),
        "--ssl-certfile", str(home / "runtime.crt"), "--ssl-keyfile", str(home / "runtime.key"),
        "--ssl-ca-certfile", str(home / "runtime.crt"),
    ]  # fmt: skip


def build_superexec_arguments(folder: Path, port: int, supernode: int) -> list[str]:
    """Return the arguments with which a SuperExec connects to a SuperNode, and ends when the SuperNode ends.

    Args:
        folder: The client's folder.
        port: The port of the runtime API.
        supernode: The process id of the SuperNode.
    """
    home = folder / "flwr"
    return [
        "--runtime-api-address", f"127.0.0.1:{port}", "--root-certificates", str(home / "runtime.crt"),
        "--superexec-auth-secret-file", str(home / "runtime.secret"), "--parent-pid", str(supernode),
    ]  # fmt: skip


def _create_certificate(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "feddrift client")])
    now = datetime.now(UTC)
    usage = build_key_usage(digital_signature=True, key_cert_sign=True)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # the clock may be set back later
        .not_valid_after(now + timedelta(days=RUNTIME_CERTIFICATE_VALID_DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )


def _write_private_file(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read, also if others could read the file before."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
