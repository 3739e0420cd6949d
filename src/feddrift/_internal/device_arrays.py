"""Arrays that stay on the device on which they were trained until somebody reads them.

To NumPy a `Resident` is an array: whoever computes with it, looks at a row or gives it to one of NumPy's functions
reads it, once; functions of JAX want `jnp.asarray` of it. Some of its rows are a Resident again, and so is what
`concatenated` makes of it: surgery on models moves nothing. What a server does with all updates in every round asks
`place_of` first, and has it done there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

from feddrift.trees import leaves, tree_map
from feddrift.types import Bools, Floats, Ints, Models, Params, Updates

T = TypeVar("T")


class Moves(Protocol):
    """How the updates of the model at position m move it."""

    def mean_length(self, m: int) -> float:
        """The length of their plain mean."""
        ...

    def lengths(self, m: int) -> Floats:
        """[update], the length of each."""
        ...

    def cosines(self, m: int) -> Floats:
        """[update, update], of the angle between each two."""
        ...


class Storage(Protocol):
    """Where stacks of arrays are."""

    def concatenated(self, arrays: Sequence[Any]) -> Any: ...


class Place(Storage, Protocol):
    """A device that does with updates what a server else does on its host: see `averaging`."""

    def finite(self, models: Models, updates: Updates) -> Bools: ...
    def averaged(self, models: Models, updates: Updates) -> Models: ...
    def moves(self, models: Models, updates: Updates) -> Moves: ...


class Resident(NDArrayOperatorsMixin):
    """Some rows of a stack that lies elsewhere, as an array."""

    def __init__(self, place: Storage, stack: Any, rows: Ints) -> None:
        self.place: Storage | None = place  # None: somebody has written into it
        if isinstance(stack, np.ndarray):  # several models may share a row
            stack = stack.view()
            stack.setflags(write=False)
        self.stack, self.rows = stack, rows
        self.shape = (len(rows), *stack.shape[1:])
        self.dtype, self.ndim = stack.dtype, stack.ndim

    @cached_property
    def here(self) -> npt.NDArray[Any]:
        """The same on the host."""
        everything, n = np.asarray(self.stack), len(self.rows)
        return everything[:n] if np.array_equal(self.rows, np.arange(n)) else everything[self.rows]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.here, dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if "out" in options:
            options["out"] = tuple(value.own() if isinstance(value, Resident) else value for value in options["out"])
        read = [value.here if isinstance(value, Resident) else value for value in inputs]
        return getattr(ufunc, method)(*read, **options)

    def own(self) -> npt.NDArray[Any]:
        """The same to write into: from then on it lies on the host."""
        if self.place is not None:
            self.here, self.place = self.here.copy(), None
        return self.here

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: Any) -> Any:
        if self.place is SHARED_ROWS and isinstance(at, int | np.integer | slice):
            return self.stack[self.rows[at]]
        if self.place is SHARED_ROWS and isinstance(at, list | np.ndarray) and len(at) == 0:
            return Resident(self.place, self.stack[:0], self.rows[:0])
        if self.place is None or not isinstance(at, list | np.ndarray) or not np.ndim(at) == 1 <= len(at):
            return self.here[at]
        return Resident(self.place, self.stack, self.rows[at])

    def __setitem__(self, at: Any, value: Any) -> None:
        self.own()[at] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copies and pickles look for
            raise AttributeError(name)
        return getattr(self.here, name)

    def __reduce__(self) -> Any:
        return np.array, (self.here,)

    def __repr__(self) -> str:
        return repr(self.here)


class SharedRows:
    """A place on the host where equal rows are stored once, however many models have them.

    The server of a deployment stores its models so: of private models it has nothing but one row without values.
    """

    def concatenated(self, arrays: Sequence[Any]) -> Any:
        """As `np.concatenate`, of the rows that are in use."""
        stacks, rows, begin = [], [], 0
        for array in arrays:
            stack, index = distinct_rows(array)
            stacks.append(stack)
            rows.append(begin + index)
            begin += len(stack)
        return _with_one_empty_row(Resident(self, np.concatenate(stacks), np.concatenate(rows)))

    def store(self, models: Models) -> Models:
        """Return the models with their arrays in this place."""

        def stored(leaf: Any) -> Any:
            return leaf if isinstance(leaf, Resident) else Resident(self, np.asarray(leaf), np.arange(len(leaf)))

        return replace(models, params=tree_map(stored, models.params))

    def without_values(self, array: Any, rows: Ints) -> Resident:
        """Return the array with NaN in these rows, which all share one."""
        stack, index = distinct_rows(array)
        empty = np.full((1, *stack.shape[1:]), np.nan, dtype=stack.dtype)
        index = index.copy()
        index[rows] = len(stack)
        stack, index = distinct_rows(Resident(self, np.concatenate([stack, empty]), index))
        return Resident(self, stack, index)


SHARED_ROWS = SharedRows()


def _with_one_empty_row(array: Resident) -> Resident:
    """Return the same array, whose rows without values are one row of its stack."""
    empty = np.flatnonzero(np.isnan(array.stack).all(axis=tuple(range(1, array.stack.ndim))))
    if len(empty) < 2:
        return array
    rows = np.where(np.isin(array.rows, empty), empty[0], array.rows)
    return Resident(SHARED_ROWS, *distinct_rows(Resident(SHARED_ROWS, array.stack, rows)))


def distinct_rows(array: Any) -> tuple[npt.NDArray[Any], Ints]:
    """Return the rows in use of an array in SHARED_ROWS, and which of them each of its rows is; of others all rows."""
    if isinstance(array, Resident) and array.place is SHARED_ROWS:
        used, index = np.unique(array.rows, return_inverse=True)
        return (array.stack if len(used) == len(array.stack) else array.stack[used]), index.reshape(-1)
    return np.asarray(array), np.arange(len(array))


def concatenated(arrays: Sequence[Any]) -> Any:
    """`np.concatenate`; where one of them lies on a device, it is done there, if there is room."""
    places = [array.place for array in arrays if isinstance(array, Resident) and array.place is not None]
    return places[0].concatenated(arrays) if places else np.concatenate(arrays)


def place_of(params: Params) -> Place | None:
    """The device that all arrays of a tree are on; None: the host."""
    places = [leaf.place if isinstance(leaf, Resident) else None for leaf in leaves(params)]
    if SHARED_ROWS in places:
        return None
    return cast(Place | None, places[0]) if places and all(place is places[0] for place in places) else None


def on_host(value: T) -> T:
    """The same; where these are models or updates, with NumPy's arrays."""
    if not isinstance(value, Models | Updates):
        return value
    if not any(isinstance(leaf, Resident) and leaf.place is not SHARED_ROWS for leaf in leaves(value.params)):
        return value
    return replace(value, params=tree_map(np.asarray, value.params))
