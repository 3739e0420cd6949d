"""The compiled loops of `kernel`: written out for speed, compared with NumPy and JAX by tests.

Training works on `vectors`, scoring in plain loops over rows. Every processor gives the same bits: sums have a fixed
order, multiply-adds are explicit (`fused`), no fast-math flag is set, and exponentials and logarithms are computed here
instead of by the C library.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from feddrift import numerics
from feddrift.averaging import MAX_PARAMETER
from feddrift.engines.local import optim

try:
    from numba import njit

    from feddrift.engines.native.vectors import (
        REGISTER,
        SUMS,
        begun,
        filled,
        floor,
        folded,
        fused,
        get,
        larger,
        load,
        load_parts,
        load_rest,
        no_parts,
        power_of_two,
        put,
        root,
        scalar_power_of_two,
        spread,
        store,
        where_label,
        where_labelled,
        where_positive,
    )
except ImportError:  # the simulator's own program does it, too
    njit = None  # type: ignore[assignment]

COMPILED = njit is not None  # without numba nobody should call these

BLOCK = 64  # rows scored together
WIDTH = 16  # the rows of a minibatch, and the numbers of a layer, are padded to a multiple of this: one vector


def _native(**flags: Any) -> Callable[[Callable[..., Any]], Any]:
    def compiled(function: Callable[..., Any]) -> Any:
        if njit is None:
            return function
        try:
            return njit(cache=True, nogil=True, error_model="numpy", **flags)(function)
        except RuntimeError:  # no folder to keep it in
            return njit(nogil=True, error_model="numpy", **flags)(function)

    return compiled


_strict = _native()
_inlined = _native(forceinline=True)
# Inlined into the caller, without reference counts for arrays.
_exact = _native(forceinline=True, _nrt=False)


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


B1, C1 = np.float32(optim.BETA1), np.float32(1 - optim.BETA1)
B2, C2, EPS = np.float32(optim.BETA2), np.float32(1 - optim.BETA2), np.float32(optim.EPS)

LOG_BETA1, LOG_BETA2 = float(numerics.log(optim.BETA1)), float(numerics.log(optim.BETA2))
LOG2_E, LN2 = 1.4426950408889634, 0.6931471805599453
SQRT_HALF = 0.7071067811865476


@_inlined
def _split_power(x: Any) -> Any:
    """Return n and f with e^x = 2^n (1 + f), for finite x from -700 to 0; f is exact enough for float32."""
    n = np.floor(x * LOG2_E + 0.5)
    r = fused(-n, LN2, x)
    f = 1 / 362880
    f = fused(f, r, 1 / 40320)
    f = fused(f, r, 1 / 5040)
    f = fused(f, r, 1 / 720)
    f = fused(f, r, 1 / 120)
    f = fused(f, r, 1 / 24)
    f = fused(f, r, 1 / 6)
    f = fused(f, r, 0.5)
    f = fused(f, r, 1.0)
    return n, f * r


@_strict
def _exp_of(x: Any) -> Any:
    """Return e^x for one number x <= 0, in float64 with the precision of float32."""
    if not x > -700.0:
        return 0.0 if x <= -700.0 else x  # NaN stays NaN
    n, f = _split_power(x)
    return (1.0 + f) * scalar_power_of_two(n)


@_strict
def _log_of(x: Any) -> Any:
    """Return ln(x) for one positive number, in float64 with the precision of float32."""
    if not 0.0 < x < math.inf:
        return x  # infinity and NaN stay what they are; zero cannot happen
    m, e = math.frexp(x)
    if m < SQRT_HALF:
        m, e = 2.0 * m, e - 1
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = 1 / 13
    p = fused(p, z, 1 / 11)
    p = fused(p, z, 1 / 9)
    p = fused(p, z, 1 / 7)
    p = fused(p, z, 1 / 5)
    p = fused(p, z, 1 / 3)
    p = fused(p, z, 1.0)
    return fused(2.0 * s, p, e * LN2)


@_inlined
def _bias_correction(taken: Any, log_beta: Any) -> Any:
    """Return 1 - beta^taken, exact to float32 also for the first steps."""
    x = np.float64(taken) * log_beta
    if x < -18.0:
        return 1.0  # the nearest float32
    n, f = _split_power(x)
    power = scalar_power_of_two(n)
    return (1.0 - power) - power * f


@_inlined
def _corrections(taken: Any, lr: Any) -> Any:
    """Return the step size over the first bias and the root of the second, after `taken` steps."""
    rate = lr / np.float32(_bias_correction(taken, LOG_BETA1))
    return rate, np.float32(math.sqrt(np.float32(_bias_correction(taken, LOG_BETA2))))


@_exact
def _update(params: Any, row: Any, grads: Any, held: Any, rate: Any, bias: Any, decay: Any, adam: Any) -> None:
    """`optim.update` of this row of parameters and moments; in place. Of sgd `bias` is the momentum."""
    mean, square, largest = held
    shrink = filled(decay)
    if not adam:
        for at in range(0, params.shape[1], WIDTH):
            p, g = load(params, row, at), load(grads, 0, at)
            if bias > 0:
                g = fused(shrink, p, fused(filled(bias), load(mean, row, at), g))
                store(mean, row, at, g)
            else:
                g = fused(shrink, p, g)
            store(params, row, at, fused(filled(-rate), g, p))
        return
    over = filled(np.float32(1) / bias)
    for at in range(0, params.shape[1], WIDTH):
        p = load(params, row, at)
        g = fused(shrink, p, load(grads, 0, at))
        m = fused(filled(C1), g, filled(B1) * load(mean, row, at))
        v = fused(g * g, filled(C2), filled(B2) * load(square, row, at))
        u = larger(v, load(largest, row, at))
        store(mean, row, at, m)
        store(square, row, at, v)
        store(largest, row, at, u)
        store(params, row, at, p - filled(rate) * m / fused(root(u), over, filled(EPS)))


@_exact
def _exp(x: Any) -> Any:
    """e^x from -87 to 0, to a unit in the last place or two."""
    n = floor(fused(x, filled(np.float32(1.44269504)), filled(np.float32(0.5))))
    r = fused(n, filled(np.float32(2.12194440e-4)), fused(n, filled(np.float32(-0.693359375)), x))
    p = filled(np.float32(1.9875691500e-4))
    p = fused(p, r, filled(np.float32(1.3981999507e-3)))
    p = fused(p, r, filled(np.float32(8.3334519073e-3)))
    p = fused(p, r, filled(np.float32(4.1665795894e-2)))
    p = fused(p, r, filled(np.float32(1.6666665459e-1)))
    p = fused(p, r, filled(np.float32(5.0000001201e-1)))
    return fused(r * r, p, r + filled(np.float32(1))) * power_of_two(n)


@_exact
def _dot(a: Any, i: Any, b: Any, j: Any, n: Any) -> Any:
    """Of two rows."""
    sums, whole = no_parts(), n // SUMS * SUMS
    for at in range(0, whole, SUMS):
        sums = fused(load_parts(a, i, at), load_parts(b, j, at), sums)
    found = folded(sums)
    if whole < n:
        rest = begun(found)
        for at in range(whole, n, REGISTER):
            rest = fused(load_rest(a, i, at), load_rest(b, j, at), rest)
        found = folded(rest)
    return found


@_exact
def _total(a: Any, i: Any, n: Any) -> Any:
    """Of a row."""
    sums, whole = no_parts(), n // SUMS * SUMS
    for at in range(0, whole, SUMS):
        sums = sums + load_parts(a, i, at)
    found = folded(sums)
    if whole < n:
        rest = begun(found)
        for at in range(whole, n, REGISTER):
            rest = rest + load_rest(a, i, at)
        found = folded(rest)
    return found


@_exact
def _errors(out: Any, k: Any, y: Any, part: Any) -> None:
    """Logits out[class, row] become the gradient of the loss by them, in which a row with a label has this part."""
    for at in range(0, out.shape[1], WIDTH):
        top, total = load(out, 0, at), filled(np.float32(0))
        for c in range(1, k):
            top = larger(load(out, c, at), top)
        for c in range(k):
            value = _exp(larger(filled(np.float32(-87)), load(out, c, at) - top))
            store(out, c, at, value)
            total = total + value
        share = where_labelled(y, 0, at, filled(part) / total)
        for c in range(k):
            store(out, c, at, load(out, c, at) * share - where_label(y, 0, at, c, filled(part)))


@_exact
def _gradient(trunk: Any, lane: Any, head: Any, pair: Any, shape: Any, x: Any, y: Any, part: Any, room: Any) -> None:
    """The gradient of `losses.batch_loss` on x[feature, row], of which those with a label in y count."""
    hidden, out, back, of_trunk, of_head = room
    d, h, k = shape
    n, zero = x.shape[1], filled(np.float32(0))
    for at in range(0, n, WIDTH):
        for j in range(h):
            value = spread(trunk, lane, d * h + j)
            for i in range(d):
                value = fused(spread(trunk, lane, i * h + j), load(x, i, at), value)
            store(hidden, j, at, larger(zero, value))
    for at in range(0, n, WIDTH):
        for c in range(k):
            value = spread(head, pair, h * k + c)
            for j in range(h):
                value = fused(spread(head, pair, j * k + c), load(hidden, j, at), value)
            store(out, c, at, value)
    _errors(out, k, y, part)
    for c in range(k):
        for j in range(h):
            put(of_head, 0, j * k + c, _dot(hidden, j, out, c, n))
        put(of_head, 0, h * k + c, _total(out, c, n))
    for j in range(h):
        for at in range(0, n, WIDTH):
            value = zero
            for c in range(k):
                value = fused(spread(head, pair, j * k + c), load(out, c, at), value)
            store(back, 0, at, where_positive(load(hidden, j, at), value))
        put(of_trunk, 0, d * h + j, _total(back, 0, n))
        for i in range(d):
            put(of_trunk, 0, i * h + j, _dot(x, i, back, 0, n))


@_inlined
def _hidden_units(W1: Any, b1: Any, x: Any, n: Any, hidden: Any) -> None:
    """Compute the hidden units [unit, row] of x[feature, row], for the first n rows."""
    for j in range(len(b1)):
        weight = b1[j]
        for b in range(n):
            hidden[j, b] = weight
        for i in range(len(W1)):
            weight = W1[i, j]
            for b in range(n):
                hidden[j, b] = fused(weight, x[i, b], hidden[j, b])
        for b in range(n):
            hidden[j, b] = max(hidden[j, b], np.float32(0))


@_inlined
def _logit(W: Any, bias: Any, c: Any, x: Any, n: Any, logit: Any) -> None:
    """Compute the logits of class c from x[unit, row], for the first n rows."""
    weight = bias[c]
    for b in range(n):
        logit[b] = weight
    for j in range(len(W)):
        weight = W[j, c]
        for b in range(n):
            logit[b] = fused(weight, x[j, b], logit[b])


@_inlined
def _classify(W: Any, bias: Any, x: Any, n: Any, out: Any, best: Any) -> None:
    """Find the class with the highest logit for the first n rows of x[unit, row]; of equal ones the lowest class."""
    top = out[0]
    for c in range(len(bias)):
        logit = out[1] if c else top
        _logit(W, bias, c, x, n, logit)
        for b in range(n):
            higher = c == 0 or logit[b] > top[b] or (math.isnan(logit[b]) and not math.isnan(top[b]))
            best[b] = c if higher else best[b]
            top[b] = logit[b] if higher else top[b]


@_inlined
def _predict(W1: Any, b1: Any, W2: Any, b2: Any, x: Any, n: Any, hidden: Any, out: Any, best: Any) -> None:
    """Find the class of x[feature, row] for the first n rows."""
    _hidden_units(W1, b1, x, n, hidden)
    _classify(W2, b2, hidden, n, out, best)


@_strict
def _gather_seen(X: Any, rows: Any, begin: Any, end: Any, seen: Any, x: Any) -> Any:
    """Gather rows begin.. as `_gather` does, times what the model sees of each feature, and return their number."""
    n = _gather(X, rows, begin, end, x)
    for i in range(len(seen)):
        for b in range(n):
            x[i, b] *= seen[i]
    return n


@_strict
def compute_logits(
    lo: Any, hi: Any, W1: Any, b1: Any, W2: Any, b2: Any, on: Any, X: Any, rows: Any, sees: Any, logits: Any
) -> None:
    """Write the logits [m, row, class] of blocks lo..hi-1 of rows, with the bits that `count` and `flag` compare."""
    x, hidden, out, _ = _room(W1, W2)
    for m in range(len(on)):
        for begin in range(lo * BLOCK, min(hi * BLOCK, len(rows)), BLOCK):
            n = _gather_seen(X, rows, begin, len(rows), sees[m if sees.shape[1] else 0], x)
            _hidden_units(W1[on[m]], b1[on[m]], x, n, hidden)
            for c in range(len(b2[m])):
                _logit(W2[m], b2[m], c, hidden, n, out[0])
                for b in range(n):
                    logits[m, begin + b, c] = out[0, b]


@_strict
def compute_member_logits(
    lo: Any, hi: Any, W1: Any, b1: Any, W2: Any, b2: Any, on: Any, X: Any, rows: Any, ends: Any, teams: Any, sees: Any,
    logits: Any,
) -> None:  # fmt: skip
    """Write the logits [k, row, class] of the k-th member of each of the teams lo..hi-1; -1 is no member."""
    x, hidden, out, _ = _room(W1, W2)
    for team in range(lo, hi):
        for begin in range(ends[team - 1] if team else 0, ends[team], BLOCK):
            for k in range(teams.shape[1]):
                m = teams[team, k]
                if m < 0:
                    continue
                n = _gather_seen(X, rows, begin, ends[team], sees[m if sees.shape[1] else 0], x)
                _hidden_units(W1[on[m]], b1[on[m]], x, n, hidden)
                for c in range(len(b2[m])):
                    _logit(W2[m], b2[m], c, hidden, n, out[0])
                    for b in range(n):
                        logits[k, begin + b, c] = out[0, b]


@_strict
def compute_hidden(lo: Any, hi: Any, W1: Any, b1: Any, on: Any, X: Any, rows: Any, sees: Any, units: Any) -> None:
    """Write the hidden units [m, row, unit] of blocks lo..hi-1 of rows."""
    x = np.empty((W1.shape[1], BLOCK), dtype=np.float32)
    hidden = np.empty((W1.shape[2], BLOCK), dtype=np.float32)
    for m in range(len(on)):
        for begin in range(lo * BLOCK, min(hi * BLOCK, len(rows)), BLOCK):
            n = _gather_seen(X, rows, begin, len(rows), sees[m if sees.shape[1] else 0], x)
            _hidden_units(W1[on[m]], b1[on[m]], x, n, hidden)
            for j in range(len(hidden)):
                for b in range(n):
                    units[m, begin + b, j] = hidden[j, b]


@_strict
def _room(W1: Any, W2: Any) -> Any:
    """Space for a block of rows: inputs, hidden units, logits, classes."""
    d, h, n = W1.shape[1], W1.shape[2], BLOCK
    return (
        np.empty((d, n), dtype=np.float32), np.empty((h, n), dtype=np.float32), np.empty((2, n), dtype=np.float32),
        np.empty(n, dtype=np.int64),
    )  # fmt: skip


@_inlined
def _gather(X: Any, rows: Any, begin: Any, end: Any, x: Any) -> Any:
    """Rows begin.. as x[feature, row], as many as fit; how many those are."""
    n = min(BLOCK, end - begin)
    for b in range(n):
        for i in range(len(x)):
            x[i, b] = X[rows[begin + b], i]
    return n


@_strict
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


@_strict
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


@_strict
def _cross_entropy(out: Any, y: Any) -> Any:
    """Return the cross-entropy of one row's logits."""
    top, total = out[0], 0.0
    for c in range(1, len(out)):
        top = max(top, out[c])
    for c in range(len(out)):
        total += _exp_of(np.float64(out[c] - top))
    return np.float32(_log_of(total)) + top - out[y]


@_strict
def _held_loss(W1: Any, b1: Any, W2: Any, b2: Any, X: Any, Y: Any, rows: Any, weight: Any, sees: Any) -> Any:
    """Return `losses.weighed_loss` of these rows."""
    hidden, out, loss = np.empty(len(b1), dtype=np.float32), np.empty(len(b2), dtype=np.float32), np.float32(0)
    for r in range(len(rows)):
        if weight[r] > 0:
            hidden[:], out[:] = b1, b2
            for i in range(len(W1)):
                x = X[rows[r], i] * (sees[i] if len(sees) else np.float32(1))
                for j in range(len(b1)):
                    hidden[j] = fused(x, W1[i, j], hidden[j])
            for j in range(len(b1)):
                unit = max(hidden[j], np.float32(0))
                for c in range(len(b2)):
                    out[c] = fused(unit, W2[j, c], out[c])
            loss += weight[r] * _cross_entropy(out, Y[rows[r]])
    return loss


@_strict
def _finite(values: Any) -> Any:
    sound = True
    for value in values:
        sound = sound and abs(value) <= MAX_PARAMETER  # NaN is not
    return sound


@_exact
def _take(X: Any, Y: Any, order: Any, begin: Any, n: Any, row: Any, batch: Any, x: Any, y: Any) -> None:
    """A minibatch from this row of n on, as x[feature, row] and y; rows that come twice have no label again.

    Two features at a time: to go through all of them row by row takes twice as long.
    """
    d, b = len(x), 0
    while b < batch:
        first, many = begin + row, min(n - row, batch - b)
        for r in range(many):
            put(y, 0, b + r, get(Y, 0, get(order, 0, first + r)))
        for i in range(0, d - 1, 2):
            for r in range(many):
                at = get(order, 0, first + r)
                put(x, i, b + r, get(X, at, i))
                put(x, i + 1, b + r, get(X, at, i + 1))
        if d % 2:
            for r in range(many):
                put(x, d - 1, b + r, get(X, get(order, 0, first + r), d - 1))
        b, row = b + many, 0
    for r in range(n, batch):
        put(y, 0, r, np.int32(-1))


@_strict
def train(
    lo: Any, hi: Any, round: Any, n_heads: Any, shape: Any, trunks: Any, heads: Any, trunk: Any, head: Any,
    trunk_held: Any, head_held: Any, trunk_taken: Any, head_taken: Any, trunk_of: Any, head_of: Any, drawn: Any, X: Any,
    Y: Any, sees: Any, how: Any, looks: Any, sound: Any,
) -> None:  # fmt: skip
    """The local steps of lanes lo..hi-1 in one round, from the models' parameters; in place."""
    key0, key1, cumulative, counts, starts, order = drawn
    steps, batch, lr, decay, adam, momentum, trunk_learns, head_learns = how
    held, held_weight, every, before, patience = looks
    d, h, k = shape
    wide = (batch + WIDTH - 1) // WIDTH * WIDTH  # the rows beyond the batch have no label
    x, y = np.zeros((d, wide), dtype=np.float32), np.full((1, wide), -1, dtype=np.int32)
    of_trunk, of_head = np.zeros((1, trunk.shape[1]), dtype=np.float32), np.zeros((1, head.shape[1]), dtype=np.float32)
    room = (
        np.empty((h, wide), dtype=np.float32), np.empty((k, wide), dtype=np.float32),
        np.empty((1, wide), dtype=np.float32), of_trunk, of_head,
    )  # fmt: skip
    for lane in range(lo, hi):
        trunk[lane] = trunks[trunk_of[lane]]
        for pair in range(lane * n_heads, (lane + 1) * n_heads):
            head[pair] = heads[head_of[pair]]
        for step in range(steps):
            word0, word1 = _threefry(key0[lane], key1[lane], round, np.uint32(step))
            unit = np.float32(word0 >> np.uint32(8)) * np.float32(2.0**-24)
            cell = 0
            while unit >= cumulative[lane, cell]:
                cell += 1
            n = counts[lane, cell]
            pair = lane * n_heads + cell % n_heads
            _take(X, Y, order, starts[lane, cell], n, np.int64(word1 % np.uint32(n)), batch, x, y)
            if sees.shape[1]:
                for i in range(d):
                    for b in range(wide):
                        x[i, b] *= sees[head_of[pair], i]
            _gradient(trunk, lane, head, pair, shape, x, y, np.float32(1) / np.float32(min(n, batch)), room)
            rate, bias = lr, momentum
            if head_learns:
                head_taken[pair] += 1
                if adam:
                    rate, bias = _corrections(head_taken[pair], lr)
                _update(head, pair, of_head, head_held, rate, bias, decay, adam)
            if trunk_learns:
                trunk_taken[lane] += 1
                if adam and not (head_learns and trunk_taken[lane] == head_taken[pair]):
                    rate, bias = _corrections(trunk_taken[lane], lr)
                _update(trunk, lane, of_trunk, trunk_held, rate, bias, decay, adam)
            if every[lane] > 0 and (step + 1) % every[lane] == 0:
                loss = np.float32(0)
                W1, b1 = trunk[lane, : d * h].reshape((d, h)), trunk[lane, d * h : d * h + h]
                for i in range(n_heads):
                    pair = lane * n_heads + i
                    W2, b2 = head[pair, : h * k].reshape((h, k)), head[pair, h * k : h * k + k]
                    seen = sees[head_of[pair] if sees.shape[1] else 0]
                    loss += _held_loss(W1, b1, W2, b2, X, Y, held[lane], held_weight[lane, i], seen)
                fell, before[lane] = before[lane] - loss, loss
                if fell > 0 and fell < patience / np.float32((step + 1) // every[lane]):
                    break
        sound[lane] = _finite(trunk[lane])
        for pair in range(lane * n_heads, (lane + 1) * n_heads):
            sound[lane] = sound[lane] and _finite(head[pair])
