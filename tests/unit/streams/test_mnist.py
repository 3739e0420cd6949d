"""The MNIST streams: reading the files, standardisation, concepts and drift patterns."""

from __future__ import annotations

import gzip
import os
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pooch
import pytest

from feddrift import rng
from feddrift.errors import DataError
from feddrift.streams import mnist, stream
from feddrift.streams.patterns import build_pattern
from feddrift.types import Local
from tests.support.datasets import N_TEST, N_TRAIN, pack_idx

SWAPS = {0: (0, 0), 1: (1, 2), 2: (3, 4), 3: (5, 6)}


def find_image_numbers(x: npt.NDArray[np.float32], tiny: Path) -> npt.NDArray[np.int64]:
    """Which image each row of a stream is."""
    pixels, _ = mnist.load_mnist(tiny)
    raw = x * (pixels.std(axis=0) + 0.001) + pixels.mean(axis=0)
    high, low = np.rint(raw[:, :2]).astype(np.int64).T
    return np.asarray(256 * high + low)


def test_load_puts_train_before_test(tiny: Path) -> None:
    pixels, digits = mnist.load_mnist(tiny)
    assert pixels.shape == (N_TRAIN + N_TEST, 6)
    assert (pixels[:, 0].astype(int) * 256 + pixels[:, 1]).tolist() == list(range(N_TRAIN + N_TEST))
    assert digits.tolist() == [i % 10 for i in range(N_TRAIN + N_TEST)]


def test_pixels_are_standardised_over_all_images(tiny: Path) -> None:
    pixels, _ = mnist.load_mnist(tiny)
    s = mnist.load_label_swap("mnist-2", np.zeros((12, 1), dtype=np.int64), tiny)  # 5 times the pool
    expected = (pixels.astype(np.float64) - pixels.mean(axis=0)) / (pixels.std(axis=0) + 0.001)
    np.testing.assert_allclose(s.x, expected[find_image_numbers(s.x, tiny)], rtol=1e-5, atol=1e-6)
    assert (s.x[:, 3] == 0).all()  # a pixel that never changes


def test_cells_are_consecutive_blocks_that_wrap(tiny: Path) -> None:
    s = mnist.load_label_swap("mnist-4", np.zeros((3, 2), dtype=np.int64), tiny)
    image = find_image_numbers(s.x, tiny)
    assert sorted(image[: N_TRAIN + N_TEST].tolist()) == list(range(N_TRAIN + N_TEST))
    assert (np.diff(image[: N_TRAIN + N_TEST]) != 1).mean() > 0.9  # shuffled
    np.testing.assert_array_equal(image[N_TRAIN + N_TEST :], image[: s.x.shape[0] - N_TRAIN - N_TEST])


@pytest.mark.parametrize("k", SWAPS)
def test_concept_swaps_two_labels(tiny: Path, k: int) -> None:
    s = mnist.load_label_swap("mnist-4", np.full((2, 1), k, dtype=np.int64), tiny)
    digit = find_image_numbers(s.x, tiny) % 10
    a, b = SWAPS[k]
    np.testing.assert_array_equal(s.y, np.where(digit == a, b, np.where(digit == b, a, digit)))
    assert s.n_classes == 10


def test_label_shift_shows_two_digits_and_takes_each_image_in_turn(tiny: Path) -> None:
    concepts = np.array([[0, 3], [3, 0], [1, 2]])
    s = mnist.load_label_shift("mnist-l-4", concepts, tiny)
    image = find_image_numbers(s.x, tiny).reshape(3, 2, 500)
    for t, c in np.ndindex(3, 2):
        assert set(s.cell(t, c)[1].tolist()) == {2 * concepts[t, c], 2 * concepts[t, c] + 1}
        np.testing.assert_array_equal(s.cell(t, c)[1], image[t, c] % 10)
    for k, cells in {0: ((0, 0), (1, 1)), 3: ((0, 1), (1, 0))}.items():
        seen = np.concatenate([image[cell] for cell in cells])
        own = [i for i in range(N_TRAIN + N_TEST) if i % 10 // 2 == k]
        assert sorted(seen[: len(own)].tolist()) == own
        np.testing.assert_array_equal(seen[len(own) :], np.resize(seen[: len(own)], len(seen))[len(own) :])


def test_catalogue_streams_and_their_patterns(tiny: Path) -> None:
    for name, shape in {"mnist-2": "Y", "mnist-4": "F", "mnist-r": "R3", "mnist-l-4": "F"}.items():
        s = stream(name, seed=8, data_dir=tiny)
        assert s.concepts is not None
        np.testing.assert_array_equal(s.concepts, build_pattern(shape))
        assert (s.name, s.family, s.local) == (name, "mnist", Local(lr=1e-3))
        assert s.x.dtype == np.float32
        assert s.y.dtype == np.int32


def test_data_do_not_depend_on_the_seed(tiny: Path) -> None:
    one, two = stream("mnist-r", seed=0, data_dir=tiny), stream("mnist-r", seed=1, data_dir=tiny)
    np.testing.assert_array_equal(one.x, two.x)
    assert (one.y != two.y).any()


def test_environment_names_the_directory(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDDRIFT_DATA", str(tiny))
    assert len(stream("mnist-2").x) == 55000
    with pytest.raises(DataError, match="elsewhere"):
        stream("mnist-2", data_dir=tiny / "elsewhere")  # the argument wins


def test_missing_files_are_named(tiny: Path) -> None:
    (tiny / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError) as error:
        stream("mnist-4", data_dir=tiny)
    assert str(error.value) == f"MNIST is incomplete: put t10k-labels-idx1-ubyte.gz into {tiny / 'mnist'}"


LABELS = "train-labels-idx1-ubyte.gz"
GOOD = np.zeros(N_TRAIN, dtype=np.uint8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no gzip", "is not a whole gzip file"),
        (gzip.compress(pack_idx(GOOD))[:-20], "is not a whole gzip file"),
        (gzip.compress(b""), "is not MNIST's"),
        (gzip.compress(b"\0\0\x09\x01" + pack_idx(GOOD)[4:]), "is not MNIST's"),
        (gzip.compress(pack_idx(GOOD[:-1])), "is not MNIST's"),
        (gzip.compress(pack_idx(GOOD)[:-1]), "is not MNIST's"),
        (gzip.compress(pack_idx(GOOD) + b"\0"), "is not MNIST's"),
    ],
    ids=["plain", "cut", "empty", "magic", "fewer", "short", "long"],
)
def test_corrupt_files_are_named(tiny: Path, content: bytes, message: str) -> None:
    path = tiny / "mnist" / LABELS
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{re.escape(str(path))} {message}"):
        stream("mnist-4", data_dir=tiny)


@pytest.mark.parametrize(("digits", "got"), [(GOOD, "[0]"), (np.arange(N_TRAIN) % 11, "9, 10]")])
def test_labels_that_are_no_digits_are_named(tiny: Path, digits: npt.NDArray[np.uint8], got: str) -> None:
    """A tenth class was an IndexError, a class without images was shown by the first image."""
    for file, n in ((LABELS, N_TRAIN), ("t10k-labels-idx1-ubyte.gz", N_TEST)):
        (tiny / "mnist" / file).write_bytes(gzip.compress(pack_idx(digits[:n].astype(np.uint8))))
    with pytest.raises(DataError, match=f"labels must be all of 0 to 9, got .*{re.escape(got)}"):
        stream("mnist-l-4", data_dir=tiny)


@pytest.mark.parametrize("name", ["~nobody-of-this-name", "a" * 300, "a\0b"])
def test_a_directory_that_cannot_be_is_named(name: str) -> None:
    with pytest.raises(DataError, match="MNIST is incomplete"):
        mnist.load_mnist(name)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("FEDDRIFT_DATA", raising=False)
    monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path / "cache" / name)
    return tmp_path / "cache" / "feddrift" / "mnist"


def test_files_come_from_the_cache_with_their_checksums(
    tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def retrieve(url: str, known_hash: str, fname: str, path: Path) -> None:
        asked.append((url, known_hash))
        path.mkdir(parents=True, exist_ok=True)
        (path / fname).write_bytes((tiny / "mnist" / fname).read_bytes())

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    assert len(stream("mnist-2").x) == 55000
    assert sorted(path.name for path in cache.iterdir()) == sorted(mnist.SHAPES)
    assert (mnist.URL + LABELS, "md5:d53e105ee54ea40749a09fcbcd1e9432") in asked
    assert len(asked) == 4


@pytest.mark.parametrize("failure", [OSError("no route to host"), ValueError("MD5 hash does not match")])
def test_offline_the_error_lists_files_and_their_folder(
    cache: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def retrieve(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    with pytest.raises(DataError) as error:
        stream("mnist-2")
    assert all(file in str(error.value) for file in mnist.SHAPES)
    assert f"into {cache}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(not os.environ.get("FEDDRIFT_DATA"), reason="needs the MNIST files: set FEDDRIFT_DATA")
def test_the_real_files() -> None:
    pixels, digits = mnist.load_mnist()
    assert np.bincount(digits).tolist() == [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]
    s = stream("mnist-4")
    assert s.x.shape == (55000, 784)
    mean, std = pixels.mean(axis=0), pixels.std(axis=0)
    first = rng.permutation(rng.derive_key(0, "data", 2), len(digits))[:500]
    np.testing.assert_allclose(s.cell(0, 0)[0], (pixels[first] - mean) / (std + 0.001), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(s.cell(0, 0)[1], digits[first])  # concept 0 swaps nothing
    shifted = stream("mnist-l-4")
    assert shifted.concepts is not None
    np.testing.assert_array_equal(shifted.y // 2, np.repeat(shifted.concepts.reshape(-1), 500))
