"""ResNet-18, layer by layer, against PyTorch's numbers (torch_resnet.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feddrift import rng
from feddrift.errors import DataError
from feddrift.nets import resnet
from feddrift.trees import mark_trunk, tree_leaves
from tests.golden.make_torch_resnet import describe_array, make_pictures, make_weights

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("torch_resnet.json").read_text())


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "resnet18.npz"
    np.savez(path, **make_weights(resnet._list_parameter_shapes(1000) | resnet._list_statistics_shapes()))
    return path


def test_every_layer_is_pytorchs(file: Path) -> None:
    net = resnet.resnet18(1000, file)
    params = net.init(rng.derive_key(0, "init"))
    found = resnet.compute_layers(resnet.read_weights(file), params, make_pictures())
    for name, expected in GOLDEN.items():
        if name == "versions":
            continue
        got = describe_array(np.asarray(found[name]))
        assert got["shape"] == expected["shape"], name
        for key in ("mean", "std", "some"):
            np.testing.assert_allclose(got[key], expected[key], rtol=2e-4, atol=2e-5, err_msg=name)
    np.testing.assert_allclose(np.asarray(net.apply(params, make_pictures())), np.asarray(found["fc"]), atol=1e-5)


def test_another_number_of_classes_starts_a_new_classifier_on_the_old_trunk(file: Path) -> None:
    net = resnet.resnet18(10, file)
    params, other = net.init(rng.derive_key(0, "init")), resnet.resnet18(1000, file).init(rng.derive_key(0, "init"))
    assert params["fc"]["weight"].shape == (10, 512) and 0 < np.abs(params["fc"]["weight"]).max() <= 512**-0.5
    np.testing.assert_array_equal(params["layer4"]["1"]["conv2"]["weight"], other["layer4"]["1"]["conv2"]["weight"])
    shared = tree_leaves(mark_trunk(net, params))
    assert shared.count(False) == 2 and sum(leaf.size for leaf in tree_leaves(params)) == 11_689_512 - 990 * 513


def test_random_weights_have_the_spread_of_kaiming(file: Path) -> None:
    params = resnet.resnet18(10).init(rng.derive_key(1, "init"))
    kernel = params["layer2"]["0"]["conv1"]["weight"]
    assert kernel.std() == pytest.approx(np.sqrt(2 / (128 * 9)), rel=0.02) and abs(kernel.mean()) < 1e-3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bn1.running_var": None}, "'bn1.running_var' is missing"),
        ({"conv1.weight": np.zeros((1, 2))}, "not \\(64, 3, 7, 7\\)"),
        ({"conv1.weight": np.full((64, 3, 7, 7), np.nan)}, "'conv1.weight' must hold finite numbers"),
        ({"conv1.weight": np.full((64, 3, 7, 7), 1e300)}, "'conv1.weight' must hold finite numbers"),
        ({"bn1.running_var": np.full(64, -1.0)}, "no variance below 0"),
        ({"fc.bias": np.full(1000, "x")}, "'fc.bias' must hold floating-point numbers, got <U1"),
    ],
)
def test_other_files_are_refused_in_one_sentence(file: Path, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    arrays = {k: v for k, v in (dict(np.load(file)) | change).items() if v is not None}
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(DataError, match=said):
        resnet.read_weights(tmp_path / "bad.npz")
    (tmp_path / "no.npz").write_bytes(b"nothing")
    for name in ("no.npz", "missing.npz", "missing.safetensors", "missing.pth"):
        with pytest.raises(DataError, match="weights|PyTorch"):
            resnet.read_weights(tmp_path / name)
