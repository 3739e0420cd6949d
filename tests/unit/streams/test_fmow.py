"""The FMoW streams: class counts over time with Fashion-MNIST images, and images of a folder."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import feddrift as fd
from feddrift import run
from feddrift.errors import ConfigError, DataError
from feddrift.nets import default_net, resnet
from feddrift.runs.config import RunConfig
from feddrift.runs.recorded_run import RecordedRun
from feddrift.streams import fmow
from tests.golden.make_torch_resnet import make_weights as golden
from tests.support.datasets import write_fmow_folder


def write_fashion(folder: Path, n: int = 70000) -> Path:
    """An archive of the right shape; the first pixel of an image is its class."""
    (folder / "fashion_mnist").mkdir()
    x, y = np.zeros((n, 28, 28), dtype=np.uint8), np.arange(n) % 10
    x[:, 0, 0] = y
    np.savez(folder / "fashion_mnist" / "fashion_mnist_70k.npz", x=x, y=y.astype(np.uint8))
    return folder


def test_the_counts_are_those_of_the_papers_partition() -> None:
    counts, names = fmow.read_class_counts()
    assert counts.sum() == 41090 and counts[9].sum(axis=1).tolist() == [1000, 1000, 1000, 1000, 80]
    africa = counts[:, fmow.REGIONS.index("Africa"), names.index("single-unit_residential")] / counts[:, 2].sum(axis=1)
    assert africa[5] > 2 * africa[4]  # the jump from 2013 to 2014


def test_every_cell_has_its_counts_and_an_image_comes_again_only_after_all(tmp_path: Path) -> None:
    s = fd.stream("fmow-labels", data_dir=write_fashion(tmp_path))
    counts, _ = fmow.read_class_counts()
    assert s.n_steps == 9 and s.clients == fmow.REGIONS and s.concepts is None and s.local.rounds == 10
    for t, c in np.ndindex(counts.shape[:2]):
        x, y = s.cell(t, c)
        assert np.bincount(y, minlength=10).tolist() == counts[t, c].tolist()
        assert len(np.unique(x[:, 0].round(4))) == len(np.unique(y))  # image and class belong together


def test_the_default_settings_for_fmow(tmp_path: Path) -> None:
    s = fd.stream("fmow-labels", data_dir=write_fashion(tmp_path))
    feddrift, ifca = fd.algorithm("FedDrift", s), fd.algorithm("IFCA", s)
    assert (feddrift.delta, feddrift.first) == (0.06, "each")  # type: ignore[attr-defined]
    assert (ifca.n_models, ifca.first) == (5, "choose")  # type: ignore[attr-defined]
    assert fd.algorithm("FedDrift-C", s).first == "one"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="has its own drift"):
        fd.stream("fmow-labels", pattern="Y", data_dir=tmp_path)
    with pytest.raises(ConfigError, match="true concepts"):
        fd.algorithm("Oracle", s).init(fd.engines.engine("simulator")(s, fd.mlp(784, 2, 10), s.local, 0).at(0))


def test_the_rule_on_a_folder_of_the_same_format(tmp_path: Path) -> None:
    s = fd.stream("fmow-rule", data_dir=write_fmow_folder(tmp_path, per_cell=12))
    assert s.x.dtype == np.uint8 and s.x.shape[1:] == (32, 32, 3) and s.n_classes == 10 and s.clients == fmow.REGIONS
    africa = 8 * 12 - 2  # eight years in one, without the rare classes
    assert s.counts.tolist() == [[96, 96, africa, 96, 96]] + [[12] * 5] * 7 + [[6] * 5] * 2
    for t, c in np.ndindex(s.counts.shape):
        year, code, k = s.cell(t, c)[0][:, 0, 0].T
        assert (code == c).all() and (year <= 9).all() if t == 0 else (year == min(t, 8) + 9).all()
        assert (s.cell(t, c)[1] == k % 10).all()
    seen, again = s.cell(8, 0)[0][:, 0, 0], s.cell(9, 0)[0][:, 0, 0]
    assert not {tuple(p) for p in seen} & {tuple(p) for p in again}  # the test is another sample
    assert s.local.batch == 32 and s.local.lr == 1e-4


def test_the_papers_partition_needs_the_whole_folder(tmp_path: Path) -> None:
    cells = fmow.read_partition_d()
    counts, _ = fmow.read_class_counts()
    assert [[len(index) for index in row] for row in cells] == counts.sum(axis=2).tolist()
    with pytest.raises(DataError, match="lists 576 images, partition D needs number"):
        fd.stream("fmow", data_dir=write_fmow_folder(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["simulator", "reference"])
def test_a_whole_run_on_pictures_with_a_resnet(tmp_path: Path, engine: str) -> None:
    """From a folder and a file of weights to the first two time steps."""
    write_fmow_folder(tmp_path, per_cell=2, size=16)
    weights = tmp_path / "resnet18.npz"
    np.savez(weights, **golden(resnet._list_parameter_shapes(1000) | resnet._list_statistics_shapes()))
    config = RunConfig.from_values(
        stream="fmow-rule", algorithm="FedDrift", rounds=1, steps=1, batch=2, engine=engine, data_dir=tmp_path,
        weights=weights,
    )  # fmt: skip
    recorded = RecordedRun(config, tmp_path / "runs")
    assert recorded.header["overrides"]["weights"] and recorded.header["settings"]["first"] == "each"
    steps = list(
        run(cut(recorded.stream, 2), recorded.algorithm, net=recorded.net, engine=engine, local=recorded.local)
    )
    assert len(steps) == 2 and all(np.isfinite(step.accuracy).all() for step in steps)
    assert len(steps[0].state.models) == 5  # a model each


def cut(stream: fd.Stream, steps: int) -> fd.Stream:
    """Its first time steps only."""
    rows = int(stream.counts[: steps + 1].sum())
    times = stream.times[: steps + 1]
    return replace(stream, x=stream.x[:rows], y=stream.y[:rows], counts=stream.counts[: steps + 1], times=times)


def test_bad_folders_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rgb_metadata.csv: No such file"):
        fd.stream("fmow", data_dir=tmp_path)
    root = write_fmow_folder(tmp_path, per_cell=3) / "fmow_v1.1"
    (root / "images" / "rgb_img_3.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"rgb_img_3.png"):
        fd.stream("fmow-rule", data_dir=tmp_path)
    picture = (root / "images" / "rgb_img_4.png").read_bytes()
    header = b"IHDR" + struct.pack(">IIBBBBB", 2**16, 2**16, 8, 2, 0, 0, 0)  # it says that it is endless
    lying = picture[:12] + header + struct.pack(">I", zlib.crc32(header)) + picture[33:]
    (root / "images" / "rgb_img_3.png").write_bytes(lying)
    with pytest.raises(DataError, match=r"rgb_img_3.png: Image size"):
        fd.stream("fmow-rule", data_dir=tmp_path)
    (root / "images" / "rgb_img_3.png").unlink()
    with pytest.raises(DataError, match=r"rgb_img_3.png: No such file"):
        fd.stream("fmow-rule", data_dir=tmp_path)
    (root / "rgb_metadata.csv").write_text("split,country_code,timestamp,category\ntrain,CHN,soon,zoo\n")
    with pytest.raises(DataError, match="begins with its year, got 'soon'"):
        fd.stream("fmow-rule", data_dir=tmp_path)
    (root / "rgb_metadata.csv").write_text('split,country_code,timestamp,category\ntrain,CHN,"2004,zoo\n')
    with pytest.raises(DataError, match="unexpected end of data"):  # a quote that nobody closes
        fd.stream("fmow-rule", data_dir=tmp_path)
    for name in ("~nobody-of-this-name", "a" * 300, "a\0b"):
        for stream in ("fmow", "fmow-labels"):
            with pytest.raises(DataError, match="cannot be read|incomplete"):
                fd.stream(stream, data_dir=name)
    (root / "rgb_metadata.csv").write_text("split,country_code\ntrain,CHN\n")
    with pytest.raises(DataError, match="has no column 'timestamp'"):
        fd.stream("fmow-rule", data_dir=tmp_path)
    with pytest.raises(ConfigError, match="weights are for streams of pictures"):
        default_net(fd.stream("sine-2"), "resnet18.npz")


def test_bad_files_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Fashion-MNIST is incomplete: put train-images"):
        fd.stream("fmow-labels", data_dir=tmp_path)
    with pytest.raises(DataError, match="expected 70000 images"):
        fd.stream("fmow-labels", data_dir=write_fashion(tmp_path, 100))
    (tmp_path / "fashion_mnist" / "fashion_mnist_70k.npz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="not an archive"):
        fd.stream("fmow-labels", data_dir=tmp_path)
