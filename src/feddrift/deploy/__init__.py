"""Deployment of a federation on real machines, with Flower.

- `server`: the server program: training loop, record, checkpoints, archive of past models
- `processes`: the processes of server and clients: SuperLink, proxy, SuperNodes
- `pki`: certificates, keys and signatures
- `operate`: commands for operators: init, check, rotate keys, back up, roll back, export
- `monitor`: status, alerts, metrics, logs and the status page

`Client` and `federate` are imported when they are first used, since they need the extra `flower`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feddrift.deploy.server.loop import federate
    from feddrift.engines.flower.client.client import Client

__all__ = ["Client", "federate"]


def __getattr__(name: str) -> Any:
    """Import `Client` and `federate` when they are first used."""
    if name == "Client":
        from feddrift.engines.flower.client.client import Client

        return Client
    if name == "federate":
        from feddrift.deploy.server.loop import federate

        return federate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
