"""A real deployment on loopback for tests: its processes, its data, and the state of its server."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from flwr.proto.control_pb2 import ListNodesRequest

from feddrift.deploy.monitor.status import read_status
from feddrift.deploy.operate import scaffold
from feddrift.deploy.processes import control, launcher
from feddrift.errors import DataError
from tests.support.ports import reserve_port

NGINX = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
NAMES = ("a", "b", "c")
SETTINGS = """\
time_steps = 5
rounds = 2
steps = 50
lr = 0.05
quorum = 2
patience = 240
grace = 40
look = 2
hello = 60
evaluate = 100
train = 100
"""


class Deployment:
    """A deployment with its processes, which are ended one by one by their ids."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = folder / "server"
        self.port = reserve_port()
        self.inner = reserve_port()
        scaffold.create_deployment(
            folder, NAMES, [2], ["0", "1"], port=self.port, inner=self.inner, experiment="loopback"
        )
        settings = self.server / "federation.toml"
        settings.write_text(SETTINGS + settings.read_text().replace("FedDrift-Auto", "FedDrift") + "delta = 0.2\n")
        self.children: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, name: str, *words: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as out:
            command = [sys.executable, "-m", "feddrift", "deploy", *words]
            self.children[name] = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)

    def start_server(self) -> None:
        self.run("server", "server", str(self.folder), *([] if NGINX else ["--no-proxy"]))
        wait_until(lambda: count_nodes(self) == len(NAMES), 120, self)

    def start_client(self, name: str) -> None:
        address = f"localhost:{self.port if NGINX else self.inner}"
        self.run(name, "client", str(self.folder / "clients" / name), "--server", address)

    def end(self, name: str) -> None:
        """Terminate a process, which ends its children."""
        child = self.children.pop(name)
        child.terminate()
        try:
            child.wait(60)
        except subprocess.TimeoutExpired:
            self.kill_tree(child.pid)
            child.wait(10)

    def kill_tree(self, pid: int) -> None:
        """Kill a process and its descendants by SIGKILL."""
        for child in [*list_descendants(pid), pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    def deliver(self, t: int) -> None:
        """Write new data for all clients: from time 2 on the labels of c are swapped."""
        draw = np.random.default_rng(t)
        for name in NAMES:
            x = draw.random((200, 2))
            y = ((x[:, 0] > 0.5) != (name == "c" and t >= 2)).astype(int)
            rows = "".join(f"{a:.5f},{b:.5f},{label}\n" for (a, b), label in zip(x, y, strict=True))
            part = self.folder / "clients" / name / "data" / f".step_{t}"
            part.write_text("u,v,label\n" + rows)
            part.rename(part.with_name(f"step_{t}.csv"))

    def read_logs(self) -> str:
        """Return the last lines of all logs, for error messages."""
        logs = [*self.folder.glob("*.out"), self.server / "state" / "server.log"]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2500:]}" for log in logs if log.exists())


def list_descendants(pid: int) -> list[int]:
    """Return all processes that descend from one."""
    parent: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
    found = [pid]
    for one in found:
        found += [child for child, of in parent.items() if of == one]
    return found[1:]


def read_command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def wait_until(true: Callable[[], Any], seconds: float, deployment: Deployment | None = None) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, deployment.read_logs() if deployment else "waited too long"
        time.sleep(0.5)


def count_nodes(deployment: Deployment, *status: str) -> int:
    """Count the nodes that the SuperLink knows, or those with one of these states.

    This is the request of `flwr supernode list`, from this process: the command takes seconds of a core to start.
    """
    try:
        with launcher._connect(deployment.server) as link, control._convert_errors("list its nodes"):
            found = link._client.ListNodes(ListNodesRequest()).nodes_info
    except DataError:  # it does not listen yet
        return 0
    return sum(not status or node.status in status for node in found)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    made = Deployment(tmp_path / "fed")
    try:
        yield made
    finally:
        for name in list(made.children):
            made.end(name)


def count_tested_steps(deployment: Deployment) -> int:
    found = read_status(deployment.server)
    return 0 if found is None else found.record.tested


def list_checkpoints(deployment: Deployment) -> list[str]:
    return sorted(path.stem for path in (deployment.server / "state" / "checkpoints").glob("*.ckpt"))
