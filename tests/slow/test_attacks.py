"""Attacks from the network, another account on a client's machine, and the server (docs/deploy-security.md)."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient

from feddrift.deploy.pki import app_signature
from feddrift.deploy.processes import launcher, proxy
from tests.support.deployment import NAMES, Deployment, deployment, list_descendants, read_command_line, wait_until
from tests.support.proxy import needs_nginx, run_nginx

pytestmark = pytest.mark.slow
__all__ = ["deployment"]  # the fixture


@needs_nginx
def test_who_never_ends_a_request_is_shown_out(tmp_path: Path) -> None:
    with run_nginx(tmp_path / "fed") as server:
        trusts = ssl.create_default_context(cafile=str(server / "ca.crt"))
        line = socket.create_connection(
            ("127.0.0.1", launcher.read_ports(server)[0]), timeout=50
        )  # nginx's own limit is 60
        with trusts.wrap_socket(line, server_hostname="localhost") as tls:
            tls.sendall(b"POST /v1/fleet/x HTTP/1.1\r\nHost: local")
            assert b" 200 " not in tls.recv(4096)


@needs_nginx
def test_the_proxy_is_where_it_was_told_to_be(tmp_path: Path) -> None:
    with run_nginx(tmp_path / "one", bind="127.0.0.3") as server:
        port = launcher.read_ports(server)[0]
        assert launcher._can_connect(port, "127.0.0.3") and not launcher._can_connect(port, "127.0.0.1")
    with run_nginx(tmp_path / "all") as server:
        port = launcher.read_ports(server)[0]
        assert launcher._can_connect(port, "127.0.0.3") and launcher._can_connect(port, "::1") is proxy._has_ipv6()
    if proxy._has_ipv6():
        with run_nginx(tmp_path / "six", bind="::1", host="::1") as server:
            port = launcher.read_ports(server)[0]
            assert launcher._can_connect(port, "::1") and not launcher._can_connect(port, "127.0.0.1")
            assert f'server = "[::1]:{port}"' in (tmp_path / "six" / "clients" / "a" / "client.toml").read_text()


def acquire(port: int, certificate: Path | None, secret: bytes | None) -> None:
    """Ask a SuperNode for a task, as its SuperExec does."""
    interceptors = [RuntimeVersionHttpInterceptor(component_name="SuperExec")]
    if secret is not None:
        methods = frozenset({"/flwr.proto.Runtime/AcquireTask"})
        interceptors.append(SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=methods))  # type: ignore[arg-type]
    client = RuntimeHttpClient.from_server_address(
        server_address=f"127.0.0.1:{port}", insecure=certificate is None,
        root_certificates=None if certificate is None else certificate.read_bytes(), interceptors=interceptors,
    )  # fmt: skip
    try:
        client.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-clientapp"]))
    finally:
        client.close()


EVIL = """
import os, pathlib
pathlib.Path(os.environ["FLWR_HOME"], "owned").touch()
from feddrift.engines.flower.client.client import app
__all__ = ["app"]
"""


def test_neither_the_server_nor_another_user_of_the_machine_runs_code_at_a_client(deployment: Deployment) -> None:
    """Somebody has the server and sends clients an app of his own, signed by himself: b trusts him, a does not."""
    clients = deployment.folder / "clients"
    (deployment.server / "app" / "feddrift_client.py").write_text(EVIL)
    deployment.start_server()
    shutil.copy(deployment.server / app_signature.TRUSTED_FILE, clients / "b" / app_signature.TRUSTED_FILE)
    deployment.start_client("a")
    deployment.start_client("b")
    deployment.deliver(0)
    deployment.run("run", "run", str(deployment.folder))
    log = deployment.server / "state" / "server.log"
    refused = "client a, hello at time 0: error 7: The FAB could not be verified"
    shown = set[str]()

    def seen(path: Path, text: str = "") -> bool:
        shown.update(read_command_line(pid) for name in "ab" for pid in list_descendants(deployment.children[name].pid))
        return path.exists() and text in path.read_text()

    wait_until(lambda: seen(log, refused), 240, deployment)
    wait_until(lambda: seen(clients / "b" / "flwr" / "owned"), 240, deployment)
    assert shown and not [words for words in shown if "--token" in words]  # of the message that b has got, too
    assert not (clients / "a" / "flwr" / "owned").exists()
    assert not (clients / "a" / "flwr" / "apps").exists()  # it was not even unpacked
    assert "client b" not in log.read_text()

    home, family = clients / "a" / "flwr", list_descendants(deployment.children["a"].pid)
    (words,) = (words for words in map(read_command_line, family) if "flower-supernode" in words)
    port = int(words.split("--port ")[1].split()[0])
    secret, certificate = (home / "runtime.secret").read_bytes(), home / "runtime.crt"
    acquire(port, certificate, secret)
    for wrong in (None, b"x" * 32):
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            acquire(port, certificate, wrong)
    with pytest.raises(httpx.TransportError):
        acquire(port, None, secret)  # plain text
    for path in (home / "runtime.secret", home / "runtime.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((clients / "a").stat().st_mode) == 0o700
    assert secret.hex() not in "".join(map(read_command_line, map(int, filter(str.isdecimal, os.listdir("/proc")))))


def test_a_server_that_asks_for_single_rows_gets_no_update(deployment: Deployment) -> None:
    """Its settings are those of the first attack in test_reconstruction.py; all clients have the policy of init."""
    settings = deployment.server / "federation.toml"
    settings.write_text("batch = 1\n" + settings.read_text().replace("steps = 50", "steps = 1", 1))
    deployment.start_server()
    for name in NAMES:
        deployment.start_client(name)
    deployment.deliver(0)
    deployment.run("run", "run", str(deployment.folder))
    log = deployment.server / "state" / "server.log"
    refused = "it refuses the request: it requests batch = 1, the policy requires at least 10"
    wait_until(lambda: log.exists() and refused in log.read_text(), 240, deployment)
    record = next((deployment.server / "state").glob("loopback.jsonl*"))
    wait_until(lambda: refused in record.read_text(), 60, deployment)
    folder = deployment.folder / "clients" / "a"
    lines = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert lines[0]["kind"] == "hello" and lines[0]["rows"] == 200
    training = [line for line in lines if line["kind"] == "train"]
    assert training and all("batch = 1" in line["refused"] and line["bytes"] < 500 for line in training)
    command = [sys.executable, "-m", "feddrift", "deploy", "client", str(folder), "--status"]
    status = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "it requests batch = 1" in status and "batch = 1" in status
    output = " ".join((deployment.folder / "a.out").read_text().split())
    assert "refuses a request (train): it requests batch = 1" in output
