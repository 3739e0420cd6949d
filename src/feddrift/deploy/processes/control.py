"""Flower's control path, from this process: each `flwr` command takes seconds of a core to start."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from feddrift.errors import DataError

_log = logging.getLogger("feddrift")


class SuperLinkConnection:
    """A SuperLink that is asked again and again: `with Link(address, authority) as link`."""

    def __init__(self, address: str, authority: Path) -> None:
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        interceptors = [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
        self._to = ControlHttpClient.from_server_address(address, False, authority.read_bytes(), interceptors)

    def __enter__(self) -> SuperLinkConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._to.close()

    def register_client(self, name: str, key: bytes) -> None:
        """Let the client with this key in."""
        from flwr.proto.control_pb2 import RegisterNodeRequest

        with _convert_errors(f"take the key of client {name}"):
            if not self._to.RegisterNode(RegisterNodeRequest(public_key=key, name=name)).node_id:
                raise ValueError("it gives no node")

    def unregister_node(self, node: int) -> None:
        """Let a node in no more."""
        from flwr.proto.control_pb2 import UnregisterNodeRequest

        _log.info("a key that is no client's any more is shut out (node %d)", node)
        with _convert_errors(f"shut out node {node}"):
            self._to.UnregisterNode(UnregisterNodeRequest(node_id=node))

    def stop_run(self, run: int) -> None:
        """End a run."""
        from flwr.proto.control_pb2 import StopRunRequest

        with _convert_errors(f"stop run {run}"):
            self._to.StopRun(StopRunRequest(run_id=run))

    def list_runs(self, **which: int) -> dict[int, str]:
        """How these runs stand, by number, such as running or finished:completed: `run_id`, or the `limit` newest."""
        from flwr.proto.control_pb2 import ListRunsRequest

        with _convert_errors("tell how its runs stand"):
            found: Any = self._to.ListRuns(ListRunsRequest(**which)).run_dict
        return {name: ":".join(filter(None, (run.status.status, run.status.sub_status))) for name, run in found.items()}


@contextmanager
def _convert_errors(what: str) -> Iterator[None]:
    import httpx

    try:
        yield
    except (httpx.HTTPError, ValueError) as error:
        raise DataError(f"the SuperLink does not {what}: {error}") from None
