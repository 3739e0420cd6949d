"""The `feddrift` command, also as `python -m feddrift`."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run a command; the version alone is told without loading any."""
    if sys.argv[1:] == ["--version"]:
        from feddrift._version import __version__

        print(f"feddrift {__version__}")
        return
    gc.disable()  # what is imported stays: looking for garbage in it costs a tenth of the time to start
    from feddrift import cli

    gc.freeze()
    gc.enable()
    cli.main()


if __name__ == "__main__":
    main()
