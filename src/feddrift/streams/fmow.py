"""Functional Map of the World: five regions, ten classes of buildings and land, 2002 to 2017.

`fmow` reads the images of the paper's partition D from FMoW-WILDS v1.1; the package contains their numbers.
`fmow-rule` draws another partition by the same rule. `fmow-labels` replaces each class of partition D by one of
Fashion-MNIST, for users without the satellite images.
"""

from __future__ import annotations

import csv
import gzip
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from feddrift import rng
from feddrift.data import Stream
from feddrift.errors import DataError
from feddrift.streams import mnist
from feddrift.streams.files import find_data_folder, get_named_root
from feddrift.types import Ints, Local

REGIONS = ("Asia", "Europe", "Africa", "Americas", "Oceania")
TIMES = ("2002-09", *map(str, range(2010, 2018)), "2017 test")
URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}

MAX_CELL_IMAGES = 1000

_FASHION = 3  # identifies fmow-labels in the random keys of data
_FMOW = 4  # identifies fmow-rule


def read_class_counts() -> tuple[Ints, tuple[str, ...]]:
    """Read the number of images [t, c, class] of partition D, and the names of the classes.

    >>> counts, names = read_class_counts()
    >>> counts.shape, int(counts[0, 0].sum()), names[0]
    ((10, 5, 10), 1000, 'crop_field')
    """
    text = resources.files("feddrift.streams").joinpath("fmow_classes.csv").read_text()
    rows = list(csv.reader(text.splitlines()))
    counts = np.zeros((10, len(REGIONS), 10), dtype=np.int64)
    for client, _, step, _, _, *numbers in rows[1:]:
        counts[int(step), int(client)] = [int(number) for number in numbers]
    return counts, tuple(rows[0][5:])


@dataclass(frozen=True)
class FmowFolder:
    """Metadata of FMoW-WILDS without the split "seq"; image i is images/rgb_img_<i>.png."""

    root: Path
    category: npt.NDArray[np.str_]
    region: Ints  # a position in REGIONS; -1: none of them
    step: Ints  # 0: 2002 to 2009, 1: 2010, ..., 8: 2017; -1: another year


def read_folder(data_dir: str | Path | None = None) -> FmowFolder:
    """Read the metadata of DIR/fmow_v1.1, where DIR is the data directory or $FEDDRIFT_DATA."""
    root = find_data_folder(data_dir, "fmow_v1.1")
    lines = _read_table(root / "rgb_metadata.csv", ("split", "country_code", "timestamp", "category"))
    regions = {
        row["alpha-3"]: row["region"] for row in _read_table(root / "country_code_mapping.csv", ("alpha-3", "region"))
    }
    images = [row for row in lines if row["split"] != "seq"]
    region_index = {name: c for c, name in enumerate(REGIONS)}
    years = []
    for row in images:
        if not row["timestamp"][:4].isdecimal():
            raise DataError(f"{root / 'rgb_metadata.csv'}: a timestamp begins with its year, got {row['timestamp']!r}")
        years.append(int(row["timestamp"][:4]))
    year = np.array(years, dtype=np.int64)
    return FmowFolder(
        root=root,
        category=np.array([row["category"] for row in images]),
        region=np.array([region_index.get(regions.get(row["country_code"], ""), -1) for row in images], dtype=np.int64),
        step=np.where((year >= 2002) & (year <= 2017), np.maximum(year - 2009, 0), -1),
    )


def _read_table(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file, strict=True))
    except (OSError, ValueError, csv.Error) as error:  # missing, not text, not a table
        raise DataError(f"FMoW cannot be read: {path}: {getattr(error, 'strerror', None) or error}") from None
    missing = [name for name in columns if any(row.get(name) is None for row in rows)]
    if not rows or missing:
        raise DataError(f"FMoW cannot be read: {path} has no column '{missing[0] if missing else columns[0]}'")
    return rows


def read_partition_d() -> list[list[Ints]]:
    """Read the numbers of the images of the paper's partition D, [t][c]; the last time step only tests."""
    packed = resources.files("feddrift.streams").joinpath("fmow_partition_D.csv.gz").read_bytes()
    rows = np.loadtxt(gzip.decompress(packed).decode().splitlines(), delimiter=",", skiprows=1, dtype=np.int64)
    client, step, index = rows.T
    return [[index[(step == t) & (client == c)] for c in range(len(REGIONS))] for t in range(10)]


def draw_partition(folder: FmowFolder, seed: int = 0) -> list[list[Ints]]:
    """Draw the numbers of images, [t][c], by the rule of partition D.

    The rule: the ten most common classes, at most 1000 images in each cell, and as many other images of 2017 to test.
    """
    names, counts = np.unique(folder.category[folder.region >= 0], return_counts=True)
    common = names[np.lexsort((names, -counts))[:10]]
    usable = np.isin(folder.category, common)
    cells: list[list[Ints]] = [[np.zeros(0, dtype=np.int64)] * len(REGIONS) for _ in range(10)]
    for t in range(9):
        for c in range(len(REGIONS)):
            cell = np.flatnonzero(usable & (folder.region == c) & (folder.step == t))
            cell = cell[rng.permutation(rng.derive_key(seed, "data", _FMOW, t, c), len(cell))]
            n = min(MAX_CELL_IMAGES, len(cell) if t < 8 else len(cell) // 2)  # half of 2017 is for the test
            cells[t][c] = np.sort(cell[:n])
            if t == 8:
                cells[9][c] = np.sort(cell[n : 2 * n])
    return cells


def load_images(name: str, data_dir: str | Path | None = None) -> Stream:
    """Load `fmow` or `fmow-rule`: pictures [n, 224, 224, 3] as bytes, of partition D or drawn by its rule."""
    folder = read_folder(data_dir)
    cells = read_partition_d() if name == "fmow" else draw_partition(folder)
    numbers = np.concatenate([index for row in cells for index in row])
    if not len(numbers):
        raise DataError(f"{folder.root} has no images of these regions and years")
    if numbers.max() >= len(folder.category):
        raise DataError(
            f"{folder.root} lists {len(folder.category)} images, partition D needs number {numbers.max()}: it is not"
            " the whole of FMoW-WILDS v1.1 (fmow-rule uses the images that are present)"
        )
    classes, y = np.unique(folder.category[numbers], return_inverse=True)
    if len(classes) > 10:
        raise DataError(f"{folder.root} is not FMoW-WILDS v1.1: partition D has ten classes, got {len(classes)}")
    return Stream(
        name=name,
        x=_read_images(folder.root, numbers),
        y=y.astype(np.int32),
        n_classes=max(2, len(classes)),
        counts=np.array([[len(index) for index in row] for row in cells]),
        clients=REGIONS,
        times=TIMES,
        family="fmow",
        local=Local(rounds=10, batch=32, lr=1e-4),
    )


def _read_images(root: Path, numbers: Ints) -> npt.NDArray[Any]:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("reading FMoW's images needs Pillow: pip install 'feddrift[vision]'") from None
    pictures: npt.NDArray[np.uint8] | None = None
    for k, number in enumerate(numbers.tolist()):
        path = root / "images" / f"rgb_img_{number}.png"
        try:
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB"))
        except Exception as error:  # Pillow raises many kinds of errors for broken or huge pictures
            raise DataError(f"FMoW cannot be read: {path}: {getattr(error, 'strerror', None) or error}") from None
        if pictures is None:
            pictures = np.empty((len(numbers), *pixels.shape), dtype=np.uint8)
        if pixels.shape != pictures.shape[1:]:
            raise DataError(f"FMoW cannot be read: {path} has shape {pixels.shape}, others {pictures.shape[1:]}")
        pictures[k] = pixels
    return np.zeros((0, 224, 224, 3), dtype=np.uint8) if pictures is None else pictures


def load_labels(name: str, data_dir: str | Path | None = None, data_seed: int = 0) -> Stream:
    """Load `fmow-labels`: partition D's classes, with images of Fashion-MNIST.

    The images of a class are used in a random order, and again in this order after the last one.
    """
    pixels, classes = load_fashion(data_dir)
    counts, _ = read_class_counts()
    order = rng.permutation(rng.derive_key(data_seed, "data", _FASHION), len(classes))
    images = [order[classes[order] == k] for k in range(10)]
    n_used = np.zeros(10, dtype=np.int64)
    rows = []
    for t, c in np.ndindex(counts.shape[:2]):
        for k in range(10):
            rows.append(np.take(images[k], n_used[k] + np.arange(counts[t, c, k]), mode="wrap"))
            n_used[k] += counts[t, c, k]
    numbers = np.concatenate(rows)
    mean, std = mnist.compute_pixel_mean_and_std(pixels)
    return Stream(
        name=name,
        x=((pixels[numbers] - mean) / (std + 0.001)).astype(np.float32),
        y=classes[numbers].astype(np.int32),
        counts=counts.sum(axis=2),
        n_classes=10,
        clients=REGIONS,
        times=TIMES,
        family="fmow",
        local=Local(rounds=10, batch=32, lr=1e-3),
    )


def load_fashion(data_dir: str | Path | None = None) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Load all images [n, 784] and classes [n] of Fashion-MNIST.

    They are read from DIR/fashion_mnist, where DIR is the data directory, $FEDDRIFT_DATA or the cache: from one file
    fashion_mnist_70k.npz with x and y, or from the four files of its publishers.
    """
    folder = find_data_folder(data_dir, "fashion_mnist")
    archive = folder / "fashion_mnist_70k.npz"
    if not os.path.isfile(archive):
        return mnist.load_idx("Fashion-MNIST", folder, URL, MD5, download=not get_named_root(data_dir))
    try:
        with archive.open("rb") as file, np.load(file) as arrays:  # np.load(path) may leave a broken file open
            x = arrays["x"]
            y = arrays["y"]
    except Exception as error:  # NumPy, zipfile and zlib raise many kinds of errors for broken files
        raise DataError(f"{archive} is not an archive of x and y ({error}): replace it") from None
    if x.shape != (70000, 28, 28) or y.shape != (70000,) or x.dtype != np.uint8 or y.dtype != np.uint8:
        raise DataError(f"{archive} is not Fashion-MNIST: expected 70000 images of 28 x 28 bytes, got {x.shape}")
    return x.reshape(len(x), -1), mnist.check_ten_classes(y, archive)
