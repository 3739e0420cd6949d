"""What clients look at to see whether more local steps pay: `Local.patience` for all lanes of a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from feddrift.engines.local.engine import InProcessWorker
from feddrift.engines.simulator.moments import Name, power_of_two
from feddrift.engines.worker import Work
from feddrift.types import Local, Models

LEAST = 64  # rows that there is room for: few shapes, few compilations


@dataclass(frozen=True)
class Looks:
    """The held-out rows of padded lanes, as arrays for the compiled program."""

    rows: Any  # [lane, row]
    weight: Any  # [lane, head, row], of a lane adding up to 1
    every: Any  # [lane], local steps from one look to the next
    before: Any  # [lane], the loss at the last look, NaN: there was none

    @classmethod
    def none(cls, n_lanes: int, n_heads: int = 1, n_rows: int = 0) -> Looks:
        """No looks yet, with room for some."""
        return cls(
            np.zeros((n_lanes, n_rows), dtype=np.int32), np.zeros((n_lanes, n_heads, n_rows), dtype=np.float32),
            np.zeros(n_lanes, dtype=np.int32), np.full(n_lanes, np.nan, dtype=np.float32),
        )  # fmt: skip


def looks_of(
    worker: InProcessWorker,
    models: Models,
    work: Work,
    shape: tuple[int, int],
    past: Mapping[Name, float],
    local: Local,
) -> Looks:
    """What each lane looks at, padded to this number of lanes and of heads in each."""
    w, each = work.data, []
    for lane in range(work.n_lanes):
        pairs = np.flatnonzero(work.lane == lane)
        c, members = int(work.client[pairs[0]]), work.model[pairs]
        weights = np.zeros((w.shape[0], len(members)))
        mine = np.flatnonzero((w.c == c) & np.isin(w.m, members))
        weights[w.t[mine], np.searchsorted(members, w.m[mine])] = w.value[mine]
        drawn = worker.lane(c, [models.ids[m] for m in members], weights, local)
        each.append(((c, models.family[members[0]]), *worker.looks(c, weights, drawn, local)))
    looks = Looks.none(*shape, power_of_two(max(LEAST, *(len(rows) for _, rows, _, _ in each))))
    looks.every[:] = 1  # of padding, too
    for lane, (name, rows, weight, every) in enumerate(each):
        looks.rows[lane, : len(rows)], looks.weight[lane, : len(weight), : len(rows)] = rows, weight
        looks.every[lane], looks.before[lane] = every, past.get(name, np.nan)
    return looks
