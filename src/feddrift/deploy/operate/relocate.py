"""Relocation of a server's or client's folder: paths in its files are replaced by the new ones."""

from __future__ import annotations

import json
import logging
import re
import sqlite3
import sys
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

FILES_WITH_PATHS = "nginx.conf", "*.service", "flwr/config.toml"  # files into which `feddrift deploy init` writes paths

_log = logging.getLogger("feddrift")


def rewrite_paths(folder: Path, old: Path, new: Path) -> None:
    """Replace the old path of a folder in its files, and set the Python interpreter of its service units to this one.

    Runs that Flower's database lists as unfinished are ended, since they use the old path.

    Args:
        folder: The folder with the files, which may be moved to its new path later.
        old: The path that the files contain.
        new: The path that replaces it.
    """
    for pattern in FILES_WITH_PATHS:
        for path in sorted(folder.glob(pattern)):
            text = _replace_path(path.read_text(encoding="utf-8"), str(old), str(new))
            if path.suffix == ".service":
                text = re.sub(
                    r"(?m)^ExecStart=\S+ -m feddrift ", lambda _: f"ExecStart={sys.executable} -m feddrift ", text
                )
            path.write_text(text, encoding="utf-8")
    if (database := folder / "state" / "superlink.db").exists():
        _end_unfinished_runs(database)


def _replace_path(text: str, old: str, new: str) -> str:
    """Replace a path in a text, plain or quoted as in JSON, but not a longer name that only begins with it.

    >>> _replace_path('pid /srv/fed/nginx.pid; "/srv/fed" /srv/fed2', "/srv/fed", "/new")
    'pid /new/nginx.pid; "/new" /srv/fed2'
    """
    for before, after in {(old, new), (json.dumps(old)[1:-1], json.dumps(new)[1:-1])}:
        text = re.sub(re.escape(before) + r"""(?=[/\s;"']|$)""", lambda _, after=after: after, text)  # type: ignore[misc]
    return text


def _end_unfinished_runs(database: Path) -> None:
    """End the unfinished runs in Flower's database; if its tables are unknown, delete the database."""
    end = "finished_at = ?, sub_status = 'stopped', details = 'restored', active_until = NULL, token = NULL"
    now = datetime.now(UTC).isoformat(sep=" ")
    try:
        with closing(sqlite3.connect(database)) as connection, connection:
            connection.execute(f"UPDATE task SET {end} WHERE finished_at IS NULL", (now,))
    except sqlite3.Error as error:
        _log.warning("Flower's database cannot be changed and is deleted, the server creates a new one: %s", error)
        database.unlink(missing_ok=True)
