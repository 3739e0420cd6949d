"""Store of the optimiser's moments of all trunks and heads that train in a time step, on the host or on devices."""

from __future__ import annotations

from typing import Any

import numpy as np

from feddrift.engines.local import optim
from feddrift.engines.simulator.lanes import Devices, Lanes, Optimiser
from feddrift.engines.worker import TrainingPlan
from feddrift.trees import tree_leaves, tree_map
from feddrift.types import Ints, Models

MIN_DEVICE_BYTES = 1 << 25  # stacks of moments of this size stay on the device between rounds
MAX_COPIES_PER_PART = 3  # with more rows in all stacks for each part, most rows are out of date, and stacks are merged

PartName = tuple[int, int]  # a trunk or a head: a client, and the id of a family or of a model


def next_power_of_two(n: int) -> int:
    """Return the next of 1, 2, 4, 8, ..., a padded size for n that seldom changes."""
    return 1 << (n - 1).bit_length()


class OptimizerStateStore:
    """Moments of the optimiser for all trunks, or all heads, that have trained in this time step.

    They remain in the stacks in which they were trained. Stacks are merged only if parts of several stacks train
    together again, or if most of their rows are out of date.
    """

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self.place: dict[PartName, tuple[int, int]] = {}  # the stack of each part, and its row in this stack
        self.stacks: dict[int, Optimiser] = {}  # by number, the oldest first
        self.n_parts: dict[int, int] = {}  # number of parts of each stack when it was stored

    def get_moments(self, names: list[PartName | None], params: list[Any], max_rows: int) -> Optimiser:
        """Return the moments of parts, zeros for those that train for the first time in this time step.

        Args:
            names: The parts; None: padding.
            params: The arrays of their parameters.
            max_rows: The number of rows for which the device has memory. If there are more, or several devices, zeros
                are made on the host.
        """
        places = [self.place.get(name) if name else None for name in names]
        sources = {place[0] for place in places if place}
        if not sources:
            on_host = all(isinstance(leaf, np.ndarray) for leaf in params) or self.devices.mesh or len(names) > max_rows
            xp = np if on_host else params[0].__array_namespace__()
            return optim.init_moment_rows(xp, len(names), params), np.zeros(len(names), dtype=np.float32)
        if len(sources) > 1:
            self._merge_stacks(max_rows)
            places = [self.place.get(name) if name else None for name in names]
            sources = {place[0] for place in places if place}
        number = sources.pop()
        stack = self.stacks[number]
        rows = np.array([place[1] if place else -1 for place in places])
        is_part = np.array([name is not None for name in names])
        has_only_these = sum(place[0] == number for place in self.place.values()) == is_part.sum()
        if has_only_these and len(stack[1]) == len(names) and np.array_equal(rows[is_part], np.flatnonzero(is_part)):
            return stack  # training may overwrite it
        return _select_rows(stack, rows)

    def store_moments(self, names: list[PartName | None], stack: Optimiser, max_rows: int) -> None:
        """Store the moments of trained parts in place of their former moments.

        Args:
            names: The parts; None: padding.
            stack: Their moments.
            max_rows: The number of rows for which the device has memory. If all stacks have more, they are moved to the
                host.
        """
        number = max(self.stacks, default=-1) + 1
        self.place |= {name: (number, k) for k, name in enumerate(names) if name}
        self.stacks[number] = stack
        self.n_parts[number] = sum(name is not None for name in names)
        in_use = {k for k, _ in self.place.values()}
        self.stacks = {k: old for k, old in self.stacks.items() if k in in_use}
        self.n_parts = {k: n for k, n in self.n_parts.items() if k in in_use}
        if sum(self.n_parts.values()) > MAX_COPIES_PER_PART * len(self.place):
            self._merge_stacks(max_rows)
        elif sum(len(old[1]) for old in self.stacks.values()) > max_rows:
            self.stacks = {k: tree_map(np.asarray, old) for k, old in self.stacks.items()}

    def export_state(self) -> tuple[list[tuple[PartName, int]], Optimiser | None]:
        """Return all moments as one stack, and the row of each part, for a checkpoint."""
        if not self.stacks:
            return [], None
        self._merge_stacks(0)
        (stack,) = self.stacks.values()
        return [(name, row) for name, (_, row) in self.place.items()], stack

    def restore_state(self, saved: tuple[list[tuple[PartName, int]], Optimiser | None]) -> None:
        """Restore the moments that `export_state` returned."""
        places, stack = saved
        self.place = {name: (0, row) for name, row in places}
        self.stacks = {} if stack is None else {0: stack}
        self.n_parts = {number: len(places) for number in self.stacks}

    def _merge_stacks(self, max_rows: int) -> None:
        """Merge all stacks, the newest first, on the device only if they are large and the result fits into memory."""
        newest, *others = sorted(self.stacks, reverse=True)
        merged = self.stacks[newest]
        rows = {name: row for name, (number, row) in self.place.items() if number == newest}
        names = {k: [name for name, (number, _) in self.place.items() if number == k] for k in others}
        sizes = {k: self.devices.round_up(next_power_of_two(len(names[k]))) for k in others}  # few shapes
        on_host = _count_bytes(merged) < MIN_DEVICE_BYTES or len(merged[1]) + sum(sizes.values()) > max_rows
        for k in others:
            old_rows = np.full(sizes[k], -1)
            old_rows[: len(names[k])] = [self.place[name][1] for name in names[k]]
            stack = self.stacks[k]
            if on_host:
                merged, stack = tree_map(np.asarray, (merged, stack))
            rows |= {name: len(merged[1]) + i for i, name in enumerate(names[k])}
            merged = _join_stacks(merged, _select_rows(stack, old_rows))
        self.place = {name: (newest, row) for name, row in rows.items()}
        self.stacks = {newest: merged}
        self.n_parts = {newest: len(rows)}


def _count_bytes(stack: Optimiser) -> int:
    return sum(int(leaf.nbytes) for leaf in tree_leaves(stack))


def _select_rows(stack: Optimiser, rows: Ints) -> Optimiser:
    """Return rows of a stack, zeros for positions below 0; small stacks on the host, where nothing is compiled."""
    if _is_on_device(stack) and _count_bytes(stack) >= MIN_DEVICE_BYTES:
        from feddrift.engines.simulator import program

        return program.pick_moments(stack, rows.astype(np.int32))  # type: ignore[no-any-return]

    def select(leaf: Any) -> Any:
        selected = np.asarray(leaf)[np.maximum(rows, 0)]
        selected[rows < 0] = 0
        return selected

    return tree_map(select, stack)  # type: ignore[no-any-return]


def _join_stacks(a: Optimiser, b: Optimiser) -> Optimiser:
    if _is_on_device(a):
        from feddrift.engines.simulator import program

        return program.join_moments(a, b)  # type: ignore[no-any-return]
    return tree_map(lambda x, y: np.concatenate([x, y]), a, b)  # type: ignore[no-any-return]


def _is_on_device(stack: Optimiser) -> bool:
    return not isinstance(stack[1], np.ndarray)


def name_parts(
    models: Models, plan: TrainingPlan, lanes: Lanes, pairs: Ints
) -> tuple[list[PartName | None], list[PartName | None]]:
    """Return the names under which the moments of the trunks and heads of lanes are stored.

    Args:
        models: The models.
        plan: The pairs of clients and models.
        lanes: The padded lanes of the plan.
        pairs: [pair], the position of each pair among the flat heads.

    Returns:
        The names of trunks, by lane, and of heads; None for padding.
    """
    trunks: list[PartName | None] = [None] * len(lanes.trunk)
    heads: list[PartName | None] = [None] * len(lanes.head_share)
    for c, m, lane, pair in zip(plan.client, plan.model, plan.lane, pairs, strict=True):
        trunks[lane] = int(c), models.family[m]
        heads[pair] = int(c), models.ids[m]
    return trunks, heads
