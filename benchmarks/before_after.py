"""Compare the native code of two versions of feddrift in one run: `python benchmarks/before_after.py OTHER/src`.

Each measurement is a fresh process on one core. The two versions take turns, and the least CPU time of several turns
counts, which other work on the machine disturbs least. A ratio above 1 means that this version is slower.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
TARGETS = {"host": None, "avx2": ("haswell", "+avx,+avx2,+fma")}
NETS = ([2, 4, 2], [3, 6, 2], [11, 22, 2])
CLIENTS = 10
STEPS = 50
ROWS = 500
SECONDS = 0.3


def time_call(work: Callable[[], object]) -> float:
    """Return the least CPU seconds of one call, among as many as fit into the time."""
    work()  # compiles
    least = float("inf")
    begin = time.process_time()
    while time.process_time() - begin < SECONDS:
        start = time.process_time()
        work()
        least = min(least, time.process_time() - start)
    return least


def measure_here() -> dict[str, float]:
    """Return microseconds of CPU: per local step of each net, and per row and model of scoring."""
    import numpy as np

    import feddrift as fd
    from feddrift.engines.simulator.simulator import Simulator
    from feddrift.types import Clusters

    found = {}
    for net in NETS:
        draw = np.random.default_rng(0)
        x = draw.random((CLIENTS, ROWS, net[0]), dtype=np.float32)
        y = draw.integers(net[2], size=(CLIENTS, ROWS))
        stream = fd.Stream.from_arrays([list(zip(x, y, strict=True)), [None] * CLIENTS], n_classes=net[2])
        engine = Simulator(stream, fd.mlp(*net), fd.Local(steps=STEPS), seed=0)
        fed = engine.at(0)
        models = fed.fresh(4, distinct=True)
        w = Clusters(np.zeros((1, CLIENTS), dtype=np.int64), 1)
        name = "-".join(map(str, net))
        rounds = 20
        seconds = time_call(lambda: fed.train(fed.fresh(1), w, rounds=rounds))  # noqa: B023, used at once
        found[f"train {name}"] = seconds / (rounds * CLIENTS * STEPS) * 1e6
        for metric in ("error", "loss"):
            seconds = time_call(lambda: fed.evaluate(models, metric=metric))  # noqa: B023, used at once
            found[f"score by {metric} {name}"] = seconds / (CLIENTS * ROWS * 4) * 1e6
    return found


def measure_apart(source: Path, target: tuple[str, str] | None) -> dict[str, float]:
    """Return what `measure_here` finds in a process that imports feddrift from this folder, compiled for a target."""
    env = os.environ | {"PYTHONPATH": str(source)}
    if target is not None:
        env |= {"NUMBA_CPU_NAME": target[0], "NUMBA_CPU_FEATURES": target[1]}

    def use_one_core() -> None:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

    command = [sys.executable, __file__, "here"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, preexec_fn=use_one_core)
    if done.returncode:
        sys.exit(f"{source}: {done.stderr.strip()}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main(
    other: Annotated[Path, typer.Argument(help="The src folder of the version to compare with.")], turns: int = 5
) -> None:
    """Print CPU microseconds of both versions and their ratio."""
    if not (other / "feddrift").is_dir():
        sys.exit(f"{other} has no folder feddrift: name the src folder of another checkout")
    sources = {"before": other.resolve(), "after": HERE.parent / "src"}
    for name, target in TARGETS.items():
        least: dict[str, Any] = {version: {} for version in sources}
        for _ in range(turns):
            for version, source in sources.items():
                for what, value in measure_apart(source, target).items():
                    least[version][what] = min(value, least[version].get(what, value))
        table = Table("us of CPU", "before", "after", "after / before", title=f"native code compiled for {name}")
        for what, before in least["before"].items():
            after = least["after"][what]
            table.add_row(what, f"{before:.3f}", f"{after:.3f}", f"{after / before:.2f}")
        Console(width=100).print(table)


if __name__ == "__main__":
    if sys.argv[1:] == ["here"]:
        sys.stdout.write(json.dumps(measure_here()))
    else:
        typer.run(main)
