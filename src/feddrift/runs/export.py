"""Export of the models of a run for predictions: parameters as safetensors or ONNX, descriptions as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from feddrift import rng
from feddrift._internal import checkpoint
from feddrift._internal.system import atomic_write
from feddrift._version import __version__
from feddrift.errors import ConfigError, DataError
from feddrift.exported_models import (
    ABOUT_FILE,
    MASK_NAME,
    MODELS_FILE,
    RESNET_FILE,
    ROUTER_ARRAYS,
    ROUTER_NAME,
    choose_most_used,
)
from feddrift.models import get_params
from feddrift.nets.perceptron import get_layer_sizes
from feddrift.runs import onnx_files, record
from feddrift.runs.recorded_run import RecordedRun
from feddrift.tables.features import Feature
from feddrift.trees import tree_paths
from feddrift.types import Models, Net, Projection, Router, State, Votes

Format = Literal["safetensors", "onnx"]
PREDICT_FILE = "predict.py"  # a module of this folder, which is copied


@dataclass(frozen=True)
class ExportSource:
    """A state to export, with the names and the description of the net that a reader needs."""

    state: State
    steps: int  # number of time steps before the state
    net: Net
    net_description: dict[str, Any]  # from which `load_models` builds the net
    stream: str
    algorithm: str
    seed: int
    clients: Sequence[str]
    classes: Sequence[int | str]
    columns: Sequence[str]
    recipe: Sequence[Feature] = field(default=(), kw_only=True)  # the features of a table and their columns
    events: Sequence[Mapping[str, Any]]  # the events in the record
    clients_without_model: Sequence[str] = field(default=(), kw_only=True)  # their own is private; they get another


def export(run: RecordedRun, folder: Path, format: Format = "safetensors") -> int:
    """Write the newest models of a run into a folder, and return the number of time steps before them.

    Args:
        run: The run.
        folder: The folder.
        format: `onnx` adds ONNX files.

    Raises:
        ConfigError: The net cannot be written as ONNX, or the package is missing.
        DataError: There is nothing to export, or the files cannot be written.
    """
    state, steps = load_last_state(run.checkpoints, run.net)
    stream = run.stream
    source = ExportSource(
        state=state,
        steps=steps,
        net=run.net,
        net_description=_describe_run_net(run),
        stream=run.config.stream,
        algorithm=run.config.algorithm,
        seed=run.config.seed,
        clients=stream.clients,
        classes=list(stream.classes or range(stream.n_classes)),
        columns=stream.columns,
        recipe=stream.recipe,
        events=record.read(run.path if run.path.exists() else record.get_part_path(run.path)).events,
    )
    write_models(source, folder, format)
    return steps


def load_last_state(checkpoints: checkpoint.Folder, net: Net) -> tuple[State, int]:
    """Load the newest state of a run or federation, which may be running.

    Returns:
        The state, and the number of time steps before it.

    Raises:
        DataError: If no intact checkpoint has a state.
    """
    newest = next((c for c in checkpoints.newest_first() if isinstance(c, checkpoint.Checkpoint)), None)
    state = None if newest is None else newest.decode(net.init(rng.derive_key(0, "init", 0)))[0]
    if newest is None or state is None:
        raise DataError(f"{checkpoints.path} has no intact checkpoint of a time step to export")
    return state, int(newest.about["steps"])


def write_models(source: ExportSource, folder: Path, format: Format = "safetensors") -> None:
    """Write the parameters, the description and predict.py into a folder; for pictures the ResNet-18 weights.

    Args:
        source: The models.
        folder: The folder. The files of an earlier export are replaced.
        format: `onnx` adds ONNX files.

    Raises:
        ConfigError: The net cannot be written as ONNX, or the package is missing.
        DataError: The files cannot be written.
    """
    onnx_contents = _build_onnx_files(source) if format == "onnx" else {}
    arrays: dict[str, npt.NDArray[Any]] = {}
    models = source.state.models
    for m, i in enumerate(models.ids):
        arrays |= _name_arrays(f"{i}", models, m)
    arrays |= _name_router_arrays(source.state.router)
    atomic_write(folder / MODELS_FILE, save(arrays))
    if source.net_description["kind"] == "resnet18":
        from feddrift.nets.resnet import convert_to_torchvision  # only for pictures

        atomic_write(folder / RESNET_FILE, save(convert_to_torchvision(source.net, get_params(models, 0))))
    if source.net_description["kind"] == "perceptron":
        atomic_write(folder / PREDICT_FILE, Path(__file__).with_name(PREDICT_FILE).read_bytes())
    onnx_files.delete_files(folder)  # those of an earlier export, which has other models
    for name, content in onnx_contents.items():
        atomic_write(folder / name, content)
    atomic_write(folder / ABOUT_FILE, (json.dumps(_describe_models(source), indent=2, allow_nan=False) + "\n").encode())


def _name_arrays(prefix: str, models: Models, m: int) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a model by their names in the file."""
    parts = dict(tree_paths(get_params(models, m)))
    if models.mask is not None:
        parts[MASK_NAME] = models.mask[m]
    return {f"{prefix}/{path}": np.ascontiguousarray(leaf) for path, leaf in parts.items()}


def _name_router_arrays(router: Router | None) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a router by their names in the file."""
    if router is None:
        return {}
    parts = {name: getattr(router, name) for name in ROUTER_ARRAYS}
    if router.project is not None and not isinstance(router.project, Projection):
        parts["project"] = router.project
    arrays = {f"{ROUTER_NAME}/{name}": np.ascontiguousarray(part, dtype=np.float64) for name, part in parts.items()}
    if router.model is not None:
        arrays |= _name_arrays(f"{ROUTER_NAME}/model", router.model, 0)
    return arrays


def _build_onnx_files(source: ExportSource) -> dict[str, bytes]:
    """Return the content of the ONNX files by their names.

    Raises:
        ConfigError: The net is not a perceptron, or the package is missing.
    """
    net = source.net_description
    if net["kind"] != "perceptron":
        name = f"the net '{net['name']}'" if net["kind"] == "own" else "a ResNet-18"
        raise ConfigError(
            f"--format onnx exports perceptrons and linear nets, these models are of {name}: leave out --format, and "
            "load the models with fd.load_models"
        )
    votes = Votes.of(source.state.votes)
    graph = onnx_files.GraphDescription(
        features=tuple(net["features"]),
        classes=tuple(source.classes),
        columns=tuple(source.columns),
        recipe=tuple(source.recipe),
        ballot=source.state.ballot,
    )
    return onnx_files.build_files(
        source.state.models, graph, with_votes=bool(((votes.weight > 0).sum(axis=1) > 1).any())
    )


def describe_net(net: Net, own: str | None, features: Sequence[int], classes: int) -> dict[str, Any]:
    """Describe a net for readers: the sizes of a built-in perceptron, or the name of an external net.

    Args:
        net: The net.
        own: The name of the net if it is external.
        features: The shape of one input.
        classes: The number of classes.
    """
    sizes = get_layer_sizes(net, net.init(rng.derive_key(0, "init", 0)))
    if sizes is None:
        return {"kind": "own", "name": own, "features": list(features), "classes": classes}
    hidden = sizes[1] if len(sizes) == 3 else list(sizes[1:-1])
    return {"kind": "perceptron", "features": list(features), "hidden": hidden, "classes": classes}


def _describe_run_net(run: RecordedRun) -> dict[str, Any]:
    classes = run.stream.n_classes
    shape = list(run.stream.features)
    if run.config.net is None and len(shape) == 3 and run.stream.family == "fmow":
        return {"kind": "resnet18", "features": shape, "classes": classes}
    return describe_net(run.net, run.config.net, shape, classes)


def _describe_models(source: ExportSource) -> dict[str, Any]:
    state = source.state
    ids = state.models.ids
    votes = Votes.of(state.votes)
    clients = {
        name: {str(ids[m]): float(weight) for m, weight in zip(models, weights, strict=True) if weight > 0}
        for name, models, weights in zip(source.clients, votes.model.tolist(), votes.weight.tolist(), strict=True)
    }
    private = {i for m, i in enumerate(ids) if state.models.private[m]}
    own_votes = {name: {} if name in source.clients_without_model else votes for name, votes in clients.items()}
    most_used = choose_most_used(own_votes, [str(i) for i in ids if i not in private])
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
        "models": {
            str(i): {"family": state.models.family[m], **({"private": True} if i in private else {})}
            for m, i in enumerate(ids)
        },
        "clients": clients,
        "new_client": None if most_used is None else {"votes": most_used[0], "reason": most_used[1]},
        **({} if state.router is None else {"router": _describe_router(state.router)}),
        "lineage": [
            _name_clients(event, source.clients)
            for event in source.events
            if event["t"] < source.steps and event["event"] != "decided"  # decisions are about clients, not models
        ],
        "net": source.net_description,
    }


def _describe_router(router: Router) -> dict[str, Any]:
    """Describe a router for readers; its arrays are in the file of the parameters."""
    project = router.project
    return {
        "per": router.per,
        "of": router.of,
        "layer": router.layer,
        "margin": router.margin,
        "project": {"key": list(project.key), "size": project.size} if isinstance(project, Projection) else None,
    }


def _name_clients(event: Mapping[str, Any], clients: Sequence[str]) -> dict[str, Any]:
    """Convert an event for readers: time counts from 1, and clients have their names."""
    cause = dict(event["cause"])
    if isinstance(cause.get("clients"), list):
        cause["clients"] = [clients[c] for c in cause["clients"]]
    return {"time": event["t"] + 1, "event": event["event"], "model": event["model"], "cause": cause}
