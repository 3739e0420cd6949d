"""The models of a run in a folder of their own, to predict with: safetensors, and who uses which as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from feddrift import checkpoint, rng
from feddrift._version import __version__
from feddrift.errors import DataError
from feddrift.exported import ABOUT, MASK, MODELS, RESNET
from feddrift.models import one
from feddrift.nets.resnet import torchvision_names
from feddrift.runs import record
from feddrift.runs.recorded import RecordedRun
from feddrift.system import write_whole
from feddrift.trees import paths
from feddrift.types import State


def export(run: RecordedRun, folder: Path) -> int:
    """Write the models of a run as they stand now; how many time steps they have seen."""
    like = run.net.init(rng.derive(run.config.seed, "init", 0))
    found = next((c for c in run.checkpoints.newest_first() if isinstance(c, checkpoint.Checkpoint)), None)
    state = None if found is None else found.value(like)[0]
    if found is None or state is None:
        raise DataError(f"{run.checkpoints.path} has no whole checkpoint of a time step to export")
    arrays: dict[str, npt.NDArray[Any]] = {}
    for m, i in enumerate(state.models.ids):
        parts = dict(paths(one(state.models, m)))
        if state.models.mask is not None:
            parts[MASK] = state.models.mask[m]
        arrays |= {f"{i}/{path}": np.ascontiguousarray(leaf) for path, leaf in parts.items()}
    net = _described(run)
    about = _about(run, state, int(found.about["steps"])) | {"net": net}
    write_whole(folder / MODELS, save(arrays))
    if net["kind"] == "resnet18":
        write_whole(folder / RESNET, save(torchvision_names(run.net, one(state.models, 0))))
    write_whole(folder / ABOUT, (json.dumps(about, indent=2, allow_nan=False) + "\n").encode())
    return int(found.about["steps"])


def _described(run: RecordedRun) -> dict[str, Any]:
    """What a reader needs to make the net again."""
    classes, shape = run.stream.n_classes, list(run.stream.x.shape[1:])
    if run.config.net is not None:
        return {"kind": "own", "name": run.config.net, "features": shape, "classes": classes}
    if len(shape) == 3 and run.stream.family == "fmow":
        return {"kind": "resnet18", "features": shape, "classes": classes}
    hidden = run.net.init(rng.derive(0, "init", 0))["W1"].shape[1]
    return {"kind": "perceptron", "features": shape, "hidden": hidden, "classes": classes}


def _about(run: RecordedRun, state: State, steps: int) -> dict[str, Any]:
    known = record.read(run.path if run.path.exists() else record.part_of(run.path))
    ids = state.models.ids
    clients = {
        name: {str(ids[m]): float(votes[m]) for m in np.flatnonzero(votes)}
        for name, votes in zip(run.stream.clients, state.votes, strict=True)
    }
    return {
        "feddrift": __version__,
        "stream": run.config.stream,
        "algorithm": run.config.algorithm,
        "seed": run.config.seed,
        "time_steps": steps,
        "ballot": state.ballot,
        "classes": list(run.stream.classes or range(run.stream.n_classes)),
        "columns": list(run.stream.columns),
        "models": {str(i): {"family": state.models.family[m]} for m, i in enumerate(ids)},
        "clients": clients,
        "lineage": [_told(event, run.stream.clients) for event in known.events if event["t"] < steps],
    }


def _told(event: Mapping[str, Any], clients: Sequence[str]) -> dict[str, Any]:
    """An event for people: time counts from 1, clients have their names."""
    cause = dict(event["cause"])
    if isinstance(cause.get("clients"), list):
        cause["clients"] = [clients[c] for c in cause["clients"]]
    return {"time": event["t"] + 1, "event": event["event"], "model": event["model"], "cause": cause}
