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
from typing import Any, Protocol, TypeVar

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


class Place(Protocol):
    """A device that does with updates what a server else does on its host: see `averaging`."""

    def concatenated(self, arrays: Sequence[Any]) -> Any: ...
    def finite(self, models: Models, updates: Updates) -> Bools: ...
    def averaged(self, models: Models, updates: Updates) -> Models: ...
    def moves(self, models: Models, updates: Updates) -> Moves: ...


class Resident(NDArrayOperatorsMixin):
    """Some rows of a stack that lies elsewhere, as an array."""

    def __init__(self, place: Place, stack: Any, rows: Ints) -> None:
        self.place: Place | None = place  # None: somebody has written into it
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


def concatenated(arrays: Sequence[Any]) -> Any:
    """`np.concatenate`; where one of them lies on a device, it is done there, if there is room."""
    places = [array.place for array in arrays if isinstance(array, Resident) and array.place is not None]
    return places[0].concatenated(arrays) if places else np.concatenate(arrays)


def place_of(params: Params) -> Place | None:
    """Where all arrays of a tree lie; None: on the host."""
    places = [leaf.place if isinstance(leaf, Resident) else None for leaf in leaves(params)]
    return places[0] if places and all(place is places[0] for place in places) else None


def on_host(value: T) -> T:
    """The same; where these are models or updates, with NumPy's arrays."""
    if not isinstance(value, Models | Updates):
        return value
    if not any(isinstance(leaf, Resident) for leaf in leaves(value.params)):
        return value
    return replace(value, params=tree_map(np.asarray, value.params))
