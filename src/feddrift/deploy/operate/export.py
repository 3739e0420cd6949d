"""Export of the models of a federation, which may be running."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from feddrift._internal import checkpoint
from feddrift.deploy.monitor.status import read_status
from feddrift.deploy.settings import Settings
from feddrift.errors import DataError
from feddrift.models import take
from feddrift.runs.export import ExportSource, Format, describe_net, load_last_state, write_models
from feddrift.types import State


def export_federation(server: Path, folder: Path, format: Format = "safetensors") -> int:
    """Write the present models of a federation into a folder.

    Args:
        server: The server's folder.
        folder: The folder for the models.
        format: `onnx` adds ONNX files.

    Returns:
        The number of time steps on which the models were trained.

    Raises:
        ConfigError: If the net cannot be written as ONNX, or the package is missing.
        DataError: If no time step is done yet, or all models are private.
    """
    settings = Settings.read(server / "federation.toml")
    federation = read_status(server)
    if federation is None or not federation.record.rows.steps:
        raise DataError(f"the federation of {server} has no trained models yet: export them after its first time step")
    net = settings.create_net(server)
    state, steps = load_last_state(checkpoint.Folder(server / "state" / "checkpoints"), net)
    clients = federation.record.header["clients"][: len(state.votes)]
    shared_votes = np.asarray(state.votes)[:, ~state.models.private]
    source = ExportSource(
        state=_drop_private_models(state),
        steps=steps,
        net=net,
        net_description=describe_net(net, settings.model, settings.features, len(settings.classes)),
        stream=settings.experiment,
        algorithm=settings.algorithm,
        seed=settings.seed,
        clients=clients,
        clients_without_model=[name for name, votes in zip(clients, shared_votes, strict=True) if not votes.any()],
        classes=settings.classes,
        columns=(),
        events=federation.record.events,
    )
    write_models(source, folder, format)
    return steps


def _drop_private_models(state: State) -> State:
    """Remove the private models, which the server does not have; clients without a shared model get the first one."""
    private = state.models.private
    if not private.any():
        return state
    shared = np.flatnonzero(~private)
    if not len(shared):
        raise DataError("all models are private, so only their clients have them: nothing can be exported")
    votes = state.votes[:, shared].copy()
    votes[~votes.any(axis=1), 0] = 1.0
    models = take(state.models, shared, [state.models.ids[m] for m in shared])
    router = None if state.router is None else replace(state.router, votes=state.router.votes[:, shared])
    return replace(state, models=models, w=np.zeros((0, *votes.shape)), votes=votes, router=router)
