"""Base data of composed streams: pictures of ten classes, or points that a plane labels."""

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
from feddrift.streams.files import find_data_folder
from feddrift.streams.fmow import load_fashion
from feddrift.streams.synthetic import SEA_NOISE_RATE

PICTURES = ("mnist", "fashion", "cifar10")
BASES = (*PICTURES, "sea")
CIFAR_FILES = tuple(f"data_batch_{k}" for k in range(1, 6)) + ("test_batch",)

_SEA = 5  # identifies this data set in the random keys of data

Values = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Base:
    """Rows to draw from: pictures [n, height, width] or [n, height, width, 3] as bytes, or points [n, 3]."""

    x: npt.NDArray[Any]
    y: npt.NDArray[np.int64]  # points: 1 if the label from the plane is flipped
    n_classes: int

    @property
    def has_pictures(self) -> bool:
        """True for pictures, False for points."""
        return self.x.ndim > 2

    def scale_rows(self, rows: npt.NDArray[np.int64]) -> Values:
        """Return these rows as numbers: pictures scaled to 0 to 1, points unchanged."""
        return np.asarray(self.x[rows] / np.float32(255 if self.has_pictures else 1), dtype=np.float32)


def load_base(name: str, data_dir: str | Path | None, data_seed: int, n_points: int) -> Base:
    """Load the base data of this name; the points of `sea` are drawn.

    Args:
        name: One of `BASES`.
        data_dir: The folder of data files.
        data_seed: The seed of the points.
        n_points: The number of points; data sets of pictures are loaded as a whole.

    Raises:
        DataError: The files of the data set cannot be read.
    """
    if name == "sea":
        x = rng.uniform(rng.derive_key(data_seed, "data", _SEA, 0), (n_points, 3), 0.0, 10.0)
        flipped = rng.uniform(rng.derive_key(data_seed, "data", _SEA, 1), (n_points,)) < SEA_NOISE_RATE
        return Base(x, flipped.astype(np.int64), 2)
    if name == "cifar10":
        pictures, y = load_cifar10(data_dir)
    else:
        pixels, y = load_fashion(data_dir) if name == "fashion" else mnist.load_mnist(data_dir)
        side = math.isqrt(pixels.shape[1])
        pictures = pixels.reshape(-1, side, side)
    return Base(pictures, y.astype(np.int64), 10)


def load_cifar10(data_dir: str | Path | None = None) -> tuple[mnist.Bytes, mnist.Bytes]:
    """Load all pictures [n, 32, 32, 3] and classes [n] of CIFAR-10 from DIR/cifar-10-batches-py."""
    folder = find_data_folder(data_dir, "cifar-10-batches-py")
    missing = [file for file in CIFAR_FILES if not (folder / file).is_file()]
    if missing:
        raise DataError(
            f"CIFAR-10 is incomplete: put {', '.join(missing)} of its python version (cifar-10-python.tar.gz) "
            f"into {folder}"
        )
    batches = [_read_cifar_batch(folder / file) for file in CIFAR_FILES]
    planes = np.concatenate([pixels for pixels, _ in batches]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([labels for _, labels in batches])
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), mnist.check_ten_classes(labels, folder)


def _read_cifar_batch(path: Path) -> tuple[mnist.Bytes, mnist.Bytes]:
    try:
        with path.open("rb") as file:
            batch = _ArrayUnpickler(file, encoding="bytes").load()
        pixels = np.asarray(batch[b"data"])
        labels = np.asarray(batch[b"labels"])
        fits = pixels.dtype == np.uint8 and pixels.shape == (len(labels), 3 * 32 * 32) and labels.dtype.kind in "iu"
    except Exception as error:  # pickle and NumPy raise many kinds of errors for other files
        raise DataError(f"{path} is not a batch of CIFAR-10's python version ({error}): replace it") from None
    if not fits:
        raise DataError(f"{path} is not CIFAR-10's: expected bytes [n, 3072] and n labels, got {pixels.shape}")
    return pixels, labels.astype(np.uint8)


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickler of arrays and plain values; it refuses files with other objects."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.zeros(0).__reduce__()[0]
        if (module, name) == ("_codecs", "encode"):  # bytes, as newer versions of Python write them for older ones
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it contains {module}.{name}")
