"""The server program of a deployment: the training loop, its records, its checkpoints and its archive."""

from typing import Any

__all__ = ["app", "federate"]


def __getattr__(name: str) -> Any:
    """Import the program only when it is needed: the app file of every deployment imports `app` from here."""
    if name in __all__:
        from feddrift.deploy.server import loop

        return getattr(loop, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
