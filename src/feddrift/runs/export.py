"""The models of a run in a folder of their own, to predict with: safetensors, and who uses which as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from feddrift import rng
from feddrift._internal import checkpoint
from feddrift._internal.system import atomic_write
from feddrift._version import __version__
from feddrift.errors import DataError
from feddrift.exported_models import ABOUT, MASK, MODELS, RESNET
from feddrift.models import params_of
from feddrift.nets.perceptron import layer_sizes
from feddrift.runs import record
from feddrift.runs.recorded_run import RecordedRun
from feddrift.tables.features import Feature
from feddrift.trees import paths
from feddrift.types import Net, State, Votes


@dataclass(frozen=True)
class Source:
    """What is exported: a state, and what a reader needs to make use of it."""

    state: State
    steps: int  # that it has seen
    net: Net
    described: dict[str, Any]  # the net, to be made again
    stream: str
    algorithm: str
    seed: int
    clients: Sequence[str]
    classes: Sequence[int | str]
    columns: Sequence[str]
    recipe: Sequence[Feature] = field(default=(), kw_only=True)  # of a table: how its columns become features
    events: Sequence[Mapping[str, Any]]  # of the record


def export(run: RecordedRun, folder: Path) -> int:
    """Write the models of a run as they stand now; how many time steps they have seen."""
    state, steps = last_state(run.checkpoints, run.net)
    config, stream = run.config, run.stream
    run_record = record.read(run.path if run.path.exists() else record.part_of(run.path))
    classes = list(stream.classes or range(stream.n_classes))
    source = Source(
        state=state,
        steps=steps,
        net=run.net,
        described=_described(run),
        stream=config.stream,
        algorithm=config.algorithm,
        seed=config.seed,
        clients=stream.clients,
        classes=classes,
        columns=stream.columns,
        recipe=stream.recipe,
        events=run_record.events,
    )
    write(source, folder)
    return steps


def last_state(checkpoints: checkpoint.Folder, net: Net) -> tuple[State, int]:
    """The newest state of a run or federation, and how many time steps it has seen; it may be at work meanwhile."""
    newest = next((c for c in checkpoints.newest_first() if isinstance(c, checkpoint.Checkpoint)), None)
    state = None if newest is None else newest.value(net.init(rng.derive(0, "init", 0)))[0]
    if newest is None or state is None:
        raise DataError(f"{checkpoints.path} has no whole checkpoint of a time step to export")
    return state, int(newest.about["steps"])


def write(source: Source, folder: Path) -> None:
    """Write models and what to know of them into a folder."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    models = source.state.models
    for m, i in enumerate(models.ids):
        parts = dict(paths(params_of(models, m)))
        if models.mask is not None:
            parts[MASK] = models.mask[m]
        arrays |= {f"{i}/{path}": np.ascontiguousarray(leaf) for path, leaf in parts.items()}
    atomic_write(folder / MODELS, save(arrays))
    if source.described["kind"] == "resnet18":
        from feddrift.nets.resnet import torchvision_names  # here: few need it

        atomic_write(folder / RESNET, save(torchvision_names(source.net, params_of(models, 0))))
    atomic_write(folder / ABOUT, (json.dumps(_about(source), indent=2, allow_nan=False) + "\n").encode())


def described(net: Net, own: str | None, features: Sequence[int], classes: int) -> dict[str, Any]:
    """What a reader needs to make this net again: the name of one of your own, or the sizes of our perceptron."""
    sizes = layer_sizes(net, net.init(rng.derive(0, "init", 0)))
    if sizes is None:
        return {"kind": "own", "name": own, "features": list(features), "classes": classes}
    hidden = sizes[1] if len(sizes) == 3 else list(sizes[1:-1])
    return {"kind": "perceptron", "features": list(features), "hidden": hidden, "classes": classes}


def _described(run: RecordedRun) -> dict[str, Any]:
    classes, shape = run.stream.n_classes, list(run.stream.x.shape[1:])
    if run.config.net is None and len(shape) == 3 and run.stream.family == "fmow":
        return {"kind": "resnet18", "features": shape, "classes": classes}
    return described(run.net, run.config.net, shape, classes)


def _about(source: Source) -> dict[str, Any]:
    state = source.state
    ids = state.models.ids
    votes = Votes.of(state.votes)
    clients = {
        name: {str(ids[m]): float(weight) for m, weight in zip(models, weights, strict=True) if weight > 0}
        for name, models, weights in zip(source.clients, votes.model.tolist(), votes.weight.tolist(), strict=True)
    }
    return {
        "feddrift": __version__,
        "stream": source.stream,
        "algorithm": source.algorithm,
        "seed": source.seed,
        "time_steps": source.steps,
        "ballot": state.ballot,
        "classes": list(source.classes),
        "columns": list(source.columns),
        **({"recipe": [asdict(feature) for feature in source.recipe]} if source.recipe else {}),
        "models": {str(i): {"family": state.models.family[m]} for m, i in enumerate(ids)},
        "clients": clients,
        "lineage": [
            _with_names(event, source.clients)
            for event in source.events
            if event["t"] < source.steps and event["event"] != "decided"  # which is about clients
        ],
        "net": source.described,
    }


def _with_names(event: Mapping[str, Any], clients: Sequence[str]) -> dict[str, Any]:
    """An event for people: time counts from 1, clients have their names."""
    cause = dict(event["cause"])
    if isinstance(cause.get("clients"), list):
        cause["clients"] = [clients[c] for c in cause["clients"]]
    return {"time": event["t"] + 1, "event": event["event"], "model": event["model"], "cause": cause}
