"""The report as one HTML page without external files."""

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
from feddrift.reports.page.data import collect_page_data
from feddrift.runs.record import Record
from feddrift.runs.schema import to_json_value

SCRIPTS = (
    "tools.js", "charts.js", "map.js", "lineage.js", "words.js", "tables.js", "sections.js", "exchanges.js", "main.js",
)  # fmt: skip


def write_page(records: Sequence[Record], path: Path, name: str, against: str | None = None) -> None:
    """Write the page of these records.

    Args:
        records: The records.
        path: The file; an older page is replaced only when the new one is complete.
        name: The title of the report.
        against: The baseline of the differences in the table of methods, as for `compare`; None: no differences.

    Raises:
        ConfigError: No finished run matches the baseline, or it is ambiguous on a stream.
        DataError: The file cannot be written.
    """
    atomic_write(path, build_page(collect_page_data(records, name, against)).encode())


def build_page(data: Mapping[str, Any]) -> str:
    """Build the page: style, scripts and data in one text.

    The data are compressed and encoded in base64, so names in them cannot end a script element. The scripts show names
    as text only.

    Args:
        data: The result of `collect_page_data`.
    """
    packed = zlib.compress(json.dumps(to_json_value(data), separators=(",", ":")).encode(), level=9)
    parts = {
        "title": html.escape(f"{data['name']} · feddrift report"),
        "style": _read_file("page.css"),
        "script": "\n".join(_read_file(name) for name in SCRIPTS),
        "data": base64.b64encode(packed).decode(),
    }
    text = _read_file("page.html")
    for key, value in parts.items():
        text = text.replace(f"<!--{key}-->", value, 1)
    return text


def _read_file(name: str) -> str:
    return resources.files("feddrift.reports.page").joinpath(name).read_text(encoding="utf-8")
