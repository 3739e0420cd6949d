"""Accuracy against a threshold, and against traffic."""

from __future__ import annotations

import logging
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
from matplotlib.ticker import FuncFormatter

from feddrift.errors import DataError
from feddrift.reports.labels import describe, differences
from feddrift.reports.pictures.style import MARKERS, STRONG, key, panels_of, short
from feddrift.reports.summary import Summary, summarise
from feddrift.runs.record import Record

_log = logging.getLogger("feddrift")


def threshold(records: Sequence[Record]) -> Figure:
    """Accuracy omitting drifts against delta, a line per algorithm, one panel per stream."""
    every = _points(records)
    with_delta = {name: [summary for summary in group if _delta(summary) is not None] for name, group in every.items()}
    lines = {name: group for name, group in with_delta.items() if group}
    if not lines:
        raise DataError("nothing to draw: no finished runs of an algorithm with a delta on a stream with known drifts")
    if len(lines) < len(every):
        without_delta = dict.fromkeys(algorithm for stream, algorithm in every if (stream, algorithm) not in lines)
        _log.warning("left out, since they have no delta: %s", ", ".join(without_delta))
    streams = sorted({stream for stream, _ in lines})
    names = list(dict.fromkeys(name for _, name in lines))
    fig, panels = panels_of(len(streams), (4.6, 3.4))
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
    all_deltas = [delta for points in lines.values() for summary in points if (delta := _delta(summary)) is not None]
    low, high = min(all_deltas, default=0.0), max(all_deltas, default=0.0)
    scale = Normalize(low, high if high > low else low + 0.01)
    fig, panels = panels_of(len(streams), (5.4, 3.8))
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


def _points(records: Sequence[Record]) -> dict[tuple[str, str], list[Summary]]:
    """The summaries of each stream and algorithm (with what else it is set to), by their delta where they have one."""
    points: dict[tuple[str, str], list[Summary]] = {}
    summaries = [summary for summary in summarise(records) if summary.omitting_drifts is not None]
    other_settings = [{k: v for k, v in {**s.settings, **s.overrides}.items() if k != "delta"} for s in summaries]
    differs = differences(
        [(s.stream, s.algorithm, settings) for s, settings in zip(summaries, other_settings, strict=True)]
    )
    for summary, own in zip(summaries, differs, strict=True):
        label = summary.algorithm + (f" ({describe(own)})" if own else "")
        points.setdefault((summary.stream, label), []).append(summary)
    return {name: sorted(group, key=lambda summary: _delta(summary) or 0.0) for name, group in points.items()}


def _delta(summary: Summary) -> float | None:
    delta: Any = summary.settings.get("delta")  # a record of another program may hold anything
    return float(delta) if isinstance(delta, int | float) and 0 <= delta <= 1e6 else None


def _accuracy(ax: Axes, title: str, x: str) -> None:
    ax.set_title(title, loc="left", fontsize=11)
    ax.set_xlabel(x)
    ax.set_ylabel("accuracy omitting drifts")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g} %"))
    ax.grid(axis="y", color="#E4E4E4")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
