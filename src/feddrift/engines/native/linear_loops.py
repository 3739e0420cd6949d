"""The compiled loops of `kernel` for nets without hidden layers, as `kernel_loops` has them for those with one."""

from __future__ import annotations

from typing import Any

import numpy as np

from feddrift.engines.native.kernel_loops import (
    BLOCK,
    COMPILED,
    WIDTH,
    _classify,
    _corrections,
    _cross_entropy,
    _dot,
    _errors,
    _exact,
    _finite,
    _gather,
    _gather_seen,
    _logit,
    _strict,
    _take,
    _threefry,
    _total,
    _update,
)

if COMPILED:
    from feddrift.engines.native.vectors import fused, load, put, spread, store


@_exact
def _gradient(layer: Any, pair: Any, d: Any, k: Any, x: Any, y: Any, part: Any, out: Any, grads: Any) -> None:
    """As `kernel_loops._gradient`."""
    n = x.shape[1]
    for at in range(0, n, WIDTH):
        for c in range(k):
            value = spread(layer, pair, d * k + c)
            for i in range(d):
                value = fused(spread(layer, pair, i * k + c), load(x, i, at), value)
            store(out, c, at, value)
    _errors(out, k, y, part)
    for c in range(k):
        for i in range(d):
            put(grads, 0, i * k + c, _dot(x, i, out, c, n))
        put(grads, 0, d * k + c, _total(out, c, n))


@_strict
def compute_logits(lo: Any, hi: Any, W: Any, bias: Any, on: Any, X: Any, rows: Any, sees: Any, logits: Any) -> None:
    """As `kernel_loops.compute_logits`."""
    x, out = np.empty((W.shape[1], BLOCK), dtype=np.float32), np.empty(BLOCK, dtype=np.float32)
    for m in range(len(on)):
        for begin in range(lo * BLOCK, min(hi * BLOCK, len(rows)), BLOCK):
            n = _gather_seen(X, rows, begin, len(rows), sees[m if sees.shape[1] else 0], x)
            for c in range(len(bias[on[m]])):
                _logit(W[on[m]], bias[on[m]], c, x, n, out)
                for r in range(n):
                    logits[m, begin + r, c] = out[r]


@_strict
def compute_member_logits(
    lo: Any, hi: Any, W: Any, bias: Any, on: Any, X: Any, rows: Any, ends: Any, teams: Any, sees: Any, logits: Any
) -> None:
    """As `kernel_loops.compute_member_logits`."""
    x, out = np.empty((W.shape[1], BLOCK), dtype=np.float32), np.empty(BLOCK, dtype=np.float32)
    for team in range(lo, hi):
        for begin in range(ends[team - 1] if team else 0, ends[team], BLOCK):
            for k in range(teams.shape[1]):
                m = teams[team, k]
                if m < 0:
                    continue
                n = _gather_seen(X, rows, begin, ends[team], sees[m if sees.shape[1] else 0], x)
                for c in range(len(bias[on[m]])):
                    _logit(W[on[m]], bias[on[m]], c, x, n, out)
                    for r in range(n):
                        logits[k, begin + r, c] = out[r]


@_strict
def count(lo: Any, hi: Any, W: Any, b: Any, on: Any, X: Any, Y: Any, rows: Any, ends: Any, counts: Any) -> None:
    """As `kernel_loops.count`."""
    x, out = np.empty((W.shape[1], BLOCK), dtype=np.float32), np.empty((2, BLOCK), dtype=np.float32)
    best = np.empty(BLOCK, dtype=np.int64)
    for cell in range(lo, hi):
        begin = ends[cell - 1] if cell else 0
        while begin < ends[cell]:
            n = _gather(X, rows, begin, ends[cell], x)
            for m in range(len(on)):
                _classify(W[on[m]], b[on[m]], x, n, out, best)
                for r in range(n):
                    counts[cell, m] += best[r] != Y[rows[begin + r]]
            begin += n


@_strict
def flag(
    lo: Any, hi: Any, W: Any, b: Any, on: Any, X: Any, Y: Any, rows: Any, ends: Any, which: Any, flags: Any
) -> None:
    """As `kernel_loops.flag`."""
    x, out = np.empty((W.shape[1], BLOCK), dtype=np.float32), np.empty((2, BLOCK), dtype=np.float32)
    best = np.empty(BLOCK, dtype=np.int64)
    for cell in range(lo, hi):
        begin, m = ends[cell - 1] if cell else 0, on[which[cell]]
        while begin < ends[cell]:
            n = _gather(X, rows, begin, ends[cell], x)
            _classify(W[m], b[m], x, n, out, best)
            for r in range(n):
                flags[begin + r] = best[r] != Y[rows[begin + r]]
            begin += n


@_strict
def _held_loss(W: Any, b: Any, X: Any, Y: Any, rows: Any, weight: Any, sees: Any) -> Any:
    """As `kernel_loops._held_loss`."""
    out, loss = np.empty(len(b), dtype=np.float32), np.float32(0)
    for r in range(len(rows)):
        if weight[r] > 0:
            out[:] = b
            for i in range(len(W)):
                x = X[rows[r], i] * (sees[i] if len(sees) else np.float32(1))
                for c in range(len(b)):
                    out[c] = fused(x, W[i, c], out[c])
            loss += weight[r] * _cross_entropy(out, Y[rows[r]])
    return loss


@_strict
def train(
    lo: Any, hi: Any, round: Any, n_heads: Any, shape: Any, models: Any, work: Any, moments: Any, taken: Any,
    model: Any, drawn: Any, X: Any, Y: Any, sees: Any, how: Any, looks: Any, sound: Any,
) -> None:  # fmt: skip
    """The local steps of lanes lo..hi-1 in one round, from the models' parameters; in place."""
    key0, key1, cumulative, counts, starts, order = drawn
    steps, batch, lr, decay, adam, momentum, _, _ = how
    held, held_weight, every, before, patience = looks
    d, k = shape
    wide = (batch + WIDTH - 1) // WIDTH * WIDTH  # the rows beyond the batch have no label
    x, y = np.zeros((d, wide), dtype=np.float32), np.full((1, wide), -1, dtype=np.int32)
    out, grads = np.empty((k, wide), dtype=np.float32), np.zeros((1, work.shape[1]), dtype=np.float32)
    for lane in range(lo, hi):
        for pair in range(lane * n_heads, (lane + 1) * n_heads):
            work[pair] = models[model[pair]]
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
                    for r in range(wide):
                        x[i, r] *= sees[model[pair], i]
            _gradient(work, pair, d, k, x, y, np.float32(1) / np.float32(min(n, batch)), out, grads)
            taken[pair] += 1
            rate, bias = _corrections(taken[pair], lr) if adam else (lr, momentum)
            _update(work, pair, grads, moments, rate, bias, decay, adam)
            if every[lane] > 0 and (step + 1) % every[lane] == 0:
                loss = np.float32(0)
                for i in range(n_heads):
                    pair = lane * n_heads + i
                    W, b = work[pair, : d * k].reshape((d, k)), work[pair, d * k : d * k + k]
                    seen = sees[model[pair] if sees.shape[1] else 0]
                    loss += _held_loss(W, b, X, Y, held[lane], held_weight[lane, i], seen)
                fell, before[lane] = before[lane] - loss, loss
                if fell > 0 and fell < patience / np.float32((step + 1) // every[lane]):
                    break
        sound[lane] = True
        for pair in range(lane * n_heads, (lane + 1) * n_heads):
            sound[lane] = sound[lane] and _finite(work[pair])
