"""Pictures of drift patterns, and of the shares of FMoW's classes over time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from feddrift.errors import ConfigError, DataError
from feddrift.reports.event_text import format_concept
from feddrift.reports.pictures.style import (
    MAX_PANELS,
    add_legend,
    choose_pale_colours,
    create_panels,
    draw_background,
    shorten_name,
)
from feddrift.runs.record import Record
from feddrift.streams.fmow import REGIONS, TIMES, read_class_counts


def draw_patterns(records: Sequence[Record]) -> Figure:
    """Draw the concept of each client at each time step, a panel for each pattern.

    Raises:
        ConfigError: There are more patterns than panels.
        DataError: No record has known concepts.
    """
    with_truth = [record for record in records if record.header["concepts"] is not None]
    if not with_truth:
        raise DataError("no drift pattern to draw: these streams have no ground truth")
    by_pattern: dict[str, Record] = {}
    for record in with_truth:
        by_pattern.setdefault(str(record.header["concepts"]), record)
    if len(by_pattern) > MAX_PANELS:
        raise ConfigError(f"there is room for 1 to {MAX_PANELS} patterns, got {len(by_pattern)}: choose fewer runs")
    fig, panels = create_panels(len(by_pattern), (4.6, 3.4))
    ids = sorted({k for record in by_pattern.values() for row in record.header["concepts"] for k in row})
    colours = choose_pale_colours(ids)
    for ax, record in zip(panels, by_pattern.values(), strict=False):
        concepts = np.array(record.header["concepts"])
        draw_background(ax, concepts, colours)
        if concepts.size <= 400:
            for (t, c), k in np.ndenumerate(concepts):
                ax.text(t + 1, c, format_concept(k), ha="center", va="center", fontsize=8, color="#222222")
        ax.set(xlim=(0.5, len(concepts) + 0.5), ylim=(concepts.shape[1] - 0.5, -0.5), xlabel="time", ylabel="client")
        ax.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
        ax.tick_params(length=0, labelsize=8)
        ax.spines[:].set_visible(False)
        pattern = record.header["overrides"].get("pattern")
        ax.set_title(
            shorten_name(record.header["stream"] + (f" {pattern}" if pattern else "")), loc="left", fontsize=10
        )
    add_legend(fig, {f"Concept {format_concept(k)}": Patch(facecolor=colours[k]) for k in ids})
    return fig


def draw_class_shares() -> Figure:
    """Draw the shares of FMoW's classes over time, for all regions together and for Africa."""
    counts, names = read_class_counts()
    fig, panels = create_panels(2, (5.6, 3.6))
    shades = colormaps["tab10"](np.arange(10))
    africa = REGIONS.index("Africa")
    by_region = {"all regions": counts.sum(axis=1), "Africa": counts[:, africa]}
    for ax, (title, images) in zip(panels, by_region.items(), strict=True):
        share = 100 * images / images.sum(axis=1, keepdims=True)
        ax.stackplot(range(len(TIMES)), share.T, colors=shades)
        ax.set_xticks(range(len(TIMES)), TIMES, rotation=60, fontsize=8)
        ax.set(xlim=(0, len(TIMES) - 1), ylim=(0, 100), ylabel="share of images, %")
        ax.set_title(title, loc="left", fontsize=11)
    add_legend(fig, {name.replace("_", " "): Patch(facecolor=shades[k]) for k, name in enumerate(names)})
    return fig
