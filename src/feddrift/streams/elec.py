"""Electricity of New South Wales: is the price of a half hour above its mean of the last 24 hours?

45,312 half hours, May 1996 to December 1998 (Harries 1999; Gama et al. 2004), in the usual scaled version. Three hours
of the day are a client, 56 days a time step. The date, which only counts days, and the price itself are not features.
The true concepts are unknown; the market was opened to another state in May 1997.
"""

from __future__ import annotations

import csv
import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from feddrift.data import Cell, Stream
from feddrift.errors import DataError
from feddrift.streams.files import find_data_folder, read_once
from feddrift.types import Local

# (centre, spread): round numbers rather than statistics of the data, which would contain the future.
SCALE = {
    "day": (4, 2), "period": (0.5, 0.3), "nswdemand": (0.42, 0.16), "vicprice": (0.0035, 0.0015),
    "vicdemand": (0.42, 0.12), "transfer": (0.5, 0.15),
}  # fmt: skip
COLUMNS = tuple(SCALE)
MAX_SPREADS = 4.0  # spreads from the centre; a few prices are hundreds of spreads away
CLASSES = ("DOWN", "UP")
HALF_HOURS = 48  # in a day
CLIENTS = 8  # three hours of the day each
DAYS = 56  # in a time step
LOCAL = Local(rounds=20)


@read_once("elec2")
def load_hours(name: str, data_dir: str | Path | None = None) -> Stream:
    """Load the stream of DIR/elec2/elec2.csv.gz or elec2.csv."""
    x, y = _read_rows(find_data_folder(data_dir, "elec2"))
    row = np.arange(len(x))
    client = row % HALF_HOURS * CLIENTS // HALF_HOURS
    step = row // (HALF_HOURS * DAYS)
    centre, spread = np.array(list(SCALE.values()), dtype=np.float32).T
    x = np.clip((x - centre) / spread, -MAX_SPREADS, MAX_SPREADS)
    cells: list[list[Cell | None]] = []
    for t in range(int(step[-1]) + 1):
        masks = [(step == t) & (client == c) for c in range(CLIENTS)]
        cells.append([(x[mask], y[mask]) for mask in masks])
    hours = [f"{24 * c // CLIENTS:02d}-{24 * (c + 1) // CLIENTS:02d} h" for c in range(CLIENTS)]
    days = [f"day {DAYS * t + 1}" for t in range(len(cells))]
    stream = Stream.from_arrays(cells, name=name, n_classes=2, clients=hours, times=days, local=LOCAL)
    return replace(stream, family="elec", classes=CLASSES, columns=COLUMNS)


def _read_rows(folder: Path) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    packed = folder / "elec2.csv.gz"
    plain = folder / "elec2.csv"
    try:
        with gzip.open(packed, "rt", newline="") if packed.exists() else plain.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"elec2 cannot be read: put elec2.csv.gz into {folder} ({error})") from None
    try:
        x = np.array([[row[name] for name in COLUMNS] for row in rows], dtype=np.float32)
        y = np.array([CLASSES.index(row["class"]) for row in rows], dtype=np.int32)
    except (KeyError, TypeError, ValueError) as error:
        columns = ", ".join((*COLUMNS, "class"))
        raise DataError(f"{folder}: expected the columns {columns}, numbers and UP or DOWN: {error}") from None
    if len(x) < 2 * HALF_HOURS * DAYS or len(x) % HALF_HOURS:
        raise DataError(
            f"{folder}: expected {2 * DAYS} whole days of {HALF_HOURS} half hours or more, got {len(x)} rows"
        )
    return x, y
