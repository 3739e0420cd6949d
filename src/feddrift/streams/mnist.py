"""MNIST whose concepts swap labels, or show only some digits."""

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
from feddrift.streams.files import data_folder, named_root
from feddrift.types import Ints, Local

SAMPLES = 500  # per cell
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

_MNIST = 2  # its name among the random keys of data
LABELS = np.array([  # [concept, digit]
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
    [0, 2, 1, 3, 4, 5, 6, 7, 8, 9],
    [0, 1, 2, 4, 3, 5, 6, 7, 8, 9],
    [0, 1, 2, 3, 4, 6, 5, 7, 8, 9],
])  # fmt: skip

Bytes = npt.NDArray[np.uint8]


def swapped(name: str, concepts: Ints, data_dir: str | Path | None = None, data_seed: int = 0) -> Stream:
    """Concept 1 swaps the labels of digits 1 and 2, concept 2 those of 3 and 4, concept 3 those of 5 and 6."""
    pixels, digits = load(data_dir)
    rows = np.resize(_order(len(digits), data_seed), (concepts.size, SAMPLES))  # np.resize starts over at the end
    return _stream(name, concepts, pixels, rows, LABELS[concepts.reshape(-1, 1), digits[rows]])


def label_shift(name: str, concepts: Ints, data_dir: str | Path | None = None, data_seed: int = 0) -> Stream:
    """Concept k shows the digits 2k and 2k + 1 only; their labels stay."""
    pixels, digits = load(data_dir)
    order, of_cell = _order(len(digits), data_seed), concepts.reshape(-1)
    rows = np.empty((concepts.size, SAMPLES), dtype=np.int64)
    for k in np.unique(of_cell):
        rows[of_cell == k] = np.resize(order[digits[order] // 2 == k], (int((of_cell == k).sum()), SAMPLES))
    return _stream(name, concepts, pixels, rows, digits[rows])


def load(data_dir: str | Path | None = None) -> tuple[Bytes, Bytes]:
    """All images [n, 784] and digits [n], train then test, from DATA_DIR/mnist, $FEDDRIFT_DATA/mnist or the cache."""
    return load_idx("MNIST", data_folder(data_dir, "mnist"), URL, MD5, download=not named_root(data_dir))


def load_idx(name: str, folder: Path, url: str, md5: Mapping[str, str], download: bool) -> tuple[Bytes, Bytes]:
    """Images and classes from four files of MNIST's kind, fetched first where that is wanted."""
    if download:
        _download(name, folder, url, md5)
    missing = [file for file in SHAPES if not os.path.isfile(folder / file)]
    if missing:
        raise DataError(f"{name} is incomplete: put {', '.join(missing)} into {folder}")
    train_x, test_x, train_y, test_y = (_read(folder / file, shape, name) for file, shape in SHAPES.items())
    pixels = np.concatenate([train_x, test_x])
    return pixels.reshape(len(pixels), -1), ten_classes(np.concatenate([train_y, test_y]), folder)


def ten_classes(labels: Bytes, where: Path) -> Bytes:
    """The labels, all of 0 to 9 and no other: a stream may ask for any of them."""
    if (present := np.unique(labels).tolist()) != list(range(10)):
        raise DataError(f"{where}: labels must be all of 0 to 9, got {present}")
    return labels


def _download(name: str, folder: Path, url: str, md5: Mapping[str, str]) -> None:
    import pooch

    for file, checksum in md5.items():
        try:
            pooch.retrieve(url + file, known_hash=f"md5:{checksum}", fname=file, path=folder)
        except (OSError, ValueError) as error:  # out of reach, or not what the checksum says
            raise DataError(
                f"{name} cannot be downloaded from {url} ({type(error).__name__}): put {', '.join(SHAPES)} into"
                f" {folder}, or into DIR/{folder.name} and name DIR as the data directory"
            ) from error


def _read(path: Path, shape: tuple[int, ...], name: str) -> Bytes:
    """An idx file of bytes: two zero bytes, the type (8), the number of axes, their lengths, the data."""
    header = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
    try:
        with gzip.open(path) as file:
            raw = file.read(len(header) + math.prod(shape) + 1)  # one too many shows that it is longer
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}): replace it") from error
    if not raw.startswith(header) or len(raw) != len(header) + math.prod(shape):
        raise DataError(f"{path} is not {name}'s: expected an idx file of bytes of shape {shape}, replace it")
    return np.frombuffer(raw, dtype=np.uint8, offset=len(header)).reshape(shape)


def _order(n: int, data_seed: int) -> Ints:
    return rng.permutation(rng.derive(data_seed, "data", _MNIST), n)  # one shuffle for every seed, as in the paper


def _stream(name: str, concepts: Ints, pixels: Bytes, rows: Ints, labels: npt.NDArray[np.integer]) -> Stream:
    mean, std = moments(pixels)
    x = np.empty((rows.size, pixels.shape[1]), dtype=np.float32)

    def scale(cell: int) -> None:  # cell by cell: the whole in float64 would take 350 MB
        x[cell * SAMPLES : (cell + 1) * SAMPLES] = (pixels[rows[cell]] - mean) / (std + 0.001)

    with ThreadPoolExecutor() as pool:  # NumPy lets others work meanwhile
        list(pool.map(scale, range(len(rows))))
    return Stream(
        name=name,
        x=x,
        y=labels.reshape(-1).astype(np.int32),
        counts=np.full(concepts.shape, SAMPLES, dtype=np.int64),
        n_classes=10,
        concepts=concepts,
        family="mnist",
        local=Local(lr=1e-3),
    )


def moments(pixels: Bytes) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mean and standard deviation of each pixel over all images, from exact integer sums."""
    n = len(pixels)
    total = squares = np.zeros(pixels.shape[1], dtype=np.int64)
    for chunk in np.array_split(pixels, max(1, n // 1000)):
        wide = chunk.astype(np.uint32)
        total = total + wide.sum(axis=0, dtype=np.int64)
        squares = squares + (wide * wide).sum(axis=0, dtype=np.int64)
    return total / n, np.sqrt(n * squares - total * total) / n
