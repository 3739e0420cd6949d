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
from feddrift.runs.recorded_run import RecordedRun

HERE = Path(__file__).parent
NUMBERS = HERE / "scale.json"
ROWS = 50  # of a cell
LOCAL_STEPS = 10
STEPS = 10  # time steps
ROUNDS = 20
SHARE = 0.01  # of the clients that train in a round
ALL_STEPS = 6  # time steps and rounds if all clients train in every round
ALL_ROUNDS = 10
METHODS: dict[str, dict[str, Any]] = {
    "Oblivious": {}, "FedDrift-Eager": {}, "FedDrift": {"max_models": 50}, "FineTuned": {}, "FedDrift-Auto": {},
}  # fmt: skip
ALL_METHODS = ("Oblivious", "FineTuned", "FedDrift-Auto")
OPENED = 3  # times that the browser opens a page, from its own start on; the quickest counts
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def make_stream(clients: int, steps: int = STEPS) -> fd.Stream:
    """SINE's rule over a few rows for each client; a second concept spreads evenly over all clients."""
    draw = np.random.default_rng(0)
    concepts = np.zeros((steps + 1, clients), dtype=int)
    for t, many in enumerate(np.linspace(1, clients, steps - 1).astype(int), start=2):
        concepts[t, :many] = 1
    x = draw.random((concepts.size * ROWS, 2), dtype=np.float32)
    y = (x[:, 1] <= np.sin(x[:, 0])) ^ (np.repeat(concepts.ravel(), ROWS) == 1)
    counts = np.full(concepts.shape, ROWS)
    return fd.Stream("spreading", x, y.astype(np.int32), counts, 2, concepts=concepts, family="sine")


def configure_run(method: str, clients: int, out: Path) -> RecordedRun:
    """A run with record and checkpoints, as `feddrift run` makes it."""
    config = RunConfig(
        stream="scale:make_stream", algorithm=method, settings=METHODS[method], participation=SHARE, rounds=ROUNDS,
        steps=LOCAL_STEPS,
    )  # fmt: skip
    return RecordedRun(config, out, stream=make_stream(clients))


def run_worker(method: str, clients: int, out: str) -> dict[str, Any]:
    """One run, after a small one that compiles."""
    list(configure_run(method, 200, Path(out) / "small"))
    begin = time.perf_counter()
    cpu = time.process_time()
    most = 0
    run = configure_run(method, clients, Path(out) / "runs")
    for step in run:
        most = max(most, len(step.state.models))
    spent = time.process_time() - cpu
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    (record,) = fd.read(Path(out) / "runs")
    sent = float(record.rows.models_sent.sum())
    cells = clients * STEPS
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


def run_all(method: str, clients: int) -> dict[str, Any]:
    """Run a method in which every client trains in every round, without a record, after a small run that compiles."""
    local = fd.Local(rounds=ALL_ROUNDS, steps=LOCAL_STEPS)
    for _ in fd.run(make_stream(50, ALL_STEPS), method, local=local):
        pass
    stream = make_stream(clients, ALL_STEPS)
    begin = time.perf_counter()
    cpu = time.process_time()
    sizes = [
        (len(step.state.models), int((~step.state.models.private).sum()))
        for step in fd.run(stream, method, local=local)
    ]
    return {
        "cpu_us_per_client_step": (time.process_time() - cpu) / (clients * ALL_STEPS) * 1e6,
        "seconds": time.perf_counter() - begin,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "models": max(models for models, _ in sizes),
        "shared_models": max(shared for _, shared in sizes),
    }


def measure_all(method: str, clients: int) -> dict[str, Any]:
    """The same in a process of its own."""
    text, _ = run_child([sys.executable, __file__, "run_all", json.dumps([method, clients])])
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


def measure(method: str, clients: int) -> dict[str, Any]:
    """A run, the report of its record, and a browser that opens the page: each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        text, _ = run_child([sys.executable, __file__, "work", json.dumps([method, clients, folder])])
        found: dict[str, Any] = json.loads(text.splitlines()[-1])
        page = Path(folder) / "page.html"
        _, report = run_child([sys.executable, "-m", "feddrift", "report", f"{folder}/runs", "--html", str(page)])
        found |= {f"report_{name}": value for name, value in report.items()} | {"page_mb": page.stat().st_size / 1e6}
        if BROWSER is not None:
            options = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000", "--dump-dom")
            opened = [
                run_child([BROWSER, *options, f"--user-data-dir={folder}/profile", page.as_uri()])
                for _ in range(OPENED)
            ]
            assert all('data-ready="yes"' in text for text, _ in opened), "the page is not ready"
            found["page_seconds"] = min(used["seconds"] for _, used in opened)
        return found


def run_child(command: list[str]) -> tuple[str, dict[str, float]]:
    """Return the output of a command, its seconds by the clock and of CPU, and its peak memory."""
    begin = time.perf_counter()
    env = os.environ | {"PYTHONPATH": str(HERE.parent / "src")}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors, env=env)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - begin
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}: {errors.read().strip().splitlines()[-1]}")
        cpu = used.ru_utime + used.ru_stime
        return output.read(), {"seconds": seconds, "cpu": cpu, "peak_gb": used.ru_maxrss / 2**20}


def format_row(row: dict[str, Any], small: dict[str, Any]) -> str:
    """Put what was measured into a line, beside what a small run takes."""
    us = row["cpu_us_per_client_step"]
    least = small["cpu_us_per_client_step"]
    return (
        f"{us:.1f} us of CPU ({us / least:.2f} of that with 1,000), {row['peak_gb']:.2f} GB, "
        f"{row['models']} models, {row['mb_sent']:.1f} MB sent, {row['seconds']:.1f} s; record {row['record_mb']:.1f} "
        f"MB, checkpoint {row['checkpoint_mb']:.1f} MB; report {row['report_cpu']:.1f} s of CPU, "
        f"{row['report_peak_gb']:.2f} GB; page {row['page_mb']:.2f} MB, open after {row.get('page_seconds', 0):.1f} s"
    )


def format_all(row: dict[str, Any], small: dict[str, Any]) -> str:
    """Put what was measured into a line, beside what a small run takes."""
    us = row["cpu_us_per_client_step"]
    least = small["cpu_us_per_client_step"]
    return (
        f"{us:.0f} us of CPU ({us / least:.2f} of that with 100), {row['peak_gb']:.2f} GB, {row['models']} models, "
        f"{row['shared_models']} of them shared, {row['seconds']:.1f} s"
    )


def main(
    clients: Annotated[
        list[int] | None, typer.Option(help="default: 1000, 10000, 100000; with --all 100, 1000, 10000")
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(METHODS)}; default: all")] = None,
    all_train: Annotated[
        bool, typer.Option("--all", help="all clients train in every round, without a record")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="into scale.json, each row as it is found")] = False,
) -> None:
    """Time per client and time step, memory and models at several numbers of clients."""
    known = ALL_METHODS if all_train else tuple(METHODS)
    if unknown := set(method or ()) - set(known):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))} is not measured here: choose of {', '.join(known)}")
    numbers: dict[str, Any] = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    found: dict[str, dict[str, Any]] = numbers.setdefault("all" if all_train else "few", {})
    for n in clients or ((100, 1000, 10_000) if all_train else (1000, 10_000, 100_000)):
        for name in method or known:
            row = found.setdefault(name, {})[str(n)] = (measure_all if all_train else measure)(name, n)
            small = found[name].get("100" if all_train else "1000", row)
            print(f"{name}, {n:,} clients: {(format_all if all_train else format_row)(row, small)}", flush=True)
            if write:
                NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        print(json.dumps(run_worker(*json.loads(sys.argv[2]))))
    elif sys.argv[1:2] == ["run_all"]:
        print(json.dumps(run_all(*json.loads(sys.argv[2]))))
    else:
        typer.run(main)
