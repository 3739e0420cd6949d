"""The certificates of a deployment: how long they are valid."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509


def days_left(server: Path) -> dict[str, float]:
    """By file, the days until it ends; what cannot be read is left out, `deploy check` says what is wrong with it."""
    found = {}
    for name in ("ca.crt", "server.crt"):
        try:
            certificate = x509.load_pem_x509_certificate((server / name).read_bytes())
        except (OSError, ValueError):
            continue
        found[name] = (certificate.not_valid_after_utc - datetime.now(UTC)).total_seconds() / 86400
    return found
