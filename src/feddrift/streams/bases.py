"""Base data of composed streams: pictures of ten classes, or points that a plane will label."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift import rng
from feddrift.errors import DataError
from feddrift.streams import mnist
from feddrift.streams.files import data_folder
from feddrift.streams.fmow import fashion
from feddrift.streams.synthetic import NOISE

PICTURES = ("mnist", "fashion", "cifar10")
BASES = (*PICTURES, "sea")
CIFAR = tuple(f"data_batch_{k}" for k in range(1, 6)) + ("test_batch",)

_SEA = 5  # its name among the random keys of data

Values = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Base:
    """Rows to draw from: pictures [n, height, width] or [n, height, width, 3] as bytes, or points [n, 3]."""

    x: npt.NDArray[Any]
    y: npt.NDArray[np.int64]  # of points: whether the label that a plane gives is flipped
    n_classes: int

    @property
    def pictures(self) -> bool:
        """Whether its rows are pictures."""
        return self.x.ndim > 2

    def values(self, rows: npt.NDArray[np.int64]) -> Values:
        """These rows as numbers: pictures from 0 to 1, points as they are."""
        return np.asarray(self.x[rows] / np.float32(255 if self.pictures else 1), dtype=np.float32)


def load(name: str, data_dir: str | Path | None, data_seed: int, n_points: int) -> Base:
    """The base data of this name; points are drawn, so many of them."""
    if name == "sea":
        x = rng.uniform(rng.derive(data_seed, "data", _SEA, 0), (n_points, 3), 0.0, 10.0)
        flipped = rng.uniform(rng.derive(data_seed, "data", _SEA, 1), (n_points,)) < NOISE
        return Base(x, flipped.astype(np.int64), 2)
    if name == "cifar10":
        pictures, y = cifar10(data_dir)
    else:
        pixels, y = fashion(data_dir) if name == "fashion" else mnist.load(data_dir)
        side = math.isqrt(pixels.shape[1])
        pictures = pixels.reshape(-1, side, side)
    return Base(pictures, y.astype(np.int64), 10)


def cifar10(data_dir: str | Path | None = None) -> tuple[mnist.Bytes, mnist.Bytes]:
    """All pictures [n, 32, 32, 3] and classes [n] of CIFAR-10, from DIR/cifar-10-batches-py as its archive unpacks."""
    folder = data_folder(data_dir, "cifar-10-batches-py")
    missing = [file for file in CIFAR if not (folder / file).is_file()]
    if missing:
        raise DataError(
            f"CIFAR-10 is incomplete: put {', '.join(missing)} of its python version (cifar-10-python.tar.gz) "
            f"into {folder}"
        )
    batches = [_cifar_batch(folder / file) for file in CIFAR]
    planes = np.concatenate([pixels for pixels, _ in batches]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([labels for _, labels in batches])
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), mnist.ten_classes(labels, folder)


def _cifar_batch(path: Path) -> tuple[mnist.Bytes, mnist.Bytes]:
    try:
        with path.open("rb") as file:
            batch = _Arrays(file, encoding="bytes").load()
        pixels, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
        fits = pixels.dtype == np.uint8 and pixels.shape == (len(labels), 3 * 32 * 32) and labels.dtype.kind in "iu"
    except Exception as error:  # whatever pickle and NumPy say of a file that is none of theirs
        raise DataError(f"{path} is not a batch of CIFAR-10's python version ({error}): replace it") from None
    if not fits:
        raise DataError(f"{path} is not CIFAR-10's: expected bytes [n, 3072] and n labels, got {pixels.shape}")
    return pixels, labels.astype(np.uint8)


class _Arrays(pickle.Unpickler):
    """Reads arrays and plain values; a file that wants to run anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.zeros(0).__reduce__()[0]
        if (module, name) == ("_codecs", "encode"):  # bytes, as newer versions of Python write them for older ones
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}")
