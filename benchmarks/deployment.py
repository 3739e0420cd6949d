"""Cost of exchanges of a real deployment on this machine: `python benchmarks/deployment.py 3 10` (numbers of nodes).

Each number of nodes twice: cold, as Flower does it by itself, and warm. Everything is as in docs/deploy.md, but all
nodes share this machine with the server and nginx is left out. CPU seconds are those of a client and all that it
starts, from the first answered hello to the last exchange, over exchanges and clients.

`--idle 300`: what warm clients cost in this number of seconds without new data, in which the server sends hello once a
minute, as it does after ten minutes of waiting.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from feddrift.deploy.operate import scaffold
from feddrift.deploy.processes import launcher, process_tree

STEPS = 3
ROUNDS = 7
ANSWERED = re.compile(r"(hello|evaluate|train) at time (\d+).*: (\d+) of (\d+) clients answered in ([0-9.]+) s")
TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Measured:
    """Times of exchanges to which all clients replied."""

    seconds: dict[str, list[float]]  # by kind
    client: float  # CPU seconds per exchange and client
    server: float  # and per exchange


def main(numbers: list[int]) -> None:
    kinds = "hello | evaluate | a round of training"
    print(f"| nodes | way | {kinds} | CPU s per exchange and client | server's per exchange | exchanges | load |")
    print("|---|---|---|---|---|---|---|---|---|")
    for n in numbers:
        found = {way: row(n, way) for way in ("cold", "warm")}
        cold = found["cold"]
        warm = found["warm"]
        shares = [f"{median(warm.seconds[kind]) / median(cold.seconds[kind]):.2f}" for kind in cold.seconds]
        shares += [f"{warm.client / cold.client:.2f}", f"{warm.server / cold.server:.2f}"]
        print(f"| {n} | warm / cold | {' | '.join(shares)} | | |")


def row(n: int, way: str) -> Measured:
    """Measure and print one line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        found = measure_deployment(Path(folder) / "deployment", n, way)
    cells = [f"{median(took):.1f} ({min(took):.1f} to {max(took):.1f})" for took in found.seconds.values()]
    costs = f"{found.client:.2f} | {found.server:.2f}"
    count = sum(map(len, found.seconds.values()))
    print(f"| {n} | {way} | {' | '.join(cells)} | {costs} | {count} | {os.getloadavg()[0]:.1f} |", flush=True)
    return found


def idle(n: int, seconds: float) -> None:
    """Measure and print what waiting costs."""
    with tempfile.TemporaryDirectory() as folder:
        own = "time_steps = 2\nrounds = 1\nlook = 60\n"
        with deploy(Path(folder) / "deployment", n, "warm", own, batches=1) as fed:
            until(lambda: sum(kind == "hello" for kind, _ in fed.exchanges()) >= 2, fed.run, fed.output)
            every = fed.server, fed.run, *fed.clients
            before = [cpu(child.pid) for child in every]
            begun = len(fed.exchanges())
            time.sleep(seconds)
            burnt = [cpu(child.pid) - was for child, was in zip(every, before, strict=True)]
            hellos = len(fed.exchanges()) - begun
    server, run, *clients = (f"{100 * spent / seconds:.2f} %" for spent in burnt)
    print(f"{n} idle clients, {hellos} hellos in {seconds:g} s, load {os.getloadavg()[0]:.1f}; of a core:")
    print(f"each client {', '.join(clients)}; server {server}; `deploy run` {run}")


@dataclass
class Deployed:
    """A deployment at work."""

    server: subprocess.Popen[bytes]
    clients: list[subprocess.Popen[bytes]]
    run: subprocess.Popen[bytes]
    output: Path
    exchanges: Callable[[], list[tuple[str, float]]]  # kind and seconds of those in which all have answered


@contextmanager
def deploy(folder: Path, n: int, way: str, own: str, batches: int) -> Iterator[Deployed]:
    """Yield a deployment of n clients with this number of batches and these settings."""
    names = [f"client{k}" for k in range(n)]
    outer = launcher.find_free_port()
    inner = launcher.find_free_port()
    scaffold.create_deployment(folder, names, [2], ["0", "1"], port=outer, inner=inner, experiment="benchmark")
    settings = folder / "server" / "federation.toml"
    others = settings.read_text().replace("FedDrift-Auto", "FedDrift")  # the exchanges of the paper's method
    settings.write_text(f"{own}quorum = {n}\nhello = 300\nevaluate = 300\ntrain = 300\n{others}")
    draw = np.random.default_rng(0)
    for name in names:
        toml = folder / "clients" / name / "client.toml"
        toml.write_text(f"warm = {str(way == 'warm').lower()}\n{toml.read_text()}")
        for t in range(batches):
            x = draw.random((200, 2))
            rows = "".join(f"{a:.5f},{b:.5f},{int(a > 0.5)}\n" for a, b in x)
            (folder / "clients" / name / "data" / f"step_{t}.csv").write_text("u,v,label\n" + rows)
    output = folder / "output"
    log = folder / "server" / "state" / "server.log"

    def exchanges() -> list[tuple[str, float]]:
        every = ANSWERED.findall(log.read_text()) if log.exists() else []
        return [(kind, float(took)) for kind, _, answered, asked, took in every if int(answered) == int(asked) == n]

    with ExitStack() as running:
        server = running.enter_context(command(output, "server", str(folder), "--no-proxy"))
        until(lambda: "can connect" in output.read_text(), server, output)
        clients = []
        for name in names:
            words = "client", str(folder / "clients" / name), "--server", f"localhost:{inner}"
            clients.append(running.enter_context(command(output, *words)))
        run = running.enter_context(command(output, "run", str(folder)))
        yield Deployed(server, clients, run, output, exchanges)


def measure_deployment(folder: Path, n: int, way: str) -> Measured:
    """Run a deployment of n clients and read the time of each exchange from its log."""
    own = f"time_steps = {STEPS}\nrounds = {ROUNDS}\nsteps = 100\npatience = 600\n"
    with deploy(folder, n, way, own, STEPS + 1) as fed:
        until(fed.exchanges, fed.run, fed.output)
        before = [cpu(child.pid) for child in (fed.server, *fed.clients)]
        begun = len(fed.exchanges())
        fed.run.wait()
        after = [cpu(child.pid) for child in (fed.server, *fed.clients)]
        every = fed.exchanges()
    if fed.run.returncode:
        sys.exit(fed.output.read_text()[-4000:])
    seconds: dict[str, list[float]] = {"hello": [], "evaluate": [], "train": []}
    for kind, took in every[1:]:  # the first met processes that were about to start
        seconds[kind].append(took)
    burnt = [(b - a) / (len(every) - begun) for a, b in zip(before, after, strict=True)]
    return Measured(seconds, sum(burnt[1:]) / n, burnt[0])


def cpu(pid: int) -> float:
    """CPU seconds of a process and all below it, also of those that have ended, buried or not."""
    parents = dict[int, int]()
    ticks = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # it is gone, and its parent has its time
            fields = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(fields[1])
            ticks[int(path.parent.name)] = sum(map(int, fields[11:15]))
    family = [pid]
    for one in family:
        family += (child for child, parent in parents.items() if parent == one)
    return sum(ticks.get(one, 0) for one in family) / TICK


def until(true: Callable[[], object], child: subprocess.Popen[bytes], output: Path) -> None:
    while not true():
        if child.poll() is not None:
            sys.exit(output.read_text()[-4000:])
        time.sleep(0.2)


@contextmanager
def command(output: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """`feddrift deploy ...` in the background, until this ends."""
    with open(output, "ab") as out:
        child = subprocess.Popen([sys.executable, "-m", "feddrift", "deploy", *words], stdout=out, stderr=out)
    try:
        yield child
    finally:
        process_tree.end_process_tree(child)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as for Ctrl-C: what was started ends, too
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nodes", nargs="*", type=int, help="numbers of them")
    parser.add_argument("--idle", type=float, metavar="SECONDS", help="measure clients that wait, for so long")
    given = parser.parse_args()
    if given.idle:
        for n_nodes in given.nodes or [3]:
            idle(n_nodes, given.idle)
    else:
        main(given.nodes or [3, 10])
