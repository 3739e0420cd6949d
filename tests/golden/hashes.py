"""The golden list: the results of many short runs, which must not change.

A case that native code or the reference engine computes has a hash of its record and one of its models: these must be
equal to the bit on every processor and with every supported version of Python and of the libraries. A case that XLA
compiles has a hash of its decisions, which must be equal, and values, which must agree within `TOLERANCE`.

`python -m tests.golden.hashes` writes the list. A change that only moves code must leave it as it is; a change that
moves numbers writes a new one and is described in the CHANGELOG. `python -m tests.golden.hashes check [CASE ...]`
compares cases with the list and exits with 1 if one differs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from feddrift import algorithms
from feddrift._internal import checkpoint
from feddrift.runs.config import RunConfig
from feddrift.runs.recorded_run import RecordedRun, load_stopped_run
from feddrift.simulation import Step
from feddrift.trees import tree_leaves
from feddrift.types import State
from tests.golden import world

LIST = Path(__file__).with_name("hashes.json")
CLOCK = ("started", "seconds", "versions", "device")  # fields that differ from run to run
TOLERANCE = {"record": 0.06, "parameters": 0.01}  # largest differences of values from a compiled program
WORLD, DEEP, SHIFTED = (f"tests.golden.world:{name}" for name in ("make", "deep", "shifted"))
BRIEF: dict[str, Any] = {"rounds": 2, "steps": 4}
DRIFT: dict[str, Any] = {"delta": 0.1}
CATALOGUE = tuple(algorithms.ALGORITHMS)
DELTA = tuple(name for name in CATALOGUE if name.startswith(("FedDrift", "DriftSurf")) and name != "FedDrift-Auto")
NATIVE = ("simulator", "option", "condition", "sine", "reference", "resumed")  # kinds that need neither XLA nor Flower
KILLED = ("FedDrift", "FedDrift-Trunk", "FedDrift-Auto", "KUE", "CFL", "FLUX")


def _run(algorithm: str, settings: dict[str, Any] | None = None, **given: Any) -> RunConfig:
    settings = (DRIFT if algorithm in DELTA else {}) | (settings or {})
    return RunConfig.from_values(**{"stream": WORLD, "algorithm": algorithm, "settings": settings} | given)


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
    "robust": ("FedDrift", {"poison": "relabel:2+reverse:1+stale:3+claims:1", "defend": "robust"}),
    "auto-robust": ("FedDrift-Auto", {"poison": "backdoor:2+garbage:3+collude:1", "defend": "robust"}),
    "trunk-robust": ("FedDrift-Trunk", {"poison": "collude:1,2", "defend": "robust"}),
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
    *RUNS, *(f"resumed/{name}" for name in (*KILLED, "route", "auto-defend", "auto-robust")),
    *(f"flower/{name}" for name in FLOWER),
    "flower-own/FedDrift", "flower-resumed/FedDrift",
]  # fmt: skip


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
    parameters = [np.asarray(leaf) for leaf in tree_leaves(models.params)]
    mask = None if models.mask is None else np.asarray(models.mask)
    return digest(
        [parameters, models.ids, models.family, mask, np.asarray(state.w), np.asarray(state.votes), state.ballot]
    )


def read_record(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a record without clock and versions."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in CLOCK} for line in lines]


def split_floats(value: Any) -> tuple[Any, list[float]]:
    """Return a value without its floating-point numbers, however deep, and these numbers in their order."""
    if isinstance(value, float):
        return "float", [value]
    if isinstance(value, dict):
        parts = {key: split_floats(item) for key, item in value.items()}
        return {key: part for key, (part, _) in parts.items()}, [x for _, floats in parts.values() for x in floats]
    if isinstance(value, list):
        items = [split_floats(item) for item in value]
        return [part for part, _ in items], [x for _, floats in items for x in floats]
    return value, []


def of_step(step: Step) -> list[Any]:
    """What a record would say of a time step."""
    events = [(event.kind, event.model, dict(event.cause)) for event in step.events]
    arrays = [step.model, step.accuracy, step.tested, step.received, step.loss, step.sent, step.sent_scoring]
    return [step.tau, [np.asarray(array).tolist() for array in arrays], step.drifted.tolist(), events]


def recorded(run: RecordedRun, compiled: bool = False) -> dict[str, Any]:
    """Run it to its end and return its result: hashes, of a compiled program also values."""
    for step in run:
        last = step
    lines = read_record(run.path)
    if not compiled:
        return {"record": digest(lines), "state": of_state(last.state)}
    decisions, floats = split_floats(lines)
    models = last.state.models
    parameters = np.concatenate([np.asarray(leaf).reshape(-1) for leaf in tree_leaves(models.params)]).tolist()
    data = np.asarray(last.state.w), np.asarray(last.state.votes) > 0
    return {
        "decisions": digest([decisions, models.ids, models.family, *data, last.state.ballot]),
        "values": {"record": np.round(floats, 4).tolist(), "parameters": np.round(parameters, 4).tolist()},
    }


def find_differences(found: dict[str, Any], listed: dict[str, Any]) -> list[str]:
    """Return what differs between the result of a case and the list, one phrase for each difference."""
    different = [key for key in listed if key != "values" and found[key] != listed[key]]
    if different or "values" not in listed:
        return different
    for key, expected in listed["values"].items():
        largest = float(np.abs(np.array(found["values"][key]) - np.array(expected)).max())
        if not largest <= TOLERANCE[key]:
            different.append(f"values of {key} by {largest:.2g}, more than {TOLERANCE[key]}")
    return different


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

    from feddrift.deploy.server.loop import federate
    from feddrift.nets import default_net
    from feddrift.nets.external import net_of
    from feddrift.types import Net
    from tests.support.flower import InProcessFlower

    class Killed(BaseException):
        pass

    stream = world.make()
    local = replace(stream.local, **BRIEF)
    found: dict[int, Any] = {}
    struck = False
    while True:
        net = default_net(stream) if model is None else model
        engine = InProcessFlower(stream, net if isinstance(net, Net) else net_of(net), local, 0, root=root)
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
    send_requests = engine.send_requests
    left = [exchanges]

    @functools.wraps(send_requests)
    def counted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise blow
        return send_requests(*args, **kwargs)

    engine.send_requests = counted


def outcome(case: str) -> dict[str, Any]:
    """Return the result of one case."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    root = Path(tempfile.mkdtemp(dir=memory))
    kind, _, name = case.partition("/")
    try:
        if kind == "resumed":
            config = RUNS.get(f"condition/{name}") or RUNS[f"simulator/{name}"]
            return recorded(load_stopped_run(begun(config, root, 3, 1)))
        if kind == "flower":
            return over_flower(name, root)
        if kind == "flower-own":
            return over_flower(name, root, world.Linear())
        if kind == "flower-resumed":
            return over_flower(name, root, kill=20)
        return recorded(RecordedRun(RUNS[case], root), compiled=kind == "compiled")
    finally:
        shutil.rmtree(root)


def expected() -> dict[str, Any]:
    """Return the list: the result of each case."""
    found: dict[str, Any] = json.loads(LIST.read_text())
    return found


def newest(folder: Path) -> checkpoint.Checkpoint:
    """Return the last checkpoint below a folder."""
    found = next(checkpoint.Folder(folder).newest_first())
    assert isinstance(found, checkpoint.Checkpoint)
    return found


def write_list() -> None:
    """Run all cases and write the list."""
    made = {case: outcome(case) for case in CASES}
    lines = [f" {json.dumps(case)}: {json.dumps(result)}" for case, result in made.items()]
    LIST.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    sys.stdout.write(f"wrote {len(made)} cases\n")


def check(cases: Sequence[str]) -> int:
    """Compare cases with the list, print those that differ, and return their number."""
    listed, n_different = expected(), 0
    for case in cases:
        if differences := find_differences(outcome(case), listed[case]):
            n_different += 1
            sys.stdout.write(f"{case}: {', '.join(differences)}\n")
    sys.stdout.write(f"{n_different} of {len(cases)} cases differ from the list\n")
    return n_different


if __name__ == "__main__":
    if sys.argv[1:2] == ["check"]:
        sys.exit(check(sys.argv[2:] or CASES) > 0)
    write_list()
