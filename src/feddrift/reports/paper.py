"""The paper's results for comparison: accuracy in percent, mean and standard deviation over five trials."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from feddrift.reports.summary import PublishedResult, Spread, Summary

ACCURACIES = ("omitting_drifts", "including_drifts")


@cache
def _load_tables() -> dict[str, Any]:
    text = resources.files("feddrift.reports").joinpath("paper.json").read_text()
    tables: dict[str, Any] = json.loads(text)
    return tables


def find_published_result(summary: Summary) -> PublishedResult | None:
    """Return the paper's result for an algorithm and a stream; None if it has none for this data and training.

    Settings are not compared: the caller decides which of them correspond to the paper. On FMoW, the paper's runs start
    from weights of ImageNet.
    """
    cells = [_load_tables()[accuracy].get(summary.algorithm, {}).get(summary.stream) for accuracy in ACCURACIES]
    if set(summary.overrides) != ({"weights"} if summary.stream == "fmow" else set()) or None in cells:
        return None
    published = [Spread(mean, std) for mean, std in cells]
    ours = [getattr(summary, accuracy) for accuracy in ACCURACIES]
    within = {
        accuracy: None if our is None else abs(our.mean - cell.mean) <= max(1.0, 2 * (cell.std or 0.0))
        for accuracy, our, cell in zip(ACCURACIES, ours, published, strict=True)
    }
    return PublishedResult(published[0], published[1], within)
