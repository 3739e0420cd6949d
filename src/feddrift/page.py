"""The report as one HTML page that needs nothing but a browser."""

from __future__ import annotations

import base64
import html
import json
import zlib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from feddrift.errors import DataError
from feddrift.page_data import collect
from feddrift.record import Record
from feddrift.schema import plain

SCRIPTS = ("tools.js", "charts.js", "map.js", "lineage.js", "words.js", "tables.js", "sections.js", "main.js")


def write(records: Sequence[Record], path: Path, name: str) -> None:
    """Write the page of these records; an older page stays until the new one is whole."""
    text = page(collect(records, name))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from None


def page(data: Mapping[str, Any]) -> str:
    """The page: style, script and data in one text.

    The data are compressed and as base64, so no name in them can end a script; the scripts show them as text only.
    """
    packed = zlib.compress(json.dumps(plain(data), separators=(",", ":")).encode(), level=9)
    parts = {
        "title": html.escape(f"{data['name']} · feddrift report"),
        "style": _part("page.css"),
        "script": "\n".join(_part(name) for name in SCRIPTS),
        "data": base64.b64encode(packed).decode(),
    }
    text = _part("page.html")
    for key, value in parts.items():
        text = text.replace(f"<!--{key}-->", value, 1)
    return text


def _part(name: str) -> str:
    return resources.files("feddrift").joinpath("data", "page", name).read_text(encoding="utf-8")
