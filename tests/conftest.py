from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

collect_ignore_glob = ["golden/make_*.py"]  # scripts that wrote golden numbers; they need other packages

# How long an example takes is not what is tested; a check tries the same examples each time, a long search new ones.
settings.register_profile("feddrift", deadline=None, derandomize=os.environ.get("FEDDRIFT_FUZZ") != "long")
settings.load_profile("feddrift")


def pytest_configure(config: pytest.Config) -> None:
    """What XLA compiles is kept, for the other workers of this check and for the processes that tests start."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        kept = tempfile.TemporaryDirectory(prefix="feddrift-xla-")
        config.add_cleanup(kept.cleanup)
        os.environ |= {"JAX_COMPILATION_CACHE_DIR": kept.name, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


@pytest.fixture(scope="session", autouse=True)
def nobody_waits_for_the_disk() -> Iterator[None]:
    """No test cuts the power, so none could see what fsync waits for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield
