"""The compiled loops of `kernel`: written out for speed, held equal to NumPy and JAX by tests.

One function per unit was tried and gave the same bits, but took a fifth longer per step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from feddrift.averaging import LARGEST
from feddrift.engines import optim

try:
    from numba import njit
except ImportError:  # the simulator's own program does it, too
    njit = None  # type: ignore[assignment]

COMPILED = njit is not None  # without numba nobody should call these

BLOCK = 64  # rows scored together
WIDTH = 16  # a minibatch is padded to a multiple of this, so that no loop over its rows has a remainder


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
def average(models: Any, parts: Any, target: Any, share: Any, order: Any) -> None:
    """`averaging.averaged`, to the same bits: products, then sums part by part; in place."""
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
def shuffle(lo: Any, hi: Any, key0: Any, key1: Any, starts: Any, counts: Any, order: Any) -> None:
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
    """`optim.update` of this row of parameters and moments; in place. Of sgd `bias` is the momentum."""
    mean, square, largest = held
    if not adam and bias > 0:  # momentum
        for i in range(len(grads)):
            m = bias * mean[row, i] + (grads[i] + decay * params[row, i])
            mean[row, i] = m
            params[row, i] -= rate * m
        return
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
    """The gradient of `losses.batch_loss` on x[feature, row], of which the first `real` rows count.

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
def count(
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
def flag(
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


@_loose
def _cross_entropy(out: Any, y: Any) -> Any:
    """Of one row's logits."""
    top, total = out[0], np.float32(0)
    for c in range(1, len(out)):
        top = max(top, out[c])
    for c in range(len(out)):
        total += np.float32(math.exp(out[c] - top))
    return np.float32(math.log(total)) + top - out[y]


@_loose
def _held_loss(W1: Any, b1: Any, W2: Any, b2: Any, X: Any, Y: Any, rows: Any, weight: Any, sees: Any) -> Any:
    """`losses.weighed_loss` of these rows."""
    hidden, out, loss = np.empty(len(b1), dtype=np.float32), np.empty(len(b2), dtype=np.float32), np.float32(0)
    for r in range(len(rows)):
        if weight[r] > 0:
            hidden[:], out[:] = b1, b2
            for i in range(len(W1)):
                x = X[rows[r], i] * (sees[i] if len(sees) else np.float32(1))
                for j in range(len(b1)):
                    hidden[j] += x * W1[i, j]
            for j in range(len(b1)):
                for c in range(len(b2)):
                    out[c] += max(hidden[j], np.float32(0)) * W2[j, c]
            loss += weight[r] * _cross_entropy(out, Y[rows[r]])
    return loss


@_strict
def _finite(values: Any) -> Any:
    sound = True
    for value in values:
        sound = sound and abs(value) <= LARGEST  # NaN is not
    return sound


@_loose
def train(
    lo: Any, hi: Any, round: Any, n_heads: Any, modelW1: Any, modelb1: Any, modelW2: Any, modelb2: Any,
    W1: Any, b1: Any, W2: Any, b2: Any, flatW1: Any, flatb1: Any, flatW2: Any, flatb2: Any, heldW1: Any, heldb1: Any,
    heldW2: Any, heldb2: Any, trunk_taken: Any, head_taken: Any, trunk: Any, model: Any, drawn: Any, X: Any, Y: Any,
    sees: Any, how: Any, looks: Any, sound: Any,
) -> None:  # fmt: skip
    """The local steps of lanes lo..hi-1 in one round, from the models' parameters; in place."""
    key0, key1, cumulative, counts, starts, order = drawn
    steps, batch, lr, decay, adam, momentum, trunk_learns, head_learns = how
    held, held_weight, every, before, patience = looks
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
            rate, bias = lr, momentum
            if head_learns:
                head_taken[pair] += 1
                if adam:
                    rate, bias = _corrections(head_taken[pair], lr)
                _update(flatW2, flat[2], heldW2, pair, rate, bias, decay, adam)
                _update(flatb2, flat[3], heldb2, pair, rate, bias, decay, adam)
            if trunk_learns:
                trunk_taken[lane] += 1
                if adam and not (head_learns and trunk_taken[lane] == head_taken[pair]):
                    rate, bias = _corrections(trunk_taken[lane], lr)
                _update(flatW1, flat[0], heldW1, lane, rate, bias, decay, adam)
                _update(flatb1, flat[1], heldb1, lane, rate, bias, decay, adam)
            if every[lane] > 0 and (step + 1) % every[lane] == 0:
                loss = np.float32(0)
                for i in range(n_heads):
                    pair = lane * n_heads + i
                    seen = sees[model[pair] if sees.shape[1] else 0]
                    loss += _held_loss(
                        W1[lane], b1[lane], W2[pair], b2[pair], X, Y, held[lane], held_weight[lane, i], seen
                    )
                fell, before[lane] = before[lane] - loss, loss
                if fell > 0 and fell < patience / np.float32((step + 1) // every[lane]):
                    break
        sound[lane] = _finite(flatW1[lane]) and _finite(flatb1[lane])
        for pair in range(lane * n_heads, (lane + 1) * n_heads):
            sound[lane] = sound[lane] and _finite(flatW2[pair]) and _finite(flatb2[pair])
