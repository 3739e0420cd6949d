"""Storage of models and updates on devices, and the server's computations with them: averages and update geometry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from feddrift._internal.device_arrays import StackView
from feddrift.averaging import compute_cosines, compute_shares, sum_lane_sizes
from feddrift.engines.simulator import program
from feddrift.engines.simulator.lanes import (
    Devices,
    allocate_aligned_array,
    pad_model_count,
    pad_rows,
    pad_trunks_and_masks,
)
from feddrift.trees import join_trunk_and_head, map_trunk_and_head, split_trunk_and_head, tree_map
from feddrift.types import Bools, Floats, Ints, Models, Params, Updates

Parts = tuple[list[Any], list[Any]]  # the arrays of trunks, and those of heads


@dataclass(frozen=True)
class SimulatorDevice:
    """An `UpdateDevice`: the devices of the simulator, with models in stacks of `pad_model_count` rows."""

    devices: Devices

    def put_models(self, models: Models, size: int) -> tuple[Params, Any, Any]:
        """Return the parameters, the position of each model's trunk, and the masks, on the devices.

        Args:
            models: The models.
            size: The number of rows to which they are padded.
        """
        trunk, mask = self.devices.put_arrays(pad_trunks_and_masks(models, size))
        return self.put_stacks(models, size), trunk, mask

    def put_stacks(self, models: Models, size: int) -> Params:
        """Return the parameters on the devices in stacks of this size; arrays that are there already are not sent."""
        trunks, heads = (self._build_stacks(part, size) for part in self._split_params(models, models.params))
        return join_trunk_and_head(trunks, heads, self._mark_trunk(models))

    def locate_models(self, models: Models, size: int) -> tuple[Params, Ints, Ints]:
        """Return stacks on the devices that contain these models, and the rows of each model's trunk and head.

        On a CPU, models that are in stacks already are not copied. On other devices copying takes less time than
        compiling for stacks of many sizes.

        Args:
            models: The models.
            size: The size of new stacks.
        """
        trunks, heads = self._split_params(models, models.params)
        if self.devices.one_cpu and all(map(self._contains, [*trunks, *heads])):
            same_rows = all(np.array_equal(array.rows, part[0].rows) for part in (trunks, heads) for array in part)
            if same_rows:
                stacks = [array.stack for array in trunks], [array.stack for array in heads]
                rows = [part[0].rows if part else np.arange(len(models)) for part in (trunks, heads)]
                return join_trunk_and_head(*stacks, self._mark_trunk(models)), rows[0][models.trunk_index], rows[1]
        return self.put_stacks(models, size), models.trunk_index, np.arange(len(models))

    def _build_stacks(self, arrays: list[Any], size: int) -> list[Any]:
        """Return arrays with the same number of rows as stacks of this size, padded with copies of the first row."""
        if not all(map(self._contains, arrays)):
            if self.devices.mesh is not None or len(arrays[0]) > 1:
                return [self.devices.put_arrays(pad_rows(np.asarray(array), size)) for array in arrays]
            arrays = [StackView(self, self.devices.put_arrays(np.asarray(array)), np.zeros(1, int)) for array in arrays]
        stacks: list[Any] = [array.stack for array in arrays]
        if all(len(array.stack) == size and np.array_equal(array.rows, np.arange(len(array))) for array in arrays):
            return stacks
        if self.devices.mesh is not None:
            return [self.devices.put_arrays(pad_rows(array.host_array, size)) for array in arrays]
        pick_rows: list[Any] = program.pick_rows(stacks, [_pad_positions(array.rows, size) for array in arrays])
        return pick_rows

    def _contains(self, array: Any) -> bool:
        return isinstance(array, StackView) and array.storage is self

    def concatenate_arrays(self, arrays: Sequence[Any]) -> Any:
        """Concatenate arrays like `np.concatenate`, on the host if there are several devices or too little memory."""
        arrays = [array for array in arrays if len(array)]
        n = sum(map(len, arrays))
        if self.devices.mesh is not None or n > self.devices.count_fitting_lanes([arrays[0]]) // 2:
            return np.concatenate(arrays)
        if self.devices.one_cpu:  # in a single pass over memory; the compiled program needs one for each part
            return self._concatenate_on_cpu(arrays, n)
        parts = [array if self._contains(array) else self._send_array(array) for array in arrays]
        size = pad_model_count(n)
        part_of_row = _pad_positions(np.repeat(np.arange(len(parts)), [len(part) for part in parts]), size)
        rows = _pad_positions(np.concatenate([part.rows for part in parts]), size)
        return StackView(self, program.gather_rows([part.stack for part in parts], part_of_row, rows), np.arange(n))

    def _concatenate_on_cpu(self, arrays: Sequence[Any], n: int) -> StackView:
        stack = allocate_aligned_array((pad_model_count(n), *arrays[0].shape[1:]), arrays[0].dtype)
        begin = 0
        for array in arrays:
            part = stack[begin : begin + len(array)]
            if self._contains(array):
                np.take(np.asarray(array.stack), array.rows, axis=0, out=part, mode="clip")
            else:
                part[:] = array
            begin += len(array)
        return StackView(self, self.devices.put_arrays(stack), np.arange(n))

    def _send_array(self, array: Any) -> StackView:
        stack = self.devices.put_arrays(pad_rows(np.asarray(array), pad_model_count(len(array))))
        return StackView(self, stack, np.arange(len(array)))

    def wrap_models(self, models: Models, stacks: Params) -> Models:
        """Return the models with parameters in the first rows of these stacks."""
        rows = np.arange(len(models)), np.arange(len(models.families))
        return replace(models, params=map_trunk_and_head(self._wrap_rows, models, *rows, stacks))

    def wrap_updates(self, models: Models, stacks: Params, lanes: Ints, pairs: Ints) -> Params:
        """Return the parameters of updates that are in stacks on the devices.

        Args:
            models: The models.
            stacks: The stacks.
            lanes: [lane], the row of the trunk of each lane.
            pairs: [pair], the row of the head of each pair.
        """
        return map_trunk_and_head(self._wrap_rows, models, pairs, lanes, stacks)

    def _wrap_rows(self, _: Any, stack: Any, rows: Ints) -> Any:
        """Return these rows: a view if the stack is on devices, a copy if it is on the host (trained in chunks)."""
        return stack[rows] if isinstance(stack, np.ndarray) else StackView(self, stack, rows)

    def find_finite_lanes(self, models: Models, updates: Updates) -> Bools:
        """Return [lane], whether all parameters are finite: see `averaging.find_finite_lanes`."""
        _, first = np.unique(updates.lane, return_index=True)
        is_finite = np.ones(len(first), dtype=bool)
        for part, lane in zip(
            self._split_params(models, updates.params), (np.arange(len(first)), updates.lane), strict=True
        ):
            if part:
                rows = np.asarray(_find_finite_rows([leaf.stack for leaf in part]))[part[0].rows]
                is_finite[lane[~rows]] = False
        return is_finite

    def average_updates(self, models: Models, updates: Updates) -> Models:
        """Return the models with the averages of their updates: see `averaging.average_updates`."""
        is_finite = self.find_finite_lanes(models, updates)
        old = self._split_params(models, self.put_stacks(models, pad_model_count(len(models))))
        new = self._split_params(models, updates.params)
        trunk, size = sum_lane_sizes(models, updates.model, updates.lane, updates.size)
        targets = (trunk, size, is_finite), (updates.model, updates.size, is_finite[updates.lane])
        averages = [self._average_part(*part) for part in zip(old, new, targets, strict=True)]
        return self.wrap_models(models, join_trunk_and_head(averages[0], averages[1], self._mark_trunk(models)))

    def _average_part(self, old: list[Any], new: list[Any], targets: tuple[Ints, Floats, Bools]) -> list[Any]:
        """Return the averages of trunks, or of heads.

        Args:
            old: The arrays before the training.
            new: The trained arrays.
            targets: Of each trained row: the row of `old` that it belongs to, its size, and whether it is finite.
        """
        if not new:
            return old
        target, size, is_finite = targets
        rows = new[0].rows
        n = len(new[0].stack)
        scatter = partial(_scatter_values, n, rows)
        order = np.zeros(n, dtype=np.int32)
        order[: len(rows)] = rows
        share = compute_shares(target, size).astype(np.float32)
        averages: list[Any] = program.average_stacks(
            self.devices.mesh, old, [leaf.stack for leaf in new], scatter(target.astype(np.int32)), scatter(share),
            order, np.int32(len(rows)), scatter(is_finite),
        )  # fmt: skip
        return averages

    def measure_updates(self, models: Models, updates: Updates) -> DeviceUpdateGeometry:
        """Return the geometry of the updates: see `averaging.measure_updates`."""
        old = self._split_params(models, self.put_stacks(models, pad_model_count(len(models))))
        return DeviceUpdateGeometry(old, self._split_params(models, updates.params), models, updates)

    def _mark_trunk(self, models: Models) -> Params:
        return tree_map(lambda _: False, models.params) if models.trunk is None else models.trunk

    def _split_params(self, models: Models, params: Params) -> Parts:
        return split_trunk_and_head(params, self._mark_trunk(models))


class DeviceUpdateGeometry:
    """`UpdateGeometry` of models and updates on a device."""

    def __init__(self, old: Parts, new: Parts, models: Models, updates: Updates) -> None:
        self.old = old
        self.new = new
        self.models = models
        self.updates = updates

    def measure_mean(self, m: int) -> float:
        return float(np.sqrt(self._sum_measure(_compute_mean_square, m)))

    def measure_lengths(self, m: int) -> Floats:
        return np.asarray(np.sqrt(self._sum_measure(_compute_squares, m)))

    def measure_cosines(self, m: int) -> Floats:
        return compute_cosines(self._sum_measure(_compute_products, m))

    def _sum_measure(self, measure: Any, m: int) -> Any:
        """Return a measure of the updates of model m, summed over all arrays."""
        pairs = np.flatnonzero(self.updates.model == m)
        total: Any = 0.0
        for old, new, old_row, positions in zip(
            self.old, self.new, (self.models.trunk_index[m], m), (self.updates.lane[pairs], pairs), strict=True
        ):
            if new:
                rows = new[0].rows[positions]
                chosen = np.zeros(len(new[0].stack), dtype=np.float32)
                chosen[rows] = 1
                stacks = [leaf.stack for leaf in new]
                values = np.asarray(measure(old, stacks, np.int32(old_row), chosen), dtype=np.float64)
                for _ in range(values.ndim):
                    values = np.moveaxis(values, 0, -1)[..., rows]
                total = total + values
        return total


def _pad_positions(rows: Ints, size: int) -> npt.NDArray[np.int32]:
    """Return positions, padded with copies of the first one to this size."""
    return pad_rows(rows, size).astype(np.int32)


def _scatter_values(n: int, rows: Ints, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return [n], an array with these values at these rows and 0 elsewhere."""
    scattered = np.zeros(n, dtype=values.dtype)
    scattered[rows] = values
    return scattered


@jax.jit
def _find_finite_rows(stacks: list[Any]) -> Any:
    return program.find_finite_rows(stacks, len(stacks[0]))


def _compute_differences(old: list[Any], new: list[Any], m: Any) -> list[Any]:
    """Return, for each array, [row, parameter] the difference between each row of `new` and row m of `old`."""
    return [(stack - leaf[m]).reshape(len(stack), -1) for leaf, stack in zip(old, new, strict=True)]


@jax.jit
def _compute_squares(old: list[Any], new: list[Any], m: Any, chosen: Any) -> Any:
    return sum((difference * difference).sum(axis=1) for difference in _compute_differences(old, new, m))


@jax.jit
def _compute_mean_square(old: list[Any], new: list[Any], m: Any, chosen: Any) -> Any:
    with jax.default_matmul_precision("float32"):
        share = jnp.where(chosen > 0, chosen / chosen.sum(), 0)
        means = [
            share @ jnp.where(chosen[:, None] > 0, difference, 0) for difference in _compute_differences(old, new, m)
        ]
    return sum((mean * mean).sum() for mean in means)


@jax.jit
def _compute_products(old: list[Any], new: list[Any], m: Any, chosen: Any) -> Any:
    with jax.default_matmul_precision("float32"):
        return sum(difference @ difference.T for difference in _compute_differences(old, new, m))
