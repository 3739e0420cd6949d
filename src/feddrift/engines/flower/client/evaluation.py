"""Scores of models at a client, on request of the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from feddrift.engines.flower.messages import Evaluate, EvaluateReply, RequestContext, ScoreSums
from feddrift.engines.flower.model_parts import Body
from feddrift.engines.flower.serialization import InvalidMessageError
from feddrift.engines.worker import MAX_SCORED_ROWS, Worker
from feddrift.types import Ints, Metric, Models


def handle_evaluate(
    worker: Worker, context: RequestContext, times: Sequence[int], request: Evaluate, models: Models
) -> Body:
    """Score models on the newest data, and on a sample of each stored cell.

    Args:
        worker: The worker of this client for the time step.
        context: The context of the request.
        times: The time steps with data, in order.
        request: The request.
        models: Its models.

    Returns:
        The reply.

    Raises:
        InvalidMessageError: The request is not valid.
    """
    if request.metric == "confusion":
        clients = np.flatnonzero(worker.known.counts[context.tau])  # this client if it has new data
        shape = 1, len(models), context.n_classes, context.n_classes
        counts = worker.confusion(models, clients) if len(clients) else np.zeros(shape, dtype=np.int64)
        return {"confusion": counts[0].tolist()}
    metric: Any = request.metric
    by: Any = request.by
    if metric not in get_args(Metric):
        raise InvalidMessageError(f"it requests the metric {metric!r}, legal are {', '.join(get_args(Metric))}")
    if by not in (None, "class"):
        raise InvalidMessageError(f"it requests scores by {str(by)[:40]!r}, legal is class")
    cells = np.array([(t, context.index) for t in times], dtype=np.int64).reshape(-1, 2)

    def sum_scores(cells: Ints, max_rows: int | None) -> list[ScoreSums]:
        """Return, for each cell, the number of scored rows, and the sum of each model's scores on them."""
        by_cell: list[ScoreSums] = []
        for _, sums, sizes in worker.score(models, cells, metric, max_rows, by):
            by_cell += zip(sizes.tolist(), np.swapaxes(sums, 0, 1).tolist(), strict=True)
        return by_cell

    new = sum_scores(cells[cells[:, 0] == context.tau], None)
    stored = dict(zip(times, sum_scores(cells, MAX_SCORED_ROWS), strict=True))
    return EvaluateReply(new[0] if new else None, stored).to_body()
