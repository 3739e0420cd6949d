"""One file that has all of a server's folder, or a client's, though it is at work, and the way back from it.

It is a tar file of plain files, the last of which, ``backup.json``, says what it is, where the folder was, and the
SHA-256 of every other. It holds private keys.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import shutil
import sqlite3
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

from feddrift._version import __version__
from feddrift.deploy.server.resume_point import RESTORED_MARKER
from feddrift.errors import ConfigError, DataError

MANIFEST, FORMAT = "backup.json", 1
DATABASE_FILE = "state/superlink.db"
COPIED_FIRST = {
    "server": "state/checkpoints",
    "client": "store",
}  # what must not change while it is copied; the rest may grow
EXCLUDED_PATTERNS = (
    "cache/*",
    "*__pycache__/*",
    "state/nginx-*",
    "state/nginx.pid",
    "state/superlink.db*",
)  # are made again
MAX_ATTEMPTS = 5

_log = logging.getLogger("feddrift")


def write_backup(folder: Path, file: Path) -> int:
    """Write the whole folder into a new file that only its owner may read; how many files it has."""
    kind = _find_folder_kind(folder)
    folder, file = folder.resolve(), file.resolve()
    if file.is_relative_to(folder):
        raise ConfigError(f"a backup must lie outside of the folder that it is of, got {file}")
    if file.exists():
        raise ConfigError(f"{file} is there already: choose another name, or move it away")
    part = file.with_name(f"{file.name}.part")
    try:
        for _ in range(MAX_ATTEMPTS):
            with suppress(_FolderChangedError):
                part.unlink(missing_ok=True)
                with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                    n = _write_tar(folder, kind, out)
                    out.flush()
                    os.fsync(out.fileno())
                os.rename(part, file)
                return n
            time.sleep(1)
        raise DataError(f"{folder} changes all the time: try again, or stop what works there first")
    except OSError as error:
        raise DataError(f"cannot write {file}: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)


class _FolderChangedError(Exception):
    """Something changed that must not while it is copied."""


def _find_folder_kind(folder: Path) -> str:
    names = {"server": "federation.toml", "client": "client.toml"}
    kind = next((kind for kind, name in names.items() if (folder / name).exists()), None)
    if kind is None:
        raise ConfigError(
            f"{folder} is neither a server's nor a client's folder: it has no {' and no '.join(names.values())}"
        )
    return kind


def _write_tar(folder: Path, kind: str, out: IO[bytes]) -> int:
    """All files: first those that others rely on, so that a record is never behind its checkpoint."""
    sums: dict[str, str] = {}
    try:
        before = _read_file_stamps(folder / COPIED_FIRST[kind])
        found = sorted(_list_files(folder), key=lambda name: (not name.startswith(f"{COPIED_FIRST[kind]}/"), name))
    except FileNotFoundError:  # a folder that is gone
        raise _FolderChangedError from None
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in found:
            try:
                sums[name] = _add_file(tar, folder / name, name)
            except FileNotFoundError:
                if name.startswith(("state/", "store/")):  # a record that got its last name, say
                    raise _FolderChangedError from None
        if (folder / DATABASE_FILE).exists():
            with tempfile.TemporaryDirectory() as scratch:
                copy = Path(scratch) / "superlink.db"
                _copy_database(folder / DATABASE_FILE, copy)
                sums[DATABASE_FILE] = _add_file(tar, copy, DATABASE_FILE)
        if _read_file_stamps(folder / COPIED_FIRST[kind]) != before:
            raise _FolderChangedError
        about = {"feddrift": "backup", "format": FORMAT, "kind": kind, "folder": str(folder), "version": __version__}
        about |= {"made": datetime.now(UTC).isoformat(timespec="seconds"), "sha256": sums}
        text = (json.dumps(about, indent=1) + "\n").encode()
        info = tarfile.TarInfo(MANIFEST)
        info.size, info.mode = len(text), 0o600
        tar.addfile(info, io.BytesIO(text))
    return len(sums)


def _list_files(folder: Path) -> Iterator[str]:
    """The plain files of a folder, but for those that are half written or made again."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        half = name.endswith(".part") and not name.endswith(".jsonl.part")
        if half or any(fnmatch(name, pattern) for pattern in EXCLUDED_PATTERNS):
            continue
        if path.is_symlink():
            _log.warning("%s is a link and is left out of the backup", path)
        elif path.is_file():
            yield name


def _read_file_stamps(folder: Path) -> list[tuple[str, int, int]]:
    found = []
    for path in sorted(folder.rglob("*")):
        with suppress(FileNotFoundError):
            about = path.stat()
            found.append((str(path), about.st_mtime_ns, about.st_size))
    return found


def _add_file(tar: tarfile.TarFile, path: Path, name: str) -> str:
    """Add a file as long as it is now, though it may grow meanwhile; its checksum."""
    with open(path, "rb") as file:
        about = os.fstat(file.fileno())
        info = tarfile.TarInfo(name)
        info.size, info.mode, info.mtime = about.st_size, about.st_mode & 0o777, about.st_mtime
        reader = _HashingReader(file)
        try:
            tar.addfile(info, reader)  # type: ignore[arg-type]  # all it needs is read
        except OSError:
            if os.fstat(file.fileno()).st_size < info.size:  # a log was emptied
                raise _FolderChangedError from None
            raise
        return reader.sha256.hexdigest()


class _HashingReader:
    """A file whose checksum is known once it is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.sha256 = file, hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.sha256.update(data)
        return data


def _copy_database(path: Path, copy: Path) -> None:
    try:
        with (
            closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)
    except sqlite3.Error as error:
        raise DataError(f"cannot copy {path}, which the SuperLink writes: {error}") from None


def restore_backup(file: Path, folder: Path) -> tuple[str, str]:
    """Make the folder, new or empty, what the backup is of; whether that is a server or a client, and when it was."""
    from feddrift.deploy.operate.relocate import rewrite_paths

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty: a backup is restored into a new folder")
    folder = folder.resolve()
    part = folder.with_name(f"{folder.name}.part")
    if part.exists():
        raise ConfigError(f"{part} is left from a restore that was stopped: remove it first")
    try:
        part.mkdir(mode=0o700, parents=True)
        with tarfile.open(file, "r:") as tar:
            about = _extract_files(tar, part, file)
        rewrite_paths(part, Path(str(about["folder"])), folder)
        if about["kind"] == "server":
            (part / "state").mkdir(mode=0o700, exist_ok=True)
            (part / "state" / RESTORED_MARKER).touch()
        os.replace(part, folder)  # also onto an empty one
        return str(about["kind"]), str(about["made"])
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:  # what a file that is no backup may hold
        raise DataError(f"{file} is no backup, or is damaged: {error}") from None
    except OSError as error:
        raise DataError(f"cannot restore {file} into {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _extract_files(tar: tarfile.TarFile, folder: Path, file: Path) -> dict[str, Any]:
    """Write the files of a backup, and hold them to its checksums; what it says of itself."""
    sums: dict[str, str] = {}
    for info in tar:
        plain, names = info.type == tarfile.REGTYPE and not info.issparse(), Path(info.name).parts
        data = tar.extractfile(info) if plain else None
        if data is None or ".." in names or info.name.startswith("/") or not names or info.name in sums:
            raise DataError(f"{file} is no backup of feddrift: it has {info.name!r}, which is no plain file of its own")
        if info.name == MANIFEST:
            return _read_manifest(data.read(), sums, file)
        target = folder / info.name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        checksum = hashlib.sha256()
        with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, info.mode & 0o755), "wb") as out:
            while chunk := data.read(1 << 20):
                checksum.update(chunk)
                out.write(chunk)
        os.utime(target, (info.mtime, info.mtime))
        sums[info.name] = checksum.hexdigest()
    raise DataError(f"{file} is no backup of feddrift, or it ends too early: it has no {MANIFEST}")


def _read_manifest(text: bytes, sums: dict[str, str], file: Path) -> dict[str, Any]:
    try:
        about = dict(json.loads(text))
        named, number, kind = dict(about["sha256"]), about["format"], about["kind"]
        whole = about["feddrift"] == "backup" and kind in COPIED_FIRST and isinstance(about["folder"], str)
    except (ValueError, KeyError, TypeError, RecursionError):
        whole, named, number = False, {}, None
    if not whole:
        raise DataError(f"{file} is no backup of feddrift: its {MANIFEST} says nothing of one")
    if number != FORMAT:
        raise DataError(f"{file} is a backup of format {number!r}, this feddrift reads {FORMAT}")
    if wrong := sorted(name for name in named.keys() | sums.keys() if named.get(name) != sums.get(name)):
        raise DataError(f"{file} is damaged: {wrong[0]} is not what it was")
    return about
