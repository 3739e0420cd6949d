"""Hourly air quality: is the fine dust (PM2.5) above 75 ug/m3, given the weather, the hour and the date?

`air-quality`: 15 monitoring posts of five Chinese cities, 2013 to 2015 (Liang et al., JGR Atmospheres 2016; UCI 394).
`air-beijing`: 12 stations of one city, March 2013 to February 2017 (Zhang et al., Proc. R. Soc. A 2017; UCI 501).
Each post is a client, each quarter a time step. The true concepts are unknown.
"""

from __future__ import annotations

import csv
import lzma
import math
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from feddrift import numerics
from feddrift.data import Cell, Stream
from feddrift.errors import DataError
from feddrift.streams.files import find_data_folder, read_once
from feddrift.types import Floats, Local

DUST_LIMIT = 75.0  # ug/m3, the 24-hour limit of China's standard: above it the label is 1
MAX_FILLED_HOURS = 6  # number of hours for which a weather value replaces missing values after it
FEATURES = (
    "dew point", "pressure", "temperature", "wind", "from north", "from east", "rain", "hour cos", "hour sin",
    "date cos", "date sin",
)  # fmt: skip
LOCAL = Local(rounds=20)

# Values outside these ranges are typing errors or codes for missing values: -9999 and 999990 occur.
_LEGAL_RANGES = {"DEWP": (-60, 40), "PRES": (900, 1100), "TEMP": (-60, 60), "wind": (0, 2000), "rain": (0, 500)}
_TIME_RANGES = {"year": (1900, 2100), "month": (1, 12), "day": (1, 31), "hour": (0, 23)}
# (centre, spread): round numbers of the climate. Statistics of the data would contain the future, and clients would
# have to share them.
_SCALE = {"DEWP": (5, 15), "PRES": (1010, 10), "TEMP": (15, 12)}
_COMPASS_POINTS = ("N", "NNE", "NE", "ENE", "E", "ESE", "SE", "SSE", "S", "SSW", "SW", "WSW", "W", "WNW", "NW", "NNW")
_CALM_CODES = ("cv", "CV")

Table = Mapping[str, Sequence[str]]


@read_once("five_cities_pm25")
def load_five_cities(name: str, data_dir: str | Path | None = None) -> Stream:
    """Load `air-quality`: clients are the posts of DIR/five_cities_pm25/<City>PM*.csv without duplicates."""
    clients: dict[str, list[Cell | None]] = {}
    for city, table in _read_tables(data_dir, "five_cities_pm25", r"([A-Za-z]+)PM[0-9_]*\.csv", "UCI 394"):
        x = _build_features(city, table, "Iws", "precipitation", "cbwd")
        step = _read_quarters(city, table, 2013, 1)
        distinct: list[Floats] = []
        for column in (key for key in table if key.startswith("PM_")):
            pm = _read_numbers(city, table, column)
            if not any(np.array_equal(pm, earlier, equal_nan=True) for earlier in distinct):
                clients[f"{city} {column.removeprefix('PM_')}"] = _split_into_cells(x, pm, step)
                distinct.append(pm)
    return _build_stream(name, clients, [f"{2013 + t // 4} Q{t % 4 + 1}" for t in range(_count_steps(clients))])


@read_once("beijing_air")
def load_beijing(name: str, data_dir: str | Path | None = None) -> Stream:
    """Load `air-beijing`: clients are the stations of DIR/beijing_air/PRSA_Data_<Station>_*.csv."""
    clients: dict[str, list[Cell | None]] = {}
    for station, table in _read_tables(data_dir, "beijing_air", r"PRSA_Data_([A-Za-z]+)_[0-9-]*\.csv", "UCI 501"):
        x = _build_features(station, table, "WSPM", "RAIN", "wd")
        clients[station] = _split_into_cells(
            x, _read_numbers(station, table, "PM2.5"), _read_quarters(station, table, 2013, 3)
        )
    first_months = ("Mar", "Jun", "Sep", "Dec")
    times = [f"{first_months[t % 4]} {2013 + t // 4}" for t in range(_count_steps(clients))]
    return _build_stream(name, clients, times)


def _count_steps(clients: Mapping[str, list[Cell | None]]) -> int:
    return max((len(cells) for cells in clients.values()), default=0)


def _build_stream(name: str, clients: Mapping[str, list[Cell | None]], times: Sequence[str]) -> Stream:
    if not clients:
        raise DataError(f"{name}: no table has a column of fine dust, PM_<post>")
    if len(times) < 2:
        raise DataError(f"{name}: needs at least 2 quarters of data, got {len(times)}")
    rows = [[cells[t] if t < len(cells) else None for cells in clients.values()] for t in range(len(times))]
    stream = Stream.from_arrays(rows, name=name, n_classes=2, clients=list(clients), times=times, local=LOCAL)
    return replace(stream, family="air")


def _read_tables(data_dir: str | Path | None, folder: str, pattern: str, source: str) -> Iterator[tuple[str, Table]]:
    """Yield the tables of a folder with the first group of `pattern`, from .csv files or a .tar.xz of them."""
    root = find_data_folder(data_dir, folder)
    texts: dict[str, str] = {}
    try:
        for archive in sorted(root.glob("*.tar.xz")):
            with tarfile.open(archive, "r:xz") as packed:
                for member in packed:
                    file = packed.extractfile(member)
                    if file is not None:
                        texts[Path(member.name).name] = file.read().decode("utf-8-sig")
        texts |= {path.name: path.read_text(encoding="utf-8-sig") for path in sorted(root.glob("*.csv"))}
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError, ValueError) as error:  # missing, broken, not text
        raise DataError(f"{root} cannot be read: {error}") from None
    matches = [re.fullmatch(pattern, file) for file in sorted(texts)]
    by_name = {match[1]: texts[match[0]] for match in matches if match is not None}
    if not by_name:
        raise DataError(
            f"{root} has no files of this data set: put the .csv files of {source}, or a .tar.xz of them, there"
        )
    for key, text in by_name.items():  # one table at a time: the text of a table takes 50 MB
        yield key, _parse_table(key, text)


def _parse_table(place: str, text: str) -> Table:
    try:
        rows = [row for row in csv.reader(text.splitlines(), strict=True) if row]
    except csv.Error as error:
        raise DataError(f"{place} is not a table: {error}") from None
    if len({len(row) for row in rows}) != 1:
        raise DataError(f"{place}: every line needs as many values as the header")
    header, *body = rows
    if not body:
        raise DataError(f"{place}: only a header, expected a line for each hour below it")
    return dict(zip(header, zip(*body, strict=True), strict=True))


def _read_numbers(place: str, table: Table, column: str) -> Floats:
    """Return a column as numbers, NaN for NA."""
    if column not in table:
        raise DataError(f"{place}: no column '{column}' among {', '.join(table)}")
    try:
        values = np.array([math.nan if text == "NA" else float(text) for text in table[column]])
    except ValueError as error:
        raise DataError(f"{place}, column '{column}': {error}") from None
    if np.isinf(values).any():
        raise DataError(f"{place}, column '{column}': expected finite numbers or NA, got inf")
    return values


def _read_time(place: str, table: Table, column: str) -> Floats:
    values = _read_numbers(place, table, column)
    low, high = _TIME_RANGES[column]
    for invalid in values[~((values >= low) & (values <= high))][:1]:
        raise DataError(f"{place}, column '{column}': expected {low} to {high}, got {invalid:g}")
    return values


def _read_quarters(place: str, table: Table, year: int, month: int) -> npt.NDArray[np.int64]:
    """Return the quarter of each line, counted from this month; negative before it."""
    months = (_read_time(place, table, "year") - year) * 12 + _read_time(place, table, "month") - month
    return np.floor_divide(months, 3).astype(np.int64)


def _build_features(place: str, table: Table, wind: str, rain: str, direction: str) -> npt.NDArray[np.float32]:
    """Return x[n, 11] in the order of FEATURES; a row with NaN cannot be used."""
    measured = {
        key: np.where((values >= low) & (values <= high), values, np.nan)
        for key, column in {"DEWP": "DEWP", "PRES": "PRES", "TEMP": "TEMP", "wind": wind, "rain": rain}.items()
        for values, (low, high) in [(_read_numbers(place, table, column), _LEGAL_RANGES[key])]
    }
    north, east = _read_directions(place, table, direction)
    hour, day, month = (_read_time(place, table, column) for column in ("hour", "day", "month"))
    hour_angle = 2 * np.pi * hour / 24
    date_angle = 2 * np.pi * (month - 1 + (day - 1) / 31) / 12
    columns = [
        *((_fill_gaps(measured[key]) - centre) / spread for key, (centre, spread) in _SCALE.items()),
        numerics.log1p(_fill_gaps(measured["wind"])) - 1.5,
        _fill_gaps(north),
        _fill_gaps(east),
        numerics.log1p(np.nan_to_num(measured["rain"])),
        numerics.cos(hour_angle),
        numerics.sin(hour_angle),
        numerics.cos(date_angle),
        numerics.sin(date_angle),
    ]
    return np.stack(columns, axis=1).astype(np.float32)


def _read_directions(place: str, table: Table, column: str) -> tuple[Floats, Floats]:
    """Return the components of the wind's direction to the north and to the east, 0 for calm and NaN for NA."""
    angles = {point: k * np.pi / 8 for k, point in enumerate(_COMPASS_POINTS)}
    legal = {
        **{point: (float(numerics.cos(a)), float(numerics.sin(a))) for point, a in angles.items()},
        **dict.fromkeys(_CALM_CODES, (0.0, 0.0)),
        "NA": (np.nan, np.nan),
    }
    if column not in table:
        raise DataError(f"{place}: no column '{column}' among {', '.join(table)}")
    for text in set(table[column]) - set(legal):
        raise DataError(f"{place}, column '{column}': unknown wind direction {text!r} (one of: {', '.join(legal)})")
    components = np.array([legal[text] for text in table[column]])
    return components[:, 0], components[:, 1]


def _fill_gaps(values: Floats) -> Floats:
    """Replace missing values by the last known one, if it is recent enough; later values are never used.

    >>> _fill_gaps(np.array([np.nan, 1.0, np.nan, 3.0])).tolist()
    [nan, 1.0, 1.0, 3.0]
    """
    hour = np.arange(len(values))
    last = np.maximum.accumulate(np.where(np.isnan(values), -1, hour))
    return np.where((last >= 0) & (hour - last <= MAX_FILLED_HOURS), values[last], np.nan)


def _split_into_cells(x: npt.NDArray[np.float32], pm: Floats, step: npt.NDArray[np.int64]) -> list[Cell | None]:
    """Return the cell of each quarter: its hours with both dust and weather; None if there are none."""
    usable = ~np.isnan(pm) & ~np.isnan(x).any(axis=1) & (step >= 0)
    last = int(step[usable].max(initial=-1))
    parts = [usable & (step == t) for t in range(last + 1)]
    return [(x[part], pm[part] > DUST_LIMIT) if part.any() else None for part in parts]
