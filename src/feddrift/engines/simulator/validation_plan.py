"""Held-out batches for early stopping of local training (`Local.patience`), for all lanes of a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from feddrift.engines.local.engine import InProcessWorker
from feddrift.engines.simulator.moments import PartName, next_power_of_two
from feddrift.engines.worker import TrainingPlan
from feddrift.types import Local, Models

MIN_PADDED_ROWS = 64  # smallest padded number of rows: few shapes need few compilations


@dataclass(frozen=True)
class ValidationPlan:
    """Held-out rows of padded lanes, as arrays for the compiled program."""

    rows: Any  # [lane, row]
    weight: Any  # [lane, head, row]; the sum of a lane is 1
    interval: Any  # [lane], number of local steps between two checks
    last_loss: Any  # [lane], the loss at the last check; NaN: there was none

    @classmethod
    def make_empty(cls, n_lanes: int, n_heads: int = 1, n_rows: int = 0) -> ValidationPlan:
        """Return a plan without checks for lanes of this number of heads and of rows."""
        return cls(
            np.zeros((n_lanes, n_rows), dtype=np.int32), np.zeros((n_lanes, n_heads, n_rows), dtype=np.float32),
            np.zeros(n_lanes, dtype=np.int32), np.full(n_lanes, np.nan, dtype=np.float32),
        )  # fmt: skip


def build_validation_plan(
    worker: InProcessWorker,
    models: Models,
    plan: TrainingPlan,
    shape: tuple[int, int],
    last_losses: Mapping[PartName, float],
    local: Local,
) -> ValidationPlan:
    """Return the held-out rows of all lanes.

    Args:
        worker: The worker that has the data.
        models: The models.
        plan: The pairs of clients and models, and their data.
        shape: The padded number of lanes, and of heads in each lane.
        last_losses: The loss of each lane at its last check in this time step.
        local: The settings of local training.
    """
    w = plan.data
    parts = []
    for lane in range(plan.n_lanes):
        pairs = np.flatnonzero(plan.lane == lane)
        c = int(plan.client[pairs[0]])
        members = plan.model[pairs]
        weights = np.zeros((w.shape[0], len(members)))
        entries = np.flatnonzero((w.c == c) & np.isin(w.m, members))
        weights[w.t[entries], np.searchsorted(members, w.m[entries])] = w.value[entries]
        cells = worker.build_lane(c, [models.ids[m] for m in members], weights, local)
        parts.append(((c, models.family[members[0]]), *worker.prepare_validation(c, weights, cells, local)))
    n_rows = next_power_of_two(max(MIN_PADDED_ROWS, *(len(rows) for _, rows, _, _ in parts)))
    validation = ValidationPlan.make_empty(*shape, n_rows)
    validation.interval[:] = 1  # also for padding
    for lane, (name, rows, weight, interval) in enumerate(parts):
        validation.rows[lane, : len(rows)] = rows
        validation.weight[lane, : len(weight), : len(rows)] = weight
        validation.interval[lane] = interval
        validation.last_loss[lane] = last_losses.get(name, np.nan)
    return validation
