"""Algorithm 1 for small perceptrons and linear nets on the CPU: lane after lane in native code, on all cores.

XLA spends several microseconds on a local step of a net with a few hidden units, most of them between operations; a
loop that stays in the cache needs about one. numba compiles it once and keeps it on disk. The simulator uses it where
it applies, with the arguments and results of its own program.
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
from feddrift._internal.system import cores
from feddrift.averaging import renormalised
from feddrift.data import Stream
from feddrift.engines.native import kernel_loops, linear_loops
from feddrift.nets.perceptron import MAX_SMALL_LAYER, linear, perceptron
from feddrift.trees import split, trunk_of
from feddrift.types import Bools, Ints, Local, Models, Net, Params

if TYPE_CHECKING:
    from feddrift.engines.simulator.validation_plan import Looks

MOMENTS = ("mean", "square", "largest")
MAX_ROWS = 1 << 16  # rows of one block of logits
LAYERS: dict[Any, tuple[tuple[str, str], ...]] = {perceptron: (("W1", "b1"), ("W2", "b2")), linear: (("W1", "b1"),)}
LEAVES: dict[Any, tuple[str, ...]] = {net: tuple(itertools.chain(*layers)) for net, layers in LAYERS.items()}
LOOPS: dict[Any, Any] = {perceptron: kernel_loops, linear: linear_loops}


def ready() -> bool:
    """Whether there is native code at all."""
    return kernel_loops.COMPILED


def applies(net: Net, params: Params) -> bool:
    """Whether these are small perceptrons, or linear, and their trunk, if they have one, is the hidden layer."""
    if not ready() or net.apply not in LEAVES or math.prod(params["W1"].shape[1:]) > MAX_SMALL_LAYER:
        return False
    shared = {name for name, is_shared in trunk_of(net, params).items() if is_shared}
    return not shared or (net.apply is perceptron and shared == {"W1", "b1"})


def rounds(
    net: Net, local: Local, params: Params, mask: Any, of_trunk: Any, of_head: Any, lanes: Any, x: Any, y: Any,
    order: Any, first: int, last: int, looks: Looks,
) -> tuple[Params, Params, Any, Any, Any]:  # fmt: skip
    """The same as `program.rounds`, in native code; lanes with looks may stop early, and change `looks.before`."""
    shape, layers, leaves, loops = trunk_of(net, params), LAYERS[net.apply], LEAVES[net.apply], LOOPS[net.apply]
    n_lanes, n_pairs, n_heads = int(lanes.n_lanes), int(lanes.n_pairs), lanes.model.shape[1]
    heads = lanes.model.reshape(-1)
    shared = [shape[weights] for weights, _ in layers]
    at = [lanes.trunk if is_trunk else heads for is_trunk in shared]
    models = [_packed([params[name] for name in layer]) for layer in layers]
    work = [stack[rows] for stack, rows in zip(models, at, strict=True)]
    moments_of, steps_of = {}, {}
    for shelf, names in zip((of_trunk, of_head), split({name: name for name in leaves}, shape), strict=True):
        moments, steps = shelf
        steps = np.array(steps)
        for k, name in enumerate(names):
            moments_of[name], steps_of[name] = [moments[key][k] for key in MOMENTS], steps
    held = [tuple(map(_packed, zip(*(moments_of[name] for name in layer), strict=True))) for layer in layers]
    counters: tuple[Any, ...] = (steps_of["W1"],)
    if net.apply is perceptron:  # both layers count their steps
        counters = steps_of["W1"] if shape["W1"] else steps_of["W2"].copy(), steps_of["W2"], at[0]
    drawn = (lanes.key[0], lanes.key[1], lanes.cumulative, lanes.counts, lanes.starts, order)
    sees = _sees(mask)
    how = (
        local.steps, local.batch, np.float32(local.lr), np.float32(local.weight_decay),
        local.optimizer == "adam", np.float32(local.momentum), local.trains != "head" or not shape["W1"],
        local.trains != "trunk",
    )  # fmt: skip
    look = looks.rows, looks.weight, looks.every, looks.before, np.float32(local.patience)
    flat = x.reshape(len(x), -1)
    sound, refused = np.ones(n_lanes, dtype=bool), np.zeros(n_lanes, dtype=np.int32)
    sizes = (*params["W1"].shape[1:], *(params[weights].shape[2] for weights, _ in layers[1:]))
    arguments = (
        n_heads, sizes, *models, *work, *held, *counters, heads, drawn, flat, y, sees, how, look, sound,
    )  # fmt: skip
    every = np.arange(n_lanes, dtype=np.int32)
    parts = {True: (lanes.trunk_share, every), False: (lanes.head_share, lanes.pair[:n_pairs])}
    average = [parts[is_trunk] for is_trunk in shared]
    with _Cores(n_lanes) as team:
        for round in range(int(first), int(last)):
            team.run(loops.train, np.uint32(round), *arguments)
            used = average
            if not sound.all():
                refused += ~sound
                lane_of = {True: every, False: lanes.pair[:n_pairs] // n_heads}
                used = [
                    renormalised(*parts[is_trunk], rows, sound[lane_of[is_trunk]])
                    for is_trunk, rows in zip(shared, at, strict=True)
                ]
            for is_trunk, stack, trained, rows, shares in zip(shared, models, work, at, used, strict=True):
                if local.trains == "trunk" and not is_trunk:
                    continue  # as it was, to the last bit
                kernel_loops.average(stack, trained, rows, *shares)
    found, trained, *moments = (
        {
            name: leaf
            for layer, stack in zip(layers, stacks, strict=True)
            for name, leaf in _leaves(layer, stack, params)
        }
        for stacks in (models, work, *zip(*held, strict=True))
    )
    kept = []
    for shelf, names in zip((of_trunk, of_head), split({name: name for name in leaves}, shape), strict=True):
        stacks = {key: [moment[name] for name in names] for key, moment in zip(MOMENTS, moments, strict=True)}
        kept.append((stacks, steps_of[names[0]] if names else shelf[1]))
    return found, trained, kept[0], kept[1], refused


def mistakes(net: Net, models: Models, stream: Stream, rows: Ints, sizes: Ints) -> Ints:
    """[m, cell]: on how many of each cell's rows, which lie one cell after the other, each model is mistaken."""
    counts: Ints = np.zeros((len(sizes), len(models)), dtype=np.int64)
    parts, on, ends = _stacks(net, models), _positions(net, models), np.cumsum(sizes)
    flat, loops = stream.x.reshape(len(stream.x), -1), LOOPS[net.apply]
    with _Cores(len(sizes)) as team:
        team.run(lambda lo, hi: loops.count(lo, hi, *parts, on, flat, stream.y, rows, ends, counts))
    return counts.T


def wrong(net: Net, models: Models, stream: Stream, rows: Ints, sizes: Ints, which: Ints) -> Bools:
    """[row]: whether the model at position which[cell] is mistaken."""
    flags: Bools = np.zeros(len(rows), dtype=bool)
    parts, on, ends = _stacks(net, models), _positions(net, models), np.cumsum(sizes)
    flat, loops = stream.x.reshape(len(stream.x), -1), LOOPS[net.apply]
    with _Cores(len(sizes)) as team:
        team.run(lambda lo, hi: loops.flag(lo, hi, *parts, on, flat, stream.y, rows, ends, which, flags))
    return flags


def logits(net: Net, models: Models, stream: Stream, rows: Ints) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the logits [m, row, class] of these rows in blocks of rows, with the bits that `wrong` compares."""
    stacks = _stacks(net, models)
    yield from _compute_blocks(LOOPS[net.apply].compute_logits, stacks, stacks[-1].shape[1], net, models, stream, rows)


def member_logits(
    net: Net, models: Models, stream: Stream, rows: Ints, sizes: Ints, teams: Ints
) -> npt.NDArray[np.float32]:
    """Return the logits [k, row, class] of the k-th member of each team, whose sizes[team] rows follow each other."""
    stacks = _stacks(net, models)
    logits = np.zeros((teams.shape[1], len(rows), stacks[-1].shape[1]), dtype=np.float32)
    flat, ends, compute = stream.x.reshape(len(stream.x), -1), np.cumsum(sizes), LOOPS[net.apply].compute_member_logits
    with _Cores(len(sizes)) as team:
        team.run(compute, *stacks, _positions(net, models), flat, rows, ends, teams, _sees(models.mask), logits)
    return logits


def hidden(net: Net, models: Models, stream: Stream, rows: Ints) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the inputs [m, row, unit] of the last layers for these rows, in blocks of rows."""
    w1, b1, *last = _stacks(net, models)
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
    """Yield what `compute` writes for these rows, [m, row, number], in blocks of rows, on all cores."""
    on, sees = _positions(net, models), _sees(models.mask)
    flat = stream.x.reshape(len(stream.x), -1)
    for start in range(0, len(rows), MAX_ROWS):
        part = np.ascontiguousarray(rows[start : start + MAX_ROWS])
        out = np.empty((len(models), len(part), width), dtype=np.float32)
        with _Cores(-(-len(part) // kernel_loops.BLOCK)) as team:
            team.run(compute, *stacks, on, flat, part, sees, out)
        yield out


def _sees(mask: Any) -> Any:
    """Return the features that each model sees as factors [m, feature]; [1, 0] if every model sees all."""
    return np.ones((1, 0), dtype=np.float32) if mask is None else mask.reshape(len(mask), -1).astype(np.float32)


def shuffle(key: rng.Words, starts: Ints, counts: Ints, order: npt.NDArray[np.int32]) -> None:
    """order[starts[k]:][:counts[k]] becomes those rows in the `rng.permutation` of key k."""
    with _Cores(len(counts)) as team:
        team.run(kernel_loops.shuffle, key[0], key[1], starts, counts, order)


def _stacks(net: Net, models: Models) -> list[Any]:
    return [np.ascontiguousarray(models.params[name]) for name in LEAVES[net.apply]]


def _positions(net: Net, models: Models) -> Ints:
    """The row of each model in the stack of first layers."""
    return models.trunk_index if trunk_of(net, models.params)["W1"] else np.arange(len(models))


class _Cores:
    """Deals n pieces of work to one thread per core."""

    def __init__(self, n: int) -> None:
        cuts = np.linspace(0, n, min(cores(), max(n, 1)) + 1).astype(int).tolist()
        self.pieces = list(itertools.pairwise(cuts))

    def __enter__(self) -> Self:
        self.pool = ThreadPoolExecutor(max(1, len(self.pieces) - 1))
        return self

    def run(self, work: Callable[..., None], *args: Any) -> None:
        """Call work(lo, hi, *args) for every share of the pieces; this thread takes the first."""
        futures = [self.pool.submit(work, *piece, *args) for piece in self.pieces[1:]]
        work(*self.pieces[0], *args)
        for future in futures:
            future.result()

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()


def _packed(leaves: Sequence[Any]) -> Any:
    """A row for each model, filled up with zeros to whole vectors: one array after the other."""
    size = sum(leaf[0].size for leaf in leaves)
    packed = np.zeros((len(leaves[0]), -(-size // kernel_loops.WIDTH) * kernel_loops.WIDTH), dtype=np.float32)
    np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1, out=packed[:, :size])
    return packed


def _leaves(names: Sequence[str], packed: Any, like: Params) -> Iterator[tuple[str, Any]]:
    """The way back from `_packed`."""
    begin = 0
    for name in names:
        shape = like[name].shape[1:]
        yield name, packed[:, begin : begin + math.prod(shape)].reshape(len(packed), *shape)
        begin += math.prod(shape)
