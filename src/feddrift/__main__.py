"""The `feddrift` command, also as `python -m feddrift`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run a command; the version alone is told without loading any."""
    if sys.argv[1:] == ["--version"]:
        from feddrift._version import __version__

        print(f"feddrift {__version__}")
        return
    from feddrift import cli

    cli.main()


if __name__ == "__main__":
    main()
