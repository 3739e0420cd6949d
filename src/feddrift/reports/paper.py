"""The paper's numbers beside ours: accuracy in percent, mean and standard deviation over five trials."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from feddrift.reports.summary import Published, Spread, Summary

ACCURACIES = ("omitting_drifts", "including_drifts")


@cache
def _tables() -> dict[str, Any]:
    text = resources.files("feddrift.reports").joinpath("paper.json").read_text()
    tables: dict[str, Any] = json.loads(text)
    return tables


def published(summary: Summary) -> Published | None:
    """The paper's cell for this algorithm and stream; None where it has none, or where data or training were others.

    Settings are not looked at: which of them a table holds is for its maker to choose. FMoW's cells are of runs from
    ImageNet's weights.
    """
    cells = [_tables()[accuracy].get(summary.algorithm, {}).get(summary.stream) for accuracy in ACCURACIES]
    if set(summary.overrides) != ({"weights"} if summary.stream == "fmow" else set()) or None in cells:
        return None
    printed = [Spread(mean, std) for mean, std in cells]
    ours = [getattr(summary, accuracy) for accuracy in ACCURACIES]
    within = {
        accuracy: None if mine is None else abs(mine.mean - cell.mean) <= max(1.0, 2 * (cell.std or 0.0))
        for accuracy, mine, cell in zip(ACCURACIES, ours, printed, strict=True)
    }
    return Published(printed[0], printed[1], within)
