"""Operation over years with real processes: restoring a server from a backup, and rolling back to old models."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from feddrift.deploy.monitor.alerts import read_audit_log
from feddrift.deploy.monitor.status import read_status
from feddrift.deploy.operate import client_keys
from feddrift.deploy.operate.backup import restore_backup, write_backup
from feddrift.deploy.operate.rollback import roll_back
from feddrift.engines.flower.client.serve import current
from feddrift.engines.flower.revocations import REVOCATIONS_FILE, read_revocations
from feddrift.engines.flower.server.connection import KEY_REVOKED
from feddrift.errors import BusyError
from tests.support.deployment import (
    NAMES,
    NGINX,
    Deployment,
    count_nodes,
    count_tested_steps,
    deployment,
    list_checkpoints,
    wait_until,
)

pytestmark = pytest.mark.slow
__all__ = ["deployment"]  # the fixture


def test_a_restored_server_continues_with_present_clients_and_can_be_rolled_back(
    deployment: Deployment, tmp_path: Path
) -> None:
    deployment.start_server()
    for name in NAMES:
        deployment.start_client(name)
    for t in range(3):
        deployment.deliver(t)
    deployment.run("run", "run", str(deployment.folder))
    wait_until(lambda: "000001-000001" in list_checkpoints(deployment), 240, deployment)  # inside time 2
    with pytest.raises(BusyError, match="runs: stop `feddrift deploy server` first"):
        roll_back(deployment.server, 1)
    write_backup(deployment.server, tmp_path / "fed.tar")

    # The machine is lost; another has its address, and the clients know nothing of it.
    server = deployment.children.pop("server")
    deployment.kill_tree(server.pid)
    server.wait(10)
    deployment.kill_tree(deployment.children["run"].pid)
    deployment.children.pop("run").wait(10)
    deployment.server.rename(tmp_path / "lost")
    restore_backup(tmp_path / "fed.tar", tmp_path / "restored")
    client_keys.confirm_keys(tmp_path / "restored")
    deployment.server = tmp_path / "restored"
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "lost").rglob("*")}

    def start() -> None:
        deployment.run("server", "server", str(deployment.server), *([] if NGINX else ["--no-proxy"]))
        wait_until(lambda: count_nodes(deployment, "online") == len(NAMES), 240, deployment)
        deployment.run("run", "run", str(deployment.server))

    def tested(n: int) -> bool:
        """Whether so many time steps are tested; a run that has ended is started again, as its unit does."""
        if deployment.children["run"].poll() is not None:
            deployment.run("run", "run", str(deployment.server))
        return count_tested_steps(deployment) >= n

    start()
    deployment.deliver(3)
    wait_until(lambda: tested(3), 400, deployment)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "lost").rglob("*")} == before

    # Model 1 was made for c at time 3; back to time 1, it is no more, and the clients know it at once.
    deployment.end("server")
    deployment.end("run")
    roll_back(deployment.server, 1)
    start()
    deployment.deliver(4)
    wait_until(lambda: tested(4), 400, deployment)
    found = read_status(deployment.server)
    assert found is not None
    turns = [(e["t"], e["event"], e["model"]) for e in found.record.events if e["event"] != "revived"]
    assert turns == [(2, "created", 1), (3, "decided", 0), (3, "retired", 1), (3, "created", 2)], deployment.read_logs()
    assert found.record.rows.model[:4].tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 2]]
    assert current(deployment.folder / "clients" / "c").models.ids == (2,)


def test_a_revoked_client_stays_out_of_a_server_restored_from_an_older_backup(
    deployment: Deployment, tmp_path: Path
) -> None:
    """The backup has the keys of all; then c is excluded and b gets another key; the operator overlooks c."""
    settings = deployment.server / "federation.toml"
    text = settings.read_text().replace('"FedDrift"', '"Oblivious"').replace("delta = 0.2", "")
    settings.write_text(text.replace("rounds = 2", "rounds = 1").replace("time_steps = 5", "time_steps = 3"))
    deployment.start_server()
    for name in NAMES:
        deployment.start_client(name)
    wait_until(lambda: count_nodes(deployment, "online") == len(NAMES), 240, deployment)
    deployment.deliver(0)
    deployment.run("run", "run", str(deployment.folder))
    wait_until(lambda: "000001-000000" in list_checkpoints(deployment), 240, deployment)
    write_backup(deployment.server, tmp_path / "fed.tar")
    old_key = (deployment.server / "keys" / "c.pub").read_text()

    deployment.run("revoke", "revoke", str(deployment.folder), "c")
    assert deployment.children.pop("revoke").wait(120) == 0, deployment.read_logs()
    deployment.run("rotate", "rotate", str(deployment.folder), "b")
    assert deployment.children.pop("rotate").wait(120) == 0, deployment.read_logs()
    expected = read_revocations(deployment.server / REVOCATIONS_FILE)[0]
    assert [(entry.serial, entry.client) for entry in expected] == [(1, "c"), (2, "b")]
    deployment.deliver(1)
    clients = deployment.folder / "clients"
    wait_until(
        lambda: all(read_revocations(clients / name / REVOCATIONS_FILE)[0] == expected for name in "ab"),
        240,
        deployment,
    )
    deployment.end("run")
    deployment.end("server")
    deployment.server.rename(tmp_path / "lost")

    server = tmp_path / "restored"
    deployment.run("restore", "restore", str(tmp_path / "fed.tar"), str(server))
    assert deployment.children.pop("restore").wait(120) == 0, deployment.read_logs()
    listed = " ".join((deployment.folder / "restore.out").read_text().split())
    assert all(f"client {name}: key " in listed for name in NAMES), listed
    assert (server / "keys" / "c.pub").read_text() == old_key
    assert read_revocations(server / REVOCATIONS_FILE)[0] == []
    deployment.server = server
    words = [] if NGINX else ["--no-proxy"]
    deployment.run("refused", "server", str(server), *words)
    assert deployment.children.pop("refused").wait(120) == 2, deployment.read_logs()
    refusal = " ".join((deployment.folder / "refused.out").read_text().split())
    assert "was restored from a backup, which may bring back keys that were revoked" in refusal
    assert count_nodes(deployment) == 0

    client_keys.accept_new_key(server, "b", clients / "b" / "key.pub")
    assert client_keys.confirm_keys(server)
    deployment.run("server", "server", str(server), *words)
    wait_until(lambda: count_nodes(deployment, "online") == len(NAMES), 240, deployment)  # c is back, with its old key
    deployment.run("run", "run", str(server))
    wait_until(lambda: count_nodes(deployment, "unregistered") == 2, 240, deployment)  # also the old key of b
    deployment.deliver(2)
    deployment.deliver(3)

    def is_tested() -> bool:
        if deployment.children["run"].poll() is not None:
            deployment.run("run", "run", str(server))
        return count_tested_steps(deployment) >= 3

    wait_until(is_tested, 400, deployment)
    assert count_nodes(deployment, "online") == 2, deployment.read_logs()
    found = read_status(server)
    assert found is not None
    problems = {name: client["trouble"] for name, client in found.describe_clients().items()}
    assert problems == {"a": None, "b": None, "c": KEY_REVOKED}, deployment.read_logs()
    keys = {entry.key: entry.client for entry in read_revocations(server / REVOCATIONS_FILE)[0]}
    assert keys == {entry.key: entry.client for entry in expected}
    assert not (server / "keys" / "c.pub").exists()
    assert any("client c had a revoked key again, which was removed" in note.text for note in read_audit_log(server))
    notes = " ".join((server / "state" / "server.log").read_text().split())
    assert "it reported a revocation that this server lacked: revocation 1, of key" in notes
