"""The models of a federation, to take away while it runs or after."""

from __future__ import annotations

from pathlib import Path

from feddrift import checkpoint
from feddrift.deploy.settings import Settings
from feddrift.deploy.status import status
from feddrift.errors import DataError
from feddrift.runs.export import Source, last_state, perceptron, write


def export(server: Path, folder: Path) -> int:
    """Write the models of a federation as they stand now; how many time steps they have seen."""
    settings, found = Settings.read(server / "federation.toml"), status(server)
    if found is None or not found.record.rows.steps:
        raise DataError(f"the federation of {server} has done no time step yet: there is nothing to export")
    net, classes = settings.net(server), len(settings.classes)
    state, steps = last_state(checkpoint.Folder(server / "state" / "checkpoints"), net)
    if settings.model is None:
        described = perceptron(net, settings.features, classes)
    else:
        described = {
            "kind": "own",
            "name": settings.model,
            "features": list(settings.features),
            "classes": classes,
        }
    clients = found.record.header["clients"][: len(state.votes)]
    of = settings.experiment, settings.algorithm, settings.seed, clients, settings.classes, ()
    write(Source(state, steps, net, described, *of, found.record.events), folder)
    return steps
