"""Functional Map of the World: five regions, ten classes of buildings and land, 2002 to 2017.

The shares of the classes, which drift, ship with the package (the paper's partition D). `fmow-labels` lays them over
the images of Fashion-MNIST, for those who have not got the satellite's.
"""

from __future__ import annotations

import csv
import os
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pooch

from feddrift import rng
from feddrift.errors import DataError
from feddrift.streams import mnist
from feddrift.types import Ints, Local, Stream

REGIONS = ("Asia", "Europe", "Africa", "Americas", "Oceania")
URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}

_FASHION = 3  # its name among the random keys of data


def class_counts() -> tuple[Ints, tuple[str, ...]]:
    """How many images of each class each client sees at each time step [t, c, class], and the names of the classes.

    >>> counts, names = class_counts()
    >>> counts.shape, counts[0, 0].sum(), names[0]
    ((10, 5, 10), 1000, 'crop_field')
    """
    text = resources.files("feddrift").joinpath("data", "fmow_classes.csv").read_text()
    rows = list(csv.reader(text.splitlines()))
    counts = np.zeros((10, len(REGIONS), 10), dtype=np.int64)
    for client, _, step, _, _, *numbers in rows[1:]:
        counts[int(step), int(client)] = [int(number) for number in numbers]
    return counts, tuple(rows[0][5:])


def labels(name: str, data_dir: str | Path | None = None) -> Stream:
    """FMoW's classes over time, each shown by one of Fashion-MNIST's; a class that has shown all images starts over."""
    pixels, classes = fashion(data_dir)
    counts, _ = class_counts()
    order = rng.permutation(rng.derive(0, "data", _FASHION), len(classes))
    of_class = [order[classes[order] == k] for k in range(10)]
    taken = np.zeros(10, dtype=np.int64)
    rows = []
    for t, c in np.ndindex(counts.shape[:2]):
        for k in range(10):
            rows.append(np.take(of_class[k], taken[k] + np.arange(counts[t, c, k]), mode="wrap"))
            taken[k] += counts[t, c, k]
    chosen = np.concatenate(rows)
    mean, std = mnist.moments(pixels)
    return Stream(
        name=name, x=((pixels[chosen] - mean) / (std + 0.001)).astype(np.float32), y=classes[chosen].astype(np.int32),
        counts=counts.sum(axis=2), n_classes=10, clients=REGIONS, family="fmow",
        local=Local(rounds=10, batch=32, lr=1e-3),
    )  # fmt: skip


def fashion(data_dir: str | Path | None = None) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """All images [n, 784] and classes [n] of Fashion-MNIST.

    From DIR/fashion_mnist, DIR being the data directory, $FEDDRIFT_DATA or the cache: one file fashion_mnist_70k.npz
    with x and y, or the four files of its publishers.
    """
    named = data_dir or os.environ.get("FEDDRIFT_DATA")
    folder = Path(named or pooch.os_cache("feddrift")).expanduser() / "fashion_mnist"
    whole = folder / "fashion_mnist_70k.npz"
    if not whole.is_file():
        return mnist.load_idx("Fashion-MNIST", folder, URL, MD5, download=not named)
    try:
        with np.load(whole) as arrays:
            x, y = arrays["x"], arrays["y"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{whole} is not an archive of x and y ({error}): replace it") from None
    if x.shape != (70000, 28, 28) or y.shape != (70000,) or x.dtype != np.uint8 or y.max(initial=0) > 9:
        raise DataError(f"{whole} is not Fashion-MNIST: expected 70000 images of 28 x 28 bytes, got {x.shape}")
    return x.reshape(len(x), -1), y.astype(np.uint8)
