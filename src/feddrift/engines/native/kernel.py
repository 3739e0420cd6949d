"""Algorithm 1 for small perceptrons and linear nets on the CPU: native code trains lanes on all cores.

XLA needs several microseconds for a local step of a net with a few hidden units, most of them between operations. A
loop whose data remain in the processor's cache needs about one microsecond. numba compiles the loop once and stores it
on disk. The simulator uses it for the nets that it supports, with the arguments and results of `simulator.program`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from feddrift import rng
from feddrift._internal.system import count_cores
from feddrift.averaging import renormalize_shares
from feddrift.data import Stream
from feddrift.engines.local.optim import MOMENT_NAMES
from feddrift.engines.native import kernel_loops, linear_loops
from feddrift.nets.perceptron import MAX_SMALL_LAYER, apply_linear, apply_perceptron
from feddrift.trees import mark_trunk, split_trunk_and_head
from feddrift.types import Bools, Ints, Local, Models, Net, Params

if TYPE_CHECKING:
    from feddrift.engines.simulator.validation_plan import ValidationPlan

MAX_BLOCK_ROWS = 1 << 16  # rows of one block of logits
LAYERS: dict[Any, tuple[tuple[str, str], ...]] = {
    apply_perceptron: (("W1", "b1"), ("W2", "b2")),
    apply_linear: (("W1", "b1"),),
}
LEAVES: dict[Any, tuple[str, ...]] = {net: tuple(itertools.chain(*layers)) for net, layers in LAYERS.items()}
LOOPS: dict[Any, Any] = {apply_perceptron: kernel_loops, apply_linear: linear_loops}


def is_available() -> bool:
    """Return whether numba is installed, which compiles the native code."""
    return kernel_loops.COMPILED


def supports_net(net: Net, params: Params) -> bool:
    """Return whether a net is linear or a small perceptron, and its trunk, if it has one, is the hidden layer."""
    if not is_available() or net.apply not in LEAVES or math.prod(params["W1"].shape[1:]) > MAX_SMALL_LAYER:
        return False
    shared = {name for name, is_shared in mark_trunk(net, params).items() if is_shared}
    return not shared or (net.apply is apply_perceptron and shared == {"W1", "b1"})


def run_rounds(
    net: Net, local: Local, params: Params, mask: Any, trunk_state: Any, head_state: Any, lanes: Any, x: Any, y: Any,
    order: Any, first: int, last: int, validation: ValidationPlan,
) -> tuple[Params, Params, Any, Any, Any]:  # fmt: skip
    """Run rounds first..last-1 as `program.run_rounds` does, in native code.

    Lanes with a validation plan may stop early; their losses are written to `validation.last_loss`.
    """
    in_trunk = mark_trunk(net, params)
    layers = LAYERS[net.apply]
    loops = LOOPS[net.apply]
    names_by_part = split_trunk_and_head({name: name for name in LEAVES[net.apply]}, in_trunk)
    n_lanes = int(lanes.n_lanes)
    n_pairs = int(lanes.n_pairs)
    n_heads = lanes.model.shape[1]
    heads = lanes.model.reshape(-1)
    is_shared = [in_trunk[weights] for weights, _ in layers]
    targets = [lanes.trunk if shared else heads for shared in is_shared]
    models = [_pack_rows([params[name] for name in layer]) for layer in layers]
    lane_params = [stack[rows] for stack, rows in zip(models, targets, strict=True)]
    moments_by_name: dict[str, list[Any]] = {}
    steps_by_name: dict[str, Any] = {}
    for (moments, steps), names in zip((trunk_state, head_state), names_by_part, strict=True):
        n_steps = np.array(steps)
        for k, name in enumerate(names):
            moments_by_name[name] = [moments[key][k] for key in MOMENT_NAMES]
            steps_by_name[name] = n_steps
    layer_moments = [
        tuple(map(_pack_rows, zip(*(moments_by_name[name] for name in layer), strict=True))) for layer in layers
    ]
    counters: tuple[Any, ...] = (steps_by_name["W1"],)
    if net.apply is apply_perceptron:  # both layers count their steps
        trunk_steps = steps_by_name["W1"] if in_trunk["W1"] else steps_by_name["W2"].copy()
        counters = trunk_steps, steps_by_name["W2"], targets[0]
    draws = (lanes.key[0], lanes.key[1], lanes.cumulative, lanes.counts, lanes.starts, order)
    masks = _flatten_masks(mask)
    options = (
        local.steps, local.batch, np.float32(local.lr), np.float32(local.weight_decay),
        local.optimizer == "adam", np.float32(local.momentum), local.trains != "head" or not in_trunk["W1"],
        local.trains != "trunk",
    )  # fmt: skip
    validation_arrays = (
        validation.rows, validation.weight, validation.interval, validation.last_loss, np.float32(local.patience)
    )  # fmt: skip
    features = x.reshape(len(x), -1)
    is_finite = np.ones(n_lanes, dtype=bool)
    left_out = np.zeros(n_lanes, dtype=np.int32)
    sizes = (*params["W1"].shape[1:], *(params[weights].shape[2] for weights, _ in layers[1:]))
    arguments = (
        n_heads, sizes, *models, *lane_params, *layer_moments, *counters, heads, draws, features, y, masks, options,
        validation_arrays, is_finite,
    )  # fmt: skip
    all_lanes = np.arange(n_lanes, dtype=np.int32)
    shares_by_part = {True: (lanes.trunk_share, all_lanes), False: (lanes.head_share, lanes.pair[:n_pairs])}
    all_shares = [shares_by_part[shared] for shared in is_shared]
    with _CorePool(n_lanes) as pool:
        for round in range(int(first), int(last)):
            pool.run(loops.train_lanes, np.uint32(round), *arguments)
            layer_shares = all_shares
            if not is_finite.all():
                left_out += ~is_finite
                lane_by_part = {True: all_lanes, False: lanes.pair[:n_pairs] // n_heads}
                layer_shares = [
                    renormalize_shares(*shares_by_part[shared], rows, is_finite[lane_by_part[shared]])
                    for shared, rows in zip(is_shared, targets, strict=True)
                ]
            for shared, stack, parts, rows, shares in zip(
                is_shared, models, lane_params, targets, layer_shares, strict=True
            ):
                if local.trains == "trunk" and not shared:
                    continue  # averaging equal heads might change their last bits
                kernel_loops.average_rows(stack, parts, rows, *shares)

    def unpack_layers(stacks: Sequence[Any]) -> Params:
        return {
            name: leaf
            for layer, stack in zip(layers, stacks, strict=True)
            for name, leaf in _unpack_rows(layer, stack, params)
        }

    new_moments = {
        key: unpack_layers(stacks) for key, stacks in zip(MOMENT_NAMES, zip(*layer_moments, strict=True), strict=True)
    }
    new_states = []
    for (_, steps), names in zip((trunk_state, head_state), names_by_part, strict=True):
        stacks = {key: [leaves[name] for name in names] for key, leaves in new_moments.items()}
        new_states.append((stacks, steps_by_name[names[0]] if names else steps))
    return unpack_layers(models), unpack_layers(lane_params), new_states[0], new_states[1], left_out


def count_mistakes(net: Net, models: Models, stream: Stream, rows: Ints, sizes: Ints) -> Ints:
    """Count the mistakes [m, cell] of each model in each cell.

    Args:
        net: The net.
        models: The models.
        stream: The stream that has the rows.
        rows: The rows of the cells, one cell after the other.
        sizes: The number of rows of each cell.
    """
    counts: Ints = np.zeros((len(sizes), len(models)), dtype=np.int64)
    arguments = _list_arguments(net, models, stream)
    with _CorePool(len(sizes)) as pool:
        pool.run(LOOPS[net.apply].count_mistakes, *arguments, stream.y, rows, np.cumsum(sizes), counts)
    return counts.T


def find_mistakes(net: Net, models: Models, stream: Stream, rows: Ints, sizes: Ints, model_of_cell: Ints) -> Bools:
    """Return [row], True where model model_of_cell[cell] predicts a wrong class; see `count_mistakes`."""
    flags: Bools = np.zeros(len(rows), dtype=bool)
    arguments = _list_arguments(net, models, stream)
    with _CorePool(len(sizes)) as pool:
        pool.run(LOOPS[net.apply].flag_mistakes, *arguments, stream.y, rows, np.cumsum(sizes), model_of_cell, flags)
    return flags


def compute_logits(net: Net, models: Models, stream: Stream, rows: Ints) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the logits [m, row, class] of these rows in blocks of rows, with the bits that `find_mistakes` compares."""
    arguments = _list_arguments(net, models, stream)
    yield from _compute_blocks(LOOPS[net.apply].compute_logits, arguments, stream.n_classes, models, rows)


def compute_member_logits(
    net: Net, models: Models, stream: Stream, rows: Ints, sizes: Ints, teams: Ints
) -> npt.NDArray[np.float32]:
    """Return the logits [k, row, class] of the k-th member of each team on the rows of the team.

    Args:
        net: The net.
        models: The models.
        stream: The stream that has the rows.
        rows: The rows of the teams, one team after the other.
        sizes: The number of rows of each team.
        teams: [team, k], the positions of the members; -1: the team has fewer members.
    """
    logits = np.zeros((teams.shape[1], len(rows), stream.n_classes), dtype=np.float32)
    arguments = _list_arguments(net, models, stream)
    masks = _flatten_masks(models.mask)
    with _CorePool(len(sizes)) as pool:
        pool.run(LOOPS[net.apply].compute_member_logits, *arguments, rows, np.cumsum(sizes), teams, masks, logits)
    return logits


def compute_hidden(net: Net, models: Models, stream: Stream, rows: Ints) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the inputs [m, row, unit] of the last layers for these rows, in blocks of rows."""
    if net.apply is apply_perceptron:
        w1, b1, _, _, *arguments = _list_arguments(net, models, stream)
        yield from _compute_blocks(kernel_loops.compute_hidden, [w1, b1, *arguments], b1.shape[1], models, rows)
        return
    inputs = stream.x[rows].reshape(len(rows), -1)
    if models.mask is None:
        yield np.broadcast_to(inputs, (len(models), *inputs.shape))
    else:
        yield inputs * models.mask.reshape(len(models), 1, -1).astype(np.float32)


def _compute_blocks(
    compute: Callable[..., None], arguments: Sequence[Any], width: int, models: Models, rows: Ints
) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the results [m, row, number] of a compiled loop for these rows, in blocks of rows, on all cores."""
    masks = _flatten_masks(models.mask)
    for start in range(0, len(rows), MAX_BLOCK_ROWS):
        block = np.ascontiguousarray(rows[start : start + MAX_BLOCK_ROWS])
        results = np.empty((len(models), len(block), width), dtype=np.float32)
        with _CorePool(-(-len(block) // kernel_loops.BLOCK)) as pool:
            pool.run(compute, *arguments, block, masks, results)
        yield results


def _flatten_masks(mask: Any) -> Any:
    """Return the masks [m, feature]; an array [1, 0] if the models have none."""
    return np.ones((1, 0), dtype=np.float32) if mask is None else mask.reshape(len(mask), -1).astype(np.float32)


def shuffle_cells(key: rng.Words, starts: Ints, counts: Ints, order: npt.NDArray[np.int32]) -> None:
    """Write the rows of each cell to `order`, in the `rng.permutation` of its key.

    Args:
        key: The random key of each cell.
        starts: The first row of each cell, which is also its position in `order`.
        counts: The number of rows of each cell.
        order: The result.
    """
    with _CorePool(len(counts)) as pool:
        pool.run(kernel_loops.shuffle_cells, key[0], key[1], starts, counts, order)


def _list_arguments(net: Net, models: Models, stream: Stream) -> list[Any]:
    """Return the first arguments of all loops for scores.

    They are the arrays of the layers, [m] the row of each model in the arrays of the first layer, and the inputs.
    """
    stacks = [np.ascontiguousarray(models.params[name]) for name in LEAVES[net.apply]]
    trunk_rows = models.trunk_index if mark_trunk(net, models.params)["W1"] else np.arange(len(models))
    return [*stacks, trunk_rows, stream.x.reshape(len(stream.x), -1)]


class _CorePool:
    """Threads, one for each core, among which n items are divided."""

    def __init__(self, n: int) -> None:
        cuts = np.linspace(0, n, min(count_cores(), max(n, 1)) + 1).astype(int).tolist()
        self.ranges = list(itertools.pairwise(cuts))

    def __enter__(self) -> Self:
        self.executor = ThreadPoolExecutor(max(1, len(self.ranges) - 1))
        return self

    def run(self, loop: Callable[..., None], *args: Any) -> None:
        """Call loop(lo, hi, *args) for each range of items; this thread takes the first range."""
        futures = [self.executor.submit(loop, lo, hi, *args) for lo, hi in self.ranges[1:]]
        loop(*self.ranges[0], *args)
        for future in futures:
            future.result()

    def __exit__(self, *_: object) -> None:
        self.executor.shutdown()


def _pack_rows(leaves: Sequence[Any]) -> Any:
    """Concatenate the arrays of each model to one row, padded with zeros to whole vectors."""
    size = sum(leaf[0].size for leaf in leaves)
    packed = np.zeros(
        (len(leaves[0]), -(-size // kernel_loops.VECTOR_SIZE) * kernel_loops.VECTOR_SIZE), dtype=np.float32
    )
    np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1, out=packed[:, :size])
    return packed


def _unpack_rows(names: Sequence[str], packed: Any, like: Params) -> Iterator[tuple[str, Any]]:
    """Yield the name and the array of each leaf from rows that `_pack_rows` made; leaves have the shapes of `like`."""
    begin = 0
    for name in names:
        shape = like[name].shape[1:]
        yield name, packed[:, begin : begin + math.prod(shape)].reshape(len(packed), *shape)
        begin += math.prod(shape)
