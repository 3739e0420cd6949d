"""Algorithm 1 for small perceptrons on the CPU: lane after lane in native code, on all cores.

XLA spends several microseconds on a local step of a net with a few hidden units, most of them between operations; a
loop that stays in the cache needs about one. numba compiles it once and keeps it on disk. The simulator uses it where
it applies, with the arguments and results of its own program.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from feddrift import optim, rng
from feddrift.background import cores
from feddrift.models import sound_parts, split, trunk_of
from feddrift.nets import perceptron
from feddrift.types import Bools, Ints, Local, Models, Net, Params, Stream

try:
    from numba import njit
except ImportError:  # the simulator's own program does it, too
    njit = None  # type: ignore[assignment]

MOST_WEIGHTS = 2048  # in the hidden layer: for larger ones XLA's matrix products are faster
LEAVES = ("W1", "b1", "W2", "b2")
BLOCK = 64  # rows scored together
WIDTH = 16  # a minibatch is padded to a multiple of this, so that no loop over its rows has a remainder


def ready() -> bool:
    """Whether there is native code at all."""
    return njit is not None


def applies(net: Net, params: Params) -> bool:
    """Whether these are small perceptrons whose trunk, if they have one, is the hidden layer."""
    if not ready() or net.apply is not perceptron or params["W1"][0].size > MOST_WEIGHTS:
        return False
    trunk = trunk_of(net, params)
    return {name for name in LEAVES if trunk[name]} in (set(), {"W1", "b1"})


def rounds(
    net: Net, local: Local, params: Params, mask: Any, of_trunk: Any, of_head: Any, lanes: Any, x: Any, y: Any,
    order: Any, first: int, last: int,
) -> tuple[Params, Params, Any, Any, Any]:  # fmt: skip
    """As `program.rounds`."""
    shape = trunk_of(net, params)
    n_lanes, n_pairs, n_heads = int(lanes.n_lanes), int(lanes.n_pairs), lanes.model.shape[1]
    models = {name: np.array(params[name]) for name in LEAVES}
    heads = lanes.model.reshape(-1)
    at = {name: lanes.trunk if shape[name] else heads for name in LEAVES}
    work = {name: models[name][at[name]] for name in LEAVES}
    held, done = {}, {}
    for shelf, names in zip((of_trunk, of_head), split({name: name for name in LEAVES}, shape), strict=True):
        moments, taken = shelf
        stacks = [[np.array(leaf) for leaf in moments[key]] for key in ("mean", "square", "largest")]
        taken = np.array(taken)
        for k, name in enumerate(names):
            held[name], done[name] = tuple(stack[k] for stack in stacks), taken
    if not shape["W1"]:
        done["W1"] = done["W2"].copy()  # both layers count their steps
    drawn = (lanes.key[0], lanes.key[1], lanes.cumulative, lanes.counts, lanes.starts, order)
    sees = np.ones((1, 0), dtype=np.float32) if mask is None else mask.reshape(len(mask), -1)
    how = (
        local.steps, local.batch, np.float32(local.lr), np.float32(local.weight_decay),
        local.optimizer == "adam", local.trains == "all" or not shape["W1"],
    )  # fmt: skip
    flat = x.reshape(len(x), -1)
    sound, refused = np.ones(n_lanes, dtype=bool), np.zeros(n_lanes, dtype=np.int32)
    given = (
        n_heads, *(models[k] for k in LEAVES), *(work[k] for k in LEAVES), *(_rows(work[k]) for k in LEAVES),
        *(tuple(map(_rows, held[k])) for k in LEAVES), done["W1"], done["W2"], at["W1"], heads, drawn, flat,
        y, sees, how, sound,
    )  # fmt: skip
    every = np.arange(n_lanes, dtype=np.int32)
    parts = {True: (lanes.trunk_share, every), False: (lanes.head_share, lanes.pair[:n_pairs])}
    places = [(_rows(models[k]), _rows(work[k]), at[k]) for k in LEAVES]
    average = [parts[shape[k]] for k in LEAVES]
    with _Cores(n_lanes) as team:
        for round in range(int(first), int(last)):
            team.run(_train, np.uint32(round), *given)
            taken = average
            if not sound.all():
                refused += ~sound
                lane_of = {True: every, False: lanes.pair[:n_pairs] // n_heads}
                left = {trunk: sound_parts(*parts[trunk], at[k], sound[lane_of[trunk]]) for k, trunk in shape.items()}
                taken = [left[shape[k]] for k in LEAVES]
            for place, some in zip(places, taken, strict=True):
                _average(*place, *some)
    kept = []
    for shelf, names in zip((of_trunk, of_head), split({name: name for name in LEAVES}, shape), strict=True):
        moments = {key: [held[name][i] for name in names] for i, key in enumerate(("mean", "square", "largest"))}
        kept.append((moments, done[names[0]] if names else shelf[1]))
    return models, work, kept[0], kept[1], refused


def mistakes(net: Net, models: Models, stream: Stream, rows: Ints, sizes: Ints) -> Ints:
    """[m, cell]: on how many of each cell's rows, which lie one cell after the other, each model is mistaken."""
    counts: Ints = np.zeros((len(sizes), len(models)), dtype=np.int64)
    parts, on, ends = _stacks(models), _positions(net, models), np.cumsum(sizes)
    flat = stream.x.reshape(len(stream.x), -1)
    with _Cores(len(sizes)) as team:
        team.run(lambda lo, hi: _count(lo, hi, *parts, on, flat, stream.y, rows, ends, counts))
    return counts.T


def wrong(net: Net, models: Models, stream: Stream, rows: Ints, sizes: Ints, which: Ints) -> Bools:
    """[row]: whether the model at position which[cell] is mistaken."""
    flags: Bools = np.zeros(len(rows), dtype=bool)
    parts, on, ends = _stacks(models), _positions(net, models), np.cumsum(sizes)
    flat = stream.x.reshape(len(stream.x), -1)
    with _Cores(len(sizes)) as team:
        team.run(lambda lo, hi: _flag(lo, hi, *parts, on, flat, stream.y, rows, ends, which, flags))
    return flags


def shuffle(key: rng.Words, starts: Ints, counts: Ints, order: npt.NDArray[np.int32]) -> None:
    """order[starts[k]:][:counts[k]] becomes those rows in the `rng.permutation` of key k."""
    with _Cores(len(counts)) as team:
        team.run(_shuffle, key[0], key[1], starts, counts, order)


def _stacks(models: Models) -> list[Any]:
    return [np.ascontiguousarray(models.params[name]) for name in LEAVES]


def _positions(net: Net, models: Models) -> Ints:
    """The row of each model in the stack of hidden layers."""
    return models.stands_on if trunk_of(net, models.params)["W1"] else np.arange(len(models))


class _Cores:
    """Deals n pieces of work to one thread per core."""

    def __init__(self, n: int) -> None:
        cuts = np.linspace(0, n, min(cores(), max(n, 1)) + 1).astype(int).tolist()
        self.pieces = list(itertools.pairwise(cuts))

    def __enter__(self) -> Self:
        self.pool = ThreadPoolExecutor(max(1, len(self.pieces) - 1))
        return self

    def run(self, some: Callable[..., None], *more: Any) -> None:
        """some(lo, hi, ...) for every share of the work; this thread takes the first."""
        others = [self.pool.submit(some, *piece, *more) for piece in self.pieces[1:]]
        some(*self.pieces[0], *more)
        for other in others:
            other.result()

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()


def _rows(stack: Any) -> Any:
    return stack.reshape(len(stack), -1)


def _native(**flags: Any) -> Callable[[Callable[..., Any]], Any]:
    def compiled(function: Callable[..., Any]) -> Any:
        if njit is None:
            return function
        try:
            return njit(cache=True, nogil=True, error_model="numpy", **flags)(function)
        except RuntimeError:  # no folder to keep it in
            return njit(nogil=True, error_model="numpy", **flags)(function)

    return compiled


# Sums may be reordered and multiply-adds fused; NaN and infinity stay what they are.
_loose = _native(fastmath={"reassoc", "contract", "nsz", "arcp"})
_strict = _native()


@_strict
def _average(models: Any, parts: Any, target: Any, share: Any, order: Any) -> None:
    """`models.averaged`, to the same bits: products, then sums part by part; in place."""
    for k in range(len(order)):
        models[target[order[k]]] = np.float32(0)
    for k in range(len(order)):
        i = order[k]
        for j in range(models.shape[1]):
            models[target[i], j] += share[i] * parts[i, j]


@_strict
def _turned(x0: Any, x1: Any, by: Any) -> Any:
    x0 = np.uint32(x0 + x1)
    return x0, np.uint32((x1 << by) | (x1 >> np.uint32(np.uint32(32) - by))) ^ x0


@_strict
def _threefry(k0: Any, k1: Any, x0: Any, x1: Any) -> Any:
    """`rng.threefry2x32` of single words."""
    keys = (k0, k1, np.uint32(k0 ^ k1 ^ np.uint32(0x1BD11BDA)))
    x0, x1 = np.uint32(x0 + k0), np.uint32(x1 + k1)
    for block in range(5):
        odd = block % 2 == 1
        x0, x1 = _turned(x0, x1, np.uint32(17 if odd else 13))
        x0, x1 = _turned(x0, x1, np.uint32(29 if odd else 15))
        x0, x1 = _turned(x0, x1, np.uint32(16 if odd else 26))
        x0, x1 = _turned(x0, x1, np.uint32(24 if odd else 6))
        x0 = np.uint32(x0 + keys[(block + 1) % 3])
        x1 = np.uint32(x1 + keys[(block + 2) % 3] + np.uint32(block + 1))
    return x0, x1


@_strict
def _shuffle(lo: Any, hi: Any, key0: Any, key1: Any, starts: Any, counts: Any, order: Any) -> None:
    """Sorts random words, each with its place below it: first into buckets by their top bits, then by insertion."""
    most = 2
    for cell in range(lo, hi):
        most = max(most, counts[cell])
    words, sorted_ = np.empty(most + 1, dtype=np.uint32), np.empty(most, dtype=np.uint64)
    ends = np.empty(2 * most + 1, dtype=np.int64)
    for cell in range(lo, hi):
        n, bits = counts[cell], 1
        while (1 << bits) < n:
            bits += 1
        shift = np.uint32(32 - bits)
        ends[: (1 << bits) + 1] = 0
        for pair in range((n + 1) // 2):
            words[2 * pair], words[2 * pair + 1] = _threefry(key0[cell], key1[cell], np.uint32(pair), np.uint32(0))
        for i in range(n):
            ends[(words[i] >> shift) + 1] += 1
        for bucket in range(1 << bits):
            ends[bucket + 1] += ends[bucket]
        for i in range(n):
            bucket = words[i] >> shift
            sorted_[ends[bucket]] = (np.uint64(words[i]) << np.uint64(32)) | np.uint64(i)
            ends[bucket] += 1
        for i in range(1, n):
            word, at = sorted_[i], i
            while at > 0 and sorted_[at - 1] > word:
                sorted_[at] = sorted_[at - 1]
                at -= 1
            sorted_[at] = word
        for i in range(n):
            order[starts[cell] + i] = starts[cell] + np.int64(sorted_[i] & np.uint64(0xFFFFFFFF))


@_loose
def _corrections(taken: Any, lr: Any) -> Any:
    """The step size over the first bias, and the root of the second, after so many steps."""
    rate = np.float32(lr / np.float32(-math.expm1(taken * LOG1)))
    return rate, np.float32(math.sqrt(np.float32(-math.expm1(taken * LOG2))))


@_loose
def _update(params: Any, grads: Any, held: Any, row: Any, rate: Any, bias: Any, decay: Any, adam: Any) -> None:
    """`optim.update` of this row of parameters and moments; in place."""
    mean, square, largest = held
    if not adam:
        for i in range(len(grads)):
            params[row, i] -= rate * (grads[i] + decay * params[row, i])
        return
    for i in range(len(grads)):
        g = grads[i] + decay * params[row, i]
        m = B1 * mean[row, i] + C1 * g
        v = B2 * square[row, i] + C2 * g * g
        u = max(largest[row, i], v)
        mean[row, i], square[row, i], largest[row, i] = m, v, u
        params[row, i] -= rate * m / (math.sqrt(u) / bias + EPS)


@_strict
def _exp(x: Any) -> Any:
    """e^x of a float32 from -87 to 0, to a unit in the last place or two; unlike math.exp, in vector registers."""
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = (x - n * np.float32(0.693359375)) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


B1, C1 = np.float32(optim.BETA1), np.float32(1 - optim.BETA1)
B2, C2, EPS = np.float32(optim.BETA2), np.float32(1 - optim.BETA2), np.float32(optim.EPS)
LOG1, LOG2 = np.float32(math.log(optim.BETA1)), np.float32(math.log(optim.BETA2))


@_loose
def _gradient(W1: Any, b1: Any, W2: Any, b2: Any, x: Any, y: Any, real: Any, room: Any, grads: Any) -> None:
    """The gradient of `nets.batch_loss` on x[feature, row], of which the first `real` rows count.

    Layers are written out, here and in `_predict`: calls of one function for a unit cost a fifth of a local step.
    """
    hidden, out, top, total, back = room
    gW1, gb1, gW2, gb2 = grads
    d, h, k, n = len(W1), len(b1), len(b2), len(y) // WIDTH * WIDTH
    zero, part = np.float32(0), np.float32(1) / np.float32(real)
    for j in range(h):  # sums and weights in scalars: what lies in an array might be another array's, for the compiler
        weight = b1[j]
        for b in range(n):
            hidden[j, b] = weight
        for i in range(d):
            weight = W1[i, j]
            for b in range(n):
                hidden[j, b] += weight * x[i, b]
        for b in range(n):
            hidden[j, b] = max(hidden[j, b], zero)
    for c in range(k):
        weight = b2[c]
        for b in range(n):
            out[c, b] = weight
        for j in range(h):
            weight = W2[j, c]
            for b in range(n):
                out[c, b] += weight * hidden[j, b]
    for b in range(n):
        top[b], total[b] = out[0, b], zero
    for c in range(1, k):
        for b in range(n):
            top[b] = max(top[b], out[c, b])
    for c in range(k):
        for b in range(n):
            out[c, b] = _exp(max(out[c, b] - top[b], np.float32(-87)))
        for b in range(n):
            total[b] += out[c, b]
    for b in range(n):
        total[b] = part / total[b]
    for b in range(real, n):
        total[b] = zero
    for c in range(k):
        for b in range(n):
            out[c, b] *= total[b]
    for b in range(real):
        out[y[b], b] -= part
    for c in range(k):
        for j in range(h):
            dot = zero
            for b in range(n):
                dot += hidden[j, b] * out[c, b]
            gW2[j, c] = dot
        dot = zero
        for b in range(n):
            dot += out[c, b]
        gb2[c] = dot
    for j in range(h):
        for b in range(n):
            back[b] = zero
        for c in range(k):
            weight = W2[j, c]
            for b in range(n):
                back[b] += weight * out[c, b]
        for b in range(n):
            back[b] = back[b] if hidden[j, b] > zero else zero
        dot = zero
        for b in range(n):
            dot += back[b]
        gb1[j] = dot
        for i in range(d):
            dot = zero
            for b in range(n):
                dot += x[i, b] * back[b]
            gW1[i, j] = dot


@_loose
def _predict(W1: Any, b1: Any, W2: Any, b2: Any, x: Any, n: Any, hidden: Any, out: Any, best: Any) -> None:
    """The class of x[feature, row] for the first n rows: the lowest of those with the highest logit."""
    top = out[0]
    for j in range(len(b1)):
        weight = b1[j]
        for b in range(n):
            hidden[j, b] = weight
        for i in range(len(W1)):
            weight = W1[i, j]
            for b in range(n):
                hidden[j, b] += weight * x[i, b]
        for b in range(n):
            hidden[j, b] = max(hidden[j, b], np.float32(0))
    for c in range(len(b2)):
        logit = out[1] if c else top
        weight = b2[c]
        for b in range(n):
            logit[b] = weight
        for j in range(len(b1)):
            weight = W2[j, c]
            for b in range(n):
                logit[b] += weight * hidden[j, b]
        for b in range(n):
            higher = c == 0 or logit[b] > top[b] or (math.isnan(logit[b]) and not math.isnan(top[b]))
            best[b] = c if higher else best[b]
            top[b] = logit[b] if higher else top[b]


@_strict
def _room(W1: Any, W2: Any) -> Any:
    """Space for a block of rows: inputs, hidden units, logits, classes."""
    d, h, n = W1.shape[1], W1.shape[2], BLOCK
    return (
        np.empty((d, n), dtype=np.float32), np.empty((h, n), dtype=np.float32), np.empty((2, n), dtype=np.float32),
        np.empty(n, dtype=np.int64),
    )  # fmt: skip


@_strict
def _gather(X: Any, rows: Any, begin: Any, end: Any, x: Any) -> Any:
    """Rows begin.. as x[feature, row], as many as fit; how many those are."""
    n = min(BLOCK, end - begin)
    for b in range(n):
        for i in range(len(x)):
            x[i, b] = X[rows[begin + b], i]
    return n


@_loose
def _count(
    lo: Any, hi: Any, W1: Any, b1: Any, W2: Any, b2: Any, on: Any, X: Any, Y: Any, rows: Any, ends: Any, counts: Any
) -> None:
    """counts[cell, m]: how many rows of cells lo..hi-1 each model gets wrong."""
    x, hidden, out, best = _room(W1, W2)
    for cell in range(lo, hi):
        begin = ends[cell - 1] if cell else 0
        while begin < ends[cell]:
            n = _gather(X, rows, begin, ends[cell], x)
            for m in range(len(on)):
                _predict(W1[on[m]], b1[on[m]], W2[m], b2[m], x, n, hidden, out, best)
                for b in range(n):
                    counts[cell, m] += best[b] != Y[rows[begin + b]]
            begin += n


@_loose
def _flag(
    lo: Any, hi: Any, W1: Any, b1: Any, W2: Any, b2: Any, on: Any, X: Any, Y: Any, rows: Any, ends: Any, which: Any,
    flags: Any,
) -> None:  # fmt: skip
    """flags[row]: whether model which[cell] gets it wrong, for cells lo..hi-1."""
    x, hidden, out, best = _room(W1, W2)
    for cell in range(lo, hi):
        begin, m = ends[cell - 1] if cell else 0, which[cell]
        while begin < ends[cell]:
            n = _gather(X, rows, begin, ends[cell], x)
            _predict(W1[on[m]], b1[on[m]], W2[m], b2[m], x, n, hidden, out, best)
            for b in range(n):
                flags[begin + b] = best[b] != Y[rows[begin + b]]
            begin += n


@_strict
def _finite(values: Any) -> Any:
    sound = True
    for value in values:
        sound = sound and math.isfinite(value)
    return sound


@_loose
def _train(
    lo: Any, hi: Any, round: Any, n_heads: Any, modelW1: Any, modelb1: Any, modelW2: Any, modelb2: Any,
    W1: Any, b1: Any, W2: Any, b2: Any, flatW1: Any, flatb1: Any, flatW2: Any, flatb2: Any, heldW1: Any, heldb1: Any,
    heldW2: Any, heldb2: Any, trunk_taken: Any, head_taken: Any, trunk: Any, model: Any, drawn: Any, X: Any, Y: Any,
    sees: Any, how: Any, sound: Any,
) -> None:  # fmt: skip
    """The local steps of lanes lo..hi-1 in one round, from the models' parameters; in place."""
    key0, key1, cumulative, counts, starts, order = drawn
    steps, batch, lr, decay, adam, all_learn = how
    d, h, k = W1.shape[1], W1.shape[2], W2.shape[2]
    wide = (batch + WIDTH - 1) // WIDTH * WIDTH  # the rows beyond the batch have no weight
    x, y = np.zeros((d, wide), dtype=np.float32), np.zeros(wide, dtype=np.int32)
    room = (
        np.empty((h, wide), dtype=np.float32), np.empty((k, wide), dtype=np.float32),
        np.empty(wide, dtype=np.float32), np.empty(wide, dtype=np.float32), np.empty(wide, dtype=np.float32),
    )  # fmt: skip
    grads = (
        np.empty((d, h), dtype=np.float32), np.empty(h, dtype=np.float32),
        np.empty((h, k), dtype=np.float32), np.empty(k, dtype=np.float32),
    )  # fmt: skip
    flat = grads[0].reshape(-1), grads[1], grads[2].reshape(-1), grads[3]
    for lane in range(lo, hi):
        W1[lane], b1[lane] = modelW1[trunk[lane]], modelb1[trunk[lane]]
        for pair in range(lane * n_heads, (lane + 1) * n_heads):
            W2[pair], b2[pair] = modelW2[model[pair]], modelb2[model[pair]]
        for step in range(steps):
            word0, word1 = _threefry(key0[lane], key1[lane], round, np.uint32(step))
            unit = np.float32(word0 >> np.uint32(8)) * np.float32(2.0**-24)
            cell = 0
            while unit >= cumulative[lane, cell]:
                cell += 1
            n = counts[lane, cell]
            row: Any = np.int64(word1 % np.uint32(n))
            pair = lane * n_heads + cell % n_heads
            for b in range(batch):
                at = order[starts[lane, cell] + row]
                y[b] = Y[at]
                for i in range(d):
                    x[i, b] = X[at, i]
                row = row + 1 if row + 1 < n else 0
            if sees.shape[1]:
                for i in range(d):
                    for b in range(wide):
                        x[i, b] *= sees[model[pair], i]
            _gradient(W1[lane], b1[lane], W2[pair], b2[pair], x, y, min(n, batch), room, grads)
            head_taken[pair] += 1
            rate, bias = _corrections(head_taken[pair], lr) if adam else (lr, lr)
            _update(flatW2, flat[2], heldW2, pair, rate, bias, decay, adam)
            _update(flatb2, flat[3], heldb2, pair, rate, bias, decay, adam)
            if all_learn:
                trunk_taken[lane] += 1
                if adam and trunk_taken[lane] != head_taken[pair]:
                    rate, bias = _corrections(trunk_taken[lane], lr)
                _update(flatW1, flat[0], heldW1, lane, rate, bias, decay, adam)
                _update(flatb1, flat[1], heldb1, lane, rate, bias, decay, adam)
        sound[lane] = _finite(flatW1[lane]) and _finite(flatb1[lane])
        for pair in range(lane * n_heads, (lane + 1) * n_heads):
            sound[lane] = sound[lane] and _finite(flatW2[pair]) and _finite(flatb2[pair])
