"""FedDrift-Auto with one of its constants halved or doubled: `--algorithm experiments.constants:short_halved`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from feddrift.algorithms.auto.method import FedDriftAuto

FACTORS = {"halved": 0.5, "doubled": 2.0}


def _changed(name: str, word: str) -> type[FedDriftAuto]:
    value = getattr(FedDriftAuto, name) * FACTORS[word]
    body: dict[str, Any] = {"__doc__": f"{name} {word}.", "__annotations__": {name: float}, name: value}
    return dataclass(frozen=True)(type(f"{name}_{word}", (FedDriftAuto,), body))


VARIANTS = {f"{field.name}_{word}": _changed(field.name, word) for field in fields(FedDriftAuto) for word in FACTORS}
globals().update(VARIANTS)
