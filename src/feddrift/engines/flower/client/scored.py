"""Scores over the network: a client's answer to Evaluate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from feddrift.engines.flower.messages import About, Evaluate, Scores, Sums
from feddrift.engines.flower.model_parts import Body
from feddrift.engines.flower.serialization import Refused
from feddrift.engines.worker import SCORE_ROWS, Worker
from feddrift.types import Ints, Metric, Models


def answer(worker: Worker, task: About, times: Sequence[int], request: Evaluate, models: Models) -> Body:
    """What a client says that has data of these times."""
    if request.metric == "confusion":
        new_data = np.flatnonzero(worker.known.counts[task.tau])  # this client, or nobody
        shape = 1, len(models), task.n_classes, task.n_classes
        counts = worker.confusion(models, new_data) if len(new_data) else np.zeros(shape, dtype=np.int64)
        return {"confusion": counts[0].tolist()}
    metric: Any = request.metric
    by: Any = request.by
    if metric not in get_args(Metric):
        raise Refused(f"it asks for the metric {metric!r}, legal are {', '.join(get_args(Metric))}")
    if by not in (None, "class"):
        raise Refused(f"it asks for scores by {str(by)[:40]!r}, legal is class")
    cells = np.array([(t, task.index) for t in times], dtype=np.int64).reshape(-1, 2)

    def sums(cells: Ints, most: int | None) -> list[Sums]:
        """Of each cell: how many rows were looked at, and each model's mistakes or losses on them."""
        per_cell: list[Sums] = []
        for _, values, sizes in worker.score(models, cells, metric, most, by):
            per_cell += zip(sizes.tolist(), np.swapaxes(values, 0, 1).tolist(), strict=True)
        return per_cell

    new = sums(cells[cells[:, 0] == task.tau], None)
    stored = dict(zip(times, sums(cells, SCORE_ROWS), strict=True))
    return Scores(new[0] if new else None, stored).body()
