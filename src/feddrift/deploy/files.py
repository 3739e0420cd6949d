"""Functions that write and replace files of a deployment, such as keys and certificates."""

from __future__ import annotations

import os
from pathlib import Path

OLD_SUFFIX = ".old"  # for the copy of a file that was replaced


def write_new_file(path: Path, text: str, secret: bool = False) -> None:
    """Write a file that does not exist yet.

    Args:
        path: The new file.
        text: Its content.
        secret: Whether only the owner may read it.

    Raises:
        FileExistsError: If the file exists.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    with open(handle, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, text: str, secret: bool = False) -> None:
    """Write or replace a file atomically: a reader gets either the old or the new content."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)  # left by a command that was killed
    write_new_file(part, text, secret)
    os.replace(part, path)


def replace_file_pair(secret: tuple[Path, str], public: tuple[Path, str]) -> None:
    """Replace a private and a public file that belong together, immediately after each other; keep copies of both."""
    for path, _ in (secret, public):
        if path.exists():
            replace_file(path.with_name(path.name + OLD_SUFFIX), path.read_text(), path == secret[0])
    replace_file(*public)
    replace_file(*secret, secret=True)
