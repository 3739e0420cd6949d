"""The command line of the soak tests."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests import soak
from tests.soak.faults import soak_b
from tests.soak.kills import soak_a


def main() -> None:
    parser = argparse.ArgumentParser(description=soak.__doc__)
    parser.add_argument("soaks", nargs="*", default=["a", "b"], choices=["a", "b"])
    parser.add_argument("--kills", type=int, default=30, help="of soak A")
    parser.add_argument("--steps", type=int, default=4, help="of time, of soak A")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # all that was started ends with it
    for name in options.soaks:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            if name == "a":
                soak_a(Path(folder) / "fed", options.kills, options.steps, options.seed)
            else:
                soak_b(Path(folder) / "fed")
        print(f"soak {name.upper()} took {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
