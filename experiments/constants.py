"""FedDrift-Auto with one of its constants halved or doubled: `--algorithm experiments.constants:short_halved`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from feddrift.algorithms.auto.method import FedDriftAuto

FACTORS = {"halved": 0.5, "doubled": 2.0}
FIELDS = {  # the name of each constant in the published results, and the field that it is now
    "short": "tuned_rounds_share",
    "long": "own_rounds_share",
    "look": "trial_rise_z",
    "switch": "switch_z",
    "least": "not_worse_z",
    "doubt": "review_z",
    "beyond": "certain_z",
    "alike": "group_z",
    "merge": "merge_z",
    "false": "false_discovery_rate",
}


def _create_variant(name: str, word: str) -> type[FedDriftAuto]:
    field = FIELDS[name]
    value = getattr(FedDriftAuto, field) * FACTORS[word]
    body: dict[str, Any] = {"__doc__": f"{field} {word}.", "__annotations__": {field: float}, field: value}
    return dataclass(frozen=True)(type(f"{name}_{word}", (FedDriftAuto,), body))


VARIANTS = {f"{name}_{word}": _create_variant(name, word) for name in FIELDS for word in FACTORS}
globals().update(VARIANTS)
