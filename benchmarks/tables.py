"""Time and memory of reading tables: `python benchmarks/tables.py csv`, `parquet` or `dry-run`.

Each measurement is a process of its own; its memory is the largest resident set. `--rows` makes smaller tables.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet as pq

CLIENTS = 200
TIME_STEPS = 50
FEATURES = 30
ROWS = {"csv": 200_000, "parquet": CLIENTS * TIME_STEPS * 2_000, "dry-run": 328_521}
OPTIONS = {"client": "shop", "time": "day", "label": "sold"}
FLIGHTS = {"client": "origin", "time": "date", "label": "dep_delay > 15", "every": "month", "categories": "onehot"}


def write_csv(path: Path, rows: int) -> None:
    """Write a table of 20 clients, 30 days, eight measurements and two columns of words."""
    draw = np.random.default_rng(0)
    columns = {
        "shop": np.array([f"shop {k}" for k in range(20)])[draw.integers(0, 20, rows)],
        "day": np.array([f"2026-06-{k:02}" for k in range(1, 31)])[np.sort(draw.integers(0, 30, rows))],
        "sold": np.array(["no", "yes"])[draw.integers(0, 2, rows)],
        "wind": np.array(["N", "E", "S", "W"])[draw.integers(0, 4, rows)],
        "kind": np.array([f"kind {k}" for k in range(12)])[draw.integers(0, 12, rows)],
    } | {f"x{k}": draw.normal(k, 1 + k, rows) for k in range(8)}
    from pyarrow import csv

    csv.write_csv(pa.table(columns), path)


def write_parquet(path: Path, rows: int) -> None:
    """Write 30 measurements of 200 clients over 50 time steps, a row group for each time step."""
    draw = np.random.default_rng(0)
    per_step = rows // TIME_STEPS
    writer = None
    for step in range(TIME_STEPS):
        columns = {
            "shop": np.array([f"shop {k}" for k in range(CLIENTS)])[draw.integers(0, CLIENTS, per_step)],
            "day": np.full(per_step, step),
            "sold": draw.integers(0, 2, per_step),
        } | {f"x{k}": draw.standard_normal(per_step) for k in range(FEATURES)}
        group = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, group.schema)
        writer.write_table(group)
    if writer is not None:
        writer.close()


def write_flights(path: Path, rows: int) -> None:
    """Write a table like a year of departures from three airports."""
    draw = np.random.default_rng(0)
    day = np.sort(draw.integers(0, 365, rows))
    dates = (np.datetime64("2013-01-01") + day).astype(str)
    delay = np.round(draw.exponential(20, rows) - 10)
    columns = {
        "date": dates,
        "origin": np.array(["EWR", "JFK", "LGA"])[draw.integers(0, 3, rows)],
        "carrier": np.array([f"{k:02}C" for k in range(16)])[draw.integers(0, 16, rows)],
        "dep_delay": delay,
        "distance": draw.integers(80, 5000, rows),
        "hour": draw.integers(5, 24, rows),
        "air_time": np.round(draw.normal(150, 90, rows)),
    } | {name: np.round(draw.normal(50, 20, rows), 2) for name in ("temp", "wind", "humidity")}
    from pyarrow import csv

    csv.write_csv(pa.table(columns), path)


def read_with_feddrift(path: Path) -> None:
    import feddrift as fd

    fd.stream(str(path), **OPTIONS, categories="onehot")


def read_with_pandas(path: Path) -> None:
    import pandas as pd

    for _, group in pd.read_csv(path).groupby(["day", "shop"]):
        len(group)


def measure(function: str, path: Path) -> dict[str, float]:
    """Call a function of this file in a new process, and return its seconds and its memory in GB."""
    reply = subprocess.run([sys.executable, __file__, "call", function, str(path)], capture_output=True, check=True)
    return dict(json.loads(reply.stdout.splitlines()[-1]))


def call_and_report(function: str, path: Path) -> None:
    """Print what a call takes, without the import of the library, and the memory before and at its peak."""
    if "feddrift" in function:
        import feddrift.streams.arrow_table  # noqa: F401
    else:
        import pandas  # noqa: F401
    before = read_peak_memory()
    start = time.perf_counter()
    cpu_start = time.process_time()
    globals()[function](path)
    seconds = time.perf_counter() - start
    cpu = time.process_time() - cpu_start
    print(json.dumps({"seconds": seconds, "cpu": cpu, "before": before, "peak": read_peak_memory()}))


def read_peak_memory() -> float:
    """Return the largest resident set of this process in GB; getrusage would include that of the parent process."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1e6


def print_row(name: str, cost: dict[str, float]) -> None:
    memory = f"{cost['before']:.2f} GB before, {cost['peak']:.2f} GB at the peak"
    print(f"{name:32} {cost['seconds']:7.2f} s {cost['cpu']:7.2f} s of CPU   {memory}", flush=True)


def compare_csv(folder: Path, rows: int) -> None:
    path = folder / "sales.csv"
    write_csv(path, rows)
    print(f"CSV of {rows:,} rows, {path.stat().st_size / 1e6:.0f} MB")
    for name, function in (("pandas.read_csv and groups", "read_with_pandas"), ("feddrift", "read_with_feddrift")):
        print_row(name, min((measure(function, path) for _ in range(3)), key=lambda cost: cost["seconds"]))


def measure_parquet(folder: Path, rows: int) -> None:
    path = folder / "sales.parquet"
    write_parquet(path, rows)
    print(f"Parquet of {rows:,} rows, {path.stat().st_size / 1e9:.2f} GB")
    with path.open("rb") as file:
        while file.read(1 << 26):  # so that the file is in memory
            pass
    print_row("feddrift", measure("read_with_feddrift", path))


def time_dry_runs(folder: Path, rows: int) -> None:
    path = folder / "flights.csv"
    write_flights(path, rows)
    os.environ.pop("FEDDRIFT_TABLE_CACHE", None)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    words = [word for name, value in FLIGHTS.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "feddrift", "run", "--stream", str(path), *words, "--dry-run"]
    print(f"dry run on {rows:,} rows, {path.stat().st_size / 1e6:.0f} MB")
    for name in ("empty caches", "table in the cache", "table in the cache, again"):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        print(f"{name:32} {time.perf_counter() - start:7.2f} s")


def main() -> None:
    if sys.argv[1:2] == ["call"]:
        call_and_report(sys.argv[2], Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=ROWS)
    parser.add_argument("--rows", type=int)
    arguments = parser.parse_args()
    os.environ.setdefault("FEDDRIFT_TABLE_CACHE", "false")
    run = {"csv": compare_csv, "parquet": measure_parquet, "dry-run": time_dry_runs}[arguments.part]
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), arguments.rows or ROWS[arguments.part])


if __name__ == "__main__":
    main()
