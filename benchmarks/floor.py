"""floor.c: compiled, checked against NumPy, timed."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import plain

SOURCE = Path(__file__).with_name("floor.c")
FLAGS = ["-O3", "-march=native", "-ffast-math", "-shared", "-fPIC"]


def compile_kernel(d: int, h: int, c: int) -> ctypes.CDLL:
    """Return the compiled code for nets of this shape."""
    sizes = [f"-D{name}={value}" for name, value in zip("DHCB", (d, h, c, plain.BATCH), strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder) / "floor.so")
        subprocess.run(["cc", *FLAGS, *sizes, str(SOURCE), "-o", library, "-lm"], check=True)
        return ctypes.CDLL(library)


def trainer(lib: ctypes.CDLL, x: Any, y: Any, model: Any, moments: Any) -> Callable[[int, int, int], None]:
    """Trains `model` in place on x[client, row, feature]: call it with rounds, steps per round, steps taken so far."""
    clients, n, _ = x.shape
    rows = np.arange(n + lib.padding()) % n
    by_row = np.ascontiguousarray(x[:, rows], np.float32)
    labels = np.ascontiguousarray(y[:, rows], np.int32)
    by_feature = np.ascontiguousarray(by_row.transpose(0, 2, 1))
    arrays = [ctypes.c_void_p(a.ctypes.data) for a in (by_feature, by_row, labels, model, moments)]
    lr = ctypes.c_float(plain.LR)
    decay = ctypes.c_float(plain.DECAY)

    def train(rounds: int, steps: int, taken: int, _alive: Any = (by_feature, by_row, labels)) -> None:
        lib.train(clients, rounds, steps, n, *arrays, taken, lr, decay)

    return train


def check(lib: ctypes.CDLL, d: int, h: int, c: int) -> None:
    """One step from random moments is NumPy's, in parameters and moments. A window of all rows has the same sums."""
    draw = np.random.default_rng(1)
    x = draw.random((1, plain.BATCH, d), dtype=np.float32)
    y = draw.integers(c, size=(1, plain.BATCH))
    params = plain.init(draw, d, h, c)
    moments = [[(0.01 * draw.random(p.shape)).astype(np.float32) ** k for p in params] for k in (1, 2, 2)]
    model = np.concatenate([p.ravel() for p in params])
    held = np.concatenate([p.ravel() for part in moments for p in part])
    trainer(lib, x, y, model, held)(1, 1, 3)
    plain.adam(params, plain.gradient(params, x[0], y[0]), moments, 4)
    np.testing.assert_allclose(model, np.concatenate([p.ravel() for p in params]), rtol=1e-4, atol=1e-6)
    wanted = np.concatenate([p.ravel() for part in moments for p in part])
    np.testing.assert_allclose(held, wanted, rtol=1e-4, atol=1e-8)
