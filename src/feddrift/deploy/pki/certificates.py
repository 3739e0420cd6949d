"""The certificates of a deployment: made, renewed, and how long they are valid."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from feddrift.deploy.files import replace_file_pair, write_new_file
from feddrift.errors import ConfigError

AUTHORITY_VALID_DAYS, SERVER_VALID_DAYS = 3650, 397

Authority = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


def create_certificates(server: Path, host: str) -> None:
    """The certificates of a new federation: an authority of its own, and the server's."""
    authority = issuer, key = _create_authority()
    write_new_file(server / "ca.key", _encode_private_key(key), secret=True)
    write_new_file(server / "ca.crt", _encode_certificate(issuer))
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    try:
        names.append(x509.IPAddress(ipaddress.ip_address(host)))
    except ValueError:
        names.append(x509.DNSName(host))
    made, secret = _create_server_certificate(
        authority, _build_name(host), x509.SubjectAlternativeName(dict.fromkeys(names))
    )
    write_new_file(server / "server.key", secret, secret=True)
    write_new_file(server / "server.crt", made)


def renew_server_certificate(server: Path, ca_key: Path | None = None) -> datetime:
    """A new certificate and key of the server, for the same names and of the same authority; when it ends."""
    authority = _read_authority(server, ca_key or server / "ca.key")
    path = server / "server.crt"
    try:
        old = x509.load_pem_x509_certificate(path.read_bytes())
        names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(f"cannot read {path}, which has the server's names: {error}") from None
    made, secret = _create_server_certificate(authority, old.subject, names)
    replace_file_pair((server / "server.key", secret), (path, made))
    return x509.load_pem_x509_certificate(made.encode()).not_valid_after_utc


def renew_authority(server: Path, ca_key: Path | None = None) -> datetime:
    """A new authority: ca.crt has it and, until that ends, the old one, so that clients that take it trust both."""
    certificate, key = _create_authority()
    trusted = [certificate, *(old for old in read_authorities(server) if old.not_valid_after_utc > datetime.now(UTC))]
    replace_file_pair(
        (ca_key or server / "ca.key", _encode_private_key(key)),
        (server / "ca.crt", "".join(map(_encode_certificate, trusted))),
    )
    return certificate.not_valid_after_utc


def read_authorities(server: Path) -> list[x509.Certificate]:
    """Those that ca.crt trusts, the newest first."""
    path = server / "ca.crt"
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def find_issuer(certificate: x509.Certificate, trusted: list[x509.Certificate]) -> x509.Certificate | None:
    """Which of these has signed it."""
    for authority in trusted:
        try:
            certificate.verify_directly_issued_by(authority)
        except Exception:  # another name, another kind of key, another signature
            continue
        return authority
    return None


def read_days_left(server: Path) -> dict[str, float]:
    """By file, the days until it ends; what cannot be read is left out, `deploy check` says what is wrong with it."""
    found = {}
    for name in ("ca.crt", "server.crt"):
        try:
            certificate = x509.load_pem_x509_certificate((server / name).read_bytes())
            if name == "ca.crt":  # of several the one that counts: who has signed the server's
                signed = x509.load_pem_x509_certificate((server / "server.crt").read_bytes())
                certificate = find_issuer(signed, read_authorities(server)) or certificate
        except (OSError, ValueError, ConfigError):
            continue
        found[name] = (certificate.not_valid_after_utc - datetime.now(UTC)).total_seconds() / 86400
    return found


def _read_authority(server: Path, path: Path) -> Authority:
    """The authority whose key this is."""
    if not path.exists():
        raise ConfigError(f"{path} is missing, and no certificate is made without it: say where it is, --ca-key PATH")
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"cannot read the authority's key, {path}: {error}") from None
    for certificate in read_authorities(server):
        if isinstance(key, ec.EllipticCurvePrivateKey) and certificate.public_key() == key.public_key():
            if certificate.not_valid_after_utc <= datetime.now(UTC):
                ended = certificate.not_valid_after_utc.date()
                raise ConfigError(f"{server / 'ca.crt'} has ended on {ended}: `feddrift deploy renew --ca` first")
            return certificate, key
    raise ConfigError(f"{path} is not the key of {server / 'ca.crt'}")


def _create_authority() -> Authority:
    """A certificate authority of this federation alone."""
    key, name = ec.generate_private_key(ec.SECP256R1()), _build_name("feddrift authority")
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    certificate = (
        _prepare_certificate(name, name, key, AUTHORITY_VALID_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    return certificate, key


def _create_server_certificate(
    authority: Authority, subject: x509.Name, names: x509.SubjectAlternativeName
) -> tuple[str, str]:
    """A new certificate of the server, and its key; it ends with its authority's at the latest."""
    issuer, signer = authority
    key = ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
    certificate = (
        _prepare_certificate(subject, issuer.subject, key, SERVER_VALID_DAYS, issuer.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(names, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return _encode_certificate(certificate), _encode_private_key(key)


def _prepare_certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int, last: datetime | None = None
) -> x509.CertificateBuilder:
    now = datetime.now(UTC) - timedelta(minutes=5)  # clocks differ
    end = now + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(end if last is None else min(end, last))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _build_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _encode_private_key(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def _encode_certificate(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()
