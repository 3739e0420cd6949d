"""Lanes as padded arrays, and the devices that train them.

JAX is imported only by functions that need it; native code on a CPU does not.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift import rng
from feddrift.engines.local import optim
from feddrift.trees import tree_leaves, tree_map
from feddrift.types import Ints, Models, Params

ALIGNMENT_BYTES = 64
PARAMETER_COPIES_PER_LANE = 6  # on a device: the parameters, three moments, a gradient, and a copy in transfer
LANE_MEMORY_SHARE = 0.4  # of a device's memory that lanes may use

Optimiser = tuple[optim.OptimizerMoments, Any]  # moments and numbers of steps of a stack of trunks or heads


@dataclass(frozen=True)
class Lanes:
    """Padded lanes and their heads, as arrays for the compiled program."""

    trunk: Any  # [lane], position of the lane's trunk
    model: Any  # [lane, head], positions of its models
    key: rng.Words  # [lane], two arrays
    cumulative: Any  # [lane, cell], cumulative probabilities; a cell is a pair (t, head), heads change fastest
    counts: Any  # [lane, cell], number of rows
    starts: Any  # [lane, cell], first row of the cell in `order`
    trunk_share: Any  # [lane], the lane's share in the average of its trunk
    head_share: Any  # [lane * head], the head's share in the average of its model
    pair: Any  # [lane * head], position of the k-th pair of a client and a model among the flat heads
    n_lanes: Any  # number of lanes without padding
    n_pairs: Any  # number of pairs without padding
    pull: Any = None  # [lane], weight of the pull in the loss; None: nothing is pulled


@dataclass(frozen=True)
class Devices:
    """Devices of this host, on which arrays are replicated, or sharded along their first axis.

    The device None is the CPU if it is the only device: it is found without importing JAX.
    """

    devices: tuple[Any, ...]

    @classmethod
    def find_all(cls) -> Devices:
        """Return all devices that JAX finds on this host.

        JAX then allocates memory of a GPU only when it needs it: allocating most of it at the start takes seconds.
        XLA_PYTHON_CLIENT_PREALLOCATE=true takes precedence.
        """
        if has_only_one_cpu():
            return cls((None,))
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import jax

        return cls(tuple(jax.local_devices()))

    @cached_property
    def mesh(self) -> Any:
        """The jax.sharding.Mesh over which arrays are sharded; None with a single device."""
        if len(self.devices) == 1:
            return None
        from jax.sharding import Mesh

        return Mesh(np.array(self.devices), ("lane",))

    def put_arrays(self, tree: Any, shard: bool = False) -> Any:
        """Copy arrays to the devices.

        Args:
            tree: A tree of arrays.
            shard: Shard arrays along their first axis, which must have a multiple of the number of devices; otherwise
                each device gets a copy.
        """
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        if self.mesh is None:
            return jax.device_put(tree, self.devices[0])  # None: JAX's default device
        replicated, sharded = (NamedSharding(self.mesh, PartitionSpec(*axes)) for axes in ((), ("lane",)))  # type: ignore[no-untyped-call]
        return jax.tree.map(lambda leaf: jax.device_put(leaf, sharded if shard and np.ndim(leaf) else replicated), tree)

    def split_tile(self, tile: int) -> tuple[int, tuple[int, ...]]:
        """Return the number of lanes of a unit, and the numbers of units that train at once, in descending order.

        The first number is used as often as possible, then the next one for the remaining units, and so on. On a GPU
        two tiles at once take less time per lane than one. There a unit is half a tile, if the tile has an even number
        of lanes.

        Args:
            tile: The number of lanes of a tile.
        """
        if not self.one_gpu:
            return tile, (1,)
        return (tile, (2, 1)) if tile % 2 else (tile // 2, (4, 2, 1))

    @cached_property
    def one_gpu(self) -> bool:
        """True if the only device is a GPU."""
        return self.mesh is None and getattr(self.devices[0], "platform", "cpu") == "gpu"

    @cached_property
    def one_cpu(self) -> bool:
        """True if the only device is a CPU."""
        return self.mesh is None and getattr(self.devices[0], "platform", "cpu") == "cpu"

    def round_up(self, n: int) -> int:
        """Return the next multiple of the number of devices."""
        return -(-n // len(self.devices)) * len(self.devices)

    def choose_capacity(self, n: int, tile: int, params: Params) -> int:
        """Return the number of lanes of the compiled program that trains n lanes.

        It is a quarter of a tile, half a tile, or 1, 2, 4, 8, ... tiles, so that few programs are compiled for many n;
        tiles without lanes are skipped. Except on a single CPU, compiling takes long: the numbers of tiles are 1, 4,
        16, ..., on a GPU at least 4. If that does not fit into memory, it is the smallest sufficient number of tiles.

        Args:
            n: The number of lanes.
            tile: The number of lanes of a tile, a multiple of the number of devices.
            params: The parameters of a stack of models.
        """
        for share in (4, 2):
            if n <= -(-tile // share):
                return self.round_up(-(-tile // share))
        size = 4 * tile if self.one_gpu else tile
        growth = 2 if self.one_cpu else 4
        while size < n:
            size *= growth
        return size if size <= self.count_fitting_lanes(params) else -(-n // tile) * tile

    def count_fitting_lanes(self, params: Params) -> int:
        """Return how many lanes of such models fit into memory: a power of two times the number of devices.

        Args:
            params: The parameters of a stack of models.
        """
        info = {} if self.devices[0] is None else self.devices[0].memory_stats() or {}
        memory = info.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(self.devices)
        model_bytes = sum(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in tree_leaves(params))
        lane_bytes = PARAMETER_COPIES_PER_LANE * model_bytes
        return len(self.devices) << max(0, int(LANE_MEMORY_SHARE * memory / lane_bytes).bit_length() - 1)


def start_devices() -> None:
    """Let JAX find and start its devices in a thread; with a GPU this takes seconds, and the caller need not wait."""

    def start() -> None:
        with suppress(RuntimeError):  # the first call that needs the devices raises the error again
            Devices.find_all()

    if not has_only_one_cpu():
        threading.Thread(target=start).start()  # not a daemon: interrupting JAX while it starts aborts the process


def runs_on_cpu() -> bool:
    """Return whether JAX computes, or would compute, on a CPU."""
    if has_only_one_cpu():
        return True
    import jax

    return jax.default_backend() == "cpu"


def get_device_name() -> str:
    """Return the name of the first device."""
    if has_only_one_cpu():
        return "cpu"
    import jax

    return str(jax.devices()[0].device_kind)


def has_only_one_cpu() -> bool:
    """Return whether JAX would find a single CPU and no other device, without importing it (decision 15).

    It is False if that is unknown, or if JAX is imported already.
    """
    if "jax" in sys.modules or "JAX_NUM_CPU_DEVICES" in os.environ:
        return False
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return False
    platform = os.environ.get("JAX_PLATFORMS") or os.environ.get("JAX_PLATFORM_NAME")
    if platform:
        return platform == "cpu"
    return not _has_plugins()


@cache
def _has_plugins() -> bool:
    """Return whether an installed package gives JAX other devices; cached, since the search takes a while."""
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return bool(plugins) or any(importlib.util.find_spec(name) is not None for name in ("jax_plugins", "libtpu"))


def pad_lane_count(n: int) -> int:
    """Return the padded number of lanes: the next of 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, ...

    >>> [pad_lane_count(n) for n in (1, 5, 10, 13, 17, 25)]
    [1, 5, 10, 16, 20, 32]
    """
    power = 1 << (n - 1).bit_length()
    return next(size for size in (power * 5 // 8, power * 6 // 8, power) if size >= n)


def pad_model_count(n: int) -> int:
    """Return the padded number of models: 8, 16, 32, ...; coarse, since a model without lanes takes almost no time."""
    return max(8, 1 << (n - 1).bit_length())


def concatenate_orders(orders: list[Ints]) -> npt.NDArray[np.int32]:
    """Concatenate rows and pad them with zeros to a power of two, so that their shape seldom changes."""
    rows = np.concatenate(orders)
    padded = np.zeros(1 << (len(rows) - 1).bit_length(), dtype=np.int32)
    padded[: len(rows)] = rows
    return padded


def pad_models(models: Models, size: int) -> tuple[Params, Any, Any]:
    """Return the parameters, the position of each model's trunk, and the masks, padded with copies of the first row."""
    return tree_map(partial(pad_rows, size=size), models.params), *pad_trunks_and_masks(models, size)


def pad_trunks_and_masks(models: Models, size: int) -> tuple[Any, Any]:
    """Return the position of each model's trunk, and the masks, padded with copies of the first row."""
    mask = None if models.mask is None else pad_rows(models.mask.astype(np.float32), size)
    return pad_rows(models.trunk_index.astype(np.int32), size), mask


def pad_rows(rows: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """Return a copy of the rows, padded with copies of the first row to this size."""
    padded = allocate_aligned_array((size, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    padded[len(rows) :] = rows[:1]
    return padded


def allocate_aligned_array(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an array of zeros, aligned so that JAX on a CPU uses its memory instead of a copy."""
    n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(n_bytes + ALIGNMENT_BYTES, dtype=np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[begin : begin + n_bytes].view(dtype).reshape(shape)
