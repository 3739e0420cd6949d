"""The compiled loops of `kernel` for nets without hidden layers, as `kernel_loops` has them for those with one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from feddrift.engines.kernel_loops import (
    BLOCK,
    WIDTH,
    _corrections,
    _cross_entropy,
    _exp,
    _finite,
    _gather,
    _loose,
    _threefry,
    _update,
)


@_loose
def _gradient(W: Any, b: Any, x: Any, y: Any, real: Any, room: Any, gW: Any, gb: Any) -> None:
    """The gradient of `losses.batch_loss` on x[feature, row], of which the first `real` rows count."""
    out, top, total = room
    d, k, n = len(W), len(b), len(y) // WIDTH * WIDTH
    zero, part = np.float32(0), np.float32(1) / np.float32(real)
    for c in range(k):
        weight = b[c]
        for r in range(n):
            out[c, r] = weight
        for i in range(d):
            weight = W[i, c]
            for r in range(n):
                out[c, r] += weight * x[i, r]
    for r in range(n):
        top[r], total[r] = out[0, r], zero
    for c in range(1, k):
        for r in range(n):
            top[r] = max(top[r], out[c, r])
    for c in range(k):
        for r in range(n):
            out[c, r] = _exp(max(out[c, r] - top[r], np.float32(-87)))
        for r in range(n):
            total[r] += out[c, r]
    for r in range(n):
        total[r] = part / total[r]
    for r in range(real, n):
        total[r] = zero
    for c in range(k):
        for r in range(n):
            out[c, r] *= total[r]
    for r in range(real):
        out[y[r], r] -= part
    for c in range(k):
        for i in range(d):
            dot = zero
            for r in range(n):
                dot += x[i, r] * out[c, r]
            gW[i, c] = dot
        dot = zero
        for r in range(n):
            dot += out[c, r]
        gb[c] = dot


@_loose
def _predict(W: Any, b: Any, x: Any, n: Any, out: Any, best: Any) -> None:
    """The class of x[feature, row] for the first n rows: the lowest of those with the highest logit."""
    top = out[0]
    for c in range(len(b)):
        logit = out[1] if c else top
        weight = b[c]
        for r in range(n):
            logit[r] = weight
        for i in range(len(W)):
            weight = W[i, c]
            for r in range(n):
                logit[r] += weight * x[i, r]
        for r in range(n):
            higher = c == 0 or logit[r] > top[r] or (math.isnan(logit[r]) and not math.isnan(top[r]))
            best[r] = c if higher else best[r]
            top[r] = logit[r] if higher else top[r]


@_loose
def count(lo: Any, hi: Any, W: Any, b: Any, on: Any, X: Any, Y: Any, rows: Any, ends: Any, counts: Any) -> None:
    """As `kernel_loops.count`."""
    x, out = np.empty((W.shape[1], BLOCK), dtype=np.float32), np.empty((2, BLOCK), dtype=np.float32)
    best = np.empty(BLOCK, dtype=np.int64)
    for cell in range(lo, hi):
        begin = ends[cell - 1] if cell else 0
        while begin < ends[cell]:
            n = _gather(X, rows, begin, ends[cell], x)
            for m in range(len(on)):
                _predict(W[on[m]], b[on[m]], x, n, out, best)
                for r in range(n):
                    counts[cell, m] += best[r] != Y[rows[begin + r]]
            begin += n


@_loose
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
            _predict(W[m], b[m], x, n, out, best)
            for r in range(n):
                flags[begin + r] = best[r] != Y[rows[begin + r]]
            begin += n


@_loose
def _held_loss(W: Any, b: Any, X: Any, Y: Any, rows: Any, weight: Any, sees: Any) -> Any:
    """As `kernel_loops._held_loss`."""
    out, loss = np.empty(len(b), dtype=np.float32), np.float32(0)
    for r in range(len(rows)):
        if weight[r] > 0:
            out[:] = b
            for i in range(len(W)):
                x = X[rows[r], i] * (sees[i] if len(sees) else np.float32(1))
                for c in range(len(b)):
                    out[c] += x * W[i, c]
            loss += weight[r] * _cross_entropy(out, Y[rows[r]])
    return loss


@_loose
def train(
    lo: Any, hi: Any, round: Any, n_heads: Any, modelW: Any, modelb: Any, W: Any, b: Any, flatW: Any, flatb: Any,
    heldW: Any, heldb: Any, taken: Any, model: Any, drawn: Any, X: Any, Y: Any, sees: Any, how: Any, looks: Any,
    sound: Any,
) -> None:  # fmt: skip
    """The local steps of lanes lo..hi-1 in one round, from the models' parameters; in place."""
    key0, key1, cumulative, counts, starts, order = drawn
    steps, batch, lr, decay, adam, momentum, _, _ = how
    held, held_weight, every, before, patience = looks
    d, k = W.shape[1], W.shape[2]
    wide = (batch + WIDTH - 1) // WIDTH * WIDTH  # the rows beyond the batch have no weight
    x, y = np.zeros((d, wide), dtype=np.float32), np.zeros(wide, dtype=np.int32)
    room = (
        np.empty((k, wide), dtype=np.float32), np.empty(wide, dtype=np.float32), np.empty(wide, dtype=np.float32),
    )  # fmt: skip
    gW, gb = np.empty((d, k), dtype=np.float32), np.empty(k, dtype=np.float32)
    flat = gW.reshape(-1)
    for lane in range(lo, hi):
        for pair in range(lane * n_heads, (lane + 1) * n_heads):
            W[pair], b[pair] = modelW[model[pair]], modelb[model[pair]]
        for step in range(steps):
            word0, word1 = _threefry(key0[lane], key1[lane], round, np.uint32(step))
            unit = np.float32(word0 >> np.uint32(8)) * np.float32(2.0**-24)
            cell = 0
            while unit >= cumulative[lane, cell]:
                cell += 1
            n = counts[lane, cell]
            row: Any = np.int64(word1 % np.uint32(n))
            pair = lane * n_heads + cell % n_heads
            for r in range(batch):
                at = order[starts[lane, cell] + row]
                y[r] = Y[at]
                for i in range(d):
                    x[i, r] = X[at, i]
                row = row + 1 if row + 1 < n else 0
            if sees.shape[1]:
                for i in range(d):
                    for r in range(wide):
                        x[i, r] *= sees[model[pair], i]
            _gradient(W[pair], b[pair], x, y, min(n, batch), room, gW, gb)
            taken[pair] += 1
            rate, bias = _corrections(taken[pair], lr) if adam else (lr, momentum)
            _update(flatW, flat, heldW, pair, rate, bias, decay, adam)
            _update(flatb, gb, heldb, pair, rate, bias, decay, adam)
            if every[lane] > 0 and (step + 1) % every[lane] == 0:
                loss = np.float32(0)
                for i in range(n_heads):
                    pair = lane * n_heads + i
                    seen = sees[model[pair] if sees.shape[1] else 0]
                    loss += _held_loss(W[pair], b[pair], X, Y, held[lane], held_weight[lane, i], seen)
                fell, before[lane] = before[lane] - loss, loss
                if fell > 0 and fell < patience / np.float32((step + 1) // every[lane]):
                    break
        sound[lane] = True
        for pair in range(lane * n_heads, (lane + 1) * n_heads):
            sound[lane] = sound[lane] and _finite(flatW[pair]) and _finite(flatb[pair])
