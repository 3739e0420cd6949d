"""Cache of compiled programs on disk: that of JAX, enabled by default and limited in size."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

from feddrift._internal.system import delete_oldest_files
from feddrift.streams import files

MAX_CACHE_BYTES = 1 << 30  # with more, the oldest files are deleted

log = logging.getLogger(__name__)


@cache
def enable_compilation_cache(folder: Path | None = None) -> Path | None:
    """Let JAX store compiled programs in a folder.

    JAX's own environment variables take precedence: JAX_COMPILATION_CACHE_DIR names another folder, in which nothing is
    deleted here, and JAX_ENABLE_COMPILATION_CACHE=false disables the cache.

    Args:
        folder: The folder of the cache; default: in the user's cache.

    Returns:
        The folder with the programs for this processor; None: the cache is disabled, or the folder is not writable.
    """
    import jax

    config: Any = jax.config
    if not config.jax_enable_compilation_cache:
        return None
    if config.jax_compilation_cache_dir:
        return Path(config.jax_compilation_cache_dir)
    root = folder or files.find_cache_folder() / "programs"
    # A home folder may be shared by machines that cannot run each other's programs.
    folder = root / identify_processor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        delete_oldest_files(root, MAX_CACHE_BYTES)
    except OSError as error:
        log.info("compiled programs are not stored: %s: %s", folder, error.strerror)
        return None
    if not os.access(folder, os.W_OK):
        log.info("compiled programs are not stored: %s is not writable", folder)
        return None
    config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        config.update("jax_persistent_cache_min_compile_time_secs", 0)  # the many small programs for a GPU add up
    return folder


def identify_processor() -> str:
    """Return a name for this kind of processor, made of its architecture and a digest of its features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    digest = hashlib.sha256("\n".join([platform.processor(), *features]).encode()).hexdigest()[:8]
    return f"{platform.machine()}-{digest}"
