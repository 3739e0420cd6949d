"""A real deployment on loopback whose processes are started, watched and killed by this process."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from feddrift._internal import checkpoint
from feddrift.deploy.monitor.status import find_record_path
from feddrift.deploy.operate import scaffold
from feddrift.deploy.processes.process_tree import find_descendants, list_processes
from feddrift.deploy.settings import Settings
from feddrift.engines.flower.client.batches import StepFiles
from feddrift.engines.flower.model_parts import init_template
from feddrift.errors import DataError
from feddrift.runs.record import Record, read_latest
from feddrift.trees import tree_leaves
from feddrift.types import State
from tests.support.ports import reserve_port

NGINX = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
MARK = "FEDDRIFT_SOAK"  # in the environment of all that a unit starts, as its cgroup would be
ANSWERED = r"(hello|evaluate|train) at time \d+.*clients replied"
SETTINGS = """\
steps = 50
lr = 0.05
look = 1
patience = 900
hello = 90
explain = false
"""


@dataclass
class Unit:
    """A service as its unit file has it: what it runs, and whether it is started again when it has ended."""

    words: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    wanted: bool = True


class Deployment:
    """A federation on loopback whose units this process keeps alive, as systemd does."""

    def __init__(self, folder: Path, clients: Sequence[str], settings: str) -> None:
        self.folder, self.server, self.clients = folder, folder / "server", tuple(clients)
        self.port = reserve_port()
        self.inner = reserve_port()
        scaffold.create_deployment(
            folder, clients, [2], ["0", "1"], port=self.port, inner=self.inner, experiment="soak"
        )
        path = self.server / "federation.toml"
        path.write_text(SETTINGS + settings + path.read_text().replace("FedDrift-Auto", "FedDrift") + "delta = 0.2\n")
        self.units = {
            "server": Unit(["server", str(folder), *([] if NGINX else ["--no-proxy"])]),
            "run": Unit(["run", str(folder)]),
        }
        address = f"localhost:{self.port if NGINX else self.inner}"
        for name in clients:
            self.units[name] = Unit(["client", str(folder / "clients" / name), "--server", address])
        self.delivered: dict[str, list[int]] = {name: [] for name in clients}  # rows of each batch
        self.digests: dict[int, set[str]] = {}  # by time step, of all checkpoints that were written after it
        self.kills = 0
        self._read, self._seen = 0, dict[str, int]()  # of the server's log, and of checkpoints
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """Tell what is done, and when."""
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)

    def start(self, name: str) -> None:
        """Start a unit; what an earlier start of it has left over is ended first."""
        self.sweep(name)
        unit = self.units[name]
        unit.wanted = True
        command = [sys.executable, "-m", "feddrift", "deploy", *unit.words]
        env = os.environ | {MARK: f"{self.folder}/{name}"} | unit.env
        with open(self.folder / f"{name}.out", "ab") as out:
            unit.process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)

    def end(self, name: str) -> dict[int, str]:
        """Ask a unit to end, and see to it; what it would have left behind."""
        unit = self.units[name]
        unit.wanted = False
        if unit.process is not None:
            self._signal(name, signal.SIGCONT)
            unit.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                unit.process.wait(60)
        left = self.members(name)
        self.sweep(name)
        return left

    def sweep(self, name: str) -> None:
        """End what is left of a unit, as systemd does with its cgroup."""
        for how in (signal.SIGTERM, signal.SIGKILL):
            end = time.monotonic() + 20
            self._signal(name, how)
            while self.members(name) and time.monotonic() < end:
                time.sleep(0.1)

    def _signal(self, name: str, how: signal.Signals) -> None:
        for pid in self.members(name):
            with suppress(ProcessLookupError):
                os.kill(pid, how)

    def members(self, name: str) -> dict[int, str]:
        """The processes of a unit, also of an earlier start of it, and their commands."""
        every, found = list_processes(), dict[int, str]()
        mark = f"{MARK}={self.folder}/{name}\0".encode()
        for process in every:
            with suppress(OSError):
                folder = Path(f"/proc/{process.pid}")
                command = folder.joinpath("cmdline").read_text(errors="replace").replace("\0", " ")
                proxy = name == "server" and command.startswith("nginx: ") and self._has_open(folder)
                if proxy or mark in folder.joinpath("environ").read_bytes():
                    found[process.pid] = command
                    found |= {child.pid: "" for child in find_descendants(process.pid, every) if child.pid not in found}
        return found

    def _has_open(self, folder: Path) -> bool:
        """Whether a process has a file of this server open: nginx writes over its environment."""
        return any(os.readlink(link).startswith(f"{self.server}/") for link in folder.joinpath("fd").iterdir())

    def tend(self) -> bool:
        """Start units again that have ended, and look for new checkpoints; whether the federation has finished."""
        self._look()
        for name, unit in self.units.items():
            if not unit.wanted or unit.process is None or unit.process.poll() is None:
                continue
            if name == "run" and unit.process.returncode == 0:
                return True
            if name == "run" and not _listens(self.inner):
                continue  # it would fail, and be started again
            self.say(f"{name} has ended with {unit.process.returncode} and is started again")
            self.start(name)
        return False

    def until(self, text: str, seconds: float = 420.0) -> None:
        """Wait for a line of the server's log, after those that were waited for before."""
        log, end = self.server / "state" / "server.log", time.monotonic() + seconds
        while True:
            written = log.read_text(errors="replace") if log.exists() else ""
            if match := re.compile(text).search(written, self._read):
                self._read = match.end()
                return
            if self.tend() or time.monotonic() > end:
                raise AssertionError(f"no line {text!r} in the server's log\n{self.read_logs()}")
            time.sleep(0.2)

    def skip(self) -> None:
        """Wait for later lines of the server's log only."""
        log = self.server / "state" / "server.log"
        self._read = len(log.read_text(errors="replace")) if log.exists() else 0

    def until_online(self, n: int, seconds: float = 240.0) -> None:
        """Wait until so many clients are connected."""
        database, end = self.server / "state" / "superlink.db", time.monotonic() + seconds
        query = "SELECT count(*) FROM node WHERE status = 'online'"  # a command of Flower's takes seconds of a core
        while True:
            with suppress(sqlite3.Error), closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as opened:
                if opened.execute(query).fetchone()[0] >= n and _listens(self.inner):
                    self.say(f"{n} clients are connected")
                    return
            assert time.monotonic() < end, self.read_logs()
            self.tend()
            time.sleep(0.5)

    def until_finished(self, seconds: float = 600.0) -> None:
        """Wait for the end of the run."""
        end = time.monotonic() + seconds
        while not self.tend():
            assert time.monotonic() < end, self.read_logs()
            time.sleep(0.2)

    def kill(self, name: str, word: str) -> bool:
        """SIGKILL the process of a unit whose command has this word; whether there is one."""
        victims = [pid for pid, command in self.members(name).items() if word in command]
        if not victims:
            return False
        os.kill(victims[0], signal.SIGKILL)
        self.kills += 1
        self.say(f"kill {self.kills}: {word} of {name}")
        return True

    def command(self, word: str, *words: str) -> None:
        """Give a command as an operator does."""
        command = [sys.executable, "-m", "feddrift", "deploy", word, str(self.folder), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        self.say(f"deploy {word}: {' '.join(done.stdout.split())}")

    def deliver(self, name: str, swapped: bool) -> None:
        """The next batch of a client; no two of its batches have equally many rows."""
        n = len(self.delivered[name])
        c, data = self.clients.index(name), self.folder / "clients" / name / "data"
        x = np.random.default_rng([c, n]).random((100 + 10 * n + c, 2))
        y = ((x[:, 0] > 0.5) != swapped).astype(int)
        part = data / f".step_{n}"
        part.write_text("u,v,label\n" + "".join(f"{a:.5f},{b:.5f},{k}\n" for (a, b), k in zip(x, y, strict=True)))
        part.rename(data / f"step_{n}.csv")
        self.delivered[name].append(len(x))

    def batch(self, name: str, n: int) -> Any:
        """The n-th batch of a client as it reads it."""
        return StepFiles(self.folder / "clients" / name / "data")(n)

    @property
    def settings(self) -> Settings:
        return Settings.read(self.server / "federation.toml")

    @property
    def record(self) -> Record:
        found = read_latest(find_record_path(self.server))
        assert found is not None, self.read_logs()
        return found

    def read_logs(self) -> str:
        """The ends of all logs, for when something goes wrong."""
        logs = [*self.folder.glob("*.out"), self.server / "state" / "server.log"]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.exists())

    def newest(self) -> Path:
        """The newest checkpoint of the server."""
        return max((self.server / "state" / "checkpoints").glob("*.ckpt"))

    def _look(self) -> None:
        """Take the digests of the states after whole time steps: the server keeps two checkpoints only."""
        for path in (self.server / "state" / "checkpoints").glob("*-000000.ckpt"):
            with suppress(OSError, DataError):  # deleted meanwhile, or damaged by us
                written = path.stat().st_mtime_ns
                if self._seen.get(path.name) != written:
                    self._seen[path.name] = written
                    state = checkpoint.read(path).decode(init_template(self.settings.create_net(self.server)))[0]
                    self.digests.setdefault(int(path.name[:6]) - 1, set()).add(digest(state))

    @contextmanager
    def running(self) -> Iterator[None]:
        """End all units in any case; what they leave behind is an error."""
        try:
            yield
        finally:
            left = {name: self.end(name) for name in ("run", *self.clients, "server")}
        assert not any(left.values()), left
        assert not _listens(self.port) and not _listens(self.inner)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def digest(state: State) -> str:
    """What no other state has: all bits of its models, and who uses them."""
    found = hashlib.sha256(repr(state.models.ids).encode())
    for array in (
        *tree_leaves(state.models.params),
        state.votes,
        state.w.model if hasattr(state.w, "model") else state.w,
    ):
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]
