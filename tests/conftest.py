from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

collect_ignore_glob = ["golden/make_*.py"]  # scripts that wrote golden numbers; they need other packages

# How long an example takes is not what is tested; a check tries the same examples each time, a long search new ones.
settings.register_profile("feddrift", deadline=None, derandomize=os.environ.get("FEDDRIFT_FUZZ") != "long")
settings.load_profile("feddrift")

PROGRAM_CACHE = Path(__file__).parents[1] / ".cache" / "xla"
MAX_PROGRAM_CACHE_BYTES = 1 << 28


def pytest_configure(config: pytest.Config) -> None:
    """Keep programs that XLA compiles for the other workers, for processes that tests start, and for later checks."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # a worker inherits the variable
        folder = prepare_program_cache(PROGRAM_CACHE)
        os.environ |= {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def prepare_program_cache(root: Path) -> Path:
    """Create the folder for this kind of processor, limit the size of all folders, and delete damaged programs.

    JAX writes a program in place and never replaces it, so a process that is killed meanwhile leaves a part of a file.
    Several checks may use the folder at once: JAX compiles again what another check deletes.
    """
    from feddrift._internal.system import delete_oldest_files
    from feddrift.engines.simulator import compilation_cache

    folder = root / compilation_cache.identify_processor()
    folder.mkdir(parents=True, exist_ok=True)
    delete_oldest_files(root, MAX_PROGRAM_CACHE_BYTES)
    for path in folder.glob("*-cache"):
        if not is_whole_program(path):
            path.unlink(missing_ok=True)
    return folder


def is_whole_program(path: Path) -> bool:
    """Return whether a file of JAX's compilation cache can be decompressed; a file that is gone counts as whole."""
    from jax._src import compilation_cache

    try:
        compilation_cache.decompress_executable(path.read_bytes())
    except FileNotFoundError:
        pass
    except Exception:  # which one depends on the compression
        return False
    return True


@pytest.fixture(scope="session", autouse=True)
def skip_fsync() -> Iterator[None]:
    """No test cuts the power, so none could see what fsync waits for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield
