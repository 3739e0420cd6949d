"""Operation over years with real processes: restoring a server from a backup, and rolling back to old models."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from feddrift.deploy.monitor.status import read_status
from feddrift.deploy.operate.backup import restore_backup, write_backup
from feddrift.deploy.operate.rollback import roll_back
from feddrift.engines.flower.client.serve import current
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
