"""Where data sets lie on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, wraps
from pathlib import Path

from feddrift.data import Stream

Maker = Callable[[str, str | Path | None], Stream]


def data_folder(data_dir: str | Path | None, name: str) -> Path:
    """DATA_DIR/name, $FEDDRIFT_DATA/name, or a folder in the user's cache: the first that is named."""
    return Path(os.path.expanduser(named_root(data_dir) or _cache())) / name


def named_root(data_dir: str | Path | None) -> str | Path | None:
    """The folder of data sets that the caller or the environment names; None: data may be fetched into the cache."""
    return data_dir or os.environ.get("FEDDRIFT_DATA")


def _cache() -> Path:
    import pooch  # a twentieth of a second, for nothing where a folder is named

    return Path(pooch.os_cache("feddrift"))


def read_once(folder: str) -> Callable[[Maker], Maker]:
    """Let a process that makes a stream again, as a sweep does, read DATA_DIR/folder once, unless its files change."""

    def decorate(make: Maker) -> Maker:
        @lru_cache(maxsize=1)
        def last(name: str, data_dir: str | Path | None, files: tuple[tuple[str, int, int], ...]) -> Stream:
            return make(name, data_dir)

        @wraps(make)
        def made(name: str, data_dir: str | Path | None = None) -> Stream:
            root = data_folder(data_dir, folder)
            found = sorted(root.iterdir()) if root.is_dir() else []
            files = tuple((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in found if p.is_file())
            stream = last(name, data_dir, files)
            return replace(stream, x=stream.x.copy(), y=stream.y.copy())  # whoever writes into it has a copy

        return made

    return decorate
