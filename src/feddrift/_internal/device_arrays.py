"""Arrays that stay on the device on which they were trained until their values are read.

A `StackView` works like a NumPy array. Arithmetic, reading a row and functions of NumPy copy it to the host, once;
functions of JAX need `jnp.asarray` of it. Several of its rows are again a StackView, and so is the result of
`concatenate_arrays`: copying and joining models copies no values to the host. Operations on all updates of a round call
`find_device` first, and use the device if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

from feddrift.trees import tree_leaves, tree_map
from feddrift.types import Bools, Floats, Ints, Models, Params, Updates

T = TypeVar("T")


class UpdateGeometry(Protocol):
    """Lengths of the updates (differences) from the model at position m, and the angles between them."""

    def measure_mean(self, m: int) -> float:
        """Return the length of the unweighted mean of the updates."""
        ...

    def measure_lengths(self, m: int) -> Floats:
        """Return [update], the length of each update."""
        ...

    def measure_cosines(self, m: int) -> Floats:
        """Return [update, update], the cosines of the angles between updates."""
        ...


class Storage(Protocol):
    """Place where stacks of arrays are stored."""

    def concatenate_arrays(self, arrays: Sequence[Any]) -> Any:
        """Concatenate arrays, of which at least one is stored here."""
        ...


class UpdateDevice(Storage, Protocol):
    """Device that computes the functions of `averaging` of the same names."""

    def find_finite_lanes(self, models: Models, updates: Updates) -> Bools: ...
    def average_updates(self, models: Models, updates: Updates) -> Models: ...
    def measure_updates(self, models: Models, updates: Updates) -> UpdateGeometry: ...


class StackView(NDArrayOperatorsMixin):
    """Array that consists of rows of a stored stack.

    Args:
        storage: The place of the stack.
        stack: The stack [row, ...].
        rows: The rows of the stack, in the order of this array; a row may repeat.
    """

    def __init__(self, storage: Storage, stack: Any, rows: Ints) -> None:
        self.storage: Storage | None = storage  # None after a write: `host_array` then has the values
        if isinstance(stack, np.ndarray):  # several models may share a row
            stack = stack.view()
            stack.setflags(write=False)
        self.stack = stack
        self.rows = rows
        self.shape = (len(rows), *stack.shape[1:])
        self.dtype = stack.dtype
        self.ndim = stack.ndim

    @cached_property
    def host_array(self) -> npt.NDArray[Any]:
        """The values as a NumPy array on the host."""
        stack = np.asarray(self.stack)
        n = len(self.rows)
        return stack[:n] if np.array_equal(self.rows, np.arange(n)) else stack[self.rows]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.host_array, dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if "out" in options:
            options["out"] = tuple(
                value.make_writable() if isinstance(value, StackView) else value for value in options["out"]
            )
        values = [value.host_array if isinstance(value, StackView) else value for value in inputs]
        return getattr(ufunc, method)(*values, **options)

    def make_writable(self) -> npt.NDArray[Any]:
        """Return the values as a writable array on the host, and use this array from then on."""
        if self.storage is not None:
            self.host_array = self.host_array.copy()
            self.storage = None
        return self.host_array

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if self.storage is SHARED_ROWS and isinstance(index, int | np.integer | slice):
            return self.stack[self.rows[index]]
        if self.storage is SHARED_ROWS and isinstance(index, list | np.ndarray) and len(index) == 0:
            return StackView(self.storage, self.stack[:0], self.rows[:0])
        if self.storage is None or not isinstance(index, list | np.ndarray) or not np.ndim(index) == 1 <= len(index):
            return self.host_array[index]
        return StackView(self.storage, self.stack, self.rows[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.make_writable()[index] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look for special methods
            raise AttributeError(name)
        return getattr(self.host_array, name)

    def __reduce__(self) -> Any:
        return np.array, (self.host_array,)

    def __repr__(self) -> str:
        return repr(self.host_array)


class SharedRows:
    """Storage on the host in which several models can share a row.

    The server of a deployment stores its models here. All private models share a row of NaN, since the server does not
    have their parameters.
    """

    def concatenate_arrays(self, arrays: Sequence[Any]) -> Any:
        """Concatenate arrays; the new stack contains only rows that are in use."""
        stacks = []
        rows = []
        n_rows = 0
        for array in arrays:
            stack, index = find_distinct_rows(array)
            stacks.append(stack)
            rows.append(n_rows + index)
            n_rows += len(stack)
        return _share_empty_row(StackView(self, np.concatenate(stacks), np.concatenate(rows)))

    def store_models(self, models: Models) -> Models:
        """Return the models with their arrays in this storage."""

        def store_leaf(leaf: Any) -> Any:
            return leaf if isinstance(leaf, StackView) else StackView(self, np.asarray(leaf), np.arange(len(leaf)))

        return replace(models, params=tree_map(store_leaf, models.params))

    def clear_rows(self, array: Any, rows: Ints) -> StackView:
        """Return the array with NaN in these rows, which share one row of the stack."""
        stack, index = find_distinct_rows(array)
        empty = np.full((1, *stack.shape[1:]), np.nan, dtype=stack.dtype)
        index = index.copy()
        index[rows] = len(stack)
        return StackView(self, *find_distinct_rows(StackView(self, np.concatenate([stack, empty]), index)))


SHARED_ROWS = SharedRows()


def _share_empty_row(array: StackView) -> StackView:
    """Return the same array; its rows that are entirely NaN share one row of the stack."""
    empty = np.flatnonzero(np.isnan(array.stack).all(axis=tuple(range(1, array.stack.ndim))))
    if len(empty) < 2:
        return array
    rows = np.where(np.isin(array.rows, empty), empty[0], array.rows)
    return StackView(SHARED_ROWS, *find_distinct_rows(StackView(SHARED_ROWS, array.stack, rows)))


def find_distinct_rows(array: Any) -> tuple[npt.NDArray[Any], Ints]:
    """Return the distinct rows of an array in SHARED_ROWS, and the index of each row of the array among them.

    For any other array, return all its rows and their indices.
    """
    if isinstance(array, StackView) and array.storage is SHARED_ROWS:
        used, index = np.unique(array.rows, return_inverse=True)
        return (array.stack if len(used) == len(array.stack) else array.stack[used]), index.reshape(-1)
    return np.asarray(array), np.arange(len(array))


def concatenate_arrays(arrays: Sequence[Any]) -> Any:
    """Concatenate arrays in the storage of the first one that has a storage; on the host if none has."""
    storages = [array.storage for array in arrays if isinstance(array, StackView) and array.storage is not None]
    return storages[0].concatenate_arrays(arrays) if storages else np.concatenate(arrays)


def find_device(params: Params) -> UpdateDevice | None:
    """Return the device on which all arrays of a tree are; None if there is none."""
    storages = [leaf.storage if isinstance(leaf, StackView) else None for leaf in tree_leaves(params)]
    if SHARED_ROWS in storages or not storages or any(storage is not storages[0] for storage in storages):
        return None
    return cast(UpdateDevice | None, storages[0])


def move_to_host(value: T) -> T:
    """Copy the arrays of models or updates from a device to NumPy arrays; any other value is returned unchanged."""
    if not isinstance(value, Models | Updates):
        return value
    if not any(isinstance(leaf, StackView) and leaf.storage is not SHARED_ROWS for leaf in tree_leaves(value.params)):
        return value
    return replace(value, params=tree_map(np.asarray, value.params))
