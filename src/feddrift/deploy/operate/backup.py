"""Backup of a server's or client's folder in one file, also while the program is running, and its restoration.

A backup is a tar file of plain files. The last file, ``backup.json``, contains the kind and the path of the folder, and
the SHA-256 of every other file. A backup contains private keys.
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
from feddrift.deploy.operate.relocate import rewrite_paths
from feddrift.deploy.pki.revocations import UNCONFIRMED_MARKER
from feddrift.deploy.processes import launcher
from feddrift.deploy.server.resume_point import RESTORED_MARKER
from feddrift.engines.flower import revocations
from feddrift.errors import ConfigError, DataError

MANIFEST = "backup.json"
FORMAT = 1
DATABASE_FILE = "state/superlink.db"
# Folders that must not change while they are copied; files elsewhere may grow.
COPIED_FIRST = {"server": "state/checkpoints", "client": "store"}
# Files that are not copied: they are created again, and SQLite copies the database.
EXCLUDED_PATTERNS = ("cache/*", "*__pycache__/*", "state/nginx-*", "state/nginx.pid", "state/superlink.db*")
MAX_ATTEMPTS = 5

_log = logging.getLogger("feddrift")


def write_backup(folder: Path, file: Path) -> int:
    """Write the whole folder of a server or client into a new file, which only its owner may read.

    Args:
        folder: The folder; its server or client may be running.
        file: The new file, outside of the folder.

    Returns:
        The number of files in the backup.

    Raises:
        ConfigError: If the folder is neither a server's nor a client's, or the file is in it or exists.
        DataError: If the folder keeps changing, or the file cannot be written.
    """
    kind = _find_folder_kind(folder)
    folder = folder.resolve()
    file = file.resolve()
    if file.is_relative_to(folder):
        raise ConfigError(f"a backup must be outside of the folder that it contains, {folder}, got {file}")
    if file.exists():
        raise ConfigError(f"{file} exists already: choose another name, or move it away")
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
        raise DataError(f"{folder} keeps changing: try again, or stop its server or client first")
    except OSError as error:
        raise DataError(f"cannot write {file}: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)


class _FolderChangedError(Exception):
    """A file that must not change has changed while the folder was copied."""


def _find_folder_kind(folder: Path) -> str:
    names = {"server": "federation.toml", "client": "client.toml"}
    kind = next((kind for kind, name in names.items() if (folder / name).exists()), None)
    if kind is None:
        raise ConfigError(
            f"{folder} is neither a server's nor a client's folder: it has no {' and no '.join(names.values())}"
        )
    return kind


def _write_tar(folder: Path, kind: str, out: IO[bytes]) -> int:
    """Write all files, and return their number.

    The folder in `COPIED_FIRST` comes first, so that a record has at least the time steps of its checkpoint.
    """
    checksums: dict[str, str] = {}
    try:
        stamps = _read_file_stamps(folder / COPIED_FIRST[kind])
        names = sorted(_list_files(folder), key=lambda name: (not name.startswith(f"{COPIED_FIRST[kind]}/"), name))
    except FileNotFoundError:  # a subfolder was deleted
        raise _FolderChangedError from None
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            try:
                checksums[name] = _add_file(tar, folder / name, name)
            except FileNotFoundError:
                if name.startswith(("state/", "store/")):  # for instance a record that was renamed when it was closed
                    raise _FolderChangedError from None
        if (folder / DATABASE_FILE).exists():
            with tempfile.TemporaryDirectory() as scratch:
                copy = Path(scratch) / "superlink.db"
                _copy_database(folder / DATABASE_FILE, copy)
                checksums[DATABASE_FILE] = _add_file(tar, copy, DATABASE_FILE)
        if _read_file_stamps(folder / COPIED_FIRST[kind]) != stamps:
            raise _FolderChangedError
        about = {"feddrift": "backup", "format": FORMAT, "kind": kind, "folder": str(folder), "version": __version__}
        about |= {"made": datetime.now(UTC).isoformat(timespec="seconds"), "sha256": checksums}
        text = (json.dumps(about, indent=1) + "\n").encode()
        info = tarfile.TarInfo(MANIFEST)
        info.size = len(text)
        info.mode = 0o600
        tar.addfile(info, io.BytesIO(text))
    return len(checksums)


def _list_files(folder: Path) -> Iterator[str]:
    """Yield the names of the plain files in a folder, except unfinished files and `EXCLUDED_PATTERNS`."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        is_unfinished = name.endswith(".part") and not name.endswith(".jsonl.part")  # an open record is copied
        if is_unfinished or any(fnmatch(name, pattern) for pattern in EXCLUDED_PATTERNS):
            continue
        if path.is_symlink():
            _log.warning("%s is a link and is left out of the backup", path)
        elif path.is_file():
            yield name


def _read_file_stamps(folder: Path) -> list[tuple[str, int, int]]:
    """Return the path, modification time and size of everything in a folder."""
    stamps = []
    for path in sorted(folder.rglob("*")):
        with suppress(FileNotFoundError):
            status = path.stat()
            stamps.append((str(path), status.st_mtime_ns, status.st_size))
    return stamps


def _add_file(tar: tarfile.TarFile, path: Path, name: str) -> str:
    """Add a file with its present size, even if it grows meanwhile, and return its checksum."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        info = tarfile.TarInfo(name)
        info.size = status.st_size
        info.mode = status.st_mode & 0o777
        info.mtime = status.st_mtime
        reader = _HashingReader(file)
        try:
            tar.addfile(info, reader)  # type: ignore[arg-type]  # it needs the method read only
        except OSError:
            if os.fstat(file.fileno()).st_size < info.size:  # a log was emptied
                raise _FolderChangedError from None
            raise
        return reader.sha256.hexdigest()


class _HashingReader:
    """A file reader that computes the checksum of the data that it has read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

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


def restore_backup(file: Path, folder: Path, ca_key: Path | None = None) -> tuple[str, str]:
    """Restore a backup into a folder that is new or empty.

    A backup may bring back keys that were revoked or replaced later. A restored server therefore does not start before
    `client_keys.confirm_keys`.

    Args:
        file: The backup.
        folder: The new folder.
        ca_key: The private key of the authority: keys in the list of revocations beside it are excluded at once.

    Returns:
        The kind of the folder, server or client, and the time of the backup.

    Raises:
        ConfigError: If the folder is not empty, or `ca_key` cannot be used.
        DataError: If the file is not a backup or is damaged, or the folder cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty: name a new or empty folder")
    folder = folder.resolve()
    part = folder.with_name(f"{folder.name}.part")
    if part.exists():
        raise ConfigError(f"{part} exists, which an interrupted restore has left: delete it first")
    try:
        part.mkdir(mode=0o700, parents=True)
        with tarfile.open(file, "r:") as tar:
            about = _extract_files(tar, part, file)
        rewrite_paths(part, Path(str(about["folder"])), folder)
        if about["kind"] == "server":
            (part / "state").mkdir(mode=0o700, exist_ok=True)
            (part / "state" / RESTORED_MARKER).touch()
            (part / "state" / UNCONFIRMED_MARKER).touch()
            if ca_key is not None:
                launcher.exclude_revoked_keys(part, ca_key)
        elif ca_key is not None:
            raise ConfigError(f"--ca-key is an option for the backup of a server, but {file} is that of a client")
        else:
            (part / revocations.RESTORED_MARKER).touch()
        os.replace(part, folder)  # the folder may exist if it is empty
        return str(about["kind"]), str(about["made"])
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:  # raised for arbitrary bytes
        raise DataError(f"{file} is not a backup, or is damaged: {error}") from None
    except OSError as error:
        raise DataError(f"cannot restore {file} into {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _extract_files(tar: tarfile.TarFile, folder: Path, file: Path) -> dict[str, Any]:
    """Write the files of a backup into a folder, compare them with its checksums, and return its manifest."""
    checksums: dict[str, str] = {}
    for info in tar:
        is_plain = info.type == tarfile.REGTYPE and not info.issparse()
        parts = Path(info.name).parts
        data = tar.extractfile(info) if is_plain else None
        if data is None or ".." in parts or info.name.startswith("/") or not parts or info.name in checksums:
            raise DataError(
                f"{file} is not a backup of feddrift: it has {info.name!r}, but a backup has plain files of its "
                "folder only, each once"
            )
        if info.name == MANIFEST:
            return _read_manifest(data.read(), checksums, file)
        target = folder / info.name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        checksum = hashlib.sha256()
        with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, info.mode & 0o755), "wb") as out:
            while chunk := data.read(1 << 20):
                checksum.update(chunk)
                out.write(chunk)
        os.utime(target, (info.mtime, info.mtime))
        checksums[info.name] = checksum.hexdigest()
    raise DataError(f"{file} is not a backup of feddrift, or it was cut off: it has no {MANIFEST}")


def _read_manifest(text: bytes, checksums: dict[str, str], file: Path) -> dict[str, Any]:
    """Return the manifest of a backup; raise DataError if its checksums are not those of the files."""
    try:
        about = dict(json.loads(text))
        expected = dict(about["sha256"])
        number = about["format"]
        is_valid = about["feddrift"] == "backup" and about["kind"] in COPIED_FIRST and isinstance(about["folder"], str)
    except (ValueError, KeyError, TypeError, RecursionError):
        is_valid = False
    if not is_valid:
        raise DataError(f"{file} is not a backup of feddrift: its {MANIFEST} does not describe one")
    if number != FORMAT:
        raise DataError(f"{file} is a backup of format {number!r}, this feddrift reads {FORMAT}: update feddrift")
    names = expected.keys() | checksums.keys()
    if wrong := sorted(name for name in names if expected.get(name) != checksums.get(name)):
        raise DataError(f"{file} is damaged: {wrong[0]} does not match its checksum")
    return about
