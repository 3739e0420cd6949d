"""Where the commands write: results to the output, all else beside it."""

from __future__ import annotations

import os
import signal
from typing import Any

import typer
from rich.console import Console

from feddrift.errors import one_line

out = Console(emoji=False)
if not out.is_terminal and "COLUMNS" not in os.environ:
    out = Console(width=160, emoji=False)  # a pipe or a file has no edge
err = Console(stderr=True, emoji=False)

# The base class of all errors in options and arguments, with a method format_message(). It is found through a subclass
# of it, because its module differs: typer has its own copy of click from 0.26 on and exports this class from 0.28 on.
CommandLineError: type[Any] = next(
    base for base in reversed(typer.BadParameter.__mro__) if base.__name__ in ("ClickException", "TyperException")
)


def say(text: str) -> None:
    """A plain line; a terminal wraps it between words, a pipe or a file has it whole."""
    out.print(text, highlight=False, markup=False, soft_wrap=not out.is_terminal)


def tell(sentence: str) -> None:
    """A plain line beside the output."""
    err.print(sentence, highlight=False, markup=False, soft_wrap=True)


def fail(sentence: str) -> int:
    if sentence:  # the bare command prints its help and has nothing to add
        tell(f"Error: {one_line(sentence)}")
    return 2


def can_be_stopped() -> None:
    """Let Ctrl-C and SIGTERM end this command as an exception does: a run closes its record."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def keep_nothing(yes: bool) -> None:
    """Let JAX keep no compiled programs, in this process and those that it starts; before JAX is imported."""
    if yes:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"


NO_CACHE = "keep no compiled programs for the next run, and use none that were kept"
