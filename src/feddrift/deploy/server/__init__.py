"""Server program of a deployment: the training loop, its record, its checkpoints and its archive."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feddrift.deploy.server.loop import app, federate

__all__ = ["app", "federate"]


def __getattr__(name: str) -> Any:
    """Import the program when it is first used: the app file of every deployment imports `app` from this package."""
    if name in __all__:
        from feddrift.deploy.server import loop

        return getattr(loop, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
