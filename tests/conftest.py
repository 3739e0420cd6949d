from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

collect_ignore_glob = ["golden/make_*.py"]  # scripts that wrote golden numbers; they need other packages

# How long an example takes is not what is tested; a check tries the same examples each time, a long search new ones.
settings.register_profile("feddrift", deadline=None, derandomize=os.environ.get("FEDDRIFT_FUZZ") != "long")
settings.load_profile("feddrift")


@pytest.fixture(scope="session", autouse=True)
def nobody_waits_for_the_disk() -> Iterator[None]:
    """No test cuts the power, so none could see what fsync waits for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield
