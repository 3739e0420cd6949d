from __future__ import annotations

from hypothesis import settings

collect_ignore_glob = ["golden/make_*.py"]  # scripts that wrote golden numbers; they need other packages

settings.register_profile("feddrift", deadline=None)  # how long an example takes is not what is tested
settings.load_profile("feddrift")
