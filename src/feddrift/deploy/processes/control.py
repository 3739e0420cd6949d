"""Client of Flower's control API; it replaces `flwr` commands, each of which takes seconds to start."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from feddrift.errors import DataError

_log = logging.getLogger("feddrift")


class SuperLinkConnection:
    """Connection to a SuperLink for several requests: `with SuperLinkConnection(address, authority) as superlink`.

    Args:
        address: The SuperLink as host:port.
        authority: The file with the certificate of its authority.

    All methods raise DataError if the SuperLink cannot be reached or refuses the request.
    """

    def __init__(self, address: str, authority: Path) -> None:
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        interceptors = [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
        self._client = ControlHttpClient.from_server_address(address, False, authority.read_bytes(), interceptors)

    def __enter__(self) -> SuperLinkConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def register_client(self, name: str, key: bytes) -> None:
        """Allow a client with this public key to connect."""
        from flwr.proto.control_pb2 import RegisterNodeRequest

        with _convert_errors(f"register the key of client {name}"):
            if not self._client.RegisterNode(RegisterNodeRequest(public_key=key, name=name)).node_id:
                raise ValueError("its reply contains no node")

    def unregister_node(self, node: int) -> None:
        """Revoke the key of a node permanently."""
        from flwr.proto.control_pb2 import UnregisterNodeRequest

        _log.info("the key of node %d is revoked, since it no longer belongs to a client", node)
        with _convert_errors(f"unregister node {node}"):
            self._client.UnregisterNode(UnregisterNodeRequest(node_id=node))

    def stop_run(self, run: int) -> None:
        """End a run."""
        from flwr.proto.control_pb2 import StopRunRequest

        with _convert_errors(f"stop run {run}"):
            self._client.StopRun(StopRunRequest(run_id=run))

    def list_runs(self, **selection: int) -> dict[int, str]:
        """Return the status of runs by number, such as running or finished:completed.

        Args:
            selection: `run_id`, or `limit` for the newest runs.
        """
        from flwr.proto.control_pb2 import ListRunsRequest

        with _convert_errors("list its runs"):
            runs: Any = self._client.ListRuns(ListRunsRequest(**selection)).run_dict
        return {
            run_id: ":".join(filter(None, (run.status.status, run.status.sub_status))) for run_id, run in runs.items()
        }


@contextmanager
def _convert_errors(request: str) -> Iterator[None]:
    """Convert errors of a request to DataError."""
    import httpx

    try:
        yield
    except (httpx.HTTPError, ValueError) as error:
        raise DataError(f"the SuperLink did not {request}: {error}; is `feddrift deploy server` running?") from None
