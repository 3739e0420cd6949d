"""Seconds per exchange of a real deployment on this machine: `python benchmarks/deployment.py 3 10` (numbers of nodes).

Everything is as in docs/deploy.md, but all nodes share this machine with the server and nginx is left out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import numpy as np

from feddrift.deploy import make, start

STEPS, ROUNDS = 3, 5
ANSWERED = re.compile(r"(hello|evaluate|train) at time (\d+).*: (\d+) of (\d+) clients answered in ([0-9.]+) s")


def main(numbers: list[int]) -> None:
    print("| nodes | load of this machine | hello | evaluate | a round of training | exchanges |")
    print("|---|---|---|---|---|---|")
    for n in numbers:
        with tempfile.TemporaryDirectory() as folder:
            seconds = measured(Path(folder) / "deployment", n)
        cells = [f"{median(took):.1f} (fastest {min(took):.1f})" if took else "-" for took in seconds.values()]
        load, count = os.getloadavg()[0], sum(map(len, seconds.values()))
        print(f"| {n} | {load:.1f} at the end | {' | '.join(cells)} | {count} |", flush=True)


def measured(folder: Path, n: int) -> dict[str, list[float]]:
    """By kind of exchange, how long each took in which all clients answered."""
    names = [f"client{k}" for k in range(n)]
    outer, inner = start.free_port(), start.free_port()
    make.init(folder, names, [2], ["0", "1"], port=outer, inner=inner, experiment="benchmark")
    settings = folder / "server" / "federation.toml"
    own = f"time_steps = {STEPS}\nrounds = {ROUNDS}\nsteps = 100\nquorum = {n}\npatience = 600\n"
    others = settings.read_text().replace("FedDrift-Auto", "FedDrift")  # the exchanges of the paper's method
    settings.write_text(f"{own}hello = 300\nevaluate = 300\ntrain = 300\n{others}")
    draw = np.random.default_rng(0)
    for name in names:
        for t in range(STEPS + 1):
            x = draw.random((200, 2))
            rows = "".join(f"{a:.5f},{b:.5f},{int(a > 0.5)}\n" for a, b in x)
            (folder / "clients" / name / "data" / f"step_{t}.csv").write_text("u,v,label\n" + rows)
    with ExitStack() as running:
        server = running.enter_context(command(folder, "server", str(folder), "--no-proxy"))
        while "can connect" not in (folder / "output").read_text():
            if server.poll() is not None:
                sys.exit((folder / "output").read_text())
            time.sleep(0.5)
        for name in names:
            words = "client", str(folder / "clients" / name), "--server", f"localhost:{inner}"
            running.enter_context(command(folder, *words))
        for _ in start.run(folder):
            pass
    found: dict[str, list[float]] = {"hello": [], "evaluate": [], "train": []}
    for kind, _, answered, asked, took in ANSWERED.findall((folder / "server" / "state" / "server.log").read_text()):
        if int(answered) == int(asked) == n:
            found[kind].append(float(took))
    return found


@contextmanager
def command(folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """`feddrift deploy ...` in the background, until this ends."""
    with open(folder / "output", "ab") as out:
        child = subprocess.Popen([sys.executable, "-m", "feddrift", "deploy", *words], stdout=out, stderr=out)
    try:
        yield child
    finally:
        child.terminate()
        child.wait(60)


if __name__ == "__main__":
    main([int(n) for n in sys.argv[1:]] or [3, 10])
