from __future__ import annotations

import os

from hypothesis import settings

collect_ignore_glob = ["golden/make_*.py"]  # scripts that wrote golden numbers; they need other packages

# How long an example takes is not what is tested; a check tries the same examples each time, a long search new ones.
settings.register_profile("feddrift", deadline=None, derandomize=os.environ.get("FEDDRIFT_FUZZ") != "long")
settings.load_profile("feddrift")
