"""FMoW's classes over time, shown by Fashion-MNIST."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import feddrift as fd
from feddrift.errors import ConfigError, DataError
from feddrift.streams import fmow


def write_fashion(folder: Path, n: int = 70000) -> Path:
    """An archive of the right shape; the first pixel of an image is its class."""
    (folder / "fashion_mnist").mkdir()
    x, y = np.zeros((n, 28, 28), dtype=np.uint8), np.arange(n) % 10
    x[:, 0, 0] = y
    np.savez(folder / "fashion_mnist" / "fashion_mnist_70k.npz", x=x, y=y.astype(np.uint8))
    return folder


def test_the_counts_are_those_of_the_papers_partition() -> None:
    counts, names = fmow.class_counts()
    assert counts.sum() == 41090 and counts[9].sum(axis=1).tolist() == [1000, 1000, 1000, 1000, 80]
    africa = counts[:, fmow.REGIONS.index("Africa"), names.index("single-unit_residential")] / counts[:, 2].sum(axis=1)
    assert africa[5] > 2 * africa[4]  # the jump from 2013 to 2014


def test_every_cell_has_its_counts_and_an_image_comes_again_only_after_all(tmp_path: Path) -> None:
    s = fd.stream("fmow-labels", data_dir=write_fashion(tmp_path))
    counts, _ = fmow.class_counts()
    assert s.n_steps == 9 and s.clients == fmow.REGIONS and s.concepts is None and s.local.rounds == 10
    for t, c in np.ndindex(counts.shape[:2]):
        x, y = s.cell(t, c)
        assert np.bincount(y, minlength=10).tolist() == counts[t, c].tolist()
        assert len(np.unique(x[:, 0].round(4))) == len(np.unique(y))  # image and class belong together


def test_what_fmow_is_run_with(tmp_path: Path) -> None:
    s = fd.stream("fmow-labels", data_dir=write_fashion(tmp_path))
    feddrift, ifca = fd.algorithm("FedDrift", s), fd.algorithm("IFCA", s)
    assert (feddrift.delta, feddrift.first) == (0.06, "each")  # type: ignore[attr-defined]
    assert (ifca.n_models, ifca.first) == (5, "choose")  # type: ignore[attr-defined]
    assert fd.algorithm("FedDrift-C", s).first == "one"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="has its own drift"):
        fd.stream("fmow-labels", pattern="Y", data_dir=tmp_path)
    with pytest.raises(ConfigError, match="true concepts"):
        fd.algorithm("Oracle", s).init(fd.engines.engine("simulator")(s, fd.mlp(784, 2, 10), s.local, 0).at(0))


def test_bad_files_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Fashion-MNIST is incomplete: put train-images"):
        fd.stream("fmow-labels", data_dir=tmp_path)
    with pytest.raises(DataError, match="expected 70000 images"):
        fd.stream("fmow-labels", data_dir=write_fashion(tmp_path, 100))
    (tmp_path / "fashion_mnist" / "fashion_mnist_70k.npz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="not an archive"):
        fd.stream("fmow-labels", data_dir=tmp_path)
