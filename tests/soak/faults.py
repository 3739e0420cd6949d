"""Soak B: one fault of each kind, each logged by name; no row is lost, and the simulator decides alike."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from feddrift._internal import checkpoint
from feddrift.engines.flower.messages import PROTOCOL
from feddrift.engines.flower.model_parts import init_template
from feddrift.reports.exchanges import find_client_notes, find_missing_replies
from tests.soak.deployment import Deployment, digest
from tests.soak.replay import assert_all_batches_used, assert_same_decisions, replay

RHYTHMS = {"a": 1, "b": 2, "c": 3, "d": 1}  # a batch at every so many time steps
STEPS = 3  # of time; the batches of time 3 are for the last test


def soak_b(folder: Path, waits: int = 45) -> Deployment:
    """One fault of each kind, each of them named; then the same participation in the simulator.

    A client that is stopped is waited for so many seconds.
    """
    limits = f"time_steps = {STEPS}\nrounds = 1\nquorum = 1\ngrace = 0.1\nevaluate = {waits}\ntrain = {waits}\n"
    fed = Deployment(folder, list(RHYTHMS), limits)
    disk = Disk(folder / "clients" / "b" / "store")
    older = speak_older(fed, "d")

    def deliver(t: int, without: str = "") -> None:
        for name, rhythm in RHYTHMS.items():
            if t % rhythm == 0 and name != without:
                fed.deliver(name, swapped=name == "a" and t >= 2)

    deliver(0)
    with disk.mounted(), fed.running():
        for name in ("server", *RHYTHMS):
            fed.start(name)
        fed.until_online(len(RHYTHMS))
        fed.start("run")
        fed.until("train at time 0")
        deliver(1)

        stopped = list(fed.members("a"))
        fed.until("evaluate at time 1.*replied")
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        fed.say("a is stopped, and misses the training of time 1")
        fed.until(f"client a, train at time 1, round 0: no reply within {waits} s")
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)

        fed.say("the disk of b is full, and a batch in the store of c is damaged")
        disk.fill()
        (cell,) = (folder / "clients" / "c" / "store").rglob("*.cell")
        damage(cell)
        deliver(2)
        fed.until("client b, hello at time 2: its reply is refused")
        disk.free()

        fed.until("evaluate at time 2.*replied")
        fed.say("the key of d is revoked")
        fed.command("revoke", "d")

        fed.until("time 2 is trained")
        fed.say("the server is killed, its newest checkpoint damaged and its certificate renewed")
        fed.units["run"].wanted = fed.units["server"].wanted = False
        fed.kill("server", "flower-superlink")
        fed.end("run")
        fed.end("server")
        damage(newest := fed.newest())
        fed.command("renew")
        deliver(3, without="d")
        fed.start("server")
        fed.until_online(len(RHYTHMS) - 1)
        fed.start("run")
        fed.until(f"{newest.name} is damaged: its checksum is wrong")
        fed.until_finished()
    record = fed.record
    told = sorted([*find_missing_replies(record), *find_client_notes(record)])
    said = [(t, fed.clients[c], asked, why) for _, t, c, asked, _, why in told]
    for line in said:
        fed.say(f"in the record: time {line[0]}, client {line[1]}, {line[2]}: {line[3]}")
    assert any(line[:3] == (1, "a", "train") and "no reply within" in line[3] for line in said)
    assert any(line[:3] == (2, "b", "hello") and "its reply is refused" in line[3] for line in said)
    assert any(line[:3] == (STEPS, "d", "hello") and "its key was revoked" in line[3] for line in said)
    assert any(line[:2] == (2, "c") and "its batch 0 was damaged" in line[3] for line in said)
    assert not older or any(line[:3] == (0, "d", "hello") and "it has version" in line[3] for line in said)
    audit = (fed.server / "state" / "audit.jsonl").read_text()
    for fault in ("the server has a new certificate", "the key of client d, ", f"{newest.name} is damaged"):
        assert fault in audit, audit
    state = checkpoint.read(fed.newest()).decode(init_template(fed.settings.create_net(fed.server)))[0]
    assert_all_batches_used(record, state, fed.delivered)
    same_bits = 0
    for step in replay(record, fed.settings, fed.settings.create_net(fed.server), fed.batch):
        assert_same_decisions(record, step)
        same_bits += fed.digests[step.tau] == {digest(step.state)}
    fed.say(f"soak B: {STEPS} time steps, no row lost, decided as in the simulator, in {same_bits} of them to the bit")
    return fed


class Disk:
    """A small disk of its own at this folder, where one can be mounted; else a folder that can be made read-only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def mounted(self) -> Iterator[None]:
        self.folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "feddrift-soak", str(self.folder)]
        self.small = os.geteuid() == 0 and subprocess.run(mount, stderr=subprocess.DEVNULL).returncode == 0
        try:
            yield
        finally:
            if self.small:
                subprocess.run(["umount", str(self.folder)], check=True)

    def fill(self) -> None:
        if not self.small:
            for path in (self.folder, *self.folder.rglob("*/")):
                path.chmod(0o500)
            return
        with suppress(OSError), open(self.folder / "other", "wb", buffering=0) as file:
            while file.write(b"x" * 512):
                pass

    def free(self) -> None:
        if not self.small:
            for path in (self.folder, *self.folder.rglob("*/")):
                path.chmod(0o700)
        (self.folder / "other").unlink(missing_ok=True)


def damage(path: Path) -> None:
    """Turn a byte in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


def speak_older(fed: Deployment, name: str) -> bool:
    """Let a client run the last sources of the protocol before this one, from the repository's history."""
    root, where = Path(__file__).parents[2], "src/feddrift/engines/flower/messages.py"
    words = ["git", "-C", str(root), "log", "--format=%H", f"-SPROTOCOL = {PROTOCOL}", "--", where]
    came = subprocess.run(words, capture_output=True, text=True).stdout.split()
    if not came:
        fed.say("the history of this repository is not here: no older client takes part")
        return False
    old = fed.folder / "older"
    old.mkdir()
    archive = subprocess.run(
        ["git", "-C", str(root), "archive", f"{came[-1]}^", "src"], capture_output=True, check=True
    )
    subprocess.run(["tar", "-x", "-C", str(old)], input=archive.stdout, check=True)
    assert f"PROTOCOL = {PROTOCOL - 1}" in (old / where).read_text()
    settings = fed.folder / "clients" / name / "client.toml"
    if PROTOCOL == 7:  # its folder was made by a version that knew no policy
        settings.write_text(settings.read_text().partition("[policy]")[0])
    fed.units[name].env["PYTHONPATH"] = str(old / "src")
    fed.say(f"{name} runs the sources before {came[-1][:7]}, of protocol {PROTOCOL - 1}")
    return True
