"""The proxy of a federation, without a SuperLink behind it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from feddrift.deploy.operate import scaffold
from feddrift.deploy.processes import launcher
from feddrift.deploy.processes.process_tree import end_process_tree
from tests.support.deployment import NGINX, wait_until
from tests.support.ports import reserve_port

needs_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")


@contextmanager
def run_nginx(folder: Path, **options: Any) -> Iterator[Path]:
    """Run the proxy of a new federation, without a SuperLink behind it, and yield the server's folder."""
    scaffold.create_deployment(folder, ["a"], [2], ["0", "1"], port=reserve_port(), inner=reserve_port(), **options)
    server = folder / "server"
    child = subprocess.Popen([str(NGINX), "-p", str(server), "-c", str(server / "nginx.conf")], start_new_session=True)
    try:
        wait_until(
            lambda: launcher._can_connect(launcher.read_ports(server)[0], launcher.read_proxy_address(server)), 30
        )
        yield server
    finally:
        end_process_tree(child)
