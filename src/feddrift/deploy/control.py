"""Flower's control path, from this process: each `flwr` command takes seconds to start."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from feddrift.errors import DataError

_log = logging.getLogger("feddrift")


def tell(address: str, authority: Path, new: Mapping[str, bytes], gone: Iterable[int]) -> None:
    """Register the keys of new clients, and shut out the nodes that are gone, at the SuperLink with this address."""
    import httpx
    from flwr.proto.control_pb2 import RegisterNodeRequest, UnregisterNodeRequest
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    interceptors = [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
    link = ControlHttpClient.from_server_address(address, False, authority.read_bytes(), interceptors)
    what = ""
    try:
        for name, key in new.items():
            what = f"take the key of client {name}"
            if not link.RegisterNode(RegisterNodeRequest(public_key=key, name=name)).node_id:
                raise ValueError("it gives no node")
        for node in gone:
            what = f"shut out node {node}"
            _log.info("a key that is no client's any more is shut out (node %d)", node)
            link.UnregisterNode(UnregisterNodeRequest(node_id=node))
    except (httpx.HTTPError, ValueError) as error:
        raise DataError(f"the SuperLink does not {what}: {error}") from None
    finally:
        link.close()
