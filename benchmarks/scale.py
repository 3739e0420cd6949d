"""A hundred thousand clients: `python benchmarks/scale.py`, see README.md."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import feddrift as fd
from feddrift.runs.recorded import lines_of
from feddrift.runs.writer import Writer

HERE = Path(__file__).parent
NUMBERS = HERE / "scale.json"
STEPS, ROWS, SHARE = 10, 50, 0.01  # time steps, rows a cell, the share of clients that train in a round
LOCAL = fd.Local(rounds=20, steps=10)
METHODS: dict[str, dict[str, Any]] = {"Oblivious": {}, "FedDrift-Eager": {}, "FedDrift": {"max_models": 50}}


def made(clients: int) -> fd.Stream:
    """SINE's rule over a few rows for each client; a second concept spreads evenly over all clients."""
    draw = np.random.default_rng(0)
    concepts = np.zeros((STEPS + 1, clients), dtype=int)
    for t, many in enumerate(np.linspace(1, clients, STEPS - 1).astype(int), start=2):
        concepts[t, :many] = 1
    x = draw.random((concepts.size * ROWS, 2), dtype=np.float32)
    y = (x[:, 1] <= np.sin(x[:, 0])) ^ (np.repeat(concepts.ravel(), ROWS) == 1)
    counts = np.full(concepts.shape, ROWS)
    return fd.Stream("spreading", x, y.astype(np.int32), counts, 2, concepts=concepts, family="sine")


def work(method: str, clients: int, settings: dict[str, Any]) -> dict[str, Any]:
    """One run with its record, in a process of its own."""
    conditions = fd.Conditions(participation=SHARE)
    small = made(200)
    list(fd.run(small, fd.algorithm(method, small, **settings), local=LOCAL, conditions=conditions))  # compiles
    stream = made(clients)
    algorithm = fd.algorithm(method, stream, **settings)
    begin, cpu, most, spent, sent = time.perf_counter(), time.process_time(), 0, 0.0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        header = {
            "stream": stream.name, "algorithm": method, "settings": settings, "overrides": {}, "seed": 0,
            "local": LOCAL.plain(), "engine": "simulator", "n_steps": STEPS, "n_clients": clients,
            "clients": list(stream.clients), "concepts": None if stream.concepts is None else stream.concepts.tolist(),
            "same": {}, "versions": {}, "device": "cpu", "started": "2026-01-01T00:00:00+00:00", "times": [],
        }  # fmt: skip
        with Writer(folder, header) as writer:
            for step in fd.run(stream, algorithm, local=LOCAL, conditions=conditions):
                now = time.process_time()
                writer.step(*lines_of(step, stream.concepts))
                spent += time.process_time() - now
                most, sent = max(most, len(step.state.models)), sent + float(step.sent.sum())
        seconds, size = time.perf_counter() - begin, writer.path.stat().st_size
    return {
        "cpu_us_per_client_step": (time.process_time() - cpu) / (clients * STEPS) * 1e6,
        "record_cpu_us_per_client_step": spent / (clients * STEPS) * 1e6,
        "seconds": seconds,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "models": most,
        "models_sent_per_client_step": sent / (clients * STEPS),
        "record_mb": size / 1e6,
        "accuracy": float(np.nanmean(step.accuracy)),
    }


def measured(method: str, clients: int) -> dict[str, Any]:
    """What `work` finds in another process."""
    command = [sys.executable, __file__, "work", json.dumps([method, clients, METHODS[method]])]
    env = os.environ | {"PYTHONPATH": str(HERE.parent / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise typer.Exit(f"{method}, {clients} clients: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(
    clients: Annotated[list[int] | None, typer.Option(help="default: 1000, 10000 and 100000")] = None,
    method: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(METHODS)}; default: all")] = None,
    write: Annotated[bool, typer.Option("--write", help="into scale.json, each row as it is found")] = False,
) -> None:
    """Time per client and time step, memory and models at several numbers of clients."""
    found: dict[str, dict[str, Any]] = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    base: dict[str, float] = {}
    for n in clients or (1000, 10_000, 100_000):
        for name in method or METHODS:
            row = found.setdefault(name, {})[str(n)] = measured(name, n)
            row["relative"] = row["cpu_us_per_client_step"] / base.setdefault(name, row["cpu_us_per_client_step"])
            print(f"{name:15} {n:7,} clients {row['cpu_us_per_client_step']:6.1f} us of CPU ({row['relative']:.2f}), "
                  f"{row['record_cpu_us_per_client_step']:.1f} of them for the record of {row['record_mb']:.1f} MB, "
                  f"{row['peak_gb']:.2f} GB, {row['models']} models, {row['seconds']:.1f} s", flush=True)  # fmt: skip
            if write:
                NUMBERS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        print(json.dumps(work(*json.loads(sys.argv[2]))))
    else:
        typer.run(main)
