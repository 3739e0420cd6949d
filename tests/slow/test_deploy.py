"""A real deployment on loopback: processes, TLS, keys, kills, and attacks that must fail."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from feddrift.deploy.monitor.alerts import read_audit_log
from feddrift.deploy.monitor.status import read_status
from feddrift.deploy.operate import scaffold
from feddrift.deploy.processes import launcher, runtime
from feddrift.engines.flower.client.serve import current
from feddrift.engines.flower.server.connection import KEY_REVOKED
from feddrift.reports.exchanges import find_missing_replies
from tests.support.deployment import (
    NAMES,
    NGINX,
    Deployment,
    count_nodes,
    count_tested_steps,
    deployment,
    list_checkpoints,
    list_descendants,
    read_command_line,
    wait_until,
)
from tests.support.documentation import read_blocks
from tests.support.ports import reserve_port

pytestmark = pytest.mark.slow
__all__ = ["deployment"]  # the fixture


def test_the_walk_through_of_the_docs_is_true(tmp_path: Path) -> None:
    """Both terminals of docs/deploy.md, line by line, but on ports that are free and without installing anything."""
    first, second, *_ = (block.text for block in read_blocks("docs/deploy.md"))
    outer = reserve_port()
    inner = reserve_port()
    first = first.replace("pip install '.[flower]'\n", "")
    first = first.replace("deploy init fed", f"deploy init fed --port {outer} --inner {inner}")
    if NGINX is None:  # as the page says
        first = first.replace("deploy server fed", "deploy server fed --no-proxy")
        second = second.replace("fed/clients/$name", f"fed/clients/$name --server localhost:{inner}")
    env = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    log = tmp_path / "terminal1"
    with open(log, "wb") as out:
        server = subprocess.Popen(["bash", "-ec", first], cwd=tmp_path, env=env, stdout=out, stderr=out)
    try:
        wait_until(lambda: "clients can connect" in log.read_text() or server.poll() is not None, 120)
        done = subprocess.run(
            ["bash", "-ec", second], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1200
        )
        told = log.read_text() + done.stdout + done.stderr
        assert "nothing is wrong" in log.read_text() and done.returncode == 0, told
        assert "time 3: model 1 created" in done.stdout and done.stdout.rstrip().endswith("[0 1]"), told
    finally:
        for pid in (*list_descendants(server.pid), server.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        server.wait(60)


def test_a_federation_survives_kills_and_finds_the_clusters(deployment: Deployment) -> None:
    """A drift at one of three clients; a client killed in mid-run, and the server in the middle of a time step."""
    deployment.start_server()
    for name in NAMES:
        deployment.start_client(name)
    deployment.deliver(0)
    deployment.deliver(1)
    deployment.run("run", "run", str(deployment.folder))
    wait_until(lambda: "000001-000001" in list_checkpoints(deployment), 240, deployment)  # inside time 1

    # The server dies in the middle of a time step; a new run goes on at the round where it stopped.
    server = deployment.children["server"].pid
    (app,) = [pid for pid in list_descendants(server) if "flwr-serverapp" in read_command_line(pid)][:1]
    os.kill(app, signal.SIGKILL)
    wait_until(lambda: deployment.children["run"].poll() is not None, 180, deployment)
    assert deployment.children.pop("run").returncode == 2  # it says so
    deployment.run("run", "run", str(deployment.folder))

    # A client dies, misses the drift of its neighbour, and comes back under its key.
    wait_until(lambda: "000002-000000" in list_checkpoints(deployment), 300, deployment)
    victim = deployment.children.pop("b")
    deployment.kill_tree(victim.pid)
    victim.wait(10)
    deployment.deliver(2)
    wait_until(lambda: count_tested_steps(deployment) >= 2, 300, deployment)
    deployment.start_client("b")
    for t in (3, 4, 5):
        deployment.deliver(t)
    wait_until(lambda: count_tested_steps(deployment) >= 5, 600, deployment)
    assert deployment.children.pop("run").wait(120) == 0, deployment.read_logs()

    log = (deployment.server / "state" / "server.log").read_text()
    assert "time 1 continues after round 1" in log, log
    found = read_status(deployment.server)
    assert found is not None and found.state == "finished" and found.record.tested == 5
    told = found.to_dict()
    last = told["steps"][-1]["clients"]
    assert last["a"]["model"] == last["b"]["model"] != last["c"]["model"], told
    assert all(row["accuracy"] > 0.9 for row in last.values()), told
    assert all(now["trouble"] is None for now in told["clients"].values()), told
    created = [event for step in told["steps"] for event in step["events"] if event["event"] == "created"]
    assert [event["cause"]["clients"] for event in created] == [[2]]
    assert any(c == 1 for _, _, c, *_ in find_missing_replies(found.record))  # while it was dead
    assert not list(deployment.server.rglob("history*"))
    # Three lines, and neither server nor network.
    for name in list(deployment.children):
        deployment.end(name)
    model = current(deployment.folder / "clients" / "c")
    x = np.random.default_rng(9).random((200, 2))
    assert (model.predict(x) == (x[:, 0] <= 0.5)).mean() > 0.9


def supernode(deployment: Deployment, folder: Path, *, drop: tuple[str, ...] = (), address: str | None = None) -> str:
    """What a SuperNode says that must not get in; it is given 40 seconds."""
    runtime.prepare_runtime_files(folder)
    command = launcher.build_supernode_command(
        folder, address or f"localhost:{deployment.port if NGINX else deployment.inner}"
    )
    for word in drop:
        at = command.index(word)
        del command[at : at + 2]
    command += ["--max-retries", "2", "--max-wait-time", "10"]
    env = launcher.build_environment(folder)
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=40, start_new_session=True)
    except subprocess.TimeoutExpired as late:
        return f"{late.stdout!r} {late.stderr!r} still trying"
    assert done.returncode != 0, done
    return done.stdout + done.stderr


def test_attacks_are_refused(deployment: Deployment, tmp_path: Path) -> None:
    deployment.start_server()
    other = tmp_path / "other"
    scaffold.create_deployment(other, ["a", "eve"], [2], ["0", "1"], port=deployment.port)
    ours = deployment.folder / "clients"
    eve = other / "clients" / "eve"
    shutil.copy(ours / "a" / "ca.crt", eve / "ca.crt")
    supernode(deployment, eve)  # a key that nobody registered
    supernode(deployment, ours / "a", drop=("--auth-supernode-private-key",))  # no key at all
    told = supernode(deployment, other / "clients" / "a")  # it trusts another authority: our server is not its own
    assert "certificate" in told.lower(), told
    assert count_nodes(deployment, "online") == 0 and count_nodes(deployment) == len(NAMES)

    for port in {deployment.port, deployment.inner} if NGINX else {deployment.inner}:  # plain text
        assert (
            b" 200 "
            not in send_plain_text(port, b"GET /v1/fleet/ HTTP/1.1\r\nHost: localhost\r\n\r\n").split(b"\r\n")[0]
        )
    assert not reachable_from_outside(deployment.inner)  # the SuperLink listens on loopback only

    if NGINX is None:
        pytest.skip("nginx is not installed: the control path through the proxy was not tried")
    for path in ("/v1/control/", "/v1/runtime/", "/", "/v1/fleet/../control/", "/v1/fleet/%2e%2e/control/",
                 "/v1/fleet/..%2fcontrol/", "//v1/control/", "/V1/CONTROL/"):  # fmt: skip
        status = send_over_tls(deployment, f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
        assert status in (403, 400), (path, status)
    home = tmp_path / "attacker"
    (home / "flwr").mkdir(parents=True)
    (home / "flwr" / "config.toml").write_text(
        f'[superlink.local]\naddress = "localhost:{deployment.port}"\n'
        f"root-certificates = {json.dumps(str(ours / 'a' / 'ca.crt'))}\n"
    )
    for words in (["supernode", "register", str(eve / "key.pub"), "local"], ["list", "local"],
                  ["run", str(deployment.server / "app"), "local"]):  # fmt: skip
        done = subprocess.run(
            [launcher.find_program("flwr"), *words],
            env=launcher.build_environment(home),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode != 0, (words, done.stdout, done.stderr)
    assert count_nodes(deployment) == len(NAMES)
    piece = "POST /v1/fleet/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 6000000\r\n\r\n" + "x" * 6_000_000
    assert send_over_tls(deployment, piece) in (
        401,
        404,
        405,
    )  # a piece of a large model does get through, to be refused
    big = f"POST /v1/fleet/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: {10**9}\r\n\r\n"
    assert send_over_tls(deployment, big) == 413


def test_a_node_that_claims_anothers_id_is_refused(deployment: Deployment) -> None:
    """The client with b's key says that it is a."""
    deployment.start_server()
    toml = deployment.folder / "clients" / "b" / "client.toml"
    toml.write_text(toml.read_text().replace('name = "b"', 'name = "a"'))
    for name in NAMES:
        deployment.start_client(name)
    deployment.deliver(0)
    deployment.deliver(1)
    deployment.run("run", "run", str(deployment.folder))
    wait_until(lambda: count_tested_steps(deployment) >= 1, 300, deployment)
    found = read_status(deployment.server)
    assert found is not None
    refused = [why for _, t, c, _, _, why in find_missing_replies(found.record) if (t, c) == (0, 1)]
    assert refused and "it claims to be from client 'a'" in refused[0], deployment.read_logs()
    assert found.record.rows.received[0].tolist() == [200, 0, 200]
    assert "client b, hello at time 0: its reply is refused: it claims to be from client 'a'" in deployment.read_logs()


def test_nothing_is_mute_left_behind_or_let_in_again(deployment: Deployment, tmp_path: Path) -> None:
    """What runs a client's app is killed; the server is stopped while a run is on; a client's key is taken back."""

    def executors() -> list[int]:
        found = list_descendants(deployment.children["a"].pid)
        return [pid for pid in found if "flower-superexec" in read_command_line(pid)]

    deployment.start_server()
    deployment.start_client("a")
    wait_until(lambda: count_nodes(deployment, "online") == 1 and executors(), 240, deployment)
    (killed,) = executors()
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: any(pid != killed for pid in executors()), 400, deployment)
    told = (deployment.folder / "a.out").read_text()
    assert "flower-superexec has ended with code -9; the client starts again" in " ".join(told.split()), told

    deployment.run("run", "run", str(deployment.folder))
    server = deployment.children["server"].pid
    wait_until(
        lambda: any("flwr-serverapp" in read_command_line(pid) for pid in list_descendants(server)), 240, deployment
    )
    family = {pid: read_command_line(pid) for pid in list_descendants(server)}
    deployment.end("server")
    assert not [what for pid, what in family.items() if read_command_line(pid) == what]
    deployment.end("run")

    scaffold.create_deployment(tmp_path / "other", ["x"], [2], ["0", "1"])
    shutil.copy(tmp_path / "other" / "server" / "keys" / "x.pub", deployment.server / "keys" / "a.pub")
    deployment.run("server", "server", str(deployment.folder), *([] if NGINX else ["--no-proxy"]))
    wait_until(lambda: count_nodes(deployment, "unregistered") == 1, 240, deployment)
    deployment.end("a")
    deployment.start_client("a")
    wait_until(lambda: "flower-supernode has ended" in deployment.read_logs(), 240, deployment)  # it is not let in
    assert count_nodes(deployment, "online") == 0


def test_keys_and_certificates_are_replaced_while_the_federation_runs(deployment: Deployment) -> None:
    """The server gets a new certificate; then the key of b is replaced and that of c taken back, while all run."""

    def command(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "feddrift", "deploy", *words], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done
        return done.stdout

    def served() -> str:
        return ssl.get_server_certificate(("127.0.0.1", deployment.port if NGINX else deployment.inner))

    settings = deployment.server / "federation.toml"
    text = settings.read_text().replace('"FedDrift"', '"Oblivious"').replace("delta = 0.2", "")
    settings.write_text(text.replace("rounds = 2", "rounds = 1").replace("time_steps = 5", "time_steps = 2"))
    deployment.start_server()
    for name in NAMES:
        deployment.start_client(name)
    wait_until(lambda: count_nodes(deployment, "online") == 3, 120, deployment)
    old = served()
    assert "start server and run again" in command("renew", str(deployment.folder))
    assert served() == old
    deployment.end("server")
    deployment.start_server()
    assert served() != old

    deployment.deliver(0)
    deployment.run("run", "run", str(deployment.folder))
    wait_until(lambda: "000001-000000" in list_checkpoints(deployment), 240, deployment)  # the clients have come back
    assert "client c is shut out\n" in command("revoke", str(deployment.folder), "c")
    assert "the server knows the new key of client b" in command("rotate", str(deployment.folder), "b")
    assert count_nodes(deployment, "unregistered") == 2
    deployment.deliver(1)
    # The quorum is 2: b has come back by itself.
    assert deployment.children["run"].wait(300) == 0, deployment.read_logs()

    found = read_status(deployment.server)
    assert found is not None and found.state == "finished" and found.record.tested == 2
    told = {name: now["trouble"] for name, now in found.describe_clients().items()}
    assert told == {"a": None, "b": None, "c": KEY_REVOKED}, deployment.read_logs()
    changes = [
        (notice.client, notice.text) for notice in read_audit_log(deployment.server) if notice.event == "changed"
    ]
    assert [client for client, _ in changes] == [None, "c", "b"] and "was revoked" in changes[1][1]


def send_plain_text(port: int, text: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        line.sendall(text)
        try:
            return line.recv(4096)
        except OSError:
            return b""


def send_over_tls(deployment: Deployment, text: str) -> int:
    trusts = ssl.create_default_context(cafile=str(deployment.server / "ca.crt"))
    line = socket.create_connection(("127.0.0.1", deployment.port), timeout=10)
    with trusts.wrap_socket(line, server_hostname="localhost") as tls:
        tls.sendall(text.encode())
        return int(tls.recv(4096).split()[1])


def reachable_from_outside(port: int) -> bool:
    """Whether the port answers on an address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it only chooses an address
            address = probe.getsockname()[0]
        except OSError:
            return False
    if address.startswith("127."):
        return False
    with socket.socket() as line:
        line.settimeout(3)
        return line.connect_ex((address, port)) == 0
