"""Versions of Flower that feddrift is tested with, and the warning about other versions."""

from __future__ import annotations

import importlib.metadata

TESTED_FLWR = ("1.41.0",)  # pyproject.toml also allows their patch releases


def find_flwr_problem() -> str | None:
    """Return a sentence if the installed flwr is neither a tested version nor a patch release of one, else None.

    Another version may work, so it is reported and not refused.
    """
    installed = importlib.metadata.version("flwr")
    if installed.split(".")[:2] in [tested.split(".")[:2] for tested in TESTED_FLWR]:
        return None
    return (
        f"flwr {installed} is installed, with which this feddrift is not tested: it may work; "
        f"pip install 'feddrift[flower]' installs a tested version ({', '.join(TESTED_FLWR)})"
    )
