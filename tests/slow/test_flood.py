"""A flood of connections to the proxy.

This test runs alone: nginx ends a connection whose TLS handshake takes longer than ten seconds, so hundreds of
handshakes at once need a core.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from feddrift.deploy.processes import launcher, proxy
from tests.support.proxy import needs_nginx, run_nginx

pytestmark = pytest.mark.slow

HOST = "Host: localhost\r\n"


class SuperLink:
    """Stands behind the proxy: holds its answers back until it is told to answer, but those to the path `now`."""

    def __init__(self) -> None:
        self.go, self.held, self.most = asyncio.Event(), 0, 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/v1/fleet/now" not in head:
            self.held += 1
            self.most = max(self.most, self.held)
            await self.go.wait()
            self.held -= 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()


async def ask(server: Path, times: int = 1, path: str = "/v1/fleet/x", source: str = "127.0.0.1") -> list[int]:
    """The status of each of so many requests, one after the other on one connection."""
    trusts = ssl.create_default_context(cafile=str(server / "ca.crt"))
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", launcher.read_ports(server)[0], ssl=trusts, server_hostname="localhost", local_addr=(source, 0),
        ssl_handshake_timeout=120,
    )  # fmt: skip
    found = []
    for _ in range(times):
        writer.write(f"POST {path} HTTP/1.1\r\n{HOST}Content-Length: 0\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        sizes = [line.partition(":")[2] for line in head.splitlines() if line.lower().startswith("content-length")]
        await reader.readexactly(int(sizes[0]) if sizes else 0)
        found.append(int(head.split()[1]))
    writer.close()
    return found


@contextmanager
def serve_behind_proxy(server: Path) -> Iterator[ssl.SSLContext]:
    """The SuperLink's certificate."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(server / "server.crt", server / "server.key")
    yield tls


@needs_nginx
def test_forty_clients_behind_one_address_are_served_and_a_flood_is_not(tmp_path: Path) -> None:
    async def tried(server: Path) -> None:
        link = SuperLink()
        with serve_behind_proxy(server) as tls:
            listening = await asyncio.start_server(link.answer, "127.0.0.1", launcher.read_ports(server)[1], ssl=tls)
        async with listening:
            link.go.set()
            clients = [ask(server, times=5) for _ in range(40) for _ in range(4)]  # connections of each
            assert {status for found in await asyncio.gather(*clients) for status in found} == {200}
            link.go.clear()
            link.most = 0
            flood = [asyncio.create_task(ask(server)) for _ in range(500)]
            refused = 500 - proxy.MAX_CONNECTIONS_PER_ADDRESS
            while sum(task.done() for task in flood) < refused:
                await asyncio.sleep(0.05)
            assert await ask(server, path="/v1/fleet/now", source="127.0.0.2") == [200]  # others do not notice
            link.go.set()
            answers = [status for (status,) in await asyncio.gather(*flood)]
            assert sorted(answers) == [200] * proxy.MAX_CONNECTIONS_PER_ADDRESS + [503] * refused
            assert link.most <= proxy.MAX_CONNECTIONS_PER_ADDRESS

    with run_nginx(tmp_path / "fed") as server:
        asyncio.run(asyncio.wait_for(tried(server), 240))
