"""What runs come to, to the last bit: a hash of the record and one of the models for each of many short runs.

`python -m tests.golden.hashes` writes the list; whoever moves code keeps it, whoever moves numbers says so in the
CHANGELOG and writes it anew. Bits are those of one kind of processor and one set of libraries, which the list names.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from feddrift import algorithms, checkpoint
from feddrift.run import Step
from feddrift.runs.config import RunConfig
from feddrift.runs.recorded import RecordedRun, from_checkpoints
from feddrift.scores import SCORES
from feddrift.trees import leaves
from feddrift.types import State
from tests.golden import world

LIST = Path(__file__).with_name("hashes.json")
CLOCK = ("started", "seconds", "versions", "device")  # of no concern here
WORLD, DEEP, SHIFTED = (f"tests.golden.world:{name}" for name in ("make", "deep", "shifted"))
BRIEF: dict[str, Any] = {"rounds": 2, "steps": 4}
DRIFT: dict[str, Any] = {"delta": 0.1}
CATALOGUE = tuple(algorithms.ALGORITHMS)
DELTA = tuple(name for name in CATALOGUE if name.startswith(("FedDrift", "DriftSurf")) and name != "FedDrift-Auto")
KILLED = ("FedDrift", "FedDrift-Trunk", "FedDrift-Auto", "KUE", "CFL", "FLUX")


def _run(algorithm: str, settings: dict[str, Any] | None = None, **given: Any) -> RunConfig:
    settings = (DRIFT if algorithm in DELTA else {}) | (settings or {})
    return RunConfig.checked(**{"stream": WORLD, "algorithm": algorithm, "settings": settings} | given)


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "quarantine": ("FedDrift", {"quarantine": True}), "cap": ("FedDrift", {"max_models": 2}),
    "each": ("FedDrift", {"first": "each"}), "fresh": ("FedDrift", {"init": "fresh"}),
    "best": ("FedDrift", {"init": "best"}), "ties": ("FedDrift", {"ties": "random"}),
    "loss": ("FedDrift", {"metric": "loss", "delta": 0.3}), "merge": ("FedDrift", {"merge_delta": 0.3}),
    "small": ("FedDrift", {"delta": 0.01}), "proportional": ("FedDrift", {"test": "proportional:ratio=0.3"}),
    "two-sample": ("FedDrift", {"test": "two-sample"}), "page-hinkley": ("FedDrift", {"test": "page-hinkley"}),
    "all": ("FedDrift", {"quarantine": True, "max_models": 3, "init": "best", "ties": "random", "delta": 0.02}),
    "w-quarantine": ("FedDrift-W", {"quarantine": True, "delta": 0.05}), "w-each": ("FedDrift-W", {"first": "each"}),
    "redetect": ("FedDrift-C", {"redetect": True}), "c-cap": ("FedDrift-C", {"max_models": 2, "delta": 0.02}),
    "c-quarantine": ("FedDrift-C", {"quarantine": True, "redetect": True, "delta": 0.02}),
    "eager-quarantine": ("FedDrift-Eager", {"quarantine": True, "delta": 0.02}),
    "eager-cap": ("FedDrift-Eager", {"max_models": 2, "init": "best", "delta": 0.02}),
    "trunk-head": ("FedDrift-Trunk", {"init": "head"}), "trunk-warm": ("FedDrift-Trunk", {"init": "warm"}),
    "trunk-all": ("FedDrift-Trunk", {"quarantine": True, "max_models": 6, "first": "each", "delta": 0.02}),
    "released-kue": ("KUE", {"as_released": True}), "released-aue": ("AUE", {"as_released": True}),
    "ifca-choose": ("IFCA", {"first": "choose", "n_models": 3}),
    "flux-complete": ("FLUX", {"linkage": "complete"}), "flux-known": ("FLUX", {"router": False}),
    "feroma-softmax": ("FEROMA", {"weighting": "softmax"}),
}  # fmt: skip
CONDITIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "participation": ("FedDrift", {"participation": 0.5}), "dropout": ("FedDrift", {"dropout": 0.3}),
    "flip": ("FedDrift", {"poison": "flip:1"}), "garbage": ("FedDrift", {"poison": "garbage:1"}),
    "median": ("FedDrift-Trunk", {"average": "median"}), "trimmed": ("FedDrift", {"average": "trimmed"}),
    "clipped": ("FedDrift-Trunk", {"average": "clipped"}), "kue-dropout": ("KUE", {"dropout": 0.3}),
    "cfl-participation": ("CFL", {"participation": 0.6}),
    "liars": ("FedDrift", {"poison": "claims:1+alarms:2+glue:1+losses:3"}),
    "defend": ("FedDrift", {"poison": "claims:1+alarms:2+glue:1+losses:3", "defend": True}),
    "auto-defend": ("FedDrift-Auto", {"poison": "claims:1+alarms:2+glue:1+losses:3", "defend": True}),
    "route": ("FedDrift", {"stream": SHIFTED, "route": "batch"}),
    "route-running": ("FedDrift-Trunk", {"stream": SHIFTED, "route": "running"}),
}  # fmt: skip
SINE = ("FedDrift", "FedDrift-Eager", "FedDrift-C", "FedDrift-Trunk", "Oracle-Trunk", "AUE-PC", "Oblivious")
PLAIN = ("FedDrift", "FedDrift-Trunk", "FedDrift-Auto", "FedDrift-C", "KUE", "CFL", "IFCA", "AUE", "Adaptive-FedAvg")
COMPILED = ("FedDrift", "FedDrift-Trunk", "FedDrift-Auto", "KUE", "CFL", "IFCA", "Oracle-Trunk")

RUNS: dict[str, RunConfig] = {
    **{f"simulator/{name}": _run(name) for name in CATALOGUE},
    **{f"option/{name}": _run(algorithm, settings) for name, (algorithm, settings) in OPTIONS.items()},
    **{f"condition/{name}": _run(algorithm, **given) for name, (algorithm, given) in CONDITIONS.items()},
    **{f"sine/{name}": _run(name, stream="sine-2", rounds=4) for name in SINE},
    **{f"compiled/{name}": _run(name, net=DEEP) for name in COMPILED},
    **{f"reference/{name}": _run(name, engine="reference", **BRIEF) for name in PLAIN},
}
FLOWER = [name for name in CATALOGUE if not getattr(algorithms.ALGORITHMS[name].cls, "needs_truth", False)]
CASES = [
    *RUNS, *(f"resumed/{name}" for name in (*KILLED, "route", "auto-defend")), *(f"flower/{name}" for name in FLOWER),
    "flower-own/FedDrift", "flower-resumed/FedDrift",
]  # fmt: skip


def machine() -> dict[str, str]:
    """What bits depend on besides the code."""
    flags = platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("flags")]
        vectors = {flag for line in lines for flag in line.split() if flag.startswith(("avx", "fma", "sse"))}
        flags = " ".join(sorted(vectors)) or flags
    packages = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy", "numba", "river")}
    return {"vectors": flags, "python": platform.python_version(), **packages}


def digest(value: Any) -> str:
    """A short hash of arrays and plain values, however deep."""
    found = hashlib.sha256()
    for part in _bytes(value):
        found.update(part)
    return found.hexdigest()[:16]


def _bytes(value: Any) -> Iterator[bytes]:
    if isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes()
    elif isinstance(value, dict | list | tuple):
        items: Iterable[Any] = sorted(value.items()) if isinstance(value, dict) else value
        yield f"{type(value).__name__}{len(value)}".encode()
        for item in items:
            yield from _bytes(item)
    else:
        yield f"{type(value).__name__}{value!r}".encode()


def of_state(state: State) -> str:
    """All that a state says of models, their data and votes."""
    models = state.models
    parameters = [np.asarray(leaf) for leaf in leaves(models.params)]
    mask = None if models.mask is None else np.asarray(models.mask)
    return digest([parameters, models.ids, models.family, mask, np.asarray(state.w), state.votes, state.ballot])


def of_record(path: Path) -> str:
    """A record without clock, versions, and what was added later: scores, and what moved at an alarm."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return digest([{k: v for k, v in line.items() if k not in (*CLOCK, *SCORES, "shifts")} for line in lines])


def of_step(step: Step) -> list[Any]:
    """What a record would say of a time step."""
    events = [(event.kind, event.model, dict(event.cause)) for event in step.events]
    arrays = [step.model, step.accuracy, step.tested, step.received, step.loss, step.sent, step.sent_scoring]
    return [step.tau, [np.asarray(array).tolist() for array in arrays], step.drifted.tolist(), events]


def recorded(run: RecordedRun) -> dict[str, str]:
    """Run it to its end."""
    for step in run:
        last = step
    return {"record": of_record(run.path), "state": of_state(last.state)}


def begun(config: RunConfig, out: Path, steps: int, saves: int) -> Path:
    """A run that is stopped after so many time steps, and so many checkpoints inside the next; its checkpoints."""

    class Stopped(BaseException):
        pass

    run = RecordedRun(config, out, every=2)
    run._cwd = Path()  # the place where it ran is no part of it
    write, left = run.checkpoints.write, [saves]

    def counted(done: int, rounds: int, *args: Any) -> None:
        write(done, rounds, *args)
        left[0] -= done == steps
        if left[0] < 0:
            raise Stopped

    run.checkpoints.write = counted  # type: ignore[method-assign, assignment]
    try:
        for _ in run:
            pass
    except Stopped:
        return run.checkpoints.path
    raise AssertionError("the run ended before it was stopped")


def over_flower(
    algorithm: str, root: Path, model: Any = None, kill: int | None = None, stop: int | None = None
) -> dict[str, str]:
    """A federation over Flower's in-process grid; after so many exchanges killed and started again, or stopped."""
    from dataclasses import replace

    from feddrift.deploy.server import federate
    from feddrift.nets import default_net
    from feddrift.nets.own import net_of
    from feddrift.types import Net
    from tests.flower import OverFlower

    class Killed(BaseException):
        pass

    stream = world.make()
    local = replace(stream.local, **BRIEF)
    found: dict[int, Any] = {}
    struck = False
    while True:
        net = default_net(stream) if model is None else model
        engine = OverFlower(stream, net if isinstance(net, Net) else net_of(net), local, 0, root=root)
        if model is not None:
            for client in engine.local_grid.clients.values():
                client.model = model
        if (blow := kill or stop) is not None and not struck:
            _struck_after(engine, blow, Killed)
        made = algorithms.algorithm(algorithm, **DRIFT if algorithm in DELTA else {})
        try:
            engine.n_steps = stream.n_steps
            for step in federate(engine, made, root / "server"):
                found[step.tau], last = of_step(step), step
        except Killed:
            struck = True
            if stop is not None:
                return {}
            continue
        assert struck or blow is None, "the federation ended before it was killed"
        return {"record": digest(found), "state": of_state(last.state)}


def _struck_after(engine: Any, exchanges: int, blow: type[BaseException]) -> None:
    ask, left = engine.ask, [exchanges]

    @functools.wraps(ask)
    def counted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise blow
        return ask(*args, **kwargs)

    engine.ask = counted


def outcome(case: str) -> dict[str, str]:
    """The hashes of one case."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    root = Path(tempfile.mkdtemp(dir=memory))
    kind, _, name = case.partition("/")
    try:
        if kind == "resumed":
            config = RUNS.get(f"condition/{name}") or RUNS[f"simulator/{name}"]
            return recorded(from_checkpoints(begun(config, root, 3, 1)))
        if kind == "flower":
            return over_flower(name, root)
        if kind == "flower-own":
            return over_flower(name, root, world.Linear())
        if kind == "flower-resumed":
            return over_flower(name, root, kill=20)
        return recorded(RecordedRun(RUNS[case], root))
    finally:
        shutil.rmtree(root)


def expected() -> dict[str, Any]:
    """The list."""
    found: dict[str, Any] = json.loads(LIST.read_text())
    return found


def newest(folder: Path) -> checkpoint.Checkpoint:
    """The last checkpoint below a folder."""
    found = next(checkpoint.Folder(folder).newest_first())
    assert isinstance(found, checkpoint.Checkpoint)
    return found


if __name__ == "__main__":
    made = {case: outcome(case) for case in CASES}
    LIST.write_text(json.dumps({"machine": machine(), "cases": made}, indent=1) + "\n")
    changed = subprocess.run(["git", "diff", "--stat", "--", str(LIST)], capture_output=True, text=True)
    sys.stdout.write(f"{len(made)} cases\n{changed.stdout}")
