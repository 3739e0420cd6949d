"""The optimiser's moments of everything that trained in a time step, on the host or on the device."""

from __future__ import annotations

from typing import Any

import numpy as np

from feddrift.engines.local import optim
from feddrift.engines.simulator.lanes import Devices, Lanes, Optimiser
from feddrift.engines.worker import Work
from feddrift.trees import leaves, tree_map
from feddrift.types import Ints, Models

LARGE = 1 << 25  # bytes of moments that are not carried to the host and back in every round
MAX_COPIES_PER_PART = 3  # moments in all stacks for each part, most of them out of date: then stacks are joined

Name = tuple[int, int]  # a client, and the id of a family or model


def power_of_two(n: int) -> int:
    """The next of 1, 2, 4, 8, ...: how many places to make for n, so that shapes seldom change."""
    return 1 << (n - 1).bit_length()


class MomentStore:
    """The optimiser's moments of all lanes trained in this time step, in the stacks in which they were trained.

    Stacks are joined only where lanes of several train together again, or where most of their rows are out of date.
    """

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self.place: dict[Name, tuple[int, int]] = {}  # the stack of each part, and its row there
        self.stacks: dict[int, Optimiser] = {}  # by number, from the oldest on
        self.n_parts: dict[int, int] = {}  # how many parts each stack had when it was stored

    def recall(self, names: list[Name | None], like: list[Any], room: int) -> Optimiser:
        """Return the moments of these parts, zero for those that train for the first time in this time step.

        Zeros are made on the device if it is the only one and has room for so many lanes.
        """
        places = [self.place.get(name) if name else None for name in names]
        sources = {place[0] for place in places if place}
        if not sources:
            here = all(isinstance(leaf, np.ndarray) for leaf in like) or self.devices.mesh or len(names) > room
            arrays = np if here else like[0].__array_namespace__()
            return optim.start_rows(arrays, len(names), like), np.zeros(len(names), dtype=np.float32)
        if len(sources) > 1:
            self._merge(room)
            places = [self.place.get(name) if name else None for name in names]
            sources = {place[0] for place in places if place}
        number = sources.pop()
        stack = self.stacks[number]
        rows = np.array([place[1] if place else -1 for place in places])
        named = np.array([name is not None for name in names])
        only_these = sum(place[0] == number for place in self.place.values()) == named.sum()
        if only_these and len(stack[1]) == len(names) and np.array_equal(rows[named], np.flatnonzero(named)):
            return stack  # whoever trains with it may overwrite it
        return _rows(stack, rows)

    def keep(self, names: list[Name | None], stack: Optimiser, room: int) -> None:
        """Store the moments of the parts just trained, and forget those that they replace.

        Stacks stay on the device as long as there is room for all of them.
        """
        number = max(self.stacks, default=-1) + 1
        self.place |= {name: (number, k) for k, name in enumerate(names) if name}
        self.stacks[number] = stack
        self.n_parts[number] = sum(name is not None for name in names)
        in_use = {of_stack for of_stack, _ in self.place.values()}
        self.stacks = {k: kept for k, kept in self.stacks.items() if k in in_use}
        self.n_parts = {k: n for k, n in self.n_parts.items() if k in in_use}
        if sum(self.n_parts.values()) > MAX_COPIES_PER_PART * len(self.place):
            self._merge(room)
        elif sum(len(kept[1]) for kept in self.stacks.values()) > room:
            self.stacks = {k: tree_map(np.asarray, kept) for k, kept in self.stacks.items()}

    def saved(self) -> tuple[list[tuple[Name, int]], Optimiser | None]:
        """Return all moments as one stack, and the row of each part, for a checkpoint."""
        if not self.stacks:
            return [], None
        self._merge(0)
        (stack,) = self.stacks.values()
        return [(name, row) for name, (_, row) in self.place.items()], stack

    def restore(self, saved: tuple[list[tuple[Name, int]], Optimiser | None]) -> None:
        """The way back from `saved`."""
        places, stack = saved
        self.place = {name: (0, row) for name, row in places}
        self.stacks = {} if stack is None else {0: stack}
        self.n_parts = {number: len(places) for number in self.stacks}

    def _merge(self, room: int) -> None:
        """Join all stacks, the newest first, on the device only if they are large and there is room for the result."""
        newest, *others = sorted(self.stacks, reverse=True)
        merged = self.stacks[newest]
        rows = {name: row for name, (number, row) in self.place.items() if number == newest}
        idle = {k: [name for name, (number, _) in self.place.items() if number == k] for k in others}
        sizes = {k: self.devices.evenly(power_of_two(len(names))) for k, names in idle.items()}  # few shapes
        on_host = _bytes(merged) < LARGE or len(merged[1]) + sum(sizes.values()) > room
        for k in others:
            at = np.full(sizes[k], -1)
            at[: len(idle[k])] = [self.place[name][1] for name in idle[k]]
            stack = self.stacks[k]
            if on_host:
                merged, stack = tree_map(np.asarray, (merged, stack))
            rows |= {name: len(merged[1]) + i for i, name in enumerate(idle[k])}
            merged = _joined(merged, _rows(stack, at))
        self.place = {name: (newest, row) for name, row in rows.items()}
        self.stacks = {newest: merged}
        self.n_parts = {newest: len(rows)}


def _bytes(stack: Optimiser) -> int:
    return sum(int(leaf.nbytes) for leaf in leaves(stack))


def _rows(stack: Optimiser, at: Ints) -> Optimiser:
    """The rows at these places, zeros where it is below 0: on the host, which compiles nothing, or where they are."""
    if _on_device(stack) and _bytes(stack) >= LARGE:
        from feddrift.engines.simulator import program

        return program.rows_of(stack, at.astype(np.int32))  # type: ignore[no-any-return]

    def rows(leaf: Any) -> Any:
        picked = np.asarray(leaf)[np.maximum(at, 0)]
        picked[at < 0] = 0
        return picked

    return tree_map(rows, stack)  # type: ignore[no-any-return]


def _joined(a: Optimiser, b: Optimiser) -> Optimiser:
    if _on_device(a):
        from feddrift.engines.simulator import program

        return program.joined(a, b)  # type: ignore[no-any-return]
    return tree_map(lambda x, y: np.concatenate([x, y]), a, b)  # type: ignore[no-any-return]


def _on_device(stack: Optimiser) -> bool:
    return not isinstance(stack[1], np.ndarray)


def names_of(models: Models, work: Work, described: Lanes, pairs: Ints) -> tuple[list[Name | None], list[Name | None]]:
    """Under which names the moments of lanes and pairs are kept; None for padding."""
    lanes: list[Name | None] = [None] * len(described.trunk)
    heads: list[Name | None] = [None] * len(described.head_share)
    for c, m, lane, at in zip(work.client, work.model, work.lane, pairs, strict=True):
        lanes[lane], heads[at] = (int(c), models.family[m]), (int(c), models.ids[m])
    return lanes, heads
