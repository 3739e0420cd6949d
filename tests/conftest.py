from __future__ import annotations

import os

from hypothesis import settings

collect_ignore_glob = ["golden/make_*.py"]  # scripts that wrote golden numbers; they need other packages

# How long an example takes is not what is tested; a machine tries the same examples each time, a person new ones.
settings.register_profile("feddrift", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("feddrift")
