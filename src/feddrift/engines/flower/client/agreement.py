"""Agreement of a client with an experiment: the settings that its operator accepted, and the requests so far.

The first request of an experiment determines the settings. A later change is refused until the operator accepts it
with `feddrift deploy client FOLDER --accept`. This module does not need Flower.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from feddrift._internal.system import atomic_write
from feddrift.engines.flower.client.policy import Policy, RequestRefusedError
from feddrift.errors import DataError, to_one_line

PINNED_FILE = "pinned.json"  # the settings that the operator accepted
ASKED_FILE = "asked.json"  # other settings that the server requested last
USAGE_FILE = "usage.json"  # the requests of the current time step
PINNED_LOCAL_SETTINGS = ("batch", "lr", "weight_decay", "balance", "precision")  # others vary within an experiment
MAX_VALUE_LENGTH = 200  # characters of a setting in messages
SECONDS_PER_DAY = 86_400


class Agreement:
    """Settings of an experiment that are pinned at a client, and the use of its limits.

    Args:
        folder: The client's folder of the experiment.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read_settings(self) -> dict[str, Any]:
        """Return the pinned settings by name."""
        return _read_json(self.folder / PINNED_FILE)

    def find_changes(self) -> dict[str, tuple[Any, Any]]:
        """Return by name the pinned value and the requested one, of all settings that the server wants to change."""
        asked = _read_json(self.folder / ASKED_FILE)
        pinned = self.read_settings()
        return {name: (pinned[name], value) for name, value in asked.items() if pinned.get(name, value) != value}

    def check(self, values: Mapping[str, Any]) -> None:
        """Compare requested settings with the pinned ones.

        Args:
            values: The settings by name, as plain values of JSON.

        Raises:
            RequestRefusedError: A pinned setting has another value; the request is stored for the operator.
        """
        pinned = self.read_settings()
        changed = {name: value for name, value in values.items() if name in pinned and pinned[name] != value}
        if changed:
            asked = _read_json(self.folder / ASKED_FILE) | changed
            if asked != _read_json(self.folder / ASKED_FILE):
                _write_json(self.folder / ASKED_FILE, asked)
            differences = "; ".join(format_change(name, pinned[name], value) for name, value in changed.items())
            raise RequestRefusedError(
                f"it changes pinned settings of the experiment ({differences}): the client's operator can accept them "
                "with `feddrift deploy client FOLDER --accept`"
            )

    def pin(self, values: Mapping[str, Any]) -> list[str]:
        """Pin the settings that are not pinned yet, and return their names."""
        pinned = self.read_settings()
        new = sorted(values.keys() - pinned.keys())
        if new:
            _write_json(self.folder / PINNED_FILE, {**values, **pinned})
        return new

    def count_request(self, policy: Policy, batch: int, n_models: int, n_steps: int, key: str = "") -> None:
        """Count a request against the limits of its time step.

        The counters start again with each new batch of the client's data, and after a day.

        Args:
            policy: The limits.
            batch: The number of the client's next batch.
            n_models: The number of models, times the rounds of each.
            n_steps: The number of local steps.
            key: A key of the request; if it equals that of the last request with a key, nothing is counted.

        Raises:
            RequestRefusedError: A limit is exceeded.
        """
        usage = _read_json(self.folder / USAGE_FILE)
        now = time.time()
        age = now - usage.get("since", 0)
        if usage.get("batch") != batch or not 0 <= age < SECONDS_PER_DAY:
            usage = {"batch": batch, "since": now, "requests": 0, "steps": 0, "key": usage.get("key", "")}
        if key and usage["key"] == key:
            return
        totals = {"requests": usage["requests"] + n_models, "steps": usage["steps"] + n_steps}
        for name, limit in (("requests", policy.max_requests), ("steps", policy.max_steps)):
            if totals[name] > limit:
                unit = "models in requests" if name == "requests" else "local steps"
                raise RequestRefusedError(
                    f"it would make {totals[name]} {unit} in this time step, the policy allows {limit} (max_{name})"
                )
        _write_json(self.folder / USAGE_FILE, usage | totals | ({"key": key} if key else {}))


def accept_changes(folder: Path, changes: Mapping[str, tuple[Any, Any]]) -> None:
    """Pin changed settings, and delete the request for them."""
    new_values = {name: new for name, (_, new) in changes.items()}
    _write_json(folder / PINNED_FILE, _read_json(folder / PINNED_FILE) | new_values)
    (folder / ASKED_FILE).unlink(missing_ok=True)


def format_change(name: str, before: Any, after: Any) -> str:
    """Format a changed setting.

    >>> format_change("batch", 50, 1)
    'batch: 50, requested: 1'
    """
    texts = [to_one_line(json.dumps(value))[:MAX_VALUE_LENGTH] for value in (before, after)]
    return f"{to_one_line(name)}: {texts[0]}, requested: {texts[1]}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): restore it from a backup, or delete it") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} is not a JSON object: restore it from a backup, or delete it")
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    atomic_write(path, (json.dumps(value, indent=1) + "\n").encode())
