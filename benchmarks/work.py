"""One measurement in a process of its own: `python work.py NAME ARGUMENTS`, in and out as JSON."""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import floor as c_code
import numpy as np
import plain

import feddrift as fd
from feddrift import clustering
from feddrift.engines.local.engine import InProcess
from feddrift.engines.server.federation import TimeStep
from feddrift.engines.simulator.simulator import Simulator
from feddrift.types import Clusters, Models

CLIENTS = 10
STEPS = 50
ROWS = 500
SECONDS = 0.3
REPEATS = 5


def per_round(rounds: Callable[[int], object]) -> float:
    """Seconds per round of the best of several calls: the one that other work on the machine disturbed least."""
    rounds(1)  # compiles
    begin = time.perf_counter()
    rounds(1)
    n = max(1, round(SECONDS / (time.perf_counter() - begin)))
    best = np.inf
    for _ in range(REPEATS):
        begin = time.perf_counter()
        rounds(n)
        best = min(best, time.perf_counter() - begin)
    return best / n


def data(d: int, c: int, clients: int = CLIENTS) -> tuple[Any, Any]:
    """x[client, row, feature] and y[client, row], random."""
    draw = np.random.default_rng(0)
    return draw.random((clients, ROWS, d), dtype=np.float32), draw.integers(c, size=(clients, ROWS))


def train(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Algorithm 1 in the simulator; a case has a net (d, h, c) and may have clients, steps and models."""
    return [_train(**case) for case in cases]


def _train(net: list[int], clients: int = CLIENTS, steps: int = STEPS, models: int = 1) -> dict[str, Any]:
    x, y = data(net[0], net[2], clients)
    stream = fd.Stream.from_arrays([list(zip(x, y, strict=True)), [None] * clients], n_classes=net[2])
    engine = Simulator(stream, fd.mlp(*net), fd.Local(steps=steps), seed=0)
    fed = engine.at(0)
    start = fed.fresh(models, distinct=True)
    w = Clusters(np.arange(clients)[None] % models, models)
    seconds = per_round(lambda rounds: fed.train(start, w, rounds=rounds))
    return {
        "seconds_per_round": seconds,
        "us": seconds / (clients * steps) * 1e6,
        "code": "XLA" if engine.kernel(start.params) is None else "native",
    }


def floor(net: list[int]) -> dict[str, float]:
    """The same in C, after a check that it computes the same."""
    lib = c_code.compiled(*net)
    c_code.check(lib, *net)
    model = np.concatenate([p.ravel() for p in plain.init(np.random.default_rng(0), *net)])
    moments = np.zeros((CLIENTS, 3, len(model)), dtype=np.float32)
    train = c_code.trainer(lib, *data(net[0], net[2]), model, moments)
    return {"us": per_round(lambda rounds: train(rounds, STEPS, 0)) / (CLIENTS * STEPS) * 1e6}


def loop(net: list[int]) -> dict[str, Any]:
    """The same as a plain loop over clients."""
    try:
        import torch
    except ImportError:
        seconds = per_round(_numpy_loop(net))
        name = f"NumPy {np.__version__}"
    else:
        seconds = per_round(_torch_loop(torch, net))
        name = f"PyTorch {torch.__version__}, one thread"
    return {"us": seconds / (CLIENTS * STEPS) * 1e6, "in": name}


def _numpy_loop(net: list[int]) -> Callable[[int], None]:
    x, y = data(net[0], net[2])
    draw = np.random.default_rng(0)
    model = plain.init(draw, *net)
    moments = [plain.zeros(model) for _ in range(CLIENTS)]

    def rounds(n: int) -> None:
        nonlocal model
        for k in range(n):
            trained = [[p.copy() for p in model] for _ in range(CLIENTS)]
            for c, own in enumerate(trained):
                plain.train(own, moments[c], k * STEPS, x[c], y[c], STEPS, draw)
            model = [np.mean(parts, axis=0) for parts in zip(*trained, strict=True)]

    return rounds


def _torch_loop(torch: Any, net: list[int]) -> Callable[[int], None]:
    torch.set_num_threads(1)  # several wait for each other: no gain, and ten times slower on a busy machine
    d, h, c = net
    x, y = (torch.from_numpy(a) for a in data(d, c))
    draw = np.random.default_rng(0)
    window = torch.arange(plain.BATCH)
    loss = torch.nn.CrossEntropyLoss()

    def perceptron() -> Any:
        return torch.nn.Sequential(torch.nn.Linear(d, h), torch.nn.ReLU(), torch.nn.Linear(h, c))

    model = perceptron()
    clients = [perceptron() for _ in range(CLIENTS)]
    adam = [torch.optim.Adam(own.parameters(), lr=plain.LR, weight_decay=plain.DECAY, amsgrad=True) for own in clients]

    def rounds(n: int) -> None:
        for _ in range(n):
            for k, own in enumerate(clients):
                own.load_state_dict(model.state_dict())
                for _ in range(STEPS):
                    rows = (int(draw.integers(ROWS)) + window) % ROWS
                    adam[k].zero_grad()
                    loss(own(x[k][rows]), y[k][rows]).backward()
                    adam[k].step()
            parts = [own.state_dict() for own in clients]
            model.load_state_dict({key: torch.stack([part[key] for part in parts]).mean(0) for key in parts[0]})

    return rounds


def drift(clients: int, steps: int, rounds: int = 5) -> dict[str, float]:
    """FedDrift while a second concept starts at one client and spreads evenly over all of them."""
    local = fd.Local(rounds=rounds, steps=STEPS)
    small = fd.stream("sine-2")
    for _ in zip(range(4), fd.run(small, fd.algorithm("FedDrift", small), local=local), strict=False):
        pass  # what is compiled is loaded
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    concepts = np.zeros((steps + 1, clients), dtype=int)
    for t, many in enumerate(np.linspace(1, clients, steps - 2).astype(int), start=2):
        concepts[t, :many] = 1
    concepts[steps] = concepts[steps - 1]
    with tempfile.TemporaryDirectory() as folder:
        pattern = Path(folder) / "pattern.txt"
        np.savetxt(pattern, concepts, fmt="%d")
        stream = fd.stream("sine-2", pattern=str(pattern))
    done = [time.perf_counter()]
    most = 0
    for step in fd.run(stream, fd.algorithm("FedDrift", stream), local=local):
        done.append(time.perf_counter())
        most = max(most, len(step.state.models))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "ms_per_client_step": (done[-1] - done[0]) / (clients * steps) * 1e3,
        "ms_per_late_step": float(np.mean(np.diff(done)[-max(1, steps // 10) :])) * 1e3,
        "peak_mb": peak / 1024,
        "own_mb": (peak - before) / 1024,
        "models": most,
    }


def merge(models: int) -> dict[str, float]:
    """Return the seconds to merge models of five kinds with the data of 10,000 clients over 20 time steps."""
    draw = np.random.default_rng(0)
    kind = draw.integers(0, 5, models)
    counts = np.full((20, 10_000), 500)
    stack = Models({"W1": draw.normal(size=(models, 2, 4)).astype(np.float32)}, tuple(range(models)))
    D = np.where(kind[:, None] == kind, draw.random((models, models)) * 0.05, 0.8)
    D = np.maximum(D, D.T)
    np.fill_diagonal(D, np.inf)
    w = Clusters(draw.integers(0, models, counts.shape), models)
    begin = time.perf_counter()
    left, _, _ = clustering.merge_closest(stack, w, D, counts, 0.1)
    return {"seconds": time.perf_counter() - begin, "left": len(left)}


def methods(stream: str, names: list[str]) -> dict[str, float] | None:
    """Seconds of a whole run of each method, the best of several; None where the data are not there."""
    try:
        data = fd.stream(stream)
    except fd.DataError:
        return None
    best = dict.fromkeys(names, np.inf)
    for turn in range(REPEATS - 1):
        for name in names:
            begin = time.perf_counter()
            list(fd.run(data, name))
            if turn:  # what is compiled is loaded
                best[name] = min(best[name], time.perf_counter() - begin)
    return best


def between() -> dict[str, float]:
    """The share of a FedDrift run on SINE-2 that is spent between the verbs, in percent."""
    spent = [0.0]

    def measure_time(verb: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return verb(*arguments, **named)
            finally:
                spent[0] += time.perf_counter() - begin

        return call

    stream = fd.stream("sine-2")
    list(fd.run(stream, fd.algorithm("FedDrift", stream), seed=1))  # what is compiled is loaded
    for cls, names in ((TimeStep, ("evaluate", "cross_evaluate", "train")), (InProcess, ("test",))):
        for name in names:
            setattr(cls, name, measure_time(getattr(cls, name)))
    begin = time.perf_counter()
    list(fd.run(stream, fd.algorithm("FedDrift", stream)))
    return {"percent": 100 * (1 - spent[0] / (time.perf_counter() - begin))}


if __name__ == "__main__":
    print(
        json.dumps(
            {f.__name__: f for f in (train, floor, loop, drift, merge, methods, between)}[sys.argv[1]](
                **json.loads(sys.argv[2])
            )
        )
    )
