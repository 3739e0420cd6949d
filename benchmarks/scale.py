"""A hundred thousand clients: `python benchmarks/scale.py`, see README.md."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import feddrift as fd
from feddrift.runs.config import RunConfig
from feddrift.runs.recorded import RecordedRun

HERE = Path(__file__).parent
NUMBERS = HERE / "scale.json"
STEPS, ROWS, SHARE = 10, 50, 0.01  # time steps, rows a cell, the share of clients that train in a round
ROUNDS, LOCAL_STEPS = 20, 10
METHODS: dict[str, dict[str, Any]] = {"Oblivious": {}, "FedDrift-Eager": {}, "FedDrift": {"max_models": 50}}
OPENED = 3  # times that the browser opens a page, from its own start on; the quickest counts
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


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


def run_of(method: str, clients: int, out: Path) -> RecordedRun:
    """A run with record and checkpoints, as `feddrift run` makes it."""
    config = RunConfig(
        stream="scale:made", algorithm=method, settings=METHODS[method], participation=SHARE, rounds=ROUNDS,
        steps=LOCAL_STEPS,
    )  # fmt: skip
    return RecordedRun(config, out, stream=made(clients))


def work(method: str, clients: int, out: str) -> dict[str, Any]:
    """One run, after a small one that compiles."""
    list(run_of(method, 200, Path(out) / "small"))
    begin, cpu, most = time.perf_counter(), time.process_time(), 0
    run = run_of(method, clients, Path(out) / "runs")
    for step in run:
        most = max(most, len(step.state.models))
    spent, seconds = time.process_time() - cpu, time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    (record,) = fd.read(Path(out) / "runs")
    sent, cells = float(record.rows.models_sent.sum()), clients * STEPS
    return {
        "cpu_us_per_client_step": spent / cells * 1e6,
        "seconds": seconds,
        "peak_gb": peak,
        "models": most,
        "models_sent_per_client_step": sent / cells,
        "mb_sent": sent * record.header["model_bytes"] / 1e6,
        "accuracy": float(np.nanmean(record.rows.accuracy[-1])),
        "record_mb": run.path.stat().st_size / 1e6,
        "checkpoint_mb": max(file.stat().st_size for file in run.checkpoints.path.iterdir()) / 1e6,
    }


def measured(method: str, clients: int) -> dict[str, Any]:
    """A run, the report of its record, and a browser that opens the page: each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        text, _ = child([sys.executable, __file__, "work", json.dumps([method, clients, folder])])
        found: dict[str, Any] = json.loads(text.splitlines()[-1])
        page = Path(folder) / "page.html"
        _, report = child([sys.executable, "-m", "feddrift", "report", f"{folder}/runs", "--html", str(page)])
        found |= {f"report_{name}": value for name, value in report.items()} | {"page_mb": page.stat().st_size / 1e6}
        if BROWSER is not None:
            options = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000", "--dump-dom")
            opened = [
                child([BROWSER, *options, f"--user-data-dir={folder}/profile", page.as_uri()]) for _ in range(OPENED)
            ]
            assert all('data-ready="yes"' in text for text, _ in opened), "the page is not ready"
            found["page_seconds"] = min(used["seconds"] for _, used in opened)
        return found


def child(command: list[str]) -> tuple[str, dict[str, float]]:
    """What a command prints, its seconds by the clock and of CPU, and its peak memory (at least that of this one)."""
    begin, env = time.perf_counter(), os.environ | {"PYTHONPATH": str(HERE.parent / "src")}
    with tempfile.TemporaryFile("w+") as told, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=told, stderr=errors, env=env)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - begin
        told.seek(0)
        errors.seek(0)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}: {errors.read().strip().splitlines()[-1]}")
        cpu = used.ru_utime + used.ru_stime
        return told.read(), {"seconds": seconds, "cpu": cpu, "peak_gb": used.ru_maxrss / 2**20}


def told(row: dict[str, Any], small: dict[str, Any]) -> str:
    """What was found, in a line, beside what a small run takes."""
    us, least = row["cpu_us_per_client_step"], small["cpu_us_per_client_step"]
    return (
        f"{us:.1f} us of CPU ({us / least:.2f} of that with 1,000), {row['peak_gb']:.2f} GB, "
        f"{row['models']} models, {row['mb_sent']:.1f} MB sent, {row['seconds']:.1f} s; record {row['record_mb']:.1f} "
        f"MB, checkpoint {row['checkpoint_mb']:.1f} MB; report {row['report_cpu']:.1f} s of CPU, "
        f"{row['report_peak_gb']:.2f} GB; page {row['page_mb']:.2f} MB, open after {row.get('page_seconds', 0):.1f} s"
    )


def main(
    clients: Annotated[list[int] | None, typer.Option(help="default: 1000, 10000 and 100000")] = None,
    method: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(METHODS)}; default: all")] = None,
    write: Annotated[bool, typer.Option("--write", help="into scale.json, each row as it is found")] = False,
) -> None:
    """Time per client and time step, memory and models at several numbers of clients."""
    found: dict[str, dict[str, Any]] = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    for n in clients or (1000, 10_000, 100_000):
        for name in method or METHODS:
            row = found.setdefault(name, {})[str(n)] = measured(name, n)
            print(f"{name}, {n:,} clients: {told(row, found[name].get('1000', row))}", flush=True)
            if write:
                NUMBERS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        print(json.dumps(work(*json.loads(sys.argv[2]))))
    else:
        typer.run(main)
