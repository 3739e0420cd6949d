"""MNIST with concepts that swap labels or show only some digits."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from feddrift import rng
from feddrift.data import Stream
from feddrift.errors import DataError
from feddrift.streams.files import find_data_folder, get_named_root
from feddrift.types import Ints, Local

ROWS_PER_CELL = 500
URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
SHAPES: dict[str, tuple[int, ...]] = {
    "train-images-idx3-ubyte.gz": (60000, 28, 28),
    "t10k-images-idx3-ubyte.gz": (10000, 28, 28),
    "train-labels-idx1-ubyte.gz": (60000,),
    "t10k-labels-idx1-ubyte.gz": (10000,),
}
MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}

_MNIST = 2  # identifies MNIST in the random keys of data
LABELS = np.array([  # [concept, digit]
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
    [0, 2, 1, 3, 4, 5, 6, 7, 8, 9],
    [0, 1, 2, 4, 3, 5, 6, 7, 8, 9],
    [0, 1, 2, 3, 4, 6, 5, 7, 8, 9],
])  # fmt: skip

Bytes = npt.NDArray[np.uint8]


def load_label_swap(name: str, concepts: Ints, data_dir: str | Path | None = None, data_seed: int = 0) -> Stream:
    """Load MNIST; concept 1 swaps the labels of digits 1 and 2, concept 2 those of 3 and 4, concept 3 of 5 and 6."""
    pixels, digits = load_mnist(data_dir)
    order = _shuffle_rows(len(digits), data_seed)
    rows = np.resize(order, (concepts.size, ROWS_PER_CELL))  # np.resize starts over at the end
    return _build_stream(name, concepts, pixels, rows, LABELS[concepts.reshape(-1, 1), digits[rows]])


def load_label_shift(name: str, concepts: Ints, data_dir: str | Path | None = None, data_seed: int = 0) -> Stream:
    """Load MNIST; concept k shows only the digits 2k and 2k + 1, with their own labels."""
    pixels, digits = load_mnist(data_dir)
    order = _shuffle_rows(len(digits), data_seed)
    cell_concepts = concepts.reshape(-1)
    rows = np.empty((concepts.size, ROWS_PER_CELL), dtype=np.int64)
    for k in np.unique(cell_concepts):
        has_concept = cell_concepts == k
        rows[has_concept] = np.resize(order[digits[order] // 2 == k], (int(has_concept.sum()), ROWS_PER_CELL))
    return _build_stream(name, concepts, pixels, rows, digits[rows])


def load_mnist(data_dir: str | Path | None = None) -> tuple[Bytes, Bytes]:
    """Load all images [n, 784] and digits [n], first those to train, then those to test.

    The files are in DATA_DIR/mnist or $FEDDRIFT_DATA/mnist; without either they are downloaded to the cache.
    """
    return load_idx("MNIST", find_data_folder(data_dir, "mnist"), URL, MD5, download=not get_named_root(data_dir))


def load_idx(name: str, folder: Path, url: str, md5: Mapping[str, str], download: bool) -> tuple[Bytes, Bytes]:
    """Load images and classes from four files in MNIST's format.

    Args:
        name: The name of the data set, for messages.
        folder: The folder of the files.
        url: The address of the files.
        md5: The checksum of each file.
        download: True to download missing files.

    Returns:
        The images [n, pixels] and classes [n], first those to train, then those to test.

    Raises:
        DataError: A file is missing, broken or cannot be downloaded.
    """
    if download:
        _download(name, folder, url, md5)
    missing = [file for file in SHAPES if not os.path.isfile(folder / file)]
    if missing:
        raise DataError(f"{name} is incomplete: put {', '.join(missing)} into {folder}")
    train_x, test_x, train_y, test_y = (_read_idx(folder / file, shape, name) for file, shape in SHAPES.items())
    pixels = np.concatenate([train_x, test_x])
    return pixels.reshape(len(pixels), -1), check_ten_classes(np.concatenate([train_y, test_y]), folder)


def check_ten_classes(labels: Bytes, path: Path) -> Bytes:
    """Return the labels; raise DataError unless they are 0 to 9 and each occurs, since streams may need any of them."""
    if (present := np.unique(labels).tolist()) != list(range(10)):
        raise DataError(f"{path}: labels must be all of 0 to 9, got {present}")
    return labels


def _download(name: str, folder: Path, url: str, md5: Mapping[str, str]) -> None:
    import pooch

    for file, checksum in md5.items():
        try:
            pooch.retrieve(url + file, known_hash=f"md5:{checksum}", fname=file, path=folder)
        except (OSError, ValueError) as error:  # no connection, or a wrong checksum
            raise DataError(
                f"{name} cannot be downloaded from {url} ({type(error).__name__}): put {', '.join(SHAPES)} into"
                f" {folder}, or into DIR/{folder.name} and name DIR as the data directory"
            ) from error


def _read_idx(path: Path, shape: tuple[int, ...], name: str) -> Bytes:
    """Read an idx file of bytes: two zero bytes, the type (8), the number of axes, their lengths, the data."""
    header = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
    try:
        with gzip.open(path) as file:
            raw = file.read(len(header) + math.prod(shape) + 1)  # one more byte, to notice files that are too long
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}): replace it") from error
    if not raw.startswith(header) or len(raw) != len(header) + math.prod(shape):
        raise DataError(f"{path} is not {name}'s: expected an idx file of bytes of shape {shape}, replace it")
    return np.frombuffer(raw, dtype=np.uint8, offset=len(header)).reshape(shape)


def _shuffle_rows(n: int, data_seed: int) -> Ints:
    return rng.permutation(rng.derive_key(data_seed, "data", _MNIST), n)  # one shuffle for every seed, as in the paper


def _build_stream(name: str, concepts: Ints, pixels: Bytes, rows: Ints, labels: npt.NDArray[np.integer]) -> Stream:
    mean, std = compute_pixel_mean_and_std(pixels)
    x = np.empty((rows.size, pixels.shape[1]), dtype=np.float32)

    def scale(cell: int) -> None:  # cell by cell, since all rows in float64 would take 350 MB
        x[cell * ROWS_PER_CELL : (cell + 1) * ROWS_PER_CELL] = (pixels[rows[cell]] - mean) / (std + 0.001)

    with ThreadPoolExecutor() as pool:  # NumPy releases the global interpreter lock
        list(pool.map(scale, range(len(rows))))
    return Stream(
        name=name,
        x=x,
        y=labels.reshape(-1).astype(np.int32),
        counts=np.full(concepts.shape, ROWS_PER_CELL, dtype=np.int64),
        n_classes=10,
        concepts=concepts,
        family="mnist",
        local=Local(lr=1e-3),
    )


def compute_pixel_mean_and_std(pixels: Bytes) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Compute mean and standard deviation of each pixel over all images, from exact integer sums."""
    n = len(pixels)
    total = squares = np.zeros(pixels.shape[1], dtype=np.int64)
    for chunk in np.array_split(pixels, max(1, n // 1000)):
        wide = chunk.astype(np.uint32)
        total = total + wide.sum(axis=0, dtype=np.int64)
        squares = squares + (wide * wide).sum(axis=0, dtype=np.int64)
    return total / n, np.sqrt(n * squares - total * total) / n
