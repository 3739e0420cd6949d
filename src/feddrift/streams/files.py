"""Folders of data sets, formats of files, and a cache of the last stream that was read."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, wraps
from pathlib import Path

from feddrift.data import Stream
from feddrift.errors import DataError

Maker = Callable[[str, str | Path | None], Stream]
Listing = tuple[tuple[str, int, int], ...]  # path, size and modification time of each file
BINARY_FORMATS = {  # by the first bytes of a file
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"\xff\xff\xff\xff": "arrow stream",
}
UNREADABLE_FORMATS = {b"PK": "an Excel file or an archive", b"FEA1": "a Feather file of version 1"}
SUFFIX_FORMATS = {".parquet": "a Parquet file", ".arrow": "an Arrow file", ".feather": "a Feather file"}


def find_data_folder(data_dir: str | Path | None, name: str) -> Path:
    """Return the folder of a data set: DATA_DIR/name, else $FEDDRIFT_DATA/name, else a folder in the user's cache."""
    return Path(os.path.expanduser(get_named_root(data_dir) or find_cache_folder())) / name


def get_named_root(data_dir: str | Path | None) -> str | Path | None:
    """Return the folder of data sets that the argument or $FEDDRIFT_DATA names; None: the cache, with downloads."""
    return data_dir or os.environ.get("FEDDRIFT_DATA")


def find_cache_folder() -> Path:
    """Return the user's cache folder, for files that can be downloaded or computed again."""
    import pooch  # here, since the import takes 50 ms

    return Path(pooch.os_cache("feddrift"))


def read_once(folder: str) -> Callable[[Maker], Maker]:
    """Decorate a maker of streams: it reads DATA_DIR/folder again only if a file in it has changed."""

    def decorate(make: Maker) -> Maker:
        @lru_cache(maxsize=1)
        def load_once(name: str, data_dir: str | Path | None, listing: Listing) -> Stream:
            return make(name, data_dir)

        @wraps(make)
        def load_copy(name: str, data_dir: str | Path | None = None) -> Stream:
            stream = load_once(name, data_dir, _list_files(find_data_folder(data_dir, folder)))
            return replace(stream, x=stream.x.copy(), y=stream.y.copy())  # the caller may change the arrays

        return load_copy

    return decorate


def _list_files(root: Path) -> Listing:
    try:
        return tuple((str(p), stat.st_size, stat.st_mtime_ns) for p in sorted(root.iterdir()) for stat in [p.stat()])
    except (OSError, ValueError):  # the maker reports the problem
        return ()


def read_magic_bytes(path: Path) -> bytes:
    """Return the first bytes of a file, which identify its format.

    Raises:
        DataError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def check_format(path: Path, magic: bytes) -> str:
    """Return the format of a table, "csv" or one of BINARY_FORMATS.

    Args:
        path: The file.
        magic: Its first bytes.

    Raises:
        DataError: The format cannot be read, or is not that of the file's suffix.
    """
    for begin, kind in UNREADABLE_FORMATS.items():
        if magic.startswith(begin):
            raise DataError(f"{path} is {kind}, expected a table: save it as a Parquet or CSV file")
    found = next((kind for begin, kind in BINARY_FORMATS.items() if magic.startswith(begin)), "csv")
    expected = SUFFIX_FORMATS.get(path.suffix.lower())
    if expected is not None and found == "csv":
        raise DataError(f"{path} is not {expected}: its first bytes are {magic!r}; write it again, or name it .csv")
    return found
