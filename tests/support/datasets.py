"""Small files in the formats of public data sets."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from feddrift.streams import mnist

AIR_HOURS = [
    (year, month, day, hour) for year in (2012, 2013) for month in range(1, 13) for day in (1, 9) for hour in (0, 6)
]


def write_city(folder: Path, name: str, posts: dict[str, list[str]], **weather: list[str]) -> None:
    """Write one of five_cities_pm25's files; a column that is not given is constant."""
    columns = {"year": [str(h[0]) for h in AIR_HOURS], "month": [str(h[1]) for h in AIR_HOURS]}
    columns |= {"day": [str(h[2]) for h in AIR_HOURS], "hour": [str(h[3]) for h in AIR_HOURS]}
    columns |= {f"PM_{post}": values for post, values in posts.items()}
    fixed = {"DEWP": "5", "HUMI": "50", "PRES": "1010", "TEMP": "15", "cbwd": "cv", "Iws": "0", "precipitation": "0"}
    columns |= {key: weather.get(key, [value] * len(AIR_HOURS)) for key, value in fixed.items()}
    lines = [",".join(columns), *(",".join(row) for row in zip(*columns.values(), strict=True))]
    (folder / "five_cities_pm25").mkdir(exist_ok=True)
    (folder / "five_cities_pm25" / f"{name}PM20120101_20131231.csv").write_text("\n".join(lines) + "\n")


def write_fmow_folder(folder: Path, per_cell: int = 6, size: int = 32) -> Path:
    """Write a small FMoW-WILDS: twelve classes (two rare), five regions and an unknown one, withheld lines."""
    from PIL import Image

    root = folder / "fmow_v1.1"
    (root / "images").mkdir(parents=True)
    countries = {"CHN": "Asia", "FRA": "Europe", "KEN": "Africa", "BRA": "Americas", "AUS": "Oceania", "ATA": "Other"}
    (root / "country_code_mapping.csv").write_text(
        "name,alpha-3,region\n" + "".join(f"x,{code},{region}\n" for code, region in countries.items())
    )
    lines = ["split,country_code,timestamp,category"]
    shown = 0
    draw = np.random.default_rng(0)
    for year in range(2002, 2018):
        for code in countries:
            for k in range(per_cell):
                if k == 2:
                    lines.append(f"seq,{code},{year}-05-01T00:00:00Z,withheld")
                rare = year == 2005 and code == "KEN" and k < 2
                lines.append(f"train,{code},{year}-05-01T00:00:00Z,{f'rare{k}' if rare else f'class{k % 10}'}")
                pixels = draw.integers(0, 256, (size, size, 3)).astype(np.uint8)
                pixels[0, 0] = (year - 2000, list(countries).index(code), k)
                Image.fromarray(pixels).save(root / "images" / f"rgb_img_{shown}.png")
                shown += 1
    (root / "rgb_metadata.csv").write_text("\n".join(lines) + "\n")
    return folder


N_TRAIN = 900  # images of 2 x 3 pixels of a tiny MNIST
N_TEST = 300


def pack_idx(array: npt.NDArray[np.uint8]) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a data directory whose image i has i in its first two pixels and i % 10 as digit."""
    number = np.arange(N_TRAIN + N_TEST)
    images = np.zeros((N_TRAIN + N_TEST, 2, 3), dtype=np.uint8)
    images[:, 0, 0] = number // 256
    images[:, 0, 1] = number % 256
    images[7, 1, 2] = 255
    digits = (number % 10).astype(np.uint8)
    (tmp_path / "mnist").mkdir()
    arrays = (images[:N_TRAIN], images[N_TRAIN:], digits[:N_TRAIN], digits[N_TRAIN:])
    for file, array in zip(mnist.SHAPES, arrays, strict=True):
        (tmp_path / "mnist" / file).write_bytes(gzip.compress(pack_idx(array)))
    shapes = {file: array.shape for file, array in zip(mnist.SHAPES, arrays, strict=True)}
    monkeypatch.setattr(mnist, "SHAPES", shapes)
    return tmp_path
