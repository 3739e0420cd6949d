"""Output of the commands: results go to stdout, everything else to stderr."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console

from feddrift.errors import to_one_line
from feddrift.streams.table_cache import CACHE_VARIABLE

out = Console(emoji=False)
if not out.is_terminal and "COLUMNS" not in os.environ:
    out = Console(width=160, emoji=False)  # a pipe or a file has no width
err = Console(stderr=True, emoji=False)

INTERVAL_PATTERN = re.compile(r"\[-?[0-9.]+, -?[0-9.]+\]")

# The base class of all errors in options and arguments, with a method format_message(). It is found through a subclass,
# because typer has its own copy of click from version 0.26 on, and exports this class only from 0.28 on.
CommandLineError: type[Any] = next(
    base for base in reversed(typer.BadParameter.__mro__) if base.__name__ in ("ClickException", "TyperException")
)


def print_line(text: str) -> None:
    """Print plain text to stdout; only a terminal wraps it, between words."""
    out.print(text, highlight=False, markup=False, soft_wrap=not out.is_terminal)


def print_verdicts(verdicts: Sequence[str]) -> None:
    """Print verdicts, and the meaning of the intervals in them."""
    for verdict in verdicts:
        print_line(f"{verdict}\n")
    if any(INTERVAL_PATTERN.search(verdict) for verdict in verdicts):
        print_line("Numbers in brackets are 95 % intervals over seeds.\n")


def print_to_stderr(sentence: str) -> None:
    """Print plain text to stderr."""
    err.print(sentence, highlight=False, markup=False, soft_wrap=True)


def print_error(sentence: str) -> int:
    """Print an error in one line to stderr, and return the exit code 2."""
    if sentence:  # empty if a command without arguments has printed its help
        print_to_stderr(f"Error: {to_one_line(sentence)}")
    return 2


def handle_stop_signals() -> None:
    """Make Ctrl-C and SIGTERM raise KeyboardInterrupt, so that a run closes its record."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def disable_caches(no_cache: bool) -> None:
    """Store no compiled programs and no tables, in this process and its child processes, if `no_cache` is True.

    It has an effect on compiled programs only before JAX is imported.
    """
    if no_cache:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
        os.environ[CACHE_VARIABLE] = "false"


NO_CACHE_HELP = "do not store compiled programs and tables for later runs, and do not use stored ones"
