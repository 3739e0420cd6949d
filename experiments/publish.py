"""Add finished records to a folder of results/, or pack the plain records of a folder into one file.

- `python experiments/publish.py RUNS results/tables` adds the finished records below RUNS to
  `results/tables/records.jsonl.xz`, with the rows of each time step as one line of columns. A record replaces the one
  that has the same name; all other records stay.
- `python experiments/publish.py RUNS results/field --by-stream` writes a file for each stream instead.
- `python experiments/publish.py --pack results/tables results/air` packs the plain records (`*.jsonl`) of each of these
  folders without any change, and deletes the plain files after the packed file has been read back and compared.

A packed file contains its records one after the other, in order of their names (`record.file_name`). It is read like a
folder of records.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from feddrift import algorithms
from feddrift.errors import DataError, FeddriftError
from feddrift.runs import record, schema

RECORDS = f"records{record.PACKED_SUFFIX}"
PRESET = 9 | lzma.PRESET_EXTREME
MAX_NAMED_FILES = 5  # in an error message


def compact(text: str) -> list[dict[str, Any]]:
    """Return the lines of a record with rows as columns, and with defaults for settings that its version did not have.

    Args:
        text: A complete record, as JSON lines.
    """
    lines: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    n_clients = 0
    for line in map(json.loads, text.splitlines()):
        if line["kind"] == "header":
            options = algorithms.get_options(algorithms.find_entry(line["algorithm"]).cls)
            known = {name: field.default for name, field in options.items() if not field.metadata.get("quiet")}
            line["settings"] = known | line["settings"]
        if line["kind"] == "row":
            rows.append(line)
        if rows and (line["kind"] != "row" or len(rows) == n_clients):
            columns = {
                name: [row[name] for row in rows] for name in schema.COLUMN_NAMES if all(name in row for row in rows)
            }
            lines.append({"kind": "columns", "t": rows[0]["t"], **columns})
            rows = []
        if line["kind"] != "row":
            lines.append(line)
            n_clients = line.get("n_clients", n_clients)
    return lines


def add_records(source: Path, target: Path, by_stream: bool = False) -> None:
    """Add the finished records of a folder to the packed files of another, in compact form.

    Args:
        source: A folder of plain records, which stays as it is.
        target: A folder below results/; it is made if it does not exist.
        by_stream: Write one packed file for each stream instead of `records.jsonl.xz`.

    Raises:
        DataError: If no record is finished, or if the target would contain a record twice: as a plain file, or
            in packed files of both kinds.
    """
    plain = sorted(source.glob("*.jsonl"))
    finished = [path for path in plain if record.is_complete(path)]
    if not finished:
        raise DataError(f"no finished records (*.jsonl) in {source}")
    if len(finished) < len(plain):
        print(f"left out, not finished: {len(plain) - len(finished)} of {len(plain)} records in {source}")
    _check_target(target, by_stream)
    added: dict[Path, dict[str, bytes]] = {}
    for path in finished:
        lines = compact(path.read_text())
        file = target / (f"{_shorten_stream(lines[0]['stream'])}{record.PACKED_SUFFIX}" if by_stream else RECORDS)
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        added.setdefault(file, {})[record.build_record_name(lines[0])] = text.encode()
    target.mkdir(parents=True, exist_ok=True)
    for file, records in added.items():
        write_packed_file(file, read_by_name(file) | records)


def pack_folder(folder: Path) -> None:
    """Move the plain records of a folder into its packed file, byte by byte.

    The plain files are deleted at the end, when the packed file has been verified.

    Args:
        folder: A folder of complete records with the names that feddrift gives them.

    Raises:
        DataError: If no plain record exists, or if one is not complete, has another name than the one made of its
            header, or differs from a packed record of the same name. Nothing has been changed then.
    """
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise DataError(f"no plain records (*.jsonl) in {folder}")
    unfinished = [path.name for path in paths if not record.is_complete(path)]
    if unfinished:
        raise DataError(f"finish or remove these records in {folder} first: {_list_names(unfinished)}")
    records = read_by_name(folder / RECORDS)
    for path in paths:
        content = path.read_bytes()
        name = record.build_record_name(json.loads(content.partition(b"\n")[0]))
        if path.stem != name:  # the packed file has no other names than these
            raise DataError(f"{path} must be renamed to {name}.jsonl, the name made of its header, before it is packed")
        if records.setdefault(name, content) != content:
            raise DataError(f"{path} differs from the record of this name in {RECORDS}: remove one of the two first")
    write_packed_file(folder / RECORDS, records)
    for path in paths:
        path.unlink()


def read_by_name(file: Path) -> dict[str, bytes]:
    """Return the records of a packed file by their names, or nothing if the file does not exist.

    Raises:
        DataError: If two records have the same name.
    """
    if not file.exists():
        return {}
    records: dict[str, bytes] = {}
    for lines in record.split_packed_file(file):
        name = record.build_record_name(json.loads(lines[0]))
        if name in records:
            raise DataError(f"{file} contains two records with the name {name}: remove one of them first")
        records[name] = b"".join(line + b"\n" for line in lines)
    return records


def write_packed_file(file: Path, records: Mapping[str, bytes]) -> None:
    """Write records to a packed file in order of their names, and report its size.

    The file is written under a temporary name and read back before it replaces an older one.

    Raises:
        DataError: If the file that is read back differs. An older file has not been changed then.
    """
    contents = [records[name] for name in sorted(records, key=lambda name: f"{name}.jsonl")]
    joined = b"".join(contents)
    print(f"{file}: compressing {len(contents)} records, {len(joined) / 1e6:.2f} MB", flush=True)
    temporary = file.with_name(f"{file.name}.part")
    try:
        temporary.write_bytes(lzma.compress(joined, preset=PRESET))
        found = [b"".join(line + b"\n" for line in lines) for lines in record.split_packed_file(temporary)]
        if found != contents:
            raise DataError(f"{file} not written: its records would not be read as they are in their own files")
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    print(f"{file}: wrote {len(found)} records, {file.stat().st_size / 1e6:.2f} MB")


def _check_target(target: Path, by_stream: bool) -> None:
    """Raise DataError if a record added to the target may also be in a file that is not replaced."""
    if any(target.glob("*.jsonl")):
        raise DataError(f"{target} contains plain records: run `python experiments/publish.py --pack {target}` first")
    packed = sorted(path.name for path in target.glob(f"*{record.PACKED_SUFFIX}"))
    if by_stream and RECORDS in packed:
        raise DataError(f"{target} contains {RECORDS}: leave out --by-stream")
    if not by_stream and packed not in ([], [RECORDS]):
        raise DataError(f"{target} contains a packed file for each stream: add --by-stream")


def _shorten_stream(stream: str) -> str:
    """Return a stream's name without the module of a custom stream, and without the options of a named one."""
    first, _, last = stream.partition(":")
    return last if "." in first else first


def _list_names(names: list[str]) -> str:
    more = len(names) - MAX_NAMED_FILES
    return ", ".join(names[:MAX_NAMED_FILES]) + (f" and {more} more" if more > 0 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="RUNS and TARGET, or folders to pack")
    parser.add_argument("--by-stream", action="store_true", help="write one packed file for each stream")
    parser.add_argument("--pack", action="store_true", help="pack the plain records of each folder, without any change")
    given = parser.parse_args()
    if given.pack and given.by_stream:
        parser.error("--pack writes one file for each folder: leave out --by-stream")
    if not given.pack and len(given.folders) != 2:
        parser.error(f"expected RUNS and TARGET, or --pack and the folders to pack, got {len(given.folders)} folders")
    try:
        if given.pack:
            for folder in given.folders:
                pack_folder(folder)
        else:
            add_records(*given.folders, by_stream=given.by_stream)
    except FeddriftError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
