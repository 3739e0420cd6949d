"""One local step of a perceptron in plain NumPy, without feddrift: what floor.c is checked against, and what Flower's
clients and the slow loop run."""

from __future__ import annotations

from typing import Any

import numpy as np

BATCH = 50
LR = 1e-2
DECAY = 1e-3
BETA1 = 0.9
BETA2 = 0.999
EPS = 1e-8

Arrays = list[Any]  # W1[d, h], b1[h], W2[h, c], b2[c]


def init(draw: np.random.Generator, d: int, h: int, c: int) -> Arrays:
    """A model as PyTorch's nn.Linear begins."""
    shapes = (((d, h), d), ((h,), d), ((h, c), h), ((c,), h))
    return [draw.uniform(-(fan_in**-0.5), fan_in**-0.5, shape).astype(np.float32) for shape, fan_in in shapes]


def gradient(params: Arrays, x: Any, y: Any) -> Arrays:
    """Of the mean cross-entropy."""
    W1, b1, W2, b2 = params
    hidden = np.maximum(x @ W1 + b1, 0)
    logits = hidden @ W2 + b2
    out = np.exp(logits - logits.max(axis=1, keepdims=True))
    out /= out.sum(axis=1, keepdims=True)
    out[np.arange(len(y)), y] -= 1
    out /= np.float32(len(y))
    back = (out @ W2.T) * (hidden > 0)
    return [x.T @ back, back.sum(axis=0), hidden.T @ out, out.sum(axis=0)]


def adam(params: Arrays, grads: Arrays, moments: list[Arrays], taken: int) -> None:
    """Step number `taken` of Adam with amsgrad as PyTorch has it; in place."""
    rate = LR / (1 - BETA1**taken)
    root = (1 - BETA2**taken) ** 0.5
    for p, g, mean, square, largest in zip(params, grads, *moments, strict=True):
        g = g + DECAY * p
        mean += (1 - BETA1) * (g - mean)
        square += (1 - BETA2) * (g * g - square)
        np.maximum(largest, square, out=largest)
        p -= rate * mean / (np.sqrt(largest) / root + EPS)


def train(params: Arrays, moments: list[Arrays], taken: int, x: Any, y: Any, steps: int, draw: Any) -> None:
    """Train in place for a number of steps on windows of shuffled rows."""
    for step in range(steps):
        rows = (draw.integers(len(x)) + np.arange(BATCH)) % len(x)
        adam(params, gradient(params, x[rows], y[rows]), moments, taken + step + 1)


def zeros(params: Arrays) -> list[Arrays]:
    """The moments before the first step."""
    return [[np.zeros_like(p) for p in params] for _ in range(3)]
