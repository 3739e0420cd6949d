"""Certificates of a deployment: their creation, renewal and remaining days."""

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

AUTHORITY_VALID_DAYS = 3650
SERVER_VALID_DAYS = 397

Authority = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]  # its certificate and private key


def create_certificates(server: Path, host: str) -> None:
    """Create the certificates of a new federation: that of its own certificate authority, and that of its server.

    Args:
        server: The server's folder.
        host: The name or address by which clients reach the server.
    """
    issuer, key = _create_authority()
    write_new_file(server / "ca.key", _encode_private_key(key), secret=True)
    write_new_file(server / "ca.crt", _encode_certificate(issuer))
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    try:
        names.append(x509.IPAddress(ipaddress.ip_address(host)))
    except ValueError:
        names.append(x509.DNSName(host))
    alternative_names = x509.SubjectAlternativeName(dict.fromkeys(names))
    certificate, private = _create_server_certificate((issuer, key), _build_name(host), alternative_names)
    write_new_file(server / "server.key", private, secret=True)
    write_new_file(server / "server.crt", certificate)


def renew_server_certificate(server: Path, ca_key: Path | None = None) -> datetime:
    """Replace the server's certificate and key by new ones for the same names and from the same authority.

    Args:
        server: The server's folder.
        ca_key: The private key of the authority; None: `ca.key` in the server's folder.

    Returns:
        The time at which the new certificate ends.

    Raises:
        ConfigError: If the authority's key is missing or wrong, the authority has ended, or server.crt cannot be read.
    """
    authority = read_authority_key(server, ca_key or server / "ca.key")
    path = server / "server.crt"
    try:
        old = x509.load_pem_x509_certificate(path.read_bytes())
        names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(f"cannot read the server's names in {path}: {error}") from None
    certificate, private = _create_server_certificate(authority, old.subject, names)
    replace_file_pair((server / "server.key", private), (path, certificate))
    return x509.load_pem_x509_certificate(certificate.encode()).not_valid_after_utc


def renew_authority(server: Path, ca_key: Path | None = None) -> datetime:
    """Create a new authority, and keep the old ones in ca.crt until they end: clients with this file trust them all.

    Args:
        server: The server's folder.
        ca_key: The file for the private key of the authority; None: `ca.key` in the server's folder.

    Returns:
        The time at which the new authority's certificate ends.
    """
    certificate, key = _create_authority()
    trusted = [certificate, *(old for old in read_authorities(server) if old.not_valid_after_utc > datetime.now(UTC))]
    replace_file_pair(
        (ca_key or server / "ca.key", _encode_private_key(key)),
        (server / "ca.crt", "".join(map(_encode_certificate, trusted))),
    )
    return certificate.not_valid_after_utc


def read_authorities(server: Path) -> list[x509.Certificate]:
    """Return the authorities in ca.crt, the newest first."""
    path = server / "ca.crt"
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def find_issuer(certificate: x509.Certificate, authorities: list[x509.Certificate]) -> x509.Certificate | None:
    """Return the authority that has signed a certificate; None if it is not in the list."""
    for authority in authorities:
        try:
            certificate.verify_directly_issued_by(authority)
        except Exception:  # another name, another type of key, or another signature
            continue
        return authority
    return None


def read_remaining_days(server: Path) -> dict[str, float]:
    """Return the days until each certificate ends, by its file name.

    A file that cannot be read is left out; `feddrift deploy check` reports the problem.
    """
    remaining = {}
    for name in ("ca.crt", "server.crt"):
        try:
            certificate = x509.load_pem_x509_certificate((server / name).read_bytes())
            if name == "ca.crt":  # the newest one may not have signed the server's certificate yet
                server_certificate = x509.load_pem_x509_certificate((server / "server.crt").read_bytes())
                certificate = find_issuer(server_certificate, read_authorities(server)) or certificate
        except (OSError, ValueError, ConfigError):
            continue
        remaining[name] = (certificate.not_valid_after_utc - datetime.now(UTC)).total_seconds() / 86400
    return remaining


def build_key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    """Return the purposes of a certificate's key; any purpose that is not named is excluded."""
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )


def read_authority_key(server: Path, path: Path) -> Authority:
    """Return the authority in ca.crt to which this private key belongs.

    Raises:
        ConfigError: If the key cannot be read or does not belong to an authority, or the authority has ended.
    """
    if not path.exists():
        raise ConfigError(f"{path} is missing, but it signs all certificates: give its path with --ca-key PATH")
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"cannot read the authority's key, {path}: {error}") from None
    for certificate in read_authorities(server):
        if isinstance(key, ec.EllipticCurvePrivateKey) and certificate.public_key() == key.public_key():
            end = certificate.not_valid_after_utc
            if end <= datetime.now(UTC):
                raise ConfigError(f"{server / 'ca.crt'} ended on {end.date()}: run `feddrift deploy renew --ca` first")
            return certificate, key
    raise ConfigError(
        f"{path} is not the key of {server / 'ca.crt'}: give the path of the right key with --ca-key PATH"
    )


def _create_authority() -> Authority:
    """Create a certificate authority that serves only this federation."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _build_name("feddrift authority")
    usage = build_key_usage(key_cert_sign=True, crl_sign=True)
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
    """Create a certificate and private key of the server; it ends no later than the authority's certificate."""
    issuer, signer = authority
    key = ec.generate_private_key(ec.SECP256R1())
    usage = build_key_usage(digital_signature=True)
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
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    days: int,
    latest_end: datetime | None = None,
) -> x509.CertificateBuilder:
    begin = datetime.now(UTC) - timedelta(minutes=5)  # the clients' clocks may be slow
    end = begin + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end if latest_end is None else min(end, latest_end))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _build_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _encode_private_key(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def _encode_certificate(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()
