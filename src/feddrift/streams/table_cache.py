"""Cache of arranged tables in the user's cache folder: the same files with the same options are read once.

An entry is a file with a description in JSON and three arrays. Its name is a digest of the content of the files, of
their names, and of the options. The environment variable FEDDRIFT_TABLE_CACHE=false disables the cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from feddrift._internal.system import delete_oldest_files
from feddrift._version import __version__
from feddrift.errors import DataError
from feddrift.streams.files import find_cache_folder
from feddrift.tables.arrange import StreamFields, TableOptions
from feddrift.tables.features import Feature

MIN_TABLE_BYTES = 1_000_000  # smaller tables are read in a moment
MAX_CACHE_BYTES = 4_000_000_000  # with more, the entries that were not used for the longest time are deleted
CACHE_VARIABLE = "FEDDRIFT_TABLE_CACHE"

_log = logging.getLogger("feddrift")


@dataclass(frozen=True)
class CacheEntry:
    """The place of an arranged table in the cache.

    Attributes:
        path: The file; None: the cache is disabled, or the table is small.
    """

    path: Path | None

    def load(self) -> StreamFields | None:
        """Return the table, and repeat the warnings of its first reading; None if it is not in the cache."""
        if self.path is None:
            return None
        try:
            with self.path.open("rb") as file:
                about = json.loads(_read_array(file).tobytes())
                counts = _read_array(file)
                y = _read_array(file)
                x = _read_array(file)
            recipe = tuple(Feature(**feature) for feature in about["recipe"])
            if len(x) != len(y) or len(y) != counts.sum():
                return None
            fields = StreamFields(
                x=x,
                y=y,
                counts=counts,
                n_classes=len(about["classes"]),
                clients=tuple(about["clients"]),
                times=tuple(about["times"]),
                classes=tuple(about["classes"]),
                columns=tuple(feature.name for feature in recipe),
                recipe=recipe,
            )
            os.utime(self.path)  # it was used just now
        except (OSError, ValueError, KeyError, TypeError, EOFError):  # no such entry, or a damaged one
            return None
        for sentence in about["warnings"]:
            _log.warning("%s", sentence)
        return fields

    def store(self, fields: StreamFields, warnings: Sequence[str]) -> None:
        """Write the table; if it is too large or cannot be written, it is read again the next time."""
        if self.path is None or fields.x.nbytes > MAX_CACHE_BYTES // 2:
            return
        about = {name: getattr(fields, name) for name in ("clients", "times", "classes")}
        about |= {"recipe": [asdict(feature) for feature in fields.recipe], "warnings": list(warnings)}
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with part.open("xb") as file:
                for array in (
                    np.frombuffer(json.dumps(about).encode(), dtype=np.uint8),
                    fields.counts,
                    fields.y,
                    fields.x,
                ):
                    np.lib.format.write_array(file, array, allow_pickle=False)
            os.replace(part, self.path)
            delete_oldest_files(self.path.parent, MAX_CACHE_BYTES)
        except OSError as error:
            _log.info("the table is not stored in the cache: %s: %s", part, error.strerror)
            with suppress(OSError):
                part.unlink(missing_ok=True)


def _read_array(file: BinaryIO) -> np.ndarray[Any, Any]:
    return np.lib.format.read_array(file, allow_pickle=False)


def open_entry(paths: Sequence[Path], options: TableOptions) -> CacheEntry:
    """Return the entry of these files and options, which need not exist.

    Raises:
        DataError: A file cannot be read.
    """
    if os.environ.get(CACHE_VARIABLE, "").lower() in ("false", "0", "off", "no"):
        return CacheEntry(None)
    digests: list[tuple[str, str]] = []
    try:
        if sum(path.stat().st_size for path in paths) < MIN_TABLE_BYTES:
            return CacheEntry(None)
        for path in paths:
            with path.open("rb") as file:
                digests.append((str(path), hashlib.file_digest(file, "sha256").hexdigest()))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    key = json.dumps([__version__, digests, asdict(options)])
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    return CacheEntry(find_cache_folder() / "tables" / f"{name}.table")
