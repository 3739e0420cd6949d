"""The `feddrift` command, also as `python -m feddrift`."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the command of sys.argv. `--version` imports none of the commands."""
    if sys.argv[1:] == ["--version"]:
        from feddrift._version import __version__

        print(f"feddrift {__version__}")
        return
    gc.disable()  # imported objects stay in use: garbage collection would take a tenth of the start-up time
    from feddrift import cli

    gc.freeze()
    gc.enable()
    cli.main()


if __name__ == "__main__":
    main()
