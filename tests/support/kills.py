"""The exception that replaces the end of a process."""

from __future__ import annotations


class Killed(BaseException):
    """The end of a process, after which no code cleans up."""
