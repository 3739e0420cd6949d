"""Compiled loops of `kernel` for perceptrons; tests compare their results with those of NumPy and JAX.

Training uses `vectors`, scoring uses plain loops over rows. Every processor gives the same bits: sums have a fixed
order, multiply-adds are explicit (`multiply_add`), no fast-math flag is set, and exponentials and logarithms are
computed here instead of by the C library.
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
        PARTS_SIZE,
        REGISTER_SIZE,
        broadcast_element,
        fill_vector,
        floor,
        get_element,
        load_parts,
        load_register,
        load_vector,
        multiply_add,
        power_of_two,
        put_element,
        scalar_power_of_two,
        square_root,
        start_register,
        store_vector,
        sum_parts,
        take_larger,
        where_any_label,
        where_label,
        where_positive,
        zero_parts,
    )
except ImportError:  # the simulator then uses its own compiled program
    njit = None  # type: ignore[assignment]

COMPILED = njit is not None  # without numba the functions of this module must not be called

BLOCK = 64  # rows that are scored together
VECTOR_SIZE = 16  # as in `vectors`, which needs numba; minibatches and layers are padded to a multiple of it


def _compile_with(**flags: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that compiles a function with these options of numba, or leaves it if numba is missing."""

    def compile_function(function: Callable[..., Any]) -> Any:
        if njit is None:
            return function
        try:
            return njit(cache=True, nogil=True, error_model="numpy", **flags)(function)
        except RuntimeError:  # no folder is writable for the cache
            return njit(nogil=True, error_model="numpy", **flags)(function)

    return compile_function


_compiled = _compile_with()
_inlined = _compile_with(forceinline=True)
_inlined_without_refcounts = _compile_with(forceinline=True, _nrt=False)  # arrays are not reference-counted


@_compiled
def average_rows(models: Any, parts: Any, target: Any, share: Any, order: Any) -> None:
    """Write the averages of parts to the rows of `models`, with the same bits as `averaging.average_rows`."""
    for k in range(len(order)):
        models[target[order[k]]] = np.float32(0)
    for k in range(len(order)):
        i = order[k]
        for j in range(models.shape[1]):
            models[target[i], j] += share[i] * parts[i, j]


@_compiled
def _rotate_words(x0: Any, x1: Any, n_bits: Any) -> Any:
    """Compute one round of Threefry with this rotation."""
    x0 = np.uint32(x0 + x1)
    return x0, np.uint32((x1 << n_bits) | (x1 >> np.uint32(np.uint32(32) - n_bits))) ^ x0


@_compiled
def _hash_words(k0: Any, k1: Any, x0: Any, x1: Any) -> Any:
    """Compute `rng.threefry2x32` of single words."""
    keys = (k0, k1, np.uint32(k0 ^ k1 ^ np.uint32(0x1BD11BDA)))
    x0 = np.uint32(x0 + k0)
    x1 = np.uint32(x1 + k1)
    for block in range(5):
        odd = block % 2 == 1
        x0, x1 = _rotate_words(x0, x1, np.uint32(17 if odd else 13))
        x0, x1 = _rotate_words(x0, x1, np.uint32(29 if odd else 15))
        x0, x1 = _rotate_words(x0, x1, np.uint32(16 if odd else 26))
        x0, x1 = _rotate_words(x0, x1, np.uint32(24 if odd else 6))
        x0 = np.uint32(x0 + keys[(block + 1) % 3])
        x1 = np.uint32(x1 + keys[(block + 2) % 3] + np.uint32(block + 1))
    return x0, x1


@_compiled
def shuffle_cells(lo: Any, hi: Any, key0: Any, key1: Any, starts: Any, counts: Any, order: Any) -> None:
    """Write the rows of cells lo..hi-1 to `order` in their random permutation, with the bits of `rng.permutation`.

    It sorts random words that contain their position in the low bits: first into buckets by their top bits, then by
    insertion.
    """
    max_rows = 2
    for cell in range(lo, hi):
        max_rows = max(max_rows, counts[cell])
    words = np.empty(max_rows + 1, dtype=np.uint32)
    sorted_words = np.empty(max_rows, dtype=np.uint64)
    ends = np.empty(2 * max_rows + 1, dtype=np.int64)
    for cell in range(lo, hi):
        n = counts[cell]
        bits = 1
        while (1 << bits) < n:
            bits += 1
        shift = np.uint32(32 - bits)
        ends[: (1 << bits) + 1] = 0
        for pair in range((n + 1) // 2):
            words[2 * pair], words[2 * pair + 1] = _hash_words(key0[cell], key1[cell], np.uint32(pair), np.uint32(0))
        for i in range(n):
            ends[(words[i] >> shift) + 1] += 1
        for bucket in range(1 << bits):
            ends[bucket + 1] += ends[bucket]
        for i in range(n):
            bucket = words[i] >> shift
            sorted_words[ends[bucket]] = (np.uint64(words[i]) << np.uint64(32)) | np.uint64(i)
            ends[bucket] += 1
        for i in range(1, n):
            word = sorted_words[i]
            position = i
            while position > 0 and sorted_words[position - 1] > word:
                sorted_words[position] = sorted_words[position - 1]
                position -= 1
            sorted_words[position] = word
        for i in range(n):
            order[starts[cell] + i] = starts[cell] + np.int64(sorted_words[i] & np.uint64(0xFFFFFFFF))


BETA1 = np.float32(optim.BETA1)
BETA2 = np.float32(optim.BETA2)
ONE_MINUS_BETA1 = np.float32(1 - optim.BETA1)
ONE_MINUS_BETA2 = np.float32(1 - optim.BETA2)
EPS = np.float32(optim.EPS)

LOG_BETA1 = float(numerics.log(optim.BETA1))
LOG_BETA2 = float(numerics.log(optim.BETA2))
LOG2_E = 1.4426950408889634
LN2 = 0.6931471805599453
SQRT_HALF = 0.7071067811865476


@_inlined
def _split_power(x: Any) -> Any:
    """Return n and f with e^x = 2^n (1 + f), for finite x from -700 to 0; f is exact enough for float32."""
    n = np.floor(x * LOG2_E + 0.5)
    r = multiply_add(-n, LN2, x)
    f = 1 / 362880
    f = multiply_add(f, r, 1 / 40320)
    f = multiply_add(f, r, 1 / 5040)
    f = multiply_add(f, r, 1 / 720)
    f = multiply_add(f, r, 1 / 120)
    f = multiply_add(f, r, 1 / 24)
    f = multiply_add(f, r, 1 / 6)
    f = multiply_add(f, r, 0.5)
    f = multiply_add(f, r, 1.0)
    return n, f * r


@_compiled
def _exp_scalar(x: Any) -> Any:
    """Return e^x for one number x <= 0, in float64 with the precision of float32."""
    if not x > -700.0:
        return 0.0 if x <= -700.0 else x  # NaN stays NaN
    n, f = _split_power(x)
    return (1.0 + f) * scalar_power_of_two(n)


@_compiled
def _log_scalar(x: Any) -> Any:
    """Return ln(x) for one positive number, in float64 with the precision of float32."""
    if not 0.0 < x < math.inf:
        return x  # infinity and NaN stay the same; zero does not occur
    m, e = math.frexp(x)
    if m < SQRT_HALF:
        m = 2.0 * m
        e = e - 1
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = 1 / 13
    p = multiply_add(p, z, 1 / 11)
    p = multiply_add(p, z, 1 / 9)
    p = multiply_add(p, z, 1 / 7)
    p = multiply_add(p, z, 1 / 5)
    p = multiply_add(p, z, 1 / 3)
    p = multiply_add(p, z, 1.0)
    return multiply_add(2.0 * s, p, e * LN2)


@_inlined
def _correct_bias(n_steps: Any, log_beta: Any) -> Any:
    """Return 1 - beta^n_steps, exact to float32 also for the first steps."""
    x = np.float64(n_steps) * log_beta
    if x < -18.0:
        return 1.0  # the nearest float32
    n, f = _split_power(x)
    power = scalar_power_of_two(n)
    return (1.0 - power) - power * f


@_inlined
def _compute_corrections(n_steps: Any, lr: Any) -> Any:
    """Return the step size divided by the first bias correction, and the root of the second one."""
    rate = lr / np.float32(_correct_bias(n_steps, LOG_BETA1))
    return rate, np.float32(math.sqrt(np.float32(_correct_bias(n_steps, LOG_BETA2))))


@_inlined_without_refcounts
def _update_row(params: Any, row: Any, grads: Any, moments: Any, rate: Any, bias: Any, decay: Any, adam: Any) -> None:
    """Take the step of `optim.apply_gradients` for a row of parameters and moments, in place.

    For Adam, `rate` and `bias` are those of `_compute_corrections`; for SGD, the step size and the momentum.
    """
    mean, square, largest = moments
    shrink = fill_vector(decay)
    if not adam:
        for column in range(0, params.shape[1], VECTOR_SIZE):
            p = load_vector(params, row, column)
            g = load_vector(grads, 0, column)
            if bias > 0:
                g = multiply_add(shrink, p, multiply_add(fill_vector(bias), load_vector(mean, row, column), g))
                store_vector(mean, row, column, g)
            else:
                g = multiply_add(shrink, p, g)
            store_vector(params, row, column, multiply_add(fill_vector(-rate), g, p))
        return
    over = fill_vector(np.float32(1) / bias)
    for column in range(0, params.shape[1], VECTOR_SIZE):
        p = load_vector(params, row, column)
        g = multiply_add(shrink, p, load_vector(grads, 0, column))
        m = multiply_add(fill_vector(ONE_MINUS_BETA1), g, fill_vector(BETA1) * load_vector(mean, row, column))
        v = multiply_add(g * g, fill_vector(ONE_MINUS_BETA2), fill_vector(BETA2) * load_vector(square, row, column))
        u = take_larger(v, load_vector(largest, row, column))
        store_vector(mean, row, column, m)
        store_vector(square, row, column, v)
        store_vector(largest, row, column, u)
        store_vector(
            params, row, column, p - fill_vector(rate) * m / multiply_add(square_root(u), over, fill_vector(EPS))
        )


@_inlined_without_refcounts
def _exp_vector(x: Any) -> Any:
    """Return e^x for x from -87 to 0, exact to one or two units in the last place."""
    n = floor(multiply_add(x, fill_vector(np.float32(1.44269504)), fill_vector(np.float32(0.5))))
    r = multiply_add(
        n, fill_vector(np.float32(2.12194440e-4)), multiply_add(n, fill_vector(np.float32(-0.693359375)), x)
    )
    p = fill_vector(np.float32(1.9875691500e-4))
    p = multiply_add(p, r, fill_vector(np.float32(1.3981999507e-3)))
    p = multiply_add(p, r, fill_vector(np.float32(8.3334519073e-3)))
    p = multiply_add(p, r, fill_vector(np.float32(4.1665795894e-2)))
    p = multiply_add(p, r, fill_vector(np.float32(1.6666665459e-1)))
    p = multiply_add(p, r, fill_vector(np.float32(5.0000001201e-1)))
    return multiply_add(r * r, p, r + fill_vector(np.float32(1))) * power_of_two(n)


@_inlined_without_refcounts
def _multiply_rows(a: Any, i: Any, b: Any, j: Any, n: Any) -> Any:
    """Return the inner product of the first n numbers of row i of `a` and row j of `b`."""
    sums = zero_parts()
    n_whole = n // PARTS_SIZE * PARTS_SIZE
    for column in range(0, n_whole, PARTS_SIZE):
        sums = multiply_add(load_parts(a, i, column), load_parts(b, j, column), sums)
    total = sum_parts(sums)
    if n_whole < n:
        rest = start_register(total)
        for column in range(n_whole, n, REGISTER_SIZE):
            rest = multiply_add(load_register(a, i, column), load_register(b, j, column), rest)
        total = sum_parts(rest)
    return total


@_inlined_without_refcounts
def _sum_row(a: Any, i: Any, n: Any) -> Any:
    """Return the sum of the first n numbers of row i."""
    sums = zero_parts()
    n_whole = n // PARTS_SIZE * PARTS_SIZE
    for column in range(0, n_whole, PARTS_SIZE):
        sums = sums + load_parts(a, i, column)
    total = sum_parts(sums)
    if n_whole < n:
        rest = start_register(total)
        for column in range(n_whole, n, REGISTER_SIZE):
            rest = rest + load_register(a, i, column)
        total = sum_parts(rest)
    return total


@_inlined_without_refcounts
def _compute_errors(out: Any, k: Any, y: Any, row_weight: Any) -> None:
    """Replace the logits out[class, row] by the gradient of the loss.

    A row with a label has the weight `row_weight` in the loss, other rows have none.
    """
    for column in range(0, out.shape[1], VECTOR_SIZE):
        max_logit = load_vector(out, 0, column)
        total = fill_vector(np.float32(0))
        for c in range(1, k):
            max_logit = take_larger(load_vector(out, c, column), max_logit)
        for c in range(k):
            value = _exp_vector(take_larger(fill_vector(np.float32(-87)), load_vector(out, c, column) - max_logit))
            store_vector(out, c, column, value)
            total = total + value
        share = where_any_label(y, 0, column, fill_vector(row_weight) / total)
        for c in range(k):
            store_vector(
                out,
                c,
                column,
                load_vector(out, c, column) * share - where_label(y, 0, column, c, fill_vector(row_weight)),
            )


@_inlined_without_refcounts
def _compute_gradient(
    trunks: Any, lane: Any, heads: Any, pair: Any, shape: Any, x: Any, y: Any, row_weight: Any, buffers: Any
) -> None:
    """Compute the gradient of `losses.batch_loss` on x[feature, row]; rows without a label in y are ignored."""
    hidden, out, back, trunk_grads, head_grads = buffers
    d, h, k = shape
    n = x.shape[1]
    zero = fill_vector(np.float32(0))
    for column in range(0, n, VECTOR_SIZE):
        for j in range(h):
            value = broadcast_element(trunks, lane, d * h + j)
            for i in range(d):
                value = multiply_add(broadcast_element(trunks, lane, i * h + j), load_vector(x, i, column), value)
            store_vector(hidden, j, column, take_larger(zero, value))
    for column in range(0, n, VECTOR_SIZE):
        for c in range(k):
            value = broadcast_element(heads, pair, h * k + c)
            for j in range(h):
                value = multiply_add(broadcast_element(heads, pair, j * k + c), load_vector(hidden, j, column), value)
            store_vector(out, c, column, value)
    _compute_errors(out, k, y, row_weight)
    for c in range(k):
        for j in range(h):
            put_element(head_grads, 0, j * k + c, _multiply_rows(hidden, j, out, c, n))
        put_element(head_grads, 0, h * k + c, _sum_row(out, c, n))
    for j in range(h):
        for column in range(0, n, VECTOR_SIZE):
            value = zero
            for c in range(k):
                value = multiply_add(broadcast_element(heads, pair, j * k + c), load_vector(out, c, column), value)
            store_vector(back, 0, column, where_positive(load_vector(hidden, j, column), value))
        put_element(trunk_grads, 0, d * h + j, _sum_row(back, 0, n))
        for i in range(d):
            put_element(trunk_grads, 0, i * h + j, _multiply_rows(x, i, back, 0, n))


@_inlined
def _compute_hidden_units(W1: Any, b1: Any, x: Any, n: Any, hidden: Any) -> None:
    """Compute the hidden units [unit, row] of x[feature, row], for the first n rows."""
    for j in range(len(b1)):
        weight = b1[j]
        for b in range(n):
            hidden[j, b] = weight
        for i in range(len(W1)):
            weight = W1[i, j]
            for b in range(n):
                hidden[j, b] = multiply_add(weight, x[i, b], hidden[j, b])
        for b in range(n):
            hidden[j, b] = max(hidden[j, b], np.float32(0))


@_inlined
def _compute_logit(W: Any, bias: Any, c: Any, x: Any, n: Any, logit: Any) -> None:
    """Compute the logits of class c from x[unit, row], for the first n rows."""
    weight = bias[c]
    for b in range(n):
        logit[b] = weight
    for j in range(len(W)):
        weight = W[j, c]
        for b in range(n):
            logit[b] = multiply_add(weight, x[j, b], logit[b])


@_inlined
def _find_class(W: Any, bias: Any, x: Any, n: Any, out: Any, best: Any) -> None:
    """Find the class with the highest logit for the first n rows of x[unit, row]; of equal ones, the lowest class."""
    max_logit = out[0]
    for c in range(len(bias)):
        logit = out[1] if c else max_logit
        _compute_logit(W, bias, c, x, n, logit)
        for b in range(n):
            higher = c == 0 or logit[b] > max_logit[b] or (math.isnan(logit[b]) and not math.isnan(max_logit[b]))
            best[b] = c if higher else best[b]
            max_logit[b] = logit[b] if higher else max_logit[b]


@_inlined
def _predict_classes(W1: Any, b1: Any, W2: Any, b2: Any, x: Any, n: Any, hidden: Any, out: Any, best: Any) -> None:
    """Find the class of x[feature, row] for the first n rows."""
    _compute_hidden_units(W1, b1, x, n, hidden)
    _find_class(W2, b2, hidden, n, out, best)


@_compiled
def _gather_masked_rows(X: Any, rows: Any, begin: Any, end: Any, mask: Any, x: Any) -> Any:
    """Copy rows as `_gather_rows` does, multiply them by the mask, and return their number."""
    n = _gather_rows(X, rows, begin, end, x)
    for i in range(len(mask)):
        for b in range(n):
            x[i, b] *= mask[i]
    return n


@_compiled
def compute_logits(
    lo: Any, hi: Any, W1: Any, b1: Any, W2: Any, b2: Any, trunk_rows: Any, X: Any, rows: Any, masks: Any, logits: Any
) -> None:
    """Write the logits [m, row, class] of blocks lo..hi-1 of rows, with the bits from which mistakes are counted."""
    x, hidden, out, _ = _allocate_block(W1, W2)
    for m in range(len(trunk_rows)):
        for begin in range(lo * BLOCK, min(hi * BLOCK, len(rows)), BLOCK):
            n = _gather_masked_rows(X, rows, begin, len(rows), masks[m if masks.shape[1] else 0], x)
            _compute_hidden_units(W1[trunk_rows[m]], b1[trunk_rows[m]], x, n, hidden)
            for c in range(len(b2[m])):
                _compute_logit(W2[m], b2[m], c, hidden, n, out[0])
                for b in range(n):
                    logits[m, begin + b, c] = out[0, b]


@_compiled
def compute_member_logits(
    lo: Any, hi: Any, W1: Any, b1: Any, W2: Any, b2: Any, trunk_rows: Any, X: Any, rows: Any, ends: Any, teams: Any,
    masks: Any, logits: Any,
) -> None:  # fmt: skip
    """Write the logits [k, row, class] of the k-th member of each of the teams lo..hi-1; -1: no member."""
    x, hidden, out, _ = _allocate_block(W1, W2)
    for team in range(lo, hi):
        for begin in range(ends[team - 1] if team else 0, ends[team], BLOCK):
            for k in range(teams.shape[1]):
                m = teams[team, k]
                if m < 0:
                    continue
                n = _gather_masked_rows(X, rows, begin, ends[team], masks[m if masks.shape[1] else 0], x)
                _compute_hidden_units(W1[trunk_rows[m]], b1[trunk_rows[m]], x, n, hidden)
                for c in range(len(b2[m])):
                    _compute_logit(W2[m], b2[m], c, hidden, n, out[0])
                    for b in range(n):
                        logits[k, begin + b, c] = out[0, b]


@_compiled
def compute_hidden(
    lo: Any, hi: Any, W1: Any, b1: Any, trunk_rows: Any, X: Any, rows: Any, masks: Any, units: Any
) -> None:
    """Write the hidden units [m, row, unit] of blocks lo..hi-1 of rows."""
    x = np.empty((W1.shape[1], BLOCK), dtype=np.float32)
    hidden = np.empty((W1.shape[2], BLOCK), dtype=np.float32)
    for m in range(len(trunk_rows)):
        for begin in range(lo * BLOCK, min(hi * BLOCK, len(rows)), BLOCK):
            n = _gather_masked_rows(X, rows, begin, len(rows), masks[m if masks.shape[1] else 0], x)
            _compute_hidden_units(W1[trunk_rows[m]], b1[trunk_rows[m]], x, n, hidden)
            for j in range(len(hidden)):
                for b in range(n):
                    units[m, begin + b, j] = hidden[j, b]


@_compiled
def _allocate_block(W1: Any, W2: Any) -> Any:
    """Allocate arrays for a block of rows: inputs, hidden units, logits, classes."""
    return (
        np.empty((W1.shape[1], BLOCK), dtype=np.float32), np.empty((W1.shape[2], BLOCK), dtype=np.float32),
        np.empty((2, BLOCK), dtype=np.float32), np.empty(BLOCK, dtype=np.int64),
    )  # fmt: skip


@_inlined
def _gather_rows(X: Any, rows: Any, begin: Any, end: Any, x: Any) -> Any:
    """Copy the rows from `begin` on to x[feature, row], as many as fit, and return their number."""
    n = min(BLOCK, end - begin)
    for b in range(n):
        for i in range(len(x)):
            x[i, b] = X[rows[begin + b], i]
    return n


@_compiled
def count_mistakes(
    lo: Any, hi: Any, W1: Any, b1: Any, W2: Any, b2: Any, trunk_rows: Any, X: Any, Y: Any, rows: Any, ends: Any,
    counts: Any,
) -> None:  # fmt: skip
    """Add the number of mistakes of each model in cells lo..hi-1 to counts[cell, m]."""
    x, hidden, out, best = _allocate_block(W1, W2)
    for cell in range(lo, hi):
        begin = ends[cell - 1] if cell else 0
        while begin < ends[cell]:
            n = _gather_rows(X, rows, begin, ends[cell], x)
            for m in range(len(trunk_rows)):
                _predict_classes(W1[trunk_rows[m]], b1[trunk_rows[m]], W2[m], b2[m], x, n, hidden, out, best)
                for b in range(n):
                    counts[cell, m] += best[b] != Y[rows[begin + b]]
            begin += n


@_compiled
def flag_mistakes(
    lo: Any, hi: Any, W1: Any, b1: Any, W2: Any, b2: Any, trunk_rows: Any, X: Any, Y: Any, rows: Any, ends: Any,
    model_of_cell: Any, flags: Any,
) -> None:  # fmt: skip
    """Set flags[row] to True where model model_of_cell[cell] predicts a wrong class, for cells lo..hi-1."""
    x, hidden, out, best = _allocate_block(W1, W2)
    for cell in range(lo, hi):
        begin = ends[cell - 1] if cell else 0
        m = model_of_cell[cell]
        while begin < ends[cell]:
            n = _gather_rows(X, rows, begin, ends[cell], x)
            _predict_classes(W1[trunk_rows[m]], b1[trunk_rows[m]], W2[m], b2[m], x, n, hidden, out, best)
            for b in range(n):
                flags[begin + b] = best[b] != Y[rows[begin + b]]
            begin += n


@_compiled
def _compute_cross_entropy(out: Any, y: Any) -> Any:
    """Return the cross-entropy of one row's logits."""
    max_logit = out[0]
    total = 0.0
    for c in range(1, len(out)):
        max_logit = max(max_logit, out[c])
    for c in range(len(out)):
        total += _exp_scalar(np.float64(out[c] - max_logit))
    return np.float32(_log_scalar(total)) + max_logit - out[y]


@_compiled
def _compute_loss(W1: Any, b1: Any, W2: Any, b2: Any, X: Any, Y: Any, rows: Any, weight: Any, mask: Any) -> Any:
    """Return `losses.weighted_loss` of these rows."""
    hidden = np.empty(len(b1), dtype=np.float32)
    out = np.empty(len(b2), dtype=np.float32)
    loss = np.float32(0)
    for r in range(len(rows)):
        if weight[r] > 0:
            hidden[:] = b1
            out[:] = b2
            for i in range(len(W1)):
                x = X[rows[r], i] * (mask[i] if len(mask) else np.float32(1))
                for j in range(len(b1)):
                    hidden[j] = multiply_add(x, W1[i, j], hidden[j])
            for j in range(len(b1)):
                unit = max(hidden[j], np.float32(0))
                for c in range(len(b2)):
                    out[c] = multiply_add(unit, W2[j, c], out[c])
            loss += weight[r] * _compute_cross_entropy(out, Y[rows[r]])
    return loss


@_compiled
def _is_finite(values: Any) -> Any:
    """Return True if no value is NaN or larger than MAX_PARAMETER in absolute value."""
    is_finite = True
    for value in values:
        is_finite = is_finite and abs(value) <= MAX_PARAMETER  # false for NaN
    return is_finite


@_inlined_without_refcounts
def _copy_batch(X: Any, Y: Any, order: Any, begin: Any, n: Any, row: Any, batch: Any, x: Any, y: Any) -> None:
    """Copy a minibatch to x[feature, row] and y: the rows of a cell from `row` on, then its first rows.

    A row that is repeated gets no label. Two features are copied at a time: copying row by row takes twice as long.
    """
    d = len(x)
    b = 0
    while b < batch:
        first = begin + row
        n_copied = min(n - row, batch - b)
        for r in range(n_copied):
            put_element(y, 0, b + r, get_element(Y, 0, get_element(order, 0, first + r)))
        for i in range(0, d - 1, 2):
            for r in range(n_copied):
                source = get_element(order, 0, first + r)
                put_element(x, i, b + r, get_element(X, source, i))
                put_element(x, i + 1, b + r, get_element(X, source, i + 1))
        if d % 2:
            for r in range(n_copied):
                put_element(x, d - 1, b + r, get_element(X, get_element(order, 0, first + r), d - 1))
        b += n_copied
        row = 0
    for r in range(n, batch):
        put_element(y, 0, r, np.int32(-1))


@_compiled
def train_lanes(  # noqa: C901  # a single loop over lanes and steps, for numba
    lo: Any, hi: Any, round: Any, n_heads: Any, shape: Any, model_trunks: Any, model_heads: Any, trunks: Any,
    heads: Any, trunk_moments: Any, head_moments: Any, trunk_steps: Any, head_steps: Any, trunk_of_lane: Any,
    model_of_pair: Any, draws: Any, X: Any, Y: Any, masks: Any, options: Any, validation: Any, is_finite: Any,
) -> None:  # fmt: skip
    """Train lanes lo..hi-1 in place for the local steps of one round, from the parameters of their models."""
    key0, key1, cumulative, counts, starts, order = draws
    steps, batch, lr, decay, adam, momentum, trains_trunk, trains_head = options
    validation_rows, validation_weight, interval, last_loss, patience = validation
    d, h, k = shape
    padded_batch = (batch + VECTOR_SIZE - 1) // VECTOR_SIZE * VECTOR_SIZE  # rows beyond the batch have no label
    x = np.zeros((d, padded_batch), dtype=np.float32)
    y = np.full((1, padded_batch), -1, dtype=np.int32)
    trunk_grads = np.zeros((1, trunks.shape[1]), dtype=np.float32)
    head_grads = np.zeros((1, heads.shape[1]), dtype=np.float32)
    buffers = (
        np.empty((h, padded_batch), dtype=np.float32), np.empty((k, padded_batch), dtype=np.float32),
        np.empty((1, padded_batch), dtype=np.float32), trunk_grads, head_grads,
    )  # fmt: skip
    for lane in range(lo, hi):
        trunks[lane] = model_trunks[trunk_of_lane[lane]]
        for pair in range(lane * n_heads, (lane + 1) * n_heads):
            heads[pair] = model_heads[model_of_pair[pair]]
        for step in range(steps):
            word0, word1 = _hash_words(key0[lane], key1[lane], round, np.uint32(step))
            uniform = np.float32(word0 >> np.uint32(8)) * np.float32(2.0**-24)
            cell = 0
            while uniform >= cumulative[lane, cell]:
                cell += 1
            n = counts[lane, cell]
            pair = lane * n_heads + cell % n_heads
            _copy_batch(X, Y, order, starts[lane, cell], n, np.int64(word1 % np.uint32(n)), batch, x, y)
            if masks.shape[1]:
                for i in range(d):
                    for b in range(padded_batch):
                        x[i, b] *= masks[model_of_pair[pair], i]
            _compute_gradient(
                trunks, lane, heads, pair, shape, x, y, np.float32(1) / np.float32(min(n, batch)), buffers
            )
            rate = lr
            bias = momentum
            if trains_head:
                head_steps[pair] += 1
                if adam:
                    rate, bias = _compute_corrections(head_steps[pair], lr)
                _update_row(heads, pair, head_grads, head_moments, rate, bias, decay, adam)
            if trains_trunk:
                trunk_steps[lane] += 1
                if adam and not (trains_head and trunk_steps[lane] == head_steps[pair]):
                    rate, bias = _compute_corrections(trunk_steps[lane], lr)
                _update_row(trunks, lane, trunk_grads, trunk_moments, rate, bias, decay, adam)
            if interval[lane] > 0 and (step + 1) % interval[lane] == 0:
                loss = np.float32(0)
                W1 = trunks[lane, : d * h].reshape((d, h))
                b1 = trunks[lane, d * h : d * h + h]
                for i in range(n_heads):
                    pair = lane * n_heads + i
                    W2 = heads[pair, : h * k].reshape((h, k))
                    b2 = heads[pair, h * k : h * k + k]
                    mask = masks[model_of_pair[pair] if masks.shape[1] else 0]
                    loss += _compute_loss(W1, b1, W2, b2, X, Y, validation_rows[lane], validation_weight[lane, i], mask)
                decrease = last_loss[lane] - loss
                last_loss[lane] = loss
                if decrease > 0 and decrease < patience / np.float32((step + 1) // interval[lane]):
                    break
        is_finite[lane] = _is_finite(trunks[lane])
        for pair in range(lane * n_heads, (lane + 1) * n_heads):
            is_finite[lane] = is_finite[lane] and _is_finite(heads[pair])
