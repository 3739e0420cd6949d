"""What lies on a device, and what a server has done there: averages and lengths of updates that nobody else reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from feddrift._internal.device_arrays import Resident
from feddrift.averaging import cosines_of, lane_sizes, shares
from feddrift.engines.simulator import program
from feddrift.engines.simulator.lanes import Devices, allocate, beside, model_bucket, pad_rows
from feddrift.trees import map_trunk_and_head, split, tree_map, unsplit
from feddrift.types import Bools, Floats, Ints, Models, Params, Updates

Parts = tuple[list[Any], list[Any]]  # the arrays of trunks, and those of heads


@dataclass(frozen=True)
class OnDevice:
    """A `Place`: the devices of the simulator, with models in stacks of `model_bucket`."""

    devices: Devices

    def given(self, models: Models, size: int) -> tuple[Params, Any, Any]:
        """Parameters, the trunk each model stands on, and masks, padded to this size, on the devices."""
        trunk, mask = self.devices.put(beside(models, size))
        return self.stacks(models, size), trunk, mask

    def stacks(self, models: Models, size: int) -> Params:
        """The parameters on the devices, in stacks of this size; what lies there already is not sent again."""
        trunks, heads = (self._stacked(part, size) for part in self._parts(models, models.params))
        return unsplit(trunks, heads, self._trunk(models))

    def located(self, models: Models, size: int) -> tuple[Params, Ints, Ints]:
        """Return stacks on the devices that contain these models, and where the trunk and the head of each are.

        On a CPU, models that are in its stacks already stay there. Elsewhere copies take less time than compiling for
        stacks of many sizes: there, and where models are on the host, the stacks have this size.
        """
        trunks, heads = self._parts(models, models.params)
        if self.devices.one_cpu and all(map(self._has, [*trunks, *heads])):
            same_rows = all(np.array_equal(array.rows, part[0].rows) for part in (trunks, heads) for array in part)
            if same_rows:
                stacks = [array.stack for array in trunks], [array.stack for array in heads]
                rows = [part[0].rows if part else np.arange(len(models)) for part in (trunks, heads)]
                return unsplit(*stacks, self._trunk(models)), rows[0][models.trunk_index], rows[1]
        return self.stacks(models, size), models.trunk_index, np.arange(len(models))

    def _stacked(self, arrays: list[Any], size: int) -> list[Any]:
        """Arrays of equally many rows, as stacks of this size; copies of the first row are behind them."""
        if not all(map(self._has, arrays)):
            if self.devices.mesh is not None or len(arrays[0]) > 1:
                return [self.devices.put(pad_rows(np.asarray(array), size)) for array in arrays]
            arrays = [Resident(self, self.devices.put(np.asarray(array)), np.zeros(1, int)) for array in arrays]
        stacks: list[Any] = [array.stack for array in arrays]
        if all(len(array.stack) == size and np.array_equal(array.rows, np.arange(len(array))) for array in arrays):
            return stacks
        if self.devices.mesh is not None:
            return [self.devices.put(pad_rows(array.here, size)) for array in arrays]
        picked: list[Any] = program.picked(stacks, [_places(array.rows, size) for array in arrays])
        return picked

    def _has(self, array: Any) -> bool:
        return isinstance(array, Resident) and array.place is self

    def concatenated(self, arrays: Sequence[Any]) -> Any:
        """As `np.concatenate`; on the host where several devices would have to agree on it, or there is little room."""
        arrays = [array for array in arrays if len(array)]
        n = sum(map(len, arrays))
        if self.devices.mesh is not None or n > self.devices.room([arrays[0]]) // 2:
            return np.concatenate(arrays)
        if self.devices.one_cpu:  # a single pass over memory, where the compiled program takes one for each part
            return self._copied_together(arrays, n)
        parts = [array if self._has(array) else self._sent(array) for array in arrays]
        of, rows = np.repeat(np.arange(len(parts)), [len(part) for part in parts]), [part.rows for part in parts]
        size = model_bucket(n)
        given = _places(of, size), _places(np.concatenate(rows), size)
        return Resident(self, program.gathered([part.stack for part in parts], *given), np.arange(n))

    def _copied_together(self, arrays: Sequence[Any], n: int) -> Resident:
        stack = allocate((model_bucket(n), *arrays[0].shape[1:]), arrays[0].dtype)
        begin = 0
        for array in arrays:
            part = stack[begin : begin + len(array)]
            if self._has(array):
                np.take(np.asarray(array.stack), array.rows, axis=0, out=part, mode="clip")
            else:
                part[:] = array
            begin += len(array)
        return Resident(self, self.devices.put(stack), np.arange(n))

    def _sent(self, array: Any) -> Resident:
        stack = self.devices.put(pad_rows(np.asarray(array), model_bucket(len(array))))
        return Resident(self, stack, np.arange(len(array)))

    def models(self, models: Models, stacks: Params) -> Models:
        """The models whose parameters, in order, lie in these stacks."""
        rows = np.arange(len(models)), np.arange(len(models.families))
        return replace(models, params=map_trunk_and_head(self._resident, models, *rows, stacks))

    def updates(self, models: Models, stacks: Params, lanes: Ints, pairs: Ints) -> Params:
        """What lanes and pairs have trained, which lie so in these stacks."""
        return map_trunk_and_head(self._resident, models, pairs, lanes, stacks)

    def _resident(self, _: Any, stack: Any, rows: Ints) -> Any:
        """What went through the device in chunks is on the host, and stays there: it would not fit."""
        return stack[rows] if isinstance(stack, np.ndarray) else Resident(self, stack, rows)

    def finite(self, models: Models, updates: Updates) -> Bools:
        """As `averaging.finite`."""
        _, first = np.unique(updates.lane, return_index=True)
        sound = np.ones(len(first), dtype=bool)
        for part, lane in zip(self._parts(models, updates.params), (np.arange(len(first)), updates.lane), strict=True):
            if part:
                rows = np.asarray(_finite([leaf.stack for leaf in part]))[part[0].rows]
                sound[lane[~rows]] = False
        return sound

    def averaged(self, models: Models, updates: Updates) -> Models:
        """As `averaging.averaged`, by the data behind."""
        sound = self.finite(models, updates)
        old = self._parts(models, self.stacks(models, model_bucket(len(models))))
        new = self._parts(models, updates.params)
        trunk, size = lane_sizes(models, updates.model, updates.lane, updates.size)
        targets = (trunk, size, sound), (updates.model, updates.size, sound[updates.lane])
        averages = [self._average(*each) for each in zip(old, new, targets, strict=True)]
        return self.models(models, unsplit(averages[0], averages[1], self._trunk(models)))

    def _average(self, old: list[Any], new: list[Any], parts: tuple[Ints, Floats, Bools]) -> list[Any]:
        if not new:
            return old
        (target, size, sound), rows, n = parts, new[0].rows, len(new[0].stack)
        spread = partial(_spread, n, rows)
        order = np.zeros(n, dtype=np.int32)
        order[: len(rows)] = rows
        given = spread(target.astype(np.int32)), spread(shares(target, size).astype(np.float32)), order
        averages: list[Any] = program.averaged(
            self.devices.mesh, old, [leaf.stack for leaf in new], *given, np.int32(len(rows)), spread(sound)
        )
        return averages

    def moves(self, models: Models, updates: Updates) -> DeviceMoves:
        """As `averaging.moves`."""
        old = self._parts(models, self.stacks(models, model_bucket(len(models))))
        return DeviceMoves(old, self._parts(models, updates.params), models, updates)

    def _trunk(self, models: Models) -> Params:
        return tree_map(lambda _: False, models.params) if models.trunk is None else models.trunk

    def _parts(self, models: Models, params: Params) -> Parts:
        return split(params, self._trunk(models))


class DeviceMoves:
    """`resident.Moves`, of models and updates that lie on a device."""

    def __init__(self, old: Parts, new: Parts, models: Models, updates: Updates) -> None:
        self.old, self.new, self.models, self.updates = old, new, models, updates

    def mean_length(self, m: int) -> float:
        return float(np.sqrt(self._sum(_mean_square, m)))

    def lengths(self, m: int) -> Floats:
        return np.asarray(np.sqrt(self._sum(_squares, m)))

    def cosines(self, m: int) -> Floats:
        return cosines_of(self._sum(_products, m))

    def _sum(self, measure: Any, m: int) -> Any:
        """A measure of the updates of model m, added up over all arrays."""
        pairs = np.flatnonzero(self.updates.model == m)
        total: Any = 0.0
        for old, new, at, which in zip(
            self.old, self.new, (self.models.trunk_index[m], m), (self.updates.lane[pairs], pairs), strict=True
        ):
            if new:
                rows = new[0].rows[which]
                chosen = np.zeros(len(new[0].stack), dtype=np.float32)
                chosen[rows] = 1
                found = np.asarray(measure(old, [leaf.stack for leaf in new], np.int32(at), chosen), dtype=np.float64)
                for _ in range(found.ndim):
                    found = np.moveaxis(found, 0, -1)[..., rows]
                total = total + found
        return total


def _places(rows: Ints, size: int) -> npt.NDArray[np.int32]:
    """So many, the first again behind them."""
    return pad_rows(rows, size).astype(np.int32)


def _spread(n: int, rows: Ints, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[n], values at these rows."""
    spread = np.zeros(n, dtype=values.dtype)
    spread[rows] = values
    return spread


@jax.jit
def _finite(stacks: list[Any]) -> Any:
    return program.finite(stacks, len(stacks[0]))


def _moves(old: list[Any], new: list[Any], m: Any) -> list[Any]:
    """[row, parameter] of each array: how each row moved model m."""
    return [(stack - leaf[m]).reshape(len(stack), -1) for leaf, stack in zip(old, new, strict=True)]


@jax.jit
def _squares(old: list[Any], new: list[Any], m: Any, chosen: Any) -> Any:
    return sum((move * move).sum(axis=1) for move in _moves(old, new, m))


@jax.jit
def _mean_square(old: list[Any], new: list[Any], m: Any, chosen: Any) -> Any:
    with jax.default_matmul_precision("float32"):
        share = jnp.where(chosen > 0, chosen / chosen.sum(), 0)
        means = [share @ jnp.where(chosen[:, None] > 0, move, 0) for move in _moves(old, new, m)]
    return sum((mean * mean).sum() for mean in means)


@jax.jit
def _products(old: list[Any], new: list[Any], m: Any, chosen: Any) -> Any:
    with jax.default_matmul_precision("float32"):
        return sum(move @ move.T for move in _moves(old, new, m))
