"""Pictures of accuracy over time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from feddrift.errors import DataError
from feddrift.reports.labels import format_settings
from feddrift.reports.pictures.style import (
    MARKERS,
    STRONG,
    add_legend,
    compare_settings,
    create_panels,
    shorten_name,
)
from feddrift.reports.summary import average_known_values, compute_deviation, group_by_configuration
from feddrift.runs.record import Record

LAYERS = {"Oblivious": 0, "Oracle": 0, "FedDrift": 2}  # lines of higher layers cover others; by default 1
RESERVED_STYLES = {"FedDrift": 2, "Oblivious": 6, "Oracle": 7}  # green, black, grey
DASHES = ("-", "--", ":", "-.")


def draw_accuracy(records: Sequence[Record]) -> Figure:
    """Draw the mean accuracy of clients over time: a line for each configuration, with its deviation over seeds.

    Raises:
        DataError: No run is complete.
    """
    groups = group_by_configuration(records)
    if not groups:
        raise DataError(f"no complete runs to draw, got {len(records)} unfinished")
    lines: dict[str, dict[str, list[Record]]] = {}  # stream -> label -> runs
    for group, differs in zip(groups, compare_settings([group[0] for group in groups]), strict=True):
        header = group[0].header
        label = header["algorithm"] + (f" ({format_settings(differs)})" if differs else "")
        lines.setdefault(header["stream"], {}).setdefault(label, []).extend(group)
    streams = sorted(lines)
    styles = _assign_styles(list(dict.fromkeys(label for stream in streams for label in lines[stream])))
    fig, panels = create_panels(len(streams), (7.0, 4.2) if len(streams) == 1 else (4.8, 3.4))
    legend: dict[str, Artist] = {}
    for ax, stream in zip(panels, streams, strict=False):
        layered = sorted(lines[stream].items(), key=lambda line: LAYERS.get(line[0], 1))
        for label, group in layered:
            legend[label] = _draw_line(ax, group, styles[label])
        counts = sorted({len(group) for group in lines[stream].values()})
        n_seeds = "-".join(str(n) for n in sorted({counts[0], counts[-1]})) + (" seeds" if counts[-1] > 1 else " seed")
        ax.set_title(f"{shorten_name(stream)} ({n_seeds})", loc="left", fontsize=11)
        ax.set_xlabel("time")
        ax.set_ylabel("accuracy on the next time step")
        ax.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g} %"))
        low, high = ax.get_ylim()
        ax.set_ylim(max(low, -1), min(high, 101))
        ax.grid(axis="y", color="#E4E4E4")
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    add_legend(fig, {label: legend[label] for label in styles})
    return fig


def _draw_line(ax: Axes, group: Sequence[Record], style: int) -> Line2D:
    values = np.full((len(group), max(record.rows.steps for record in group)), np.nan)  # [seed, t]
    for row, record in zip(values, group, strict=True):
        row[: record.rows.steps] = 100 * average_known_values(record.rows.accuracy.T, 0)
    mean = average_known_values(values, 0)
    time = np.arange(1, len(mean) + 1)
    colour = STRONG[style % len(STRONG)]
    dash = DASHES[style // len(STRONG) % len(DASHES)]
    marker = MARKERS[style % len(MARKERS)] if len(mean) <= 40 else None
    (line,) = ax.plot(time, mean, color=colour, linestyle=dash, marker=marker, markersize=5, linewidth=1.8)
    if len(group) > 1:
        std = compute_deviation(values)
        ax.fill_between(time, mean - std, mean + std, color=colour, alpha=0.18, linewidth=0)
    return line


def _assign_styles(labels: Sequence[str]) -> dict[str, int]:
    """Assign a style to each line: some algorithms have a reserved style, others get the free ones.

    >>> _assign_styles(["CFL", "FedDrift", "IFCA", "KUE", "Oracle"])
    {'CFL': 0, 'FedDrift': 2, 'IFCA': 1, 'KUE': 3, 'Oracle': 7}
    """
    reserved = {RESERVED_STYLES[label] for label in labels if label in RESERVED_STYLES}
    free = (style for style in itertools.count() if style not in reserved)
    return {label: RESERVED_STYLES[label] if label in RESERVED_STYLES else next(free) for label in labels}
