"""Picture of the ranks of methods, their means, and the band of means that do not differ from the best."""

from __future__ import annotations

import numpy as np

from feddrift.reports.pictures.style import OTHER, STRONG, Picture
from feddrift.reports.ranks import Ranking


def draw_ranks(ranking: Ranking, highlighted: str | None = None) -> Picture:
    """Draw the ranks of each method on a line, the best method first; means in the band do not differ from the best.

    Args:
        ranking: The ranks.
        highlighted: The method whose mean gets another colour.
    """
    fig = Picture(figsize=(8, 0.24 * len(ranking.methods) + 1.2), layout="constrained")
    axes = fig.subplots()
    height = np.arange(len(ranking.methods))[::-1]
    axes.axvspan(
        ranking.mean[0], ranking.mean[0] + ranking.critical_difference, color=STRONG[0], alpha=0.08, linewidth=0
    )
    axes.scatter(ranking.ranks.T, np.tile(height, (len(ranking.streams), 1)), s=9, color=OTHER, linewidths=0)
    color = [STRONG[1] if method == highlighted else STRONG[0] for method in ranking.methods]
    axes.scatter(ranking.mean, height, s=42, color=color, zorder=3)
    axes.set_yticks(height, list(ranking.methods), fontsize=8)
    axes.set_ylim(-0.8, len(ranking.methods) - 0.2)
    axes.set_xlabel("rank on each stream (grey) and mean rank\nin the band: not different from the first at 5 %")
    axes.spines[["top", "right"]].set_visible(False)
    return fig
