"""elec2-hours: eight clients of three hours each, steps of 56 days."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import feddrift as fd

HEADER = "date,day,period,nswprice,nswdemand,vicprice,vicdemand,transfer,class"


def lines(days: int) -> list[str]:
    return [
        f"0.{d},{1 + d % 7},{h / 47:.4f},0.5,0.42,{1.0 if h == 0 else 0.0035},0.42,0.5,{'UP' if h % 2 else 'DOWN'}"
        for d in range(days)
        for h in range(48)
    ]


def put(folder: Path, rows: list[str], packed: bool = True) -> Path:
    (folder / "elec2").mkdir(parents=True, exist_ok=True)
    text = "\n".join([HEADER, *rows]) + "\n"
    if packed:
        (folder / "elec2" / "elec2.csv.gz").write_bytes(gzip.compress(text.encode()))
    else:
        (folder / "elec2" / "elec2.csv").write_text(text)
    return folder


@pytest.mark.parametrize("packed", [True, False])
def test_hours_are_clients_and_days_are_steps(packed: bool, tmp_path: Path) -> None:
    stream = fd.stream("elec2-hours", data_dir=put(tmp_path, lines(130), packed))
    assert stream.counts.tolist() == [[336] * 8, [336] * 8, [18 * 6] * 8]
    assert stream.clients[0] == "00-03 h" and stream.times[-1] == "day 113" and stream.classes == ("DOWN", "UP")
    x, y = stream.cell(0, 0)
    assert stream.columns == ("day", "period", "nswdemand", "vicprice", "vicdemand", "transfer")
    np.testing.assert_allclose(x[0], [-1.5, -0.5 / 0.3, 0, 4, 0, 0], atol=1e-5)  # a price that is far away is clipped
    assert y[:6].tolist() == [0, 1, 0, 1, 0, 1] and x[6, 0] == -1.0  # the next day


def test_problems_of_the_file_are_reported(tmp_path: Path) -> None:
    with pytest.raises(fd.DataError, match="put elec2.csv.gz into"):
        fd.stream("elec2-hours", data_dir=tmp_path)
    with pytest.raises(fd.DataError, match="112 whole days of 48 half hours or more, got 480 rows"):
        fd.stream("elec2-hours", data_dir=put(tmp_path / "short", lines(10)))
    with pytest.raises(fd.DataError, match="numbers and UP or DOWN"):
        fd.stream("elec2-hours", data_dir=put(tmp_path / "odd", ["0,1,0,0,0,0,0,0,SIDEWAYS"]))


def test_the_real_one() -> None:
    root = os.environ.get("FEDDRIFT_DATA")
    if not root or not (Path(root) / "elec2").is_dir():
        pytest.skip("needs $FEDDRIFT_DATA/elec2")
    stream = fd.stream("elec2-hours")
    assert stream.counts.shape == (17, 8) and stream.y.sum() == 19_237 and np.abs(stream.x).max() <= 4


def test_unchanged_files_are_read_once_and_rows_are_not_shared(tmp_path: Path) -> None:
    folder = put(tmp_path, lines(130))
    first = fd.stream("elec2-hours", data_dir=folder)
    kept = first.x.copy()
    with mock.patch("feddrift.streams.elec._read_rows", side_effect=AssertionError("read again")):
        first.x[:] = 0
        assert np.array_equal(fd.stream("elec2-hours", data_dir=folder).x, kept)
    put(tmp_path, lines(186))
    assert fd.stream("elec2-hours", data_dir=folder).n_steps == first.n_steps + 1
