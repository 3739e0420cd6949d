"""Algorithm 1 for small perceptrons and linear nets on the CPU: lanes in native code, on all cores.

XLA needs several microseconds for a local step of a net with a few hidden units, most of them between operations; a
loop whose data stay in the processor's cache needs about one. numba compiles it once and stores it on disk. The
simulator uses it for nets that it supports, with the arguments and results of the simulator's own program.
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
from feddrift.engines.native import kernel_loops, linear_loops
from feddrift.nets.perceptron import MAX_SMALL_LAYER, apply_linear, apply_perceptron
from feddrift.trees import mark_trunk, split_trunk_and_head
from feddrift.types import Bools, Ints, Local, Models, Net, Params

if TYPE_CHECKING:
    from feddrift.engines.simulator.validation_plan import ValidationPlan

MOMENTS = ("mean", "square", "largest")
MAX_BLOCK_ROWS = 1 << 16  # rows of one block of logits
LAYERS: dict[Any, tuple[tuple[str, str], ...]] = {
    apply_perceptron: (("W1", "b1"), ("W2", "b2")),
    apply_linear: (("W1", "b1"),),
}
LEAVES: dict[Any, tuple[str, ...]] = {net: tuple(itertools.chain(*layers)) for net, layers in LAYERS.items()}
LOOPS: dict[Any, Any] = {apply_perceptron: kernel_loops, apply_linear: linear_loops}


def is_available() -> bool:
    """Return True if native code is available: if numba is installed."""
    return kernel_loops.COMPILED


def supports_net(net: Net, params: Params) -> bool:
    """Return True for small perceptrons and linear nets whose trunk, if they have one, is the hidden layer."""
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
    work = [stack[rows] for stack, rows in zip(models, targets, strict=True)]
    moments_by_name: dict[str, list[Any]] = {}
    steps_by_name: dict[str, Any] = {}
    for (moments, steps), names in zip((trunk_state, head_state), names_by_part, strict=True):
        n_steps = np.array(steps)
        for k, name in enumerate(names):
            moments_by_name[name] = [moments[key][k] for key in MOMENTS]
            steps_by_name[name] = n_steps
    layer_moments = [
        tuple(map(_pack_rows, zip(*(moments_by_name[name] for name in layer), strict=True))) for layer in layers
    ]
    counters: tuple[Any, ...] = (steps_by_name["W1"],)
    if net.apply is apply_perceptron:  # both layers count their steps
        trunk_steps = steps_by_name["W1"] if in_trunk["W1"] else steps_by_name["W2"].copy()
        counters = trunk_steps, steps_by_name["W2"], targets[0]
    draws = (lanes.key[0], lanes.key[1], lanes.cumulative, lanes.counts, lanes.starts, order)
    factors = _get_feature_factors(mask)
    options = (
        local.steps, local.batch, np.float32(local.lr), np.float32(local.weight_decay),
        local.optimizer == "adam", np.float32(local.momentum), local.trains != "head" or not in_trunk["W1"],
        local.trains != "trunk",
    )  # fmt: skip
    plan = validation.rows, validation.weight, validation.interval, validation.last_loss, np.float32(local.patience)
    features = x.reshape(len(x), -1)
    is_finite = np.ones(n_lanes, dtype=bool)
    n_refused = np.zeros(n_lanes, dtype=np.int32)
    sizes = (*params["W1"].shape[1:], *(params[weights].shape[2] for weights, _ in layers[1:]))
    arguments = (
        n_heads, sizes, *models, *work, *layer_moments, *counters, heads, draws, features, y, factors, options, plan,
        is_finite,
    )  # fmt: skip
    all_lanes = np.arange(n_lanes, dtype=np.int32)
    shares_by_part = {True: (lanes.trunk_share, all_lanes), False: (lanes.head_share, lanes.pair[:n_pairs])}
    all_shares = [shares_by_part[shared] for shared in is_shared]
    with _CoreTeam(n_lanes) as team:
        for round in range(int(first), int(last)):
            team.run(loops.train_lanes, np.uint32(round), *arguments)
            layer_shares = all_shares
            if not is_finite.all():
                n_refused += ~is_finite
                lane_by_part = {True: all_lanes, False: lanes.pair[:n_pairs] // n_heads}
                layer_shares = [
                    renormalize_shares(*shares_by_part[shared], rows, is_finite[lane_by_part[shared]])
                    for shared, rows in zip(is_shared, targets, strict=True)
                ]
            for shared, stack, parts, rows, shares in zip(is_shared, models, work, targets, layer_shares, strict=True):
                if local.trains == "trunk" and not shared:
                    continue  # an average of equal heads might change their last bits
                kernel_loops.average_rows(stack, parts, rows, *shares)

    def unpack_layers(stacks: Sequence[Any]) -> Params:
        return {
            name: leaf
            for layer, stack in zip(layers, stacks, strict=True)
            for name, leaf in _unpack_rows(layer, stack, params)
        }

    new_moments = {
        key: unpack_layers(stacks) for key, stacks in zip(MOMENTS, zip(*layer_moments, strict=True), strict=True)
    }
    new_states = []
    for (_, steps), names in zip((trunk_state, head_state), names_by_part, strict=True):
        stacks = {key: [leaves[name] for name in names] for key, leaves in new_moments.items()}
        new_states.append((stacks, steps_by_name[names[0]] if names else steps))
    return unpack_layers(models), unpack_layers(work), new_states[0], new_states[1], n_refused


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
    stacks = _get_stacks(net, models)
    trunk_rows = _get_trunk_rows(net, models)
    ends = np.cumsum(sizes)
    features = stream.x.reshape(len(stream.x), -1)
    with _CoreTeam(len(sizes)) as team:
        team.run(LOOPS[net.apply].count_mistakes, *stacks, trunk_rows, features, stream.y, rows, ends, counts)
    return counts.T


def find_mistakes(net: Net, models: Models, stream: Stream, rows: Ints, sizes: Ints, which: Ints) -> Bools:
    """Return [row], True where model which[cell] predicts a wrong class; rows and sizes as for `count_mistakes`."""
    flags: Bools = np.zeros(len(rows), dtype=bool)
    stacks = _get_stacks(net, models)
    trunk_rows = _get_trunk_rows(net, models)
    ends = np.cumsum(sizes)
    features = stream.x.reshape(len(stream.x), -1)
    with _CoreTeam(len(sizes)) as team:
        team.run(LOOPS[net.apply].flag_mistakes, *stacks, trunk_rows, features, stream.y, rows, ends, which, flags)
    return flags


def compute_logits(net: Net, models: Models, stream: Stream, rows: Ints) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the logits [m, row, class] of these rows in blocks of rows, with the bits that `find_mistakes` compares."""
    stacks = _get_stacks(net, models)
    yield from _compute_blocks(LOOPS[net.apply].compute_logits, stacks, stacks[-1].shape[1], net, models, stream, rows)


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
    stacks = _get_stacks(net, models)
    logits = np.zeros((teams.shape[1], len(rows), stacks[-1].shape[1]), dtype=np.float32)
    trunk_rows = _get_trunk_rows(net, models)
    factors = _get_feature_factors(models.mask)
    ends = np.cumsum(sizes)
    features = stream.x.reshape(len(stream.x), -1)
    compute = LOOPS[net.apply].compute_member_logits
    with _CoreTeam(len(sizes)) as core_team:
        core_team.run(compute, *stacks, trunk_rows, features, rows, ends, teams, factors, logits)
    return logits


def compute_hidden(net: Net, models: Models, stream: Stream, rows: Ints) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the inputs [m, row, unit] of the last layers for these rows, in blocks of rows."""
    w1, b1, *last = _get_stacks(net, models)
    if last:
        yield from _compute_blocks(kernel_loops.compute_hidden, [w1, b1], b1.shape[1], net, models, stream, rows)
        return
    inputs = stream.x[rows].reshape(len(rows), -1)
    if models.mask is None:
        yield np.broadcast_to(inputs, (len(models), *inputs.shape))
    else:
        yield inputs * models.mask.reshape(len(models), 1, -1).astype(np.float32)


def _compute_blocks(
    compute: Callable[..., None], stacks: list[Any], width: int, net: Net, models: Models, stream: Stream, rows: Ints
) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the results [m, row, number] of a compiled loop for these rows, in blocks of rows, on all cores."""
    trunk_rows = _get_trunk_rows(net, models)
    factors = _get_feature_factors(models.mask)
    features = stream.x.reshape(len(stream.x), -1)
    for start in range(0, len(rows), MAX_BLOCK_ROWS):
        block = np.ascontiguousarray(rows[start : start + MAX_BLOCK_ROWS])
        results = np.empty((len(models), len(block), width), dtype=np.float32)
        with _CoreTeam(-(-len(block) // kernel_loops.BLOCK)) as team:
            team.run(compute, *stacks, trunk_rows, features, block, factors, results)
        yield results


def _get_feature_factors(mask: Any) -> Any:
    """Return the features that each model sees as factors [m, feature]; [1, 0] if every model sees all."""
    return np.ones((1, 0), dtype=np.float32) if mask is None else mask.reshape(len(mask), -1).astype(np.float32)


def shuffle_cells(key: rng.Words, starts: Ints, counts: Ints, order: npt.NDArray[np.int32]) -> None:
    """Write the rows of each cell to `order`, in the `rng.permutation` of its key.

    Args:
        key: The random key of each cell.
        starts: The first row of each cell, which is also its position in `order`.
        counts: The number of rows of each cell.
        order: The result.
    """
    with _CoreTeam(len(counts)) as team:
        team.run(kernel_loops.shuffle_cells, key[0], key[1], starts, counts, order)


def _get_stacks(net: Net, models: Models) -> list[Any]:
    return [np.ascontiguousarray(models.params[name]) for name in LEAVES[net.apply]]


def _get_trunk_rows(net: Net, models: Models) -> Ints:
    """Return the row of each model in the stack of first layers."""
    return models.trunk_index if mark_trunk(net, models.params)["W1"] else np.arange(len(models))


class _CoreTeam:
    """Threads, one for each core, that divide n units of work among them."""

    def __init__(self, n: int) -> None:
        cuts = np.linspace(0, n, min(count_cores(), max(n, 1)) + 1).astype(int).tolist()
        self.pieces = list(itertools.pairwise(cuts))

    def __enter__(self) -> Self:
        self.pool = ThreadPoolExecutor(max(1, len(self.pieces) - 1))
        return self

    def run(self, work: Callable[..., None], *args: Any) -> None:
        """Call work(lo, hi, *args) for each piece, a range of units; this thread takes the first piece."""
        futures = [self.pool.submit(work, *piece, *args) for piece in self.pieces[1:]]
        work(*self.pieces[0], *args)
        for future in futures:
            future.result()

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()


def _pack_rows(leaves: Sequence[Any]) -> Any:
    """Join the arrays of each model in one row, padded with zeros to whole vectors."""
    size = sum(leaf[0].size for leaf in leaves)
    packed = np.zeros((len(leaves[0]), -(-size // kernel_loops.WIDTH) * kernel_loops.WIDTH), dtype=np.float32)
    np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1, out=packed[:, :size])
    return packed


def _unpack_rows(names: Sequence[str], packed: Any, like: Params) -> Iterator[tuple[str, Any]]:
    """Yield the name and the array of each leaf of rows from `_pack_rows`; the leaves have the shapes of `like`."""
    begin = 0
    for name in names:
        shape = like[name].shape[1:]
        yield name, packed[:, begin : begin + math.prod(shape)].reshape(len(packed), *shape)
        begin += math.prod(shape)
