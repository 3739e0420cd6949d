"""Hourly air quality: is the fine dust (PM2.5) above 75 ug/m3, given the weather, the hour and the date?

`air-quality`: 15 monitoring posts of five Chinese cities, 2013 to 2015 (Liang et al., JGR Atmospheres 2016; UCI 394).
`air-beijing`: 12 stations of one city, March 2013 to February 2017 (Zhang et al., Proc. R. Soc. A 2017; UCI 501).
A post is a client, three months are a time step. Nobody knows the true concepts.
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
from feddrift.streams.files import data_folder, read_once
from feddrift.types import Floats, Local

LIMIT = 75.0  # ug/m3, the 24-hour limit of China's standard: above it the label is 1
PATIENCE = 6  # hours for which a weather value that is missing is the last one known
FEATURES = (
    "dew point", "pressure", "temperature", "wind", "from north", "from east", "rain", "hour cos", "hour sin",
    "date cos", "date sin",
)  # fmt: skip
LOCAL = Local(rounds=20)

# Values beyond are slips of the keyboard or codes for missing: -9999 and 999990 occur.
_LEGAL = {"DEWP": (-60, 40), "PRES": (900, 1100), "TEMP": (-60, 60), "wind": (0, 2000), "rain": (0, 500)}
_TIMES = {"year": (1900, 2100), "month": (1, 12), "day": (1, 31), "hour": (0, 23)}
# (centre, spread): round numbers of the climate rather than moments of the data, so that no client tells its own and
# nothing of the future is in them.
_SCALE = {"DEWP": (5, 15), "PRES": (1010, 10), "TEMP": (15, 12)}
_POINTS = ("N", "NNE", "NE", "ENE", "E", "ESE", "SE", "SSE", "S", "SSW", "SW", "WSW", "W", "WNW", "NW", "NNW")
_CALM = ("cv", "CV")

Table = Mapping[str, Sequence[str]]


@read_once("five_cities_pm25")
def five_cities(name: str, data_dir: str | Path | None = None) -> Stream:
    """Clients are the posts of DIR/five_cities_pm25/<City>PM*.csv; a post that repeats another is left out."""
    clients: dict[str, list[Cell | None]] = {}
    for city, table in _tables(data_dir, "five_cities_pm25", r"([A-Za-z]+)PM[0-9_]*\.csv", "UCI 394"):
        x = _features(city, table, "Iws", "precipitation", "cbwd")
        step = _quarter(city, table, 2013, 1)
        seen: list[Floats] = []
        for column in (key for key in table if key.startswith("PM_")):
            pm = _numbers(city, table, column)
            if not any(np.array_equal(pm, earlier, equal_nan=True) for earlier in seen):
                clients[f"{city} {column.removeprefix('PM_')}"] = _cells(x, pm, step)
                seen.append(pm)
    return _stream(name, clients, [f"{2013 + t // 4} Q{t % 4 + 1}" for t in range(_steps(clients))])


@read_once("beijing_air")
def beijing(name: str, data_dir: str | Path | None = None) -> Stream:
    """Clients are the stations of DIR/beijing_air/PRSA_Data_<Station>_*.csv."""
    clients: dict[str, list[Cell | None]] = {}
    for station, table in _tables(data_dir, "beijing_air", r"PRSA_Data_([A-Za-z]+)_[0-9-]*\.csv", "UCI 501"):
        x = _features(station, table, "WSPM", "RAIN", "wd")
        clients[station] = _cells(x, _numbers(station, table, "PM2.5"), _quarter(station, table, 2013, 3))
    begins = ("Mar", "Jun", "Sep", "Dec")
    return _stream(name, clients, [f"{begins[t % 4]} {2013 + t // 4}" for t in range(_steps(clients))])


def _steps(clients: Mapping[str, list[Cell | None]]) -> int:
    return max((len(cells) for cells in clients.values()), default=0)


def _stream(name: str, clients: Mapping[str, list[Cell | None]], times: Sequence[str]) -> Stream:
    if not clients:
        raise DataError(f"{name}: no table has a column of fine dust, PM_<post>")
    if len(times) < 2:
        raise DataError(f"{name}: needs at least 2 quarters of data, got {len(times)}")
    rows = [[cells[t] if t < len(cells) else None for cells in clients.values()] for t in range(len(times))]
    stream = Stream.from_arrays(rows, name=name, n_classes=2, clients=list(clients), times=times, local=LOCAL)
    return replace(stream, family="air")


def _tables(data_dir: str | Path | None, folder: str, pattern: str, source: str) -> Iterator[tuple[str, Table]]:
    """The files of a folder by the name in their names, from .csv files or a .tar.xz of them."""
    root = data_folder(data_dir, folder)
    texts: dict[str, str] = {}
    try:
        for archive in sorted(root.glob("*.tar.xz")):
            with tarfile.open(archive, "r:xz") as packed:
                for member in packed:
                    file = packed.extractfile(member)
                    if file is not None:
                        texts[Path(member.name).name] = file.read().decode("utf-8-sig")
        texts |= {path.name: path.read_text(encoding="utf-8-sig") for path in sorted(root.glob("*.csv"))}
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError, ValueError) as error:  # not there, broken, no text
        raise DataError(f"{root} cannot be read: {error}") from None
    by_name = {match[1]: texts[file] for file in sorted(texts) if (match := re.fullmatch(pattern, file))}
    if not by_name:
        raise DataError(f"{root} has no such files: put the .csv files of {source}, or a .tar.xz of them, there")
    for key, text in by_name.items():  # one at a time: as text a table takes fifty megabytes
        yield key, _table(key, text)


def _table(where: str, text: str) -> Table:
    try:
        rows = [row for row in csv.reader(text.splitlines(), strict=True) if row]
    except csv.Error as error:
        raise DataError(f"{where} is no table: {error}") from None
    if len({len(row) for row in rows}) != 1:
        raise DataError(f"{where}: every line needs as many values as the header")
    header, *body = rows
    if not body:
        raise DataError(f"{where}: a header alone, expected a line per hour below it")
    return dict(zip(header, zip(*body, strict=True), strict=True))


def _numbers(where: str, table: Table, column: str) -> Floats:
    """A column; NaN where it says NA."""
    if column not in table:
        raise DataError(f"{where}: no column '{column}' among {', '.join(table)}")
    try:
        values = np.array([math.nan if text == "NA" else float(text) for text in table[column]])
    except ValueError as error:
        raise DataError(f"{where}, column '{column}': {error}") from None
    if np.isinf(values).any():
        raise DataError(f"{where}, column '{column}': expected finite numbers or NA, got inf")
    return values


def _time(where: str, table: Table, column: str) -> Floats:
    values, (low, high) = _numbers(where, table, column), _TIMES[column]
    for bad in values[~((values >= low) & (values <= high))][:1]:
        raise DataError(f"{where}, column '{column}': expected {low} to {high}, got {bad:g}")
    return values


def _quarter(where: str, table: Table, year: int, month: int) -> npt.NDArray[np.int64]:
    """How many quarters after this month each line lies; below 0: before it."""
    months = (_time(where, table, "year") - year) * 12 + _time(where, table, "month") - month
    return np.floor_divide(months, 3).astype(np.int64)


def _features(where: str, table: Table, wind: str, rain: str, direction: str) -> npt.NDArray[np.float32]:
    """x[n, 11] in the order of FEATURES; a row with NaN cannot be used."""
    measured = {
        key: np.where((values >= low) & (values <= high), values, np.nan)
        for key, column in {"DEWP": "DEWP", "PRES": "PRES", "TEMP": "TEMP", "wind": wind, "rain": rain}.items()
        for values, (low, high) in [(_numbers(where, table, column), _LEGAL[key])]
    }
    north, east = _directions(where, table, direction)
    hour, day, month = (_time(where, table, column) for column in ("hour", "day", "month"))
    hour, date = 2 * np.pi * hour / 24, 2 * np.pi * (month - 1 + (day - 1) / 31) / 12
    columns = [
        *((_filled(measured[key]) - centre) / spread for key, (centre, spread) in _SCALE.items()),
        numerics.log1p(_filled(measured["wind"])) - 1.5,
        _filled(north),
        _filled(east),
        numerics.log1p(np.nan_to_num(measured["rain"])),
        numerics.cos(hour),
        numerics.sin(hour),
        numerics.cos(date),
        numerics.sin(date),
    ]
    return np.stack(columns, axis=1).astype(np.float32)


def _directions(where: str, table: Table, column: str) -> tuple[Floats, Floats]:
    angle = {point: k * np.pi / 8 for k, point in enumerate(_POINTS)}
    legal = {
        **{point: (float(numerics.cos(a)), float(numerics.sin(a))) for point, a in angle.items()},
        **dict.fromkeys(_CALM, (0.0, 0.0)),
        "NA": (np.nan, np.nan),
    }
    if column not in table:
        raise DataError(f"{where}: no column '{column}' among {', '.join(table)}")
    for text in set(table[column]) - set(legal):
        raise DataError(f"{where}, column '{column}': unknown wind direction {text!r} (one of: {', '.join(legal)})")
    both = np.array([legal[text] for text in table[column]])
    return both[:, 0], both[:, 1]


def _filled(values: Floats) -> Floats:
    """Where a value is missing, the last one known, if it is young enough: the future fills nothing.

    >>> _filled(np.array([np.nan, 1.0, np.nan, 3.0])).tolist()
    [nan, 1.0, 1.0, 3.0]
    """
    line = np.arange(len(values))
    last = np.maximum.accumulate(np.where(np.isnan(values), -1, line))
    return np.where((last >= 0) & (line - last <= PATIENCE), values[last], np.nan)


def _cells(x: npt.NDArray[np.float32], pm: Floats, step: npt.NDArray[np.int64]) -> list[Cell | None]:
    """S_c^(t) for t = 0, 1, ...: the hours that have both their dust and their weather."""
    usable = ~np.isnan(pm) & ~np.isnan(x).any(axis=1) & (step >= 0)
    last = int(step[usable].max(initial=-1))
    parts = [usable & (step == t) for t in range(last + 1)]
    return [(x[part], pm[part] > LIMIT) if part.any() else None for part in parts]
