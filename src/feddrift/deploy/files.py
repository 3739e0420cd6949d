"""Files of a deployment that are made, and replaced, by its commands."""

from __future__ import annotations

import os
from pathlib import Path

OLD = ".old"  # beside a file that was replaced


def write(path: Path, text: str, secret: bool = False) -> None:
    """Write a new file; a secret is the owner's alone."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    with open(handle, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def put(path: Path, text: str, secret: bool = False) -> None:
    """Write a file in the place of an older one, whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)  # of a command that was killed
    write(part, text, secret)
    os.replace(part, path)


def put_pair(secret: tuple[Path, str], public: tuple[Path, str]) -> None:
    """Replace a private and a public file that belong together; the old ones are kept aside, a last step apart."""
    for path, _ in (secret, public):
        if path.exists():
            put(path.with_name(path.name + OLD), path.read_text(), path == secret[0])
    put(*public)
    put(*secret, secret=True)
