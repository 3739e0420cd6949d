"""Cost of a run on a GPU: `python benchmarks/gpu.py [step] [runs]`; MNIST must be in $FEDDRIFT_DATA/mnist.

`step`: microseconds per lane-step of MNIST's net, beside what its memory traffic alone would take: at the speed of a
plain copy measured here, and at the one that is given (4.3 TB/s for an H200). `runs`: seconds of whole runs on mnist-4,
each in a process of its own, with an empty folder of compiled programs and with what the run before has left there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from statistics import median

import numpy as np

import feddrift as fd

LANES = (10, 20, 40)
STEPS = 50
ROUNDS = 20
COPIES = 9  # of a model that a step moves: weights read twice and written, three moments read and written
SPEED = 4.3e12  # bytes per second, of the GPU's memory
RUN = """
import sys, feddrift as fd
name, rounds, precision = sys.argv[1:]
local = fd.Local(lr=1e-3, rounds=int(rounds), precision=precision)
steps = list(fd.run("mnist-4", name, local=local))
print(sum(float(step.accuracy.mean()) for step in steps) / len(steps) * 100, len(steps[-1].state.models))
"""


def main(parts: list[str]) -> None:
    if "step" in parts:
        step()
    if "runs" in parts:
        runs()


def step() -> None:
    """Microseconds per lane-step, and their floors."""
    import jax
    import jax.numpy as jnp

    from feddrift.engines.simulator.simulator import Simulator
    from feddrift.engines.sparse_weights import Entries
    from feddrift.engines.worker import TrainingPlan
    from feddrift.models import init_models
    from feddrift.trees import tree_leaves

    net = fd.mlp(784, 1568, 10)
    stream = fd.stream("mnist-4")
    size = sum(leaf[0].nbytes for leaf in tree_leaves(init_models(net, 0).params))
    arrays = [jnp.ones((1 << 26,)) for _ in range(4)]
    copy = jax.jit(lambda arrays: [array + 1 for array in arrays], donate_argnums=0)
    for _ in range(12):
        begin = time.perf_counter()
        arrays = jax.block_until_ready(copy(arrays))
        took = time.perf_counter() - begin
    plain = 2 * 4 * arrays[0].nbytes / took
    floors = [COPIES * size / speed * 1e6 for speed in (SPEED, plain)]
    print(f"{jax.devices()[0].device_kind}, {size / 1e6:.1f} MB a model; a plain copy moves {plain / 1e12:.2f} TB/s")
    print("| precision | lanes | us per lane-step | / floor at full speed | / floor at that of a copy |")
    print("|---|---|---|---|---|")
    print(f"| floor | | {floors[0]:.1f}, {floors[1]:.1f} | | |")
    for precision in ("float32", "tf32"):
        local = fd.Local(steps=STEPS, precision=precision)
        engine = Simulator(stream, net, local, 0)
        for n in LANES:
            models = init_models(net, 0, -(-n // 10))
            clients = stream.n_clients
            w = np.zeros((10, clients, len(models)))
            w[:, np.arange(n) % clients, np.arange(n) // clients] = 1
            worker = engine.worker(9)
            work = TrainingPlan.of(models, Entries.of(w, w.shape), worker.known.counts)
            took = {}
            for rounds in (1, 1, 1, ROUNDS + 1, ROUNDS + 1, ROUNDS + 1):
                begin = time.perf_counter()
                worker.rounds(models, work, 0, rounds, local)
                took.setdefault(rounds, []).append(time.perf_counter() - begin)
            one = (median(took[ROUNDS + 1]) - took[1][-1]) / ROUNDS / STEPS / n * 1e6
            print(f"| {precision} | {n} | {one:.1f} | {one / floors[0]:.2f} | {one / floors[1]:.2f} |", flush=True)


def runs() -> None:
    """Seconds of whole runs, cold and warm."""
    print("| method | rounds | precision | cold, s | warm, s | accuracy, % | models |")
    print("|---|---|---|---|---|---|---|")
    for name, rounds, precision in (
        ("FedDrift", 100, "float32"), ("FedDrift", 100, "tf32"), ("FedDrift", 1, "float32"),
        ("IFCA", 100, "float32"), ("CFL", 100, "float32"),
    ):  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": folder}
            environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
            took = []
            for given in (rounds, rounds) if name == "FedDrift" else (2, rounds):  # its programs are soon compiled
                begin = time.perf_counter()
                command = [sys.executable, "-c", RUN, name, str(given), precision]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                took.append(time.perf_counter() - begin)
        accuracy, models = done.stdout.split()
        cold = f"{took[0]:.1f}" if name == "FedDrift" else f"{took[0]:.1f} (2 rounds)"
        print(
            f"| {name} | {rounds} | {precision} | {cold} | {took[1]:.1f} | {float(accuracy):.2f} | {models} |",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:] or ["step", "runs"])
