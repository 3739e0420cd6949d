"""Where data sets lie on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, wraps
from pathlib import Path

from feddrift.data import Stream

Maker = Callable[[str, str | Path | None], Stream]
Listing = tuple[tuple[str, int, int], ...]  # path, size and time of each file


def data_folder(data_dir: str | Path | None, name: str) -> Path:
    """DATA_DIR/name, $FEDDRIFT_DATA/name, or a folder in the user's cache: the first that is named."""
    return Path(os.path.expanduser(named_root(data_dir) or cache())) / name


def named_root(data_dir: str | Path | None) -> str | Path | None:
    """The folder of data sets that the caller or the environment names; None: data may be fetched into the cache."""
    return data_dir or os.environ.get("FEDDRIFT_DATA")


def cache() -> Path:
    """The user's folder of what can be fetched or computed again."""
    import pooch  # a twentieth of a second, for nothing where a folder is named

    return Path(pooch.os_cache("feddrift"))


def read_once(folder: str) -> Callable[[Maker], Maker]:
    """Let a process that makes a stream again, as a sweep does, read DATA_DIR/folder once, unless its files change."""

    def decorate(make: Maker) -> Maker:
        @lru_cache(maxsize=1)
        def last(name: str, data_dir: str | Path | None, listing: Listing) -> Stream:
            return make(name, data_dir)

        @wraps(make)
        def made(name: str, data_dir: str | Path | None = None) -> Stream:
            stream = last(name, data_dir, _listing(data_folder(data_dir, folder)))
            return replace(stream, x=stream.x.copy(), y=stream.y.copy())  # whoever writes into it has a copy

        return made

    return decorate


def _listing(root: Path) -> Listing:
    try:
        return tuple((str(path), (on := path.stat()).st_size, on.st_mtime_ns) for path in sorted(root.iterdir()))
    except (OSError, ValueError):  # the maker tells what is wrong with the folder
        return ()
