"""Where data sets lie on disk."""

from __future__ import annotations

import os
from pathlib import Path


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
