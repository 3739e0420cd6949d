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

from feddrift._internal.system import atomic_write
from feddrift.reports.page.data import collect
from feddrift.runs.record import Record
from feddrift.runs.schema import plain

SCRIPTS = (
    *("tools.js", "charts.js", "map.js", "lineage.js", "words.js", "tables.js", "sections.js", "exchanges.js"),
    "main.js",
)


def write(records: Sequence[Record], path: Path, name: str) -> None:
    """Write the page of these records; an older page stays until the new one is whole."""
    atomic_write(path, page(collect(records, name)).encode())


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
    return resources.files("feddrift.reports.page").joinpath(name).read_text(encoding="utf-8")
