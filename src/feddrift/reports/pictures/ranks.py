"""Ranks over streams: each of them, their means, and which means do not differ."""

from __future__ import annotations

import numpy as np

from feddrift.reports.pictures.style import OTHER, STRONG, Picture
from feddrift.reports.ranks import Ranking


def ranks(ranking: Ranking, ours: str | None = None) -> Picture:
    """A line for each method, the best first; within the band means do not differ from the best. `ours` stands out."""
    fig = Picture(figsize=(8, 0.24 * len(ranking.methods) + 1.2), layout="constrained")
    axes, at = fig.subplots(), np.arange(len(ranking.methods))[::-1]
    axes.axvspan(
        ranking.mean[0], ranking.mean[0] + ranking.critical_difference, color=STRONG[0], alpha=0.08, linewidth=0
    )
    axes.scatter(ranking.ranks.T, np.tile(at, (len(ranking.streams), 1)), s=9, color=OTHER, linewidths=0)
    color = [STRONG[1] if method == ours else STRONG[0] for method in ranking.methods]
    axes.scatter(ranking.mean, at, s=42, color=color, zorder=3)
    axes.set_yticks(at, list(ranking.methods), fontsize=8)
    axes.set_ylim(-0.8, len(ranking.methods) - 0.2)
    axes.set_xlabel("rank on each stream (grey) and mean rank\nin the band: not different from the first at 5 %")
    axes.spines[["top", "right"]].set_visible(False)
    return fig
