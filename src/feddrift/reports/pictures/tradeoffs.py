"""Pictures of accuracy against a threshold, and against traffic."""

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
from feddrift.reports.labels import find_differing_settings, format_settings
from feddrift.reports.pictures.style import MARKERS, STRONG, add_legend, create_panels, shorten_name
from feddrift.reports.summary import Summary, summarise
from feddrift.runs.record import Record

_log = logging.getLogger("feddrift")


def draw_threshold(records: Sequence[Record]) -> Figure:
    """Draw accuracy omitting drifts against delta: a line for each algorithm, a panel for each stream.

    Raises:
        DataError: No complete run has a delta and known drifts.
    """
    groups = _group_summaries(records)
    with_delta = {
        name: [summary for summary in group if _get_delta(summary) is not None] for name, group in groups.items()
    }
    lines = {name: group for name, group in with_delta.items() if group}
    if not lines:
        raise DataError("nothing to draw: no finished runs of an algorithm with a delta on a stream with known drifts")
    if len(lines) < len(groups):
        without_delta = dict.fromkeys(algorithm for stream, algorithm in groups if (stream, algorithm) not in lines)
        _log.warning("left out, since they have no delta: %s", ", ".join(without_delta))
    streams = sorted({stream for stream, _ in lines})
    names = list(dict.fromkeys(name for _, name in lines))
    fig, panels = create_panels(len(streams), (4.6, 3.4))
    legend: dict[str, Artist] = {}
    for ax, stream in zip(panels, streams, strict=False):
        for k, name in enumerate(names):
            points = lines.get((stream, name), [])
            x = [float(summary.settings["delta"]) for summary in points]
            y = [summary.omitting_drifts.mean for summary in points if summary.omitting_drifts]
            spread = [summary.omitting_drifts.std or 0.0 for summary in points if summary.omitting_drifts]
            (line,) = ax.plot(x, y, color=STRONG[k % len(STRONG)], marker=MARKERS[k % len(MARKERS)], markersize=5)
            ax.fill_between(
                x, np.subtract(y, spread), np.add(y, spread), color=STRONG[k % len(STRONG)], alpha=0.18, linewidth=0
            )
            legend[name] = line
        _format_axes(ax, shorten_name(stream), "delta")
    add_legend(fig, legend)
    return fig


def draw_traffic(records: Sequence[Record]) -> Figure:
    """Draw accuracy omitting drifts against models sent: a point for each algorithm and delta, a panel for each stream.

    Raises:
        DataError: No complete run has known drifts.
    """
    lines = _group_summaries(records)
    if not lines:
        raise DataError("nothing to draw: no finished runs on a stream with known drifts")
    streams = sorted({stream for stream, _ in lines})
    names = list(dict.fromkeys(name for _, name in lines))
    all_deltas = [_get_delta(summary) for points in lines.values() for summary in points]
    known_deltas = [delta for delta in all_deltas if delta is not None]
    low = min(known_deltas, default=0.0)
    high = max(known_deltas, default=0.0)
    scale = Normalize(low, high if high > low else low + 0.01)
    fig, panels = create_panels(len(streams), (5.4, 3.8))
    legend: dict[str, Artist] = {}
    for ax, stream in zip(panels, streams, strict=False):
        for k, name in enumerate(names):
            points = lines.get((stream, name), [])
            x = [summary.models_sent_ratio for summary in points]
            y = [summary.omitting_drifts.mean for summary in points if summary.omitting_drifts]
            deltas = [_get_delta(summary) for summary in points]
            shades = ["#CCCCCC" if delta is None else colormaps["viridis"](scale(delta)) for delta in deltas]
            marker = MARKERS[k % len(MARKERS)]
            ax.scatter(x, y, color=shades, marker=marker, s=45, edgecolors="#222222", linewidths=0.5)
            legend[name] = Line2D([], [], linestyle="", marker=marker, color="#555555")
        _format_axes(ax, shorten_name(stream), "models sent, relative to one per client and round")
    if high > low:
        fig.colorbar(ScalarMappable(scale, colormaps["viridis"]), ax=panels[: len(streams)], label="delta")
    add_legend(fig, legend)
    return fig


def _group_summaries(records: Sequence[Record]) -> dict[tuple[str, str], list[Summary]]:
    """Group summaries by stream and label, sorted by delta; labels contain the settings that differ, except delta."""
    points: dict[tuple[str, str], list[Summary]] = {}
    summaries = [summary for summary in summarise(records) if summary.omitting_drifts is not None]
    other_settings = [{k: v for k, v in {**s.settings, **s.overrides}.items() if k != "delta"} for s in summaries]
    differs = find_differing_settings(
        [(s.stream, s.algorithm, settings) for s, settings in zip(summaries, other_settings, strict=True)]
    )
    for summary, own in zip(summaries, differs, strict=True):
        label = summary.algorithm + (f" ({format_settings(own)})" if own else "")
        points.setdefault((summary.stream, label), []).append(summary)
    return {name: sorted(group, key=lambda summary: _get_delta(summary) or 0.0) for name, group in points.items()}


def _get_delta(summary: Summary) -> float | None:
    delta: Any = summary.settings.get("delta")  # a record of another program may have any value
    return float(delta) if isinstance(delta, int | float) and 0 <= delta <= 1e6 else None


def _format_axes(ax: Axes, title: str, x_label: str) -> None:
    ax.set_title(title, loc="left", fontsize=11)
    ax.set_xlabel(x_label)
    ax.set_ylabel("accuracy omitting drifts")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g} %"))
    ax.grid(axis="y", color="#E4E4E4")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
