"""Requests to a client and its pinned settings, for the operator of the client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from feddrift.engines.flower.client.agreement import Agreement, accept_changes, format_change
from feddrift.engines.flower.client.client_toml import describe_policy, read_client_toml
from feddrift.engines.flower.client.request_log import REQUEST_LOG_FILE, RequestLog
from feddrift.errors import format_count


def describe_requests(folder: Path) -> Iterator[str]:
    """Yield lines of text: the client's policy, the requests so far, and the settings of each experiment.

    Args:
        folder: The client's folder.

    Raises:
        ConfigError: client.toml cannot be read or is not valid.
        DataError: A file of the client's store cannot be read.
    """
    yield describe_policy(folder)
    yield from RequestLog(folder / REQUEST_LOG_FILE).summarise()
    for experiment, agreement in list_agreements(folder):
        pinned = agreement.read_settings()
        yield f"pinned settings of experiment {experiment}:" + ("" if pinned else " none")
        yield from (f"  {name} = {json.dumps(value)}" for name, value in pinned.items())
        changes = agreement.find_changes()
        if changes:
            yield f"refused until you accept them with `feddrift deploy client {folder} --accept`:"
            yield from (f"  {format_change(name, *values)}" for name, values in changes.items())


def accept_requested_settings(folder: Path) -> Iterator[str]:
    """Pin the settings that the server requested, and yield a line of text for each change, before it is pinned.

    Args:
        folder: The client's folder.
    """
    is_changed = False
    for experiment, agreement in list_agreements(folder):
        changes = agreement.find_changes()
        for name, values in changes.items():
            yield f"experiment {experiment}: {format_change(name, *values)}"
        if changes:
            accept_changes(agreement.folder, changes)
            is_changed = True
            yield f"experiment {experiment}: accepted and pinned {format_count(len(changes), 'setting')}"
    if not is_changed:
        yield "the server has not requested other settings than the pinned ones"


def list_agreements(folder: Path) -> list[tuple[str, Agreement]]:
    """Return the agreement of each experiment that the client has taken part in, by the name of the experiment."""
    name = read_client_toml(folder)["name"]
    experiments = sorted(path for path in (folder / "store").glob("*") if (path / name).is_dir())
    return [(path.name, Agreement(path / name)) for path in experiments]
