"""Errors a user can act on: one sentence with the value and the legal set."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FeddriftError(Exception):
    """Anything the user can mend; the command line prints it and exits with code 2."""


class ConfigError(FeddriftError):
    """A name, option or setting that is not legal."""


class DataError(FeddriftError):
    """A file or array that cannot be used; the message names it and says what is wrong."""


class BusyError(DataError):
    """A record that another run is writing just now."""


def unknown(what: str, name: object, legal: Iterable[object]) -> ConfigError:
    """An error that names the legal set and suggests the nearest name.

    >>> unknown("algorithm", "FedDrif", ["FedDrift", "Oracle"])
    ConfigError("unknown algorithm 'FedDrif', did you mean 'FedDrift'? (one of: FedDrift, Oracle)")
    """
    names = [str(n) for n in legal]
    lower = {n.lower(): n for n in names}
    near = difflib.get_close_matches(str(name).lower(), lower, n=1, cutoff=0.6)
    hint = f", did you mean '{lower[near[0]]}'?" if near else ""
    return ConfigError(f"unknown {what} '{name}'{hint} (one of: {', '.join(names)})")
