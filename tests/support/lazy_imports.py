"""New processes that report which slow libraries they have imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys

SLOW_LIBRARIES = ("jax", "scipy", "matplotlib", "flwr", "numba")

COMMAND_CODE = """
import sys
sys.argv = ["feddrift", *{words!r}]
from feddrift.__main__ import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""


def find_loaded_libraries(code: str, **env: str) -> set[str]:
    """Return the slow libraries that a new process has loaded after this code."""
    report_code = f"import json, sys\nprint(json.dumps([name for name in {SLOW_LIBRARIES!r} if name in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report_code}"],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))
