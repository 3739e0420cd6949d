"""A deployment's folder that has another place now: what names the old one is written again."""

from __future__ import annotations

import json
import logging
import re
import sqlite3
import sys
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

FILES_WITH_PATHS = "nginx.conf", "*.service", "flwr/config.toml"  # what `feddrift deploy init` writes paths into

_log = logging.getLogger("feddrift")


def rewrite_paths(folder: Path, old: Path, new: Path) -> None:
    """Write the new place of a folder, which may still lie elsewhere, into its files, and this Python into units."""
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
    """A text with another path, also where it is quoted, and none that only begins like it.

    >>> _renamed('pid /srv/fed/nginx.pid; "/srv/fed" /srv/fed2', "/srv/fed", "/new")
    'pid /new/nginx.pid; "/new" /srv/fed2'
    """
    for before, after in {(old, new), (json.dumps(old)[1:-1], json.dumps(new)[1:-1])}:
        text = re.sub(re.escape(before) + r"""(?=[/\s;"']|$)""", lambda _, after=after: after, text)  # type: ignore[misc]
    return text


def _end_unfinished_runs(database: Path) -> None:
    """End the runs that were under way, which know the old folder; of tables that we do not know nothing is kept."""
    end = "finished_at = ?, sub_status = 'stopped', details = 'restored', active_until = NULL, token = NULL"
    now = datetime.now(UTC).isoformat(sep=" ")
    try:
        with closing(sqlite3.connect(database)) as opened, opened:
            opened.execute(f"UPDATE task SET {end} WHERE finished_at IS NULL", (now,))
    except sqlite3.Error as error:
        _log.warning("Flower's database is left out, and made again when the server starts: %s", error)
        database.unlink(missing_ok=True)
