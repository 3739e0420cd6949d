"""Warm starts of real clients: one thread at the fork, and the same bits as a federation in one process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from feddrift._internal import checkpoint
from feddrift.deploy.operate import scaffold
from feddrift.deploy.processes import flower_preload, launcher
from feddrift.deploy.processes.process_tree import end_process_tree
from feddrift.deploy.server import loop
from feddrift.deploy.settings import Settings
from feddrift.engines.flower import model_parts
from feddrift.engines.flower.client.client import load_client
from feddrift.engines.flower.local_grid import LocalGrid
from feddrift.engines.flower.server.connection import Roster
from feddrift.trees import tree_leaves
from tests.support.deployment import NAMES, Deployment, deployment, list_descendants, read_command_line, wait_until
from tests.support.ports import reserve_port

pytestmark = pytest.mark.slow
__all__ = ["deployment"]  # the fixture

# The waiting process as it is, but what a message's process does is to tell what it found.
PROGRAM = """
import json, os, sys
import flwr.supernode.cli
from feddrift.deploy.processes import flower_preload

def handle():
    loaded = "feddrift.engines.simulator.program" in sys.modules
    from jax._src import xla_bridge
    with open(sys.argv[1], "w") as file:
        json.dump([loaded, xla_bridge.backends_are_initialized(), "numba" in sys.modules], file)

flwr.supernode.cli.flwr_clientapp = handle
flower_preload.main()
"""


def test_it_waits_with_one_thread_and_learns_to_import_jax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setattr(
        flower_preload, "build_command", lambda name: [sys.executable, str(tmp_path / "program.py"), name]
    )
    executor = flower_preload.PreloadedProcess()
    try:
        for k, loaded in enumerate((False, False, True)):  # it imports JAX once it knows that a message has done so
            path = tmp_path / str(k)
            executor.Popen(["flwr-clientapp", str(path)])
            assert executor._process is not None and not executor._new_processes
            wait_until(lambda path=path: path.exists() and path.read_text().endswith("]"), 120)  # type: ignore[misc]
            assert json.loads(path.read_text()) == [loaded, False, True]
            wait_until(lambda: len(list_descendants(executor._process.pid)) == 0, 60)  # type: ignore[union-attr]
            assert len(os.listdir(f"/proc/{executor._process.pid}/task")) == 1
    finally:
        executor._kill_process()


def read_trained_models(state: Path, settings: Settings) -> list[Any]:
    """The models and who uses them, by the newest checkpoint."""
    saved = next(iter(checkpoint.Folder(state / "checkpoints").newest_first()))
    assert isinstance(saved, checkpoint.Checkpoint)
    found = saved.decode(model_parts.init_template(settings.create_net(state.parent)))[0]
    return [found.models.ids, found.w, found.votes, *tree_leaves(found.models.params)]


def test_forks_and_kills_of_what_forks_change_no_bit(deployment: Deployment) -> None:
    path = deployment.server / "federation.toml"
    path.write_text(path.read_text().replace("time_steps = 5", "time_steps = 2"))
    for t in range(3):
        deployment.deliver(t)
    shutil.copytree(deployment.folder / "clients", deployment.folder / "others")

    def waiting() -> list[int]:
        """What forks for client a; what it has forked, which looks the same, is further below."""
        found = list_descendants(deployment.children["a"].pid)
        return [
            pid for pid in found if "feddrift.deploy.processes.flower_preload flwr-clientapp" in read_command_line(pid)
        ][:1]

    deployment.start_server()
    for name in NAMES:
        deployment.start_client(name)
    deployment.run("run", "run", str(deployment.folder))
    done = deployment.server / "state" / "checkpoints"
    wait_until(lambda: list(done.glob("000000-000001*")) and waiting(), 240, deployment)
    os.kill(waiting()[0], signal.SIGKILL)
    assert deployment.children.pop("run").wait(400) == 0, deployment.read_logs()
    assert "this message starts a new Python process" in (deployment.folder / "a.out").read_text()
    assert waiting()  # again
    tokens = [read_command_line(pid) for name in NAMES for pid in list_descendants(deployment.children[name].pid)]
    assert tokens and not [words for words in tokens if "--token" in words]

    settings = Settings.read(path)
    clients = {name: load_client(deployment.folder / "others" / name) for name in NAMES}
    roster = Roster(settings.experiment, NAMES, {name.encode(): name for name in NAMES}, (2,), 2)
    other = deployment.folder / "other" / "state"
    loop.run_federation(LocalGrid(clients), settings, roster, other)
    for ours, theirs in zip(
        read_trained_models(done.parent, settings), read_trained_models(other, settings), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_a_client_that_is_killed_leaves_nothing(deployment: Deployment) -> None:
    """Not even its SuperNode, which used to go on, and to keep a new one from being let in."""
    deployment.start_server()
    deployment.start_client("a")
    wait_until(
        lambda: any(
            "flwr-clientapp" in read_command_line(pid) for pid in list_descendants(deployment.children["a"].pid)
        ),
        120,
    )
    family = {pid: read_command_line(pid) for pid in list_descendants(deployment.children["a"].pid)}
    assert len(family) >= 3
    deployment.children["a"].kill()
    wait_until(lambda: not [pid for pid, what in family.items() if read_command_line(pid) == what], 60, deployment)


def test_ten_keys_are_registered_at_once(tmp_path: Path) -> None:
    """Against a real SuperLink, which then has them all, and takes one back."""
    names = [f"client{k}" for k in range(10)]
    inner = reserve_port()
    scaffold.create_deployment(tmp_path / "fed", names, [2], ["0", "1"], port=reserve_port(), inner=inner)
    folder = tmp_path / "fed" / "server"
    child = subprocess.Popen(
        launcher.build_superlink_command(folder), env=launcher.build_environment(folder), start_new_session=True
    )
    try:
        wait_until(lambda: launcher._can_connect(inner), 120)
        launcher.register_keys(folder)
        assert len(launcher._read_registered_keys(folder / "state" / "superlink.db")) == 10
        (folder / "keys" / "client9.pub").unlink()
        launcher.register_keys(folder)
        known = launcher._read_registered_keys(folder / "state" / "superlink.db")
        assert sum(node is None for node in known.values()) == 1
    finally:
        end_process_tree(child)
