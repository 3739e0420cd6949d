"""`python -m feddrift` is the `feddrift` command."""

from feddrift.cli import main

main()
