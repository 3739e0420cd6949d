"""The optimiser's moments of everything that trained in a time step, on the host or on the device."""

from __future__ import annotations

from typing import Any

import numpy as np

from feddrift.engines import optim
from feddrift.engines.lanes import Devices, Lanes, Optimiser
from feddrift.engines.worker import Work
from feddrift.trees import leaves, tree_map
from feddrift.types import Ints, Models

LARGE = 1 << 25  # bytes of moments that are not carried to the host and back in every round

Name = tuple[int, int]  # a client, and the id of a family or model


def power_of_two(n: int) -> int:
    """The next of 1, 2, 4, 8, ...: how many places to make for n, so that shapes seldom change."""
    return 1 << (n - 1).bit_length()


class MomentStore:
    """Optimiser moments of everything trained in this time step, as one stack, and where each part lies in it."""

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self.place: dict[Name, int] = {}  # the row of each part in the stack
        self.stack: Optimiser | None = None

    def recall(self, names: list[Name | None], like: list[Any], room: int) -> Optimiser:
        """The moments of these parts, zero for those that train for the first time in this time step.

        Zeros are made on the device if it is the only one and has room for so many lanes.
        """
        if self.stack is None:
            here = all(isinstance(leaf, np.ndarray) for leaf in like) or self.devices.mesh or len(names) > room
            arrays = np if here else like[0].__array_namespace__()
            zeros = [arrays.zeros((len(names), *leaf.shape[1:]), dtype=leaf.dtype) for leaf in like]
            return optim.start(zeros), np.zeros(len(names), dtype=np.float32)
        if self.place == {name: k for k, name in enumerate(names) if name} and len(self.stack[1]) == len(names):
            return self.stack
        places = np.array([self.place.get(name, -1) if name else -1 for name in names])
        return _rows(self.stack, places)

    def keep(self, names: list[Name | None], stack: Optimiser, room: int) -> None:
        """Store the moments of the parts just trained; those of idle parts are kept behind them, on the device only if
        they are large and there is room."""
        place = {name: k for k, name in enumerate(names) if name}
        idle = [name for name in self.place if name not in place]
        if self.stack is not None and idle:  # parts that rest in this call keep theirs
            at = np.full(self.devices.evenly(power_of_two(len(idle))), -1)  # padded: few shapes, few compilations
            at[: len(idle)] = [self.place[name] for name in idle]
            if _bytes(stack) < LARGE or len(names) + len(at) > room:
                stack, self.stack = tree_map(np.asarray, (stack, self.stack))
            stack = _joined(stack, _rows(self.stack, at))
            place |= {name: len(names) + k for k, name in enumerate(idle)}
        self.place, self.stack = place, stack

    def saved(self) -> tuple[list[tuple[Name, int]], Optimiser | None]:
        return list(self.place.items()), self.stack

    def restore(self, saved: tuple[list[tuple[Name, int]], Optimiser | None]) -> None:
        """The way back from `saved`."""
        self.place, self.stack = dict(saved[0]), saved[1]


def _bytes(stack: Optimiser) -> int:
    return sum(int(leaf.nbytes) for leaf in leaves(stack))


def _rows(stack: Optimiser, at: Ints) -> Optimiser:
    """The rows at these places, zeros where it is below 0: on the host, which compiles nothing, or where they are."""
    if _on_device(stack) and _bytes(stack) >= LARGE:
        from feddrift.engines import program

        return program.rows_of(stack, at.astype(np.int32))  # type: ignore[no-any-return]

    def rows(leaf: Any) -> Any:
        picked = np.asarray(leaf)[np.maximum(at, 0)]
        picked[at < 0] = 0
        return picked

    return tree_map(rows, stack)  # type: ignore[no-any-return]


def _joined(a: Optimiser, b: Optimiser) -> Optimiser:
    if _on_device(a):
        from feddrift.engines import program

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
