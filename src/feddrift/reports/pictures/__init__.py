"""Pictures, drawn from records alone."""

from __future__ import annotations

from feddrift.reports.pictures.accuracy import accuracy
from feddrift.reports.pictures.clusters import clusters
from feddrift.reports.pictures.patterns import classes, patterns
from feddrift.reports.pictures.ranks import ranks
from feddrift.reports.pictures.style import save
from feddrift.reports.pictures.tradeoffs import threshold, traffic

__all__ = ["accuracy", "classes", "clusters", "patterns", "ranks", "save", "threshold", "traffic"]
