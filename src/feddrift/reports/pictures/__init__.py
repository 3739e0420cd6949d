"""Pictures of records, drawn with Matplotlib."""

from __future__ import annotations

from feddrift.reports.pictures.accuracy import draw_accuracy
from feddrift.reports.pictures.clusters import draw_clusters
from feddrift.reports.pictures.patterns import draw_class_shares, draw_patterns
from feddrift.reports.pictures.ranks import draw_ranks
from feddrift.reports.pictures.style import save_picture
from feddrift.reports.pictures.tradeoffs import draw_threshold, draw_traffic

__all__ = [
    "draw_accuracy",
    "draw_class_shares",
    "draw_clusters",
    "draw_patterns",
    "draw_ranks",
    "draw_threshold",
    "draw_traffic",
    "save_picture",
]
