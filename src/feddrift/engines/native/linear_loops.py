"""Compiled loops of `kernel` for nets without hidden layers; `kernel_loops` has those for one hidden layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from feddrift.engines.native.kernel_loops import (
    BLOCK,
    COMPILED,
    VECTOR_SIZE,
    _compiled,
    _compute_corrections,
    _compute_cross_entropy,
    _compute_errors,
    _compute_logit,
    _copy_batch,
    _find_class,
    _gather_masked_rows,
    _gather_rows,
    _hash_words,
    _inlined_without_refcounts,
    _is_finite,
    _multiply_rows,
    _sum_row,
    _update_row,
)

if COMPILED:
    from feddrift.engines.native.vectors import broadcast_element, load_vector, multiply_add, put_element, store_vector


@_inlined_without_refcounts
def _compute_gradient(
    layers: Any, pair: Any, d: Any, k: Any, x: Any, y: Any, row_weight: Any, out: Any, grads: Any
) -> None:
    """Compute the same as `kernel_loops._compute_gradient`."""
    n = x.shape[1]
    for column in range(0, n, VECTOR_SIZE):
        for c in range(k):
            value = broadcast_element(layers, pair, d * k + c)
            for i in range(d):
                value = multiply_add(broadcast_element(layers, pair, i * k + c), load_vector(x, i, column), value)
            store_vector(out, c, column, value)
    _compute_errors(out, k, y, row_weight)
    for c in range(k):
        for i in range(d):
            put_element(grads, 0, i * k + c, _multiply_rows(x, i, out, c, n))
        put_element(grads, 0, d * k + c, _sum_row(out, c, n))


@_compiled
def compute_logits(
    lo: Any, hi: Any, W: Any, bias: Any, trunk_rows: Any, X: Any, rows: Any, masks: Any, logits: Any
) -> None:
    """Compute the same as `kernel_loops.compute_logits`."""
    x = np.empty((W.shape[1], BLOCK), dtype=np.float32)
    out = np.empty(BLOCK, dtype=np.float32)
    for m in range(len(trunk_rows)):
        for begin in range(lo * BLOCK, min(hi * BLOCK, len(rows)), BLOCK):
            n = _gather_masked_rows(X, rows, begin, len(rows), masks[m if masks.shape[1] else 0], x)
            for c in range(len(bias[trunk_rows[m]])):
                _compute_logit(W[trunk_rows[m]], bias[trunk_rows[m]], c, x, n, out)
                for r in range(n):
                    logits[m, begin + r, c] = out[r]


@_compiled
def compute_member_logits(
    lo: Any, hi: Any, W: Any, bias: Any, trunk_rows: Any, X: Any, rows: Any, ends: Any, teams: Any, masks: Any,
    logits: Any,
) -> None:  # fmt: skip
    """Compute the same as `kernel_loops.compute_member_logits`."""
    x = np.empty((W.shape[1], BLOCK), dtype=np.float32)
    out = np.empty(BLOCK, dtype=np.float32)
    for team in range(lo, hi):
        for begin in range(ends[team - 1] if team else 0, ends[team], BLOCK):
            for k in range(teams.shape[1]):
                m = teams[team, k]
                if m < 0:
                    continue
                n = _gather_masked_rows(X, rows, begin, ends[team], masks[m if masks.shape[1] else 0], x)
                for c in range(len(bias[trunk_rows[m]])):
                    _compute_logit(W[trunk_rows[m]], bias[trunk_rows[m]], c, x, n, out)
                    for r in range(n):
                        logits[k, begin + r, c] = out[r]


@_compiled
def count_mistakes(
    lo: Any, hi: Any, W: Any, b: Any, trunk_rows: Any, X: Any, Y: Any, rows: Any, ends: Any, counts: Any
) -> None:
    """Compute the same as `kernel_loops.count_mistakes`."""
    x = np.empty((W.shape[1], BLOCK), dtype=np.float32)
    out = np.empty((2, BLOCK), dtype=np.float32)
    best = np.empty(BLOCK, dtype=np.int64)
    for cell in range(lo, hi):
        begin = ends[cell - 1] if cell else 0
        while begin < ends[cell]:
            n = _gather_rows(X, rows, begin, ends[cell], x)
            for m in range(len(trunk_rows)):
                _find_class(W[trunk_rows[m]], b[trunk_rows[m]], x, n, out, best)
                for r in range(n):
                    counts[cell, m] += best[r] != Y[rows[begin + r]]
            begin += n


@_compiled
def flag_mistakes(
    lo: Any, hi: Any, W: Any, b: Any, trunk_rows: Any, X: Any, Y: Any, rows: Any, ends: Any, model_of_cell: Any,
    flags: Any,
) -> None:  # fmt: skip
    """Compute the same as `kernel_loops.flag_mistakes`."""
    x = np.empty((W.shape[1], BLOCK), dtype=np.float32)
    out = np.empty((2, BLOCK), dtype=np.float32)
    best = np.empty(BLOCK, dtype=np.int64)
    for cell in range(lo, hi):
        begin = ends[cell - 1] if cell else 0
        m = trunk_rows[model_of_cell[cell]]
        while begin < ends[cell]:
            n = _gather_rows(X, rows, begin, ends[cell], x)
            _find_class(W[m], b[m], x, n, out, best)
            for r in range(n):
                flags[begin + r] = best[r] != Y[rows[begin + r]]
            begin += n


@_compiled
def _compute_loss(W: Any, b: Any, X: Any, Y: Any, rows: Any, weight: Any, mask: Any) -> Any:
    """Compute the same as `kernel_loops._compute_loss`."""
    out = np.empty(len(b), dtype=np.float32)
    loss = np.float32(0)
    for r in range(len(rows)):
        if weight[r] > 0:
            out[:] = b
            for i in range(len(W)):
                x = X[rows[r], i] * (mask[i] if len(mask) else np.float32(1))
                for c in range(len(b)):
                    out[c] = multiply_add(x, W[i, c], out[c])
            loss += weight[r] * _compute_cross_entropy(out, Y[rows[r]])
    return loss


@_compiled
def train_lanes(
    lo: Any, hi: Any, round: Any, n_heads: Any, shape: Any, model_layers: Any, layers: Any, moments: Any, n_steps: Any,
    model_of_pair: Any, draws: Any, X: Any, Y: Any, masks: Any, options: Any, validation: Any, is_finite: Any,
) -> None:  # fmt: skip
    """Train lanes lo..hi-1 in place for the local steps of one round, from the parameters of their models."""
    key0, key1, cumulative, counts, starts, order = draws
    steps, batch, lr, decay, adam, momentum, _, _ = options
    validation_rows, validation_weight, interval, last_loss, patience = validation
    d, k = shape
    padded_batch = (batch + VECTOR_SIZE - 1) // VECTOR_SIZE * VECTOR_SIZE  # rows beyond the batch have no label
    x = np.zeros((d, padded_batch), dtype=np.float32)
    y = np.full((1, padded_batch), -1, dtype=np.int32)
    out = np.empty((k, padded_batch), dtype=np.float32)
    grads = np.zeros((1, layers.shape[1]), dtype=np.float32)
    for lane in range(lo, hi):
        for pair in range(lane * n_heads, (lane + 1) * n_heads):
            layers[pair] = model_layers[model_of_pair[pair]]
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
                    for r in range(padded_batch):
                        x[i, r] *= masks[model_of_pair[pair], i]
            _compute_gradient(layers, pair, d, k, x, y, np.float32(1) / np.float32(min(n, batch)), out, grads)
            n_steps[pair] += 1
            rate, bias = _compute_corrections(n_steps[pair], lr) if adam else (lr, momentum)
            _update_row(layers, pair, grads, moments, rate, bias, decay, adam)
            if interval[lane] > 0 and (step + 1) % interval[lane] == 0:
                loss = np.float32(0)
                for i in range(n_heads):
                    pair = lane * n_heads + i
                    W = layers[pair, : d * k].reshape((d, k))
                    b = layers[pair, d * k : d * k + k]
                    mask = masks[model_of_pair[pair] if masks.shape[1] else 0]
                    loss += _compute_loss(W, b, X, Y, validation_rows[lane], validation_weight[lane, i], mask)
                decrease = last_loss[lane] - loss
                last_loss[lane] = loss
                if decrease > 0 and decrease < patience / np.float32((step + 1) // interval[lane]):
                    break
        is_finite[lane] = True
        for pair in range(lane * n_heads, (lane + 1) * n_heads):
            is_finite[lane] = is_finite[lane] and _is_finite(layers[pair])
