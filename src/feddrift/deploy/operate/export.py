"""The models of a federation, to take away while it runs or after."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from feddrift._internal import checkpoint
from feddrift.deploy.monitor.status import read_status
from feddrift.deploy.settings import Settings
from feddrift.errors import DataError
from feddrift.models import take
from feddrift.runs.export import ExportSource, describe_net, load_last_state, write_models
from feddrift.types import State


def export_federation(server: Path, folder: Path) -> int:
    """Write the models of a federation as they stand now; how many time steps they have seen."""
    settings, federation = Settings.read(server / "federation.toml"), read_status(server)
    if federation is None or not federation.record.rows.steps:
        raise DataError(f"the federation of {server} has done no time step yet: there is nothing to export")
    net, classes = settings.create_net(server), len(settings.classes)
    state, steps = load_last_state(checkpoint.Folder(server / "state" / "checkpoints"), net)
    source = ExportSource(
        state=_drop_private_models(state),
        steps=steps,
        net=net,
        net_description=describe_net(net, settings.model, settings.features, classes),
        stream=settings.experiment,
        algorithm=settings.algorithm,
        seed=settings.seed,
        clients=federation.record.header["clients"][: len(state.votes)],
        classes=settings.classes,
        columns=(),
        events=federation.record.events,
    )
    write_models(source, folder)
    return steps


def _drop_private_models(state: State) -> State:
    """The state without what only clients have: who uses a private model is given the shared one that comes first."""
    private = state.models.private
    if not private.any():
        return state
    shared = np.flatnonzero(~private)
    if not len(shared):
        raise DataError("all models are private and stay with their clients: there is nothing to export here")
    votes = state.votes[:, shared].copy()
    votes[~votes.any(axis=1), 0] = 1.0
    models = take(state.models, shared, [state.models.ids[m] for m in shared])
    return replace(state, models=models, w=np.zeros((0, *votes.shape)), votes=votes)
