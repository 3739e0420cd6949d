"""What the simulator hands to those who train: lanes as padded arrays, and the devices they run on.

Nothing here imports JAX before it is needed: native code on a CPU never does.
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
from feddrift.trees import leaves, tree_map
from feddrift.types import Ints, Models, Params

ALIGNMENT = 64  # bytes
COPIES = 6  # of a lane's parameters on a device: themselves, three moments, a gradient, and one on the way
SHARE = 0.4  # of its memory that lanes may take

Optimiser = tuple[optim.Moments, Any]  # moments and steps taken, of a stack of trunks or heads


@dataclass(frozen=True)
class Lanes:
    """The arrays that describe padded lanes, and the heads in them, to the compiled program."""

    trunk: Any  # [lane], position of its trunk
    model: Any  # [lane, head], positions of its models
    key: rng.Words  # [lane] each
    cumulative: Any  # [lane, cell], a cell being a pair of t and head, heads innermost
    counts: Any  # [lane, cell]
    starts: Any  # [lane, cell], first row of the cell in `order`
    trunk_share: Any  # [lane], of its trunk's average
    head_share: Any  # [lane * head], of its model's average
    pair: Any  # [lane * head], where the k-th pair of client and model lies in the flat heads
    n_lanes: Any  # how many are real
    n_pairs: Any
    pull: Any = None  # [lane], the weight of the pull in its loss; None: there is none


@dataclass(frozen=True)
class Devices:
    """The devices of this host; arrays lie whole on each, or are dealt out along their first axis.

    A device None is the CPU, as JAX would name it if somebody asked.
    """

    devices: tuple[Any, ...]

    @classmethod
    def here(cls) -> Devices:
        """All devices that JAX finds on this host.

        Of a GPU's memory JAX then takes what it needs when it needs it, not most of it at once, which takes seconds;
        XLA_PYTHON_CLIENT_PREALLOCATE=true wins.
        """
        if only_one_cpu():
            return cls((None,))
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import jax

        return cls(tuple(jax.local_devices()))

    @cached_property
    def mesh(self) -> Any:
        """How arrays are dealt out, a jax.sharding.Mesh; None with a single device."""
        if len(self.devices) == 1:
            return None
        from jax.sharding import Mesh

        return Mesh(np.array(self.devices), ("lane",))

    def put(self, tree: Any, deal: bool = False) -> Any:
        """The tree with its arrays on the devices: whole on each, or dealt out along the first axis."""
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        if self.mesh is None:
            return jax.device_put(tree, self.devices[0])  # None: where JAX puts things by itself
        whole, dealt = (NamedSharding(self.mesh, PartitionSpec(*axes)) for axes in ((), ("lane",)))  # type: ignore[no-untyped-call]
        return jax.tree.map(lambda leaf: jax.device_put(leaf, dealt if deal and np.ndim(leaf) else whole), tree)

    def cut(self, tile: int) -> tuple[int, tuple[int, ...]]:
        """A tile or its half, and how many of these train at once: first the most, then those that are left over.

        On a GPU two tiles, which takes less time per lane than one, and at last half of one, if that is a whole number.
        """
        if not self.one_gpu:
            return tile, (1,)
        return (tile, (2, 1)) if tile % 2 else (tile // 2, (4, 2, 1))

    @cached_property
    def one_gpu(self) -> bool:
        return self.mesh is None and getattr(self.devices[0], "platform", "cpu") == "gpu"

    @cached_property
    def one_cpu(self) -> bool:
        return self.mesh is None and getattr(self.devices[0], "platform", "cpu") == "cpu"

    def evenly(self, n: int) -> int:
        """The next number that all devices can share."""
        return -(-n // len(self.devices)) * len(self.devices)

    def places(self, n: int, tile: int, params: Params) -> int:
        """For how many lanes a program is made that trains n of them, in tiles that all devices share: few serve all.

        A quarter of a tile, half of one, or 1, 2, 4, 8, ... tiles, of which only those are trained that have lanes;
        where compiling takes long 1, 4, 16, ..., on a GPU no less than 4. Where so many do not fit into memory, as
        many tiles as there must be.
        """
        for share in (4, 2):
            if n <= -(-tile // share):
                return self.evenly(-(-tile // share))
        size = 4 * tile if self.one_gpu else tile
        growth = 2 if self.one_cpu else 4
        while size < n:
            size *= growth
        return size if size <= self.room(params) else -(-n // tile) * tile

    def room(self, params: Params) -> int:
        """How many lanes of such models fit at a time, a power of two times the number of devices."""
        info = {} if self.devices[0] is None else self.devices[0].memory_stats() or {}
        memory = info.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(self.devices)
        lane = COPIES * sum(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in leaves(params))
        return len(self.devices) << max(0, int(SHARE * memory / lane).bit_length() - 1)


def wake() -> None:
    """Let JAX find and start its devices while the caller reads data: seconds, where there is a GPU."""

    def start() -> None:
        with suppress(RuntimeError):  # whoever needs them is told
            Devices.here()

    if not only_one_cpu():
        threading.Thread(target=start).start()  # no daemon: one that is cut off in there takes the process along


def on_cpu() -> bool:
    """Whether JAX computes, or would compute, on a CPU."""
    if only_one_cpu():
        return True
    import jax

    return jax.default_backend() == "cpu"


def device_kind() -> str:
    """What the first device is called."""
    if only_one_cpu():
        return "cpu"
    import jax

    return str(jax.devices()[0].device_kind)


def only_one_cpu() -> bool:
    """Whether JAX, were it imported, would find one CPU and nothing else (decision 15): then nobody needs to ask it."""
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
    """Whether anything installed brings JAX other devices; looked for once, since that takes a while."""
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return bool(plugins) or any(importlib.util.find_spec(name) is not None for name in ("jax_plugins", "libtpu"))


def lane_bucket(n: int) -> int:
    """The padded number of lanes: the next of 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, ...

    >>> [lane_bucket(n) for n in (1, 5, 10, 13, 17, 25)]
    [1, 5, 10, 16, 20, 32]
    """
    power = 1 << (n - 1).bit_length()
    return next(size for size in (power * 5 // 8, power * 6 // 8, power) if size >= n)


def model_bucket(n: int) -> int:
    """The padded number of models: 8, 16, 32, ...; coarse, since a model without lanes costs next to nothing."""
    return max(8, 1 << (n - 1).bit_length())


def joined(order: list[Ints]) -> npt.NDArray[np.int32]:
    """Rows one after the other, with room for more behind them: seldom a new shape."""
    rows = np.concatenate(order)
    room = np.zeros(1 << (len(rows) - 1).bit_length(), dtype=np.int32)
    room[: len(rows)] = rows
    return room


def padded(models: Models, size: int) -> tuple[Params, Any, Any]:
    """Parameters, the trunk each model stands on, and masks, with copies of the first row behind them."""
    return tree_map(partial(pad_rows, size=size), models.params), *beside(models, size)


def beside(models: Models, size: int) -> tuple[Any, Any]:
    """The trunk each model stands on, and masks, padded likewise."""
    mask = None if models.mask is None else pad_rows(models.mask.astype(np.float32), size)
    return pad_rows(models.trunk_index.astype(np.int32), size), mask


def pad_rows(rows: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """Copy rows and put copies of the first behind them, so many in all."""
    padded = allocate((size, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    padded[len(rows) :] = rows[:1]
    return padded


def allocate(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Make an array of zeros, aligned so that JAX on a CPU uses its memory instead of a copy."""
    n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(n_bytes + ALIGNMENT, dtype=np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + n_bytes].view(dtype).reshape(shape)
