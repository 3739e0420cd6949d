"""Accuracy over time."""

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
from feddrift.reports.labels import describe
from feddrift.reports.pictures.style import (
    MARKERS,
    STRONG,
    key,
    panels_of,
    settings_apart,
    short,
)
from feddrift.reports.summary import deviation_of_known, grouped, mean_of_known
from feddrift.runs.record import Record

LAYERS = {"Oblivious": 0, "Oracle": 0, "FedDrift": 2}  # the later lies above
KNOWN = {"FedDrift": 2, "Oblivious": 6, "Oracle": 7}  # green, black, grey
DASHES = ("-", "--", ":", "-.")


def accuracy(records: Sequence[Record]) -> Figure:
    """Accuracy over time, mean over clients: a line per algorithm and settings, its spread over seeds shaded."""
    groups = grouped(records)
    if not groups:
        raise DataError(f"no complete runs to draw, got {len(records)} unfinished")
    lines: dict[str, dict[str, list[Record]]] = {}  # stream -> label -> runs
    for group, differs in zip(groups, settings_apart([group[0] for group in groups]), strict=True):
        header = group[0].header
        label = header["algorithm"] + (f" ({describe(differs)})" if differs else "")
        lines.setdefault(header["stream"], {}).setdefault(label, []).extend(group)
    streams = sorted(lines)
    style_of = _styles(list(dict.fromkeys(label for s in streams for label in lines[s])))
    fig, panels = panels_of(len(streams), (7.0, 4.2) if len(streams) == 1 else (4.8, 3.4))
    legend: dict[str, Artist] = {}
    for ax, stream in zip(panels, streams, strict=False):
        layered = sorted(lines[stream].items(), key=lambda line: LAYERS.get(line[0], 1))
        for label, group in layered:
            legend[label] = _line(ax, group, style_of[label])
        counts = sorted({len(group) for group in lines[stream].values()})
        seeds = "-".join(str(k) for k in sorted({counts[0], counts[-1]})) + (" seeds" if counts[-1] > 1 else " seed")
        ax.set_title(f"{short(stream)} ({seeds})", loc="left", fontsize=11)
        ax.set_xlabel("time")
        ax.set_ylabel("accuracy on the next time step")
        ax.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g} %"))
        low, high = ax.get_ylim()
        ax.set_ylim(max(low, -1), min(high, 101))
        ax.grid(axis="y", color="#E4E4E4")
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    key(fig, {label: legend[label] for label in style_of})
    return fig


def _line(ax: Axes, group: Sequence[Record], style: int) -> Line2D:
    values = np.full((len(group), max(record.rows.steps for record in group)), np.nan)  # [seed, t]
    for row, record in zip(values, group, strict=True):
        row[: record.rows.steps] = 100 * mean_of_known(record.rows.accuracy.T, 0)
    mean = mean_of_known(values, 0)
    time = np.arange(1, len(mean) + 1)
    colour, dash = STRONG[style % len(STRONG)], DASHES[style // len(STRONG) % len(DASHES)]
    marker = MARKERS[style % len(MARKERS)] if len(mean) <= 40 else None
    (line,) = ax.plot(time, mean, color=colour, linestyle=dash, marker=marker, markersize=5, linewidth=1.8)
    if len(group) > 1:
        std = deviation_of_known(values)
        ax.fill_between(time, mean - std, mean + std, color=colour, alpha=0.18, linewidth=0)
    return line


def _styles(labels: Sequence[str]) -> dict[str, int]:
    """The style of each line: some algorithms look the same in all pictures, the others take what is left.

    >>> _styles(["CFL", "FedDrift", "IFCA", "KUE", "Oracle"])
    {'CFL': 0, 'FedDrift': 2, 'IFCA': 1, 'KUE': 3, 'Oracle': 7}
    """
    reserved = {KNOWN[label] for label in labels if label in KNOWN}
    free = (style for style in itertools.count() if style not in reserved)
    return {label: KNOWN[label] if label in KNOWN else next(free) for label in labels}
