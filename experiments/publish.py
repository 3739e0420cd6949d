"""Copy finished records into results/, compactly: `python experiments/publish.py RUNS results/tables`.

With `pack` at the end, one compressed file for each stream, which is read like a folder of records.
"""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path
from typing import Any

from feddrift import algorithms
from feddrift.runs import record, schema


def compact(text: str) -> list[dict[str, Any]]:
    """The lines of a record, its rows as columns; a setting that did not exist yet has its default."""
    lines: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    n_clients = 0
    for line in map(json.loads, text.splitlines()):
        if line["kind"] == "header":
            options = algorithms.options(algorithms.entry(line["algorithm"]).cls)
            known = {name: field.default for name, field in options.items() if not field.metadata.get("quiet")}
            line["settings"] = known | line["settings"]
        if line["kind"] == "row":
            rows.append(line)
        if rows and (line["kind"] != "row" or len(rows) == n_clients):
            columns = {name: [row[name] for row in rows] for name in schema.COLUMNS if all(name in row for row in rows)}
            lines.append({"kind": "columns", "t": rows[0]["t"], **columns})
            rows = []
        if line["kind"] != "row":
            lines.append(line)
            n_clients = line.get("n_clients", n_clients)
    return lines


def _short(stream: str) -> str:
    """Without the module of a stream of one's own, and without the options of one that has a name."""
    first, _, last = stream.partition(":")
    return last if "." in first else first


def main(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    paths = [path for path in sorted(source.glob("*.jsonl")) if record.is_complete(path)]
    for path in paths:
        lines = compact(path.read_text())
        copy = target / f"{record.file_name(lines[0])}.jsonl"
        copy.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
        assert record.is_complete(copy)
        if target == source and copy != path:
            path.unlink()
    size = sum(path.stat().st_size for path in target.glob("*.jsonl"))
    print(f"{len(paths)} records to {target}, {size / 1e6:.1f} MB in all")


def pack(source: Path, target: Path) -> None:
    """All finished records of a stream in one file."""
    target.mkdir(parents=True, exist_ok=True)
    by_stream: dict[str, list[str]] = {}
    for path in sorted(source.glob("*.jsonl")):
        if record.is_complete(path):
            lines = compact(path.read_text())
            texts = by_stream.setdefault(_short(lines[0]["stream"]), [])
            texts += [json.dumps(line, separators=(",", ":")) + "\n" for line in lines]
    for stream, texts in by_stream.items():
        (target / f"{stream}.jsonl.xz").write_bytes(lzma.compress("".join(texts).encode(), preset=6))
    size = sum(path.stat().st_size for path in target.glob("*.jsonl.xz"))
    print(f"{len(record.read_all(target))} records to {target}, {size / 1e6:.1f} MB in all")


if __name__ == "__main__":
    (pack if sys.argv[3:] == ["pack"] else main)(Path(sys.argv[1]), Path(sys.argv[2]))
