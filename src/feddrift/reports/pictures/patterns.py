"""What drifts: the concepts of a stream over time, and FMoW's classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from feddrift.errors import ConfigError, DataError
from feddrift.reports.event_text import letter
from feddrift.reports.pictures.style import MAX_PANELS, background, fills, key, panels_of, short
from feddrift.runs.record import Record
from feddrift.streams.fmow import REGIONS, TIMES, class_counts


def patterns(records: Sequence[Record]) -> Figure:
    """Which concept each client sees when, one panel per pattern."""
    with_truth = [record for record in records if record.header["concepts"] is not None]
    if not with_truth:
        raise DataError("no drift pattern to draw: these streams have no ground truth")
    by_pattern: dict[str, Record] = {}
    for record in with_truth:
        by_pattern.setdefault(str(record.header["concepts"]), record)
    if len(by_pattern) > MAX_PANELS:
        raise ConfigError(f"there is room for 1 to {MAX_PANELS} patterns, got {len(by_pattern)}: choose fewer runs")
    fig, panels = panels_of(len(by_pattern), (4.6, 3.4))
    ids = sorted({k for record in by_pattern.values() for row in record.header["concepts"] for k in row})
    colours = fills(ids)
    for ax, record in zip(panels, by_pattern.values(), strict=False):
        concepts = np.array(record.header["concepts"])
        background(ax, concepts, colours)
        if concepts.size <= 400:
            for (t, c), k in np.ndenumerate(concepts):
                ax.text(t + 1, c, letter(k), ha="center", va="center", fontsize=8, color="#222222")
        ax.set(xlim=(0.5, len(concepts) + 0.5), ylim=(concepts.shape[1] - 0.5, -0.5), xlabel="time", ylabel="client")
        ax.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
        ax.tick_params(length=0, labelsize=8)
        ax.spines[:].set_visible(False)
        pattern = record.header["overrides"].get("pattern")
        ax.set_title(short(record.header["stream"] + (f" {pattern}" if pattern else "")), loc="left", fontsize=10)
    key(fig, {f"Concept {letter(k)}": Patch(facecolor=colours[k]) for k in ids})
    return fig


def classes() -> Figure:
    """FMoW's classes over time, all regions together and Africa alone, as shares."""
    counts, names = class_counts()
    fig, panels = panels_of(2, (5.6, 3.6))
    shades = colormaps["tab10"](np.arange(10))
    africa = REGIONS.index("Africa")
    for ax, title, seen in zip(panels, ("all regions", "Africa"), (counts.sum(axis=1), counts[:, africa]), strict=True):
        share = 100 * seen / seen.sum(axis=1, keepdims=True)
        ax.stackplot(range(len(TIMES)), share.T, colors=shades)
        ax.set_xticks(range(len(TIMES)), TIMES, rotation=60, fontsize=8)
        ax.set(xlim=(0, len(TIMES) - 1), ylim=(0, 100), ylabel="share of images, %")
        ax.set_title(title, loc="left", fontsize=11)
    key(fig, {name.replace("_", " "): Patch(facecolor=shades[k]) for k, name in enumerate(names)})
    return fig
