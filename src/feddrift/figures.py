"""More figures from records: drift patterns, accuracy against a threshold, accuracy against traffic."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from feddrift.errors import ConfigError, DataError
from feddrift.plots import DPI, MARKERS, MAX_PANELS, STRONG, background, fills, key, short
from feddrift.record import Record
from feddrift.report import Summary, describe, differences, summarise
from feddrift.story import letter
from feddrift.streams.fmow import REGIONS, TIMES, class_counts

_log = logging.getLogger("feddrift")


def patterns(records: Sequence[Record]) -> Figure:
    """Which concept each client sees when, one panel per pattern."""
    known = [record for record in records if record.header["concepts"] is not None]
    if not known:
        raise DataError("no drift pattern to draw: these streams have no ground truth")
    found: dict[str, Record] = {}
    for record in known:
        found.setdefault(str(record.header["concepts"]), record)
    if len(found) > MAX_PANELS:
        raise ConfigError(f"there is room for 1 to {MAX_PANELS} patterns, got {len(found)}: choose fewer runs")
    fig, panels = _panels(len(found), (4.6, 3.4))
    ids = sorted({k for record in found.values() for row in record.header["concepts"] for k in row})
    colours = fills(ids)
    for ax, record in zip(panels, found.values(), strict=False):
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


def threshold(records: Sequence[Record]) -> Figure:
    """Accuracy omitting drifts against delta, a line per algorithm, one panel per stream."""
    every = _points(records)
    known = {name: [summary for summary in some if _delta(summary) is not None] for name, some in every.items()}
    lines = {name: some for name, some in known.items() if some}
    if not lines:
        raise DataError("nothing to draw: no finished runs of an algorithm with a delta on a stream with known drifts")
    if len(lines) < len(every):
        rest = dict.fromkeys(algorithm for stream, algorithm in every if (stream, algorithm) not in lines)
        _log.warning("left out, since they have no delta: %s", ", ".join(rest))
    streams = sorted({stream for stream, _ in lines})
    names = list(dict.fromkeys(name for _, name in lines))
    fig, panels = _panels(len(streams), (4.6, 3.4))
    legend: dict[str, Artist] = {}
    for ax, stream in zip(panels, streams, strict=False):
        for k, name in enumerate(names):
            points = lines.get((stream, name), [])
            x = [float(summary.settings["delta"]) for summary in points]
            y = [summary.omitting_drifts.mean for summary in points if summary.omitting_drifts]
            spread = [summary.omitting_drifts.std or 0.0 for summary in points if summary.omitting_drifts]
            (line,) = ax.plot(x, y, color=STRONG[k % len(STRONG)], marker=MARKERS[k % len(MARKERS)], markersize=5)
            low, high = np.subtract(y, spread), np.add(y, spread)
            ax.fill_between(x, low, high, color=STRONG[k % len(STRONG)], alpha=0.18, linewidth=0)
            legend[name] = line
        _accuracy(ax, short(stream), "delta")
    key(fig, legend)
    return fig


def traffic(records: Sequence[Record]) -> Figure:
    """Accuracy omitting drifts against models sent, a point per algorithm and delta, one panel per stream."""
    lines = _points(records)
    if not lines:
        raise DataError("nothing to draw: no finished runs on a stream with known drifts")
    streams = sorted({stream for stream, _ in lines})
    names = list(dict.fromkeys(name for _, name in lines))
    known = [delta for points in lines.values() for summary in points if (delta := _delta(summary)) is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    scale = Normalize(low, high if high > low else low + 0.01)
    fig, panels = _panels(len(streams), (5.4, 3.8))
    legend: dict[str, Artist] = {}
    for ax, stream in zip(panels, streams, strict=False):
        for k, name in enumerate(names):
            points = lines.get((stream, name), [])
            x = [summary.models_sent_ratio for summary in points]
            y = [summary.omitting_drifts.mean for summary in points if summary.omitting_drifts]
            deltas = [_delta(summary) for summary in points]
            shades = ["#CCCCCC" if delta is None else colormaps["viridis"](scale(delta)) for delta in deltas]
            mark = MARKERS[k % len(MARKERS)]
            ax.scatter(x, y, color=shades, marker=mark, s=45, edgecolors="#222222", linewidths=0.5)
            legend[name] = Line2D([], [], linestyle="", marker=mark, color="#555555")
        _accuracy(ax, short(stream), "models sent, relative to one per client and round")
    if high > low:
        fig.colorbar(ScalarMappable(scale, colormaps["viridis"]), ax=panels[: len(streams)], label="delta")
    key(fig, legend)
    return fig


def classes() -> Figure:
    """FMoW's classes over time, all regions together and Africa alone, as shares."""
    counts, names = class_counts()
    fig, panels = _panels(2, (5.6, 3.6))
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


def _points(records: Sequence[Record]) -> dict[tuple[str, str], list[Summary]]:
    """The summaries of each stream and algorithm (with what else it is set to), by their delta where they have one."""
    found: dict[tuple[str, str], list[Summary]] = {}
    known = [summary for summary in summarise(records) if summary.omitting_drifts is not None]
    others = [{k: v for k, v in {**s.settings, **s.overrides}.items() if k != "delta"} for s in known]
    differs = differences([(s.stream, s.algorithm, other) for s, other in zip(known, others, strict=True)])
    for summary, own in zip(known, differs, strict=True):
        label = summary.algorithm + (f" ({describe(own)})" if own else "")
        found.setdefault((summary.stream, label), []).append(summary)
    return {name: sorted(some, key=lambda summary: _delta(summary) or 0.0) for name, some in found.items()}


def _delta(summary: Summary) -> float | None:
    delta: Any = summary.settings.get("delta")  # a record of another program may hold anything
    return float(delta) if isinstance(delta, int | float) and 0 <= delta <= 1e6 else None


def _panels(n: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    n_columns = n if n <= 3 else 2 if n == 4 else 3
    n_rows = math.ceil(n / n_columns)
    fig = Figure(figsize=(n_columns * size[0], n_rows * size[1] + 0.4), dpi=DPI, layout="constrained")
    panels = list(fig.subplots(n_rows, n_columns, squeeze=False).flat)
    for ax in panels[n:]:
        ax.remove()
    return fig, panels[:n]


def _accuracy(ax: Axes, title: str, x: str) -> None:
    ax.set_title(title, loc="left", fontsize=11)
    ax.set_xlabel(x)
    ax.set_ylabel("accuracy omitting drifts")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g} %"))
    ax.grid(axis="y", color="#E4E4E4")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
