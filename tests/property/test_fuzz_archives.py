"""Digits, clothes, satellite images and weights: complete files with random damage."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddrift.nets import resnet
from feddrift.streams import air, fmow, mnist
from tests.support.datasets import AIR_HOURS, N_TEST, N_TRAIN, pack_idx, tiny, write_city, write_fmow_folder  # noqa: F401
from tests.support.fuzzing import (
    TOKENS,
    call_or_refuse,
    check_stream,
    limit_examples,
    mutations,
    npy_headers,
    pack_npz,
    pack_zip,
)

IMAGES, DIGITS = (
    np.arange(N_TRAIN * 6, dtype=np.uint8).reshape(N_TRAIN, 2, 3),
    (np.arange(N_TRAIN) % 10).astype(np.uint8),
)
FLAT = np.zeros((3, 2), dtype=np.int64)


@pytest.fixture
def digits(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue("tiny") / "mnist"  # type: ignore[no-any-return]


@limit_examples(120)
@given(
    st.sampled_from([("train-images-idx3-ubyte.gz", IMAGES), ("train-labels-idx1-ubyte.gz", DIGITS)]),
    st.booleans(),
    st.data(),
)
def test_digits(digits: Path, file: tuple[str, Any], inside: bool, data: st.DataObject) -> None:
    name, array = file
    before = (digits / name).read_bytes()
    raw = pack_idx(array)
    content = gzip.compress(data.draw(mutations(raw)), 1) if inside else data.draw(mutations(gzip.compress(raw)))
    (digits / name).write_bytes(content)
    try:
        for make in (mnist.load_label_swap, mnist.load_label_shift):
            check_stream(lambda make=make: make("mnist-4", FLAT, digits.parent))  # type: ignore[misc]
    finally:
        (digits / name).write_bytes(before)


def test_a_bomb_is_not_unpacked(digits: Path) -> None:
    (digits / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(pack_idx(DIGITS) + bytes(10**7)))
    assert call_or_refuse(lambda: mnist.load_mnist(digits.parent)) is None


SMALL = pack_npz(x=np.zeros((3, 28, 28), np.uint8), y=np.zeros(3, np.uint8))


@limit_examples(60)
@given(st.binary(max_size=40) | mutations(SMALL) | npy_headers | st.builds(lambda h: pack_zip(x=h, y=h), npy_headers))
def test_clothes(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "fashion_mnist").mkdir(exist_ok=True)
    (tmp_path / "fashion_mnist" / "fashion_mnist_70k.npz").write_bytes(content)
    assert call_or_refuse(lambda: fmow.load_fashion(tmp_path)) is None


@pytest.fixture(scope="module")
def satellite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fmow_folder(tmp_path_factory.mktemp("fmow"), per_cell=2, size=8)


@limit_examples(60)
@given(name=st.sampled_from(["rgb_metadata.csv", "country_code_mapping.csv"]), data=st.data())
def test_metadata(satellite: Path, name: str, data: st.DataObject) -> None:
    path = satellite / "fmow_v1.1" / name
    before = path.read_bytes()
    short = b"\n".join(before.split(b"\n")[: data.draw(st.sampled_from([3, 40, 200]))])
    path.write_bytes(data.draw(mutations(short)))
    try:
        check_stream(lambda: fmow.load_images("fmow-rule", satellite))
    finally:
        path.write_bytes(before)


@limit_examples(60)
@given(data=st.data())
def test_pictures(satellite: Path, data: st.DataObject) -> None:
    path = satellite / "fmow_v1.1" / "images" / "rgb_img_0.png"
    before = path.read_bytes()
    size = st.sampled_from([0, 1, 8, 9, 2**14, 2**16, 2**31 - 1, 2**31, 2**32 - 1])
    header = (
        b"IHDR"
        + struct.pack(">II", data.draw(size), data.draw(size))
        + bytes(data.draw(st.binary(min_size=5, max_size=5)))
    )
    lying = before[:12] + header + struct.pack(">I", zlib.crc32(header)) + before[33:]  # its checksum is right
    path.write_bytes(lying if data.draw(st.booleans()) else data.draw(mutations(before)))
    try:
        pixels = call_or_refuse(lambda: fmow._read_images(satellite / "fmow_v1.1", np.array([0, 1])))
        assert pixels is None or pixels.shape == (2, 8, 8, 3)
    finally:
        path.write_bytes(before)


@limit_examples(100)
@given(data=st.data())
def test_air(tmp_path: Path, data: st.DataObject) -> None:
    write_city(tmp_path, "Oslo", {"North": ["80"] * len(AIR_HOURS)})
    (path,) = (tmp_path / "five_cities_pm25").glob("*.csv")
    lines = path.read_bytes().splitlines(keepends=True)
    start = len(lines) // 2
    content = b"".join([lines[0], *lines[start : start + 3], *lines[-3:]])
    if data.draw(st.booleans()):  # one value of the table
        rows = [line.split(b",") for line in content.splitlines()]
        t, k = data.draw(st.integers(1, len(rows) - 1)), data.draw(st.integers(0, len(rows[0]) - 1))
        rows[t][k] = data.draw(st.sampled_from([token for token in TOKENS if b"," not in token and b"\n" not in token]))
        content = b"\n".join(b",".join(row) for row in rows)
    else:
        content = data.draw(mutations(content))
    path.write_bytes(content)
    check_stream(lambda: air.load_five_cities("air-quality", tmp_path))


@limit_examples(40)
@given(data=st.data())
def test_air_in_an_archive(tmp_path: Path, data: st.DataObject) -> None:
    write_city(tmp_path, "Oslo", {"North": ["80"] * len(AIR_HOURS)})
    (path,) = (tmp_path / "five_cities_pm25").glob("*.csv")
    content, out, info = path.read_bytes(), io.BytesIO(), tarfile.TarInfo(path.name)
    info.size = len(content)
    with tarfile.open(fileobj=out, mode="w:xz", preset=0) as packed:
        packed.addfile(info, io.BytesIO(content))
    path.unlink()
    (path.parent / "all.tar.xz").write_bytes(data.draw(mutations(out.getvalue())))
    check_stream(lambda: air.load_five_cities("air-quality", tmp_path))


@pytest.fixture(scope="module")
def weights() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resnet, "STAGE_CHANNELS", (1, 1, 1, 1))
        return {
            name: np.full(shape, 0.5, dtype=np.float32)
            for name, shape in (resnet._list_parameter_shapes(2) | resnet._list_statistics_shapes()).items()
        }


@limit_examples(60)
@given(kind=st.sampled_from(["npz", "safetensors", "pth"]), data=st.data())
def test_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: dict[str, Any], kind: str, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(weights)))
    wrong = data.draw(
        st.sampled_from([
            weights[name] * np.nan, weights[name] * -1, weights[name][..., :0], weights[name].astype(np.int64),
            weights[name].astype(np.float64) * 1e300, weights[name].astype(np.float16),
            weights[name] > 0, np.float32(1),
        ])
    )  # fmt: skip
    arrays = {**weights, name: np.asarray(wrong)} if data.draw(st.booleans()) else weights
    path = tmp_path / f"weights.{kind}"
    whole = _serialize(arrays, kind)
    path.write_bytes(whole if arrays is not weights else data.draw(mutations(whole)))
    monkeypatch.setattr(resnet, "STAGE_CHANNELS", (1, 1, 1, 1))
    found = call_or_refuse(lambda: resnet.read_weights(path))
    for key, array in (found or {}).items():
        assert array.dtype == np.float32 and np.isfinite(array).all()
        assert not key.endswith("running_var") or (array >= 0).all()


def _serialize(arrays: dict[str, Any], kind: str) -> bytes:
    if kind == "npz":
        return pack_npz(**arrays)
    if kind == "safetensors":
        from safetensors.numpy import save

        return bytes(save(arrays))
    torch = pytest.importorskip("torch")
    out = io.BytesIO()
    torch.save({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}, out)
    return out.getvalue()
