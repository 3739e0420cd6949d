"""Compiled programs that outlive the process: JAX's compilation cache, on by default and of bounded size."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

from feddrift.streams import files

ROOM = 1 << 30  # bytes; what was written longest ago makes room

log = logging.getLogger(__name__)


@cache
def keep_programs(folder: Path | None = None) -> Path | None:
    """Let JAX keep what it compiles, in this folder or the user's cache; None where it does not, or cannot.

    JAX's own variables win: JAX_COMPILATION_CACHE_DIR names another folder, which is not tidied up here, and
    JAX_ENABLE_COMPILATION_CACHE=false keeps nothing.
    """
    import jax

    config: Any = jax.config
    if not config.jax_enable_compilation_cache:
        return None
    if config.jax_compilation_cache_dir:
        return Path(config.jax_compilation_cache_dir)
    every = folder or files.cache() / "programs"
    folder = every / processor()  # homes may be shared by machines that do not understand each other's programs
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tidy(every, ROOM)
    except OSError as error:
        log.info("compiled programs are not kept: %s: %s", folder, error.strerror)
        return None
    if not os.access(folder, os.W_OK):
        log.info("compiled programs are not kept: %s is not writable", folder)
        return None
    config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        config.update("jax_persistent_cache_min_compile_time_secs", 0)  # many small ones add up, on a GPU
    return folder


def processor() -> str:
    """A name for this kind of processor: what it is, and what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    digest = hashlib.sha256("\n".join([platform.processor(), *features]).encode()).hexdigest()[:8]
    return f"{platform.machine()}-{digest}"


def tidy(folder: Path, room: int) -> None:
    """Delete what was written longest ago until the rest takes at most so many bytes."""
    found = [(status.st_mtime, status.st_size, path) for path in folder.rglob("*") if (status := _status(path))]
    excess = sum(size for _, size, _ in found) - room
    for _, size, path in sorted(found):
        if excess <= 0:
            return
        path.unlink(missing_ok=True)  # another process may have been quicker
        excess -= size


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat() if path.is_file() else None
    except OSError:
        return None
