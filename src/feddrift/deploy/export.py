"""The models of a federation, to take away while it runs or after."""

from __future__ import annotations

from pathlib import Path

from feddrift import checkpoint
from feddrift.deploy.settings import Settings
from feddrift.deploy.status import status
from feddrift.errors import DataError
from feddrift.runs.export import Source, described, last_state, write


def export(server: Path, folder: Path) -> int:
    """Write the models of a federation as they stand now; how many time steps they have seen."""
    settings, federation = Settings.read(server / "federation.toml"), status(server)
    if federation is None or not federation.record.rows.steps:
        raise DataError(f"the federation of {server} has done no time step yet: there is nothing to export")
    net, classes = settings.net(server), len(settings.classes)
    state, steps = last_state(checkpoint.Folder(server / "state" / "checkpoints"), net)
    source = Source(
        state=state,
        steps=steps,
        net=net,
        described=described(net, settings.model, settings.features, classes),
        stream=settings.experiment,
        algorithm=settings.algorithm,
        seed=settings.seed,
        clients=federation.record.header["clients"][: len(state.votes)],
        classes=settings.classes,
        columns=(),
        events=federation.record.events,
    )
    write(source, folder)
    return steps
