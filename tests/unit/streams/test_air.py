"""The air quality streams: made-up files of the real format, and the real files if present."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

import feddrift as fd
from feddrift.errors import DataError
from feddrift.streams import air
from tests.support.datasets import AIR_HOURS, write_city


def replace_hours(column: str, at: dict[int, str], default: str) -> dict[str, list[str]]:
    return {column: [at.get(i, default) for i in range(len(AIR_HOURS))]}


def test_posts_are_clients_and_quarters_time_steps(tmp_path: Path) -> None:
    dust = [str(70 + h[1]) for h in AIR_HOURS]  # above 75 from June on
    write_city(tmp_path, "Oslo", {"North": dust, "US Post": dust, "South": ["80"] * len(AIR_HOURS)})
    write_city(tmp_path, "Rome", {"US Post": ["NA" if h[1] < 4 else "75" for h in AIR_HOURS]})
    s = fd.stream("air-quality", data_dir=tmp_path)
    assert s.clients == ("Oslo North", "Oslo South", "Rome US Post")  # Oslo's US Post repeats the first
    assert s.counts.tolist() == [[12, 12, 0], [12, 12, 12], [12, 12, 12], [12, 12, 12]]  # 2012 is before the start
    assert s.cell(1, 0)[1].tolist() == [0] * 8 + [1] * 4 and s.cell(0, 1)[1].all() and not s.cell(3, 2)[1].any()
    assert s.times == ("2013 Q1", "2013 Q2", "2013 Q3", "2013 Q4")
    assert s.n_classes == 2 and s.concepts is None and s.family == "air" and s.x.shape[1] == len(air.FEATURES)


def test_weather_is_scaled_by_constants_and_filled_from_the_past_only(tmp_path: Path) -> None:
    start = len(AIR_HOURS) // 2
    write_city(
        tmp_path,
        "Oslo",
        {"North": ["80"] * len(AIR_HOURS)},
        **replace_hours("TEMP", {start: "27", start + 1: "NA"}, "15"),
        **replace_hours("DEWP", {start + 2: "-9999"}, "5"),
        **replace_hours("cbwd", {start: "E"}, "cv"),
        **replace_hours("precipitation", {start: "NA"}, "0"),
    )
    x = fd.stream("air-quality", data_dir=tmp_path).cell(0, 0)[0]
    named = dict(zip(air.FEATURES, x.T, strict=True))
    assert named["temperature"].tolist() == [1, 1] + [0] * 10 and not named["dew point"].any()
    assert named["from north"][0] == pytest.approx(0, abs=1e-6) and named["from east"][0] == 1
    assert not named["from east"][1:].any() and not named["rain"].any()
    assert named["hour cos"][0] == 1 and named["hour sin"][1] == pytest.approx(1)
    assert named["date cos"][0] == 1 and named["date sin"][8] == pytest.approx(np.sin(np.pi / 3))


def test_a_gap_that_lasts_leaves_its_hours_out(tmp_path: Path) -> None:
    start = len(AIR_HOURS) // 2
    gap = {start + k: "NA" for k in range(air.MAX_FILLED_HOURS + 3)}
    write_city(tmp_path, "Oslo", {"North": ["80"] * len(AIR_HOURS)}, **replace_hours("PRES", gap, "1010"))
    assert fd.stream("air-quality", data_dir=tmp_path).counts.tolist() == [[9], [12], [12], [12]]
    assert np.isnan(air._fill_gaps(np.array([np.nan, 2.0]))).tolist() == [True, False]  # never from the future


def test_beijing_reads_an_archive_and_starts_in_march(tmp_path: Path) -> None:
    folder = tmp_path / "beijing_air"
    folder.mkdir()
    header = '"No","year","month","day","hour","PM2.5","TEMP","PRES","DEWP","RAIN","wd","WSPM","station"'
    rows = [f'1,2013,{m},1,0,{40 * m},15,1010,5,0,"{"NA" if m == 4 else "W"}",2,"X"' for m in (3, 4, 5, 6)]
    file = tmp_path / "PRSA_Data_X_20130301-20170228.csv"
    file.write_text("\n".join([header, *rows]))
    with tarfile.open(folder / "data.csv.tar.xz", "w:xz") as archive:
        archive.add(file, file.name)
    s = fd.stream("air-beijing", data_dir=tmp_path)
    assert s.times == ("Mar 2013", "Jun 2013")
    assert s.clients == ("X",) and s.counts.tolist() == [[3], [1]] and s.y.tolist() == [1, 1, 1, 1]
    assert s.x[:, air.FEATURES.index("from east")].tolist() == pytest.approx([-1, -1, -1, -1])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "every line needs as many values"),
        ("year,month\n2013\n", "every line needs as many values"),
        ("year,month\n2013,1\n", "no column 'DEWP'"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(DataError, match="put the .csv files of UCI 394"):
        fd.stream("air-quality", data_dir=tmp_path)
    (tmp_path / "five_cities_pm25").mkdir()
    (tmp_path / "five_cities_pm25" / "OsloPM2013.csv").write_text(text)
    with pytest.raises(DataError, match=f"Oslo.*{sentence}"):
        fd.stream("air-quality", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("year", "1e9", "expected 1900 to 2100, got 1e\\+09"),  # more quarters than memory holds
        ("month", "NA", "expected 1 to 12, got nan"),
        ("hour", "24", "expected 0 to 23, got 24"),
        ("PM_North", "1e999", "expected finite numbers or NA"),
        ("cbwd", '"cv', "is not a table: unexpected end of data"),
        ("TEMP", "1" * 140_000, "is not a table: field larger than field limit"),
    ],
)
def test_values_that_cannot_be_are_named(tmp_path: Path, column: str, value: str, said: str) -> None:
    write_city(tmp_path, "Oslo", {"North": ["80"] * len(AIR_HOURS)})
    (path,) = (tmp_path / "five_cities_pm25").glob("*.csv")
    header, *lines = path.read_text().splitlines()
    row = lines[-1].split(",")
    row[header.split(",").index(column)] = value
    path.write_text("\n".join([header, *lines[:-1], ",".join(row)]))
    with pytest.raises(DataError, match=f"Oslo.*{said}"):
        fd.stream("air-quality", data_dir=tmp_path)


@pytest.mark.parametrize("name", ["~nobody-of-this-name", "a" * 300, "a\0b"])
def test_a_directory_that_cannot_be_is_named(name: str) -> None:
    with pytest.raises(DataError, match="cannot be read|has no files of this data set"):
        fd.stream("air-quality", data_dir=name)


def test_odd_values_are_named(tmp_path: Path) -> None:
    write_city(tmp_path, "Oslo", {"North": ["much"] * len(AIR_HOURS)})
    with pytest.raises(DataError, match="Oslo, column 'PM_North'.*'much'"):
        fd.stream("air-quality", data_dir=tmp_path)
    write_city(tmp_path, "Oslo", {"North": ["80"] * len(AIR_HOURS)}, cbwd=["up"] * len(AIR_HOURS))
    with pytest.raises(DataError, match="unknown wind direction 'up'"):
        fd.stream("air-quality", data_dir=tmp_path)
    write_city(tmp_path, "Oslo", {"North": ["80" if h[0] == 2013 and h[1] < 4 else "NA" for h in AIR_HOURS]})
    with pytest.raises(DataError, match="at least 2 quarters"):
        fd.stream("air-quality", data_dir=tmp_path)
    (tmp_path / "five_cities_pm25" / "broken.tar.xz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="cannot be read"):
        fd.stream("air-quality", data_dir=tmp_path)


@pytest.mark.parametrize(("name", "folder", "shape"), [
    ("air-quality", "five_cities_pm25", (12, 15)),
    pytest.param("air-beijing", "beijing_air", (16, 12), marks=pytest.mark.slow),
])  # fmt: skip
def test_the_real_files(name: str, folder: str, shape: tuple[int, int]) -> None:
    data = os.environ.get("FEDDRIFT_DATA")
    if not data or not (Path(data) / folder).is_dir():
        pytest.skip(f"$FEDDRIFT_DATA/{folder} is not there")
    s = fd.stream(name)
    assert s.counts.shape == shape and (s.counts > 0).sum() >= s.counts.size - 1 and s.counts.max() <= 2208
    assert np.abs(s.x).max() < 6 and (np.abs(s.x.mean(axis=0)) < 1).all() and 0.2 < s.y.mean() < 0.5


def test_a_header_alone_is_one_sentence(tmp_path: Path) -> None:
    write_city(tmp_path, "Oslo", {"North": ["80"] * len(AIR_HOURS)})
    (path,) = (tmp_path / "five_cities_pm25").glob("*.csv")
    path.write_text(path.read_text().splitlines()[0])
    with pytest.raises(DataError, match="Oslo: only a header"):  # an IndexError before
        fd.stream("air-quality", data_dir=tmp_path)


def test_a_table_without_any_post_is_reported(tmp_path: Path) -> None:
    write_city(tmp_path, "Nowhere", {})
    with pytest.raises(DataError, match="no table has a column of fine dust"):
        air.load_five_cities("air-quality", tmp_path)
